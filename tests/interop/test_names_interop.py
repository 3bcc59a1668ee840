"""The documented functions and small classes, next to transformers' own."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD

transformers = pytest.importorskip("transformers")

from transformers import optimization as their_optimization  # noqa: E402
from transformers import trainer_pt_utils, trainer_utils  # noqa: E402
from transformers.data import data_collator as their_collators  # noqa: E402

import hftrain  # noqa: E402

pytestmark = pytest.mark.interop

TREES = [
    (torch.ones(2, 3), torch.zeros(1, 3)),
    (torch.ones(2, 3), torch.zeros(1, 5)),
    (torch.ones(2), torch.zeros(3)),
    (torch.tensor(1.0), torch.tensor(2.0)),
    ((torch.ones(1, 2, 2), [numpy.ones((2, 2))]), (torch.zeros(2, 1, 2), [numpy.zeros((1, 4))])),
    ({"a": torch.ones(1, 1)}, {"a": torch.zeros(1, 2)}),
]


def plain(tree: Any) -> Any:
    """Return a nested structure as lists, which compare by value."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain(value) for value in tree]
    return tree.tolist() if hasattr(tree, "tolist") else tree


@pytest.mark.parametrize(("first", "second"), TREES)
def test_nested_functions_give_the_same(first: Any, second: Any) -> None:
    joined = hftrain.nested_concat(first, second)
    assert plain(joined) == plain(trainer_pt_utils.nested_concat(first, second))
    assert plain(hftrain.nested_truncate(joined, 2)) == plain(trainer_pt_utils.nested_truncate(joined, 2))
    assert hftrain.find_batch_size(joined) == trainer_pt_utils.find_batch_size(joined)
    assert plain(hftrain.nested_detach(first)) == plain(trainer_pt_utils.nested_detach(first))
    tensors = {"a": [torch.ones(2, dtype=torch.bfloat16)], "b": (torch.zeros(1),)}
    ours, theirs = hftrain.nested_numpify(tensors), trainer_pt_utils.nested_numpify(tensors)
    assert plain(ours) == plain(theirs)
    assert ours["a"][0].dtype == theirs["a"][0].dtype


LENGTHS = numpy.random.default_rng(0).integers(1, 99, 83).tolist()


@pytest.mark.parametrize(("rank", "drop_last"), [(0, False), (1, False), (1, True)])
def test_length_samplers_give_the_same_order(rank: int, drop_last: bool) -> None:
    rows = [{"input_ids": [0] * length} for length in LENGTHS]
    orders = [
        list(kind(4, rows, generator=torch.Generator().manual_seed(3)))
        for kind in (hftrain.LengthGroupedSampler, trainer_pt_utils.LengthGroupedSampler)
    ]
    assert orders[0] == orders[1]
    shares = []
    for kind in (hftrain.DistributedLengthGroupedSampler, trainer_pt_utils.DistributedLengthGroupedSampler):
        sampler = kind(4, None, 2, rank, 7, drop_last, LENGTHS)
        sampler.set_epoch(2)
        shares.append((list(sampler), len(sampler)))
    assert shares[0] == shares[1]


WITH_WARMUP = {"num_warmup_steps": 3, "num_training_steps": 12}
SCHEDULES = [
    ("get_constant_schedule", {}),
    ("get_constant_schedule_with_warmup", {"num_warmup_steps": 3}),
    ("get_linear_schedule_with_warmup", WITH_WARMUP),
    ("get_cosine_schedule_with_warmup", {**WITH_WARMUP, "num_cycles": 1.5}),
    ("get_cosine_with_hard_restarts_schedule_with_warmup", {**WITH_WARMUP, "num_cycles": 2}),
    ("get_polynomial_decay_schedule_with_warmup", {**WITH_WARMUP, "lr_end": 0.01, "power": 2.0}),
    ("get_inverse_sqrt_schedule", {"num_warmup_steps": 3}),
    ("get_inverse_sqrt_schedule", {"num_warmup_steps": 3, "timescale": 5}),
    ("get_cosine_with_min_lr_schedule_with_warmup", {**WITH_WARMUP, "min_lr_rate": 0.1}),
    ("get_cosine_with_min_lr_schedule_with_warmup_lr_rate", {**WITH_WARMUP, "min_lr": 0.01, "warmup_lr_rate": 0.2}),
    ("get_wsd_schedule", {**WITH_WARMUP, "num_decay_steps": 4, "min_lr_ratio": 0.1}),
    ("get_wsd_schedule", {"num_warmup_steps": 3, "num_stable_steps": 2, "num_decay_steps": 4, "decay_type": "1-sqrt"}),
]


def rates(make: Any, module: Any, name: str, options: dict[str, Any], steps: int = 12) -> list[float]:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    schedule = make(module, name, optimizer, options)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(("name", "options"), SCHEDULES)
def test_schedule_functions_give_the_same_rates(name: str, options: dict[str, Any]) -> None:
    def make(module: Any, name: str, optimizer: Any, options: dict[str, Any]) -> Any:
        return getattr(module, name)(optimizer, **options)

    ours, theirs = (rates(make, module, name, options) for module in (hftrain, their_optimization))
    assert ours == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("options", [{"smooth": True, "window_size": 3}, {"cooldown": 2, "warmup": 1}, {"mode": "max"}])
def test_greedy_rates_are_the_same(options: dict[str, Any]) -> None:
    values = (numpy.random.default_rng(1).normal(size=120) - numpy.linspace(0, 1, 120)).tolist()
    found = []
    for module in (hftrain, their_optimization):
        optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        limits = {"patience": 1, "factor": 0.8, "min_lr": 0.05, "max_lr": 0.3, "reset_start": 3}
        schedule = module.GreedyLR(optimizer, **limits, **options)
        rates_of = []
        for value in values:
            schedule.step(value)
            rates_of.append(optimizer.param_groups[0]["lr"])
        found.append(rates_of)
    assert found[0] == pytest.approx(found[1], abs=1e-12)
    assert len(set(found[0])) > 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"warmup_init": True, "weight_decay": 0.1},
        {"scale_parameter": False, "relative_step": False, "lr": 1e-2, "beta1": 0.9},
        {"relative_step": False, "lr": 1e-2, "clip_threshold": 0.5, "decay_rate": -0.6},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adafactor_steps_alike(options: dict[str, Any], dtype: torch.dtype) -> None:
    found = []
    for module in (hftrain, their_optimization):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).to(dtype)
        optimizer = module.Adafactor(model.parameters(), **options)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.full((2, 4), 0.3 * step, dtype=dtype)).pow(2).sum().backward()
            optimizer.step()
        found.append([parameter.detach().float() for parameter in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_adafactor_schedule_tells_the_same() -> None:
    found = []
    for module in (hftrain, their_optimization):
        weights = nn.Parameter(torch.ones(3))
        optimizer = module.Adafactor([weights], warmup_init=True)
        schedule = module.AdafactorSchedule(optimizer, 0.5)
        told = [schedule.get_last_lr()]
        for _ in range(3):
            weights.grad = torch.ones(3)
            optimizer.step()
            schedule.step()
            told.append([float(rate) for rate in schedule.get_lr()])
        found.append(told)
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", *(f"##{letter}" for letter in "abcdefgh")]
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(pieces), encoding="utf-8")
    return transformers.BertTokenizerFast(vocab={piece: index for index, piece in enumerate(pieces)})


TEXTS = ["abc de f gh", "ab cdef ghab", "h gfe dc ba"]


def same_batches(ours: Any, theirs: Any, rows: Any) -> None:
    batches = []
    for collator in (ours, theirs):
        torch.manual_seed(5)
        batches.append(collator([dict(row) if isinstance(row, dict) else list(row) for row in rows]))
    assert batches[0].keys() == batches[1].keys()
    for name in batches[0]:
        assert batches[0][name].tolist() == batches[1][name].tolist(), name
        assert batches[0][name].dtype == batches[1][name].dtype


def test_whole_words_are_masked_alike(tokenizer: Any) -> None:
    texts = ["abc de f gh", "ab cdef g h", "a bcd efg h"]
    rows = [dict(tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)) for text in texts]
    options = {"whole_word_mask": True, "mlm_probability": 0.4}
    ours = hftrain.DataCollatorForLanguageModeling(tokenizer, **options)
    with pytest.warns(UserWarning, match="Random token replacement"):
        theirs = their_collators.DataCollatorForLanguageModeling(tokenizer, **options)
    assert len({len(row["input_ids"]) for row in rows}) == 1
    same_batches(ours, theirs, rows)


@pytest.mark.parametrize("is_named", [True, False])
def test_permutations_are_drawn_alike(tokenizer: Any, is_named: bool) -> None:
    ids = [[2, *range(5, 5 + number), 3] for number in (6, 10, 9)]
    rows = [{"input_ids": row} for row in ids] if is_named else ids
    options = {"plm_probability": 0.5, "max_span_length": 3}
    same_batches(
        hftrain.DataCollatorForPermutationLanguageModeling(tokenizer, **options),
        their_collators.DataCollatorForPermutationLanguageModeling(tokenizer, **options),
        rows,
    )


def test_choices_are_padded_alike(tokenizer: Any) -> None:
    rows = [{**tokenizer([text, text[::-1] + " ab"]), "label": number} for number, text in enumerate(TEXTS)]
    for options in ({}, {"pad_to_multiple_of": 16}):
        same_batches(
            hftrain.DataCollatorForMultipleChoice(tokenizer, **options),
            their_collators.DataCollatorForMultipleChoice(tokenizer, **options),
            rows,
        )


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2, elementwise_affine=False), nn.LayerNorm(2))
        self.head_bias = nn.Parameter(torch.ones(1))
        self.body[0].weight.requires_grad_(False)


def test_parameters_are_listed_and_counted_alike() -> None:
    model = Nested()
    for types, patterns in (([nn.LayerNorm], None), ([nn.LayerNorm], [r"bias"]), ([nn.Linear], [r"body\.1", "head"])):
        found = hftrain.get_parameter_names(model, types, patterns)
        assert found == trainer_pt_utils.get_parameter_names(model, types, patterns)
    for trainable in (True, False):
        found = hftrain.get_model_param_count(model, trainable)
        assert found == trainer_pt_utils.get_model_param_count(model, trainable)


def test_small_functions_answer_alike(tmp_path: Any) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", "other"):
        (tmp_path / name).mkdir()
    assert hftrain.get_last_checkpoint(str(tmp_path)) == trainer_utils.get_last_checkpoint(str(tmp_path))
    metrics = {"eval_loss": numpy.float32(0.5), "f1": [torch.tensor(2), "text"], "epoch": 1.0}
    assert hftrain.denumpify_detensorize(metrics) == trainer_utils.denumpify_detensorize(metrics)
    assert hftrain.number_of_arguments(same_batches) == trainer_utils.number_of_arguments(same_batches)
    shown = {"eval_mem_cpu": 5 << 20, "total_flos": 3 << 30, "eval_loss": 0.123456}
    assert hftrain.metrics_format(shown) == trainer_pt_utils.metrics_format(shown)
    for rank in (-1, 0, 1):
        assert hftrain.is_main_process(rank) == trainer_utils.is_main_process(rank)
    ours, theirs = (module.speed_metrics("x", 0.0, 4, 2, 8) for module in (hftrain, trainer_utils))
    assert ours.keys() == theirs.keys()
    assert ours["x_runtime"] == pytest.approx(theirs["x_runtime"], rel=1e-6)
    drawn = []
    for module in (hftrain, trainer_utils):
        torch.manual_seed(1)
        module.seed_worker(0, 2, 1)
        drawn.append((float(torch.rand(1)), numpy.random.rand()))
    assert drawn[0] == drawn[1]


def test_whole_words_of_word_pieces_are_those_of_4_57(tokenizer: Any) -> None:
    """transformers 5 has not the class any more: these are the numbers of 4.57.6."""
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    random.seed(3)
    torch.manual_seed(3)
    batch = hftrain.DataCollatorForWholeWordMask(tokenizer, mlm_probability=0.4)(rows)
    assert batch["input_ids"].tolist() == [
        [2, 5, 14, 15, 8, 17, 4, 4, 4, 3, 0, 0],
        [2, 4, 4, 7, 16, 17, 18, 11, 20, 13, 14, 3],
        [2, 4, 4, 4, 4, 8, 15, 6, 13, 3, 0, 0],
    ]
    predicted = [[label for label in row if label >= 0] for row in batch["labels"].tolist()]
    assert predicted == [[10, 11, 20], [5, 14], [12, 11, 18, 17]]


def test_masked_words_depend_on_the_seed_alone_where_there_is_one(tokenizer: Any) -> None:
    rows = [{"input_ids": tokenizer(text)["input_ids"], "chinese_ref": [2]} for text in TEXTS]
    collate = hftrain.DataCollatorForWholeWordMask(tokenizer, mlm_probability=0.4, seed=1)
    first = collate(rows)["input_ids"].tolist()
    random.seed(9)
    assert collate(rows)["input_ids"].tolist() == first
    collate.set_epoch(1)
    assert collate(rows)["input_ids"].tolist() != first


class Normalized(nn.Module):
    """Layers with and without weight decay, by type and by name."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True), nn.RMSNorm(4))
        self.kinds = nn.ModuleList([*kinds, nn.LayerNorm(4), nn.BatchNorm1d(4, affine=False), nn.Embedding(3, 4)])
        self.bias_net, self.Bias, self.out = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.norm, self.norm1, self.q_norm, self.norm_out = (nn.RMSNorm(4) for _ in range(4))
        self.rmsnorm_x, self.LayerNormX = nn.RMSNorm(4), nn.Linear(4, 4)
        self.final_norm = nn.ModuleDict({"gate": nn.Linear(4, 4)})
        self.my_norm, self.scales = nn.Parameter(torch.ones(2)), nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.with_child = nn.LayerNorm(4)
        self.with_child.child = nn.Linear(4, 4)
        self.out.weight = self.bias_net.weight
        self.again, self.inside = self.kinds[4], nn.Sequential(self.kinds[3])


@pytest.mark.parametrize("make", [Normalized, Nested, lambda: nn.LayerNorm(2), lambda: nn.Sequential(nn.RMSNorm(2))])
def test_same_parameters_decay(make: Any) -> None:
    model = make()
    expected = transformers.Trainer.get_decay_parameter_names(None, model)
    assert hftrain.Trainer.get_decay_parameter_names(None, model) == expected
