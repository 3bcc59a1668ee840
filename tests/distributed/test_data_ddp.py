"""Two real processes share out data: read by the main one alone, sorted by length, by samplers of the user's own."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt
from support.tiny import MapRows, Net, Stream, at, make_arguments, make_rows, make_trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset

from hftrain import Seq2SeqTrainingArguments, Trainer, TrainerCallback, set_seed
from hftrain.core.errors import ConfigError

pytestmark = pytest.mark.distributed


class Counted(MapRows):
    def __init__(self, num: int) -> None:
        super().__init__(make_rows(num))

    @property
    def num_reads(self) -> int:
        return len(self.read)


class CountedStream(IterableDataset[dict[str, torch.Tensor]]):
    """The same as a stream; each process would shuffle it in its own way."""

    def __init__(self, num: int) -> None:
        self.rows = make_rows(num)
        self.num_reads = 0

    def __iter__(self) -> Any:
        for index in torch.randperm(len(self.rows)).tolist():
            self.num_reads += 1
            yield self.rows[index]


def row_of(data: Any, x: torch.Tensor) -> int:
    return next(index for index, row in enumerate(data) if torch.equal(row["x"], x))


def in_parts(folder: str, call: str, **options: Any) -> list[Any]:
    """Call a function of this file for a whole run, for the first 8 steps of another, and for the rest of that."""
    runs: list[dict[str, Any]] = [{"folder": f"{folder}/whole"}, {"stop": 8}, {"resume": True}]
    return [globals()[call](**{"folder": f"{folder}/parts", **each, **options}) for each in runs]


def train(
    folder: str,
    *,
    num: int = 22,
    kind: str = "map",
    dispatch: bool | None = True,
    stop: int | None = None,
    resume: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train and return the rows this rank trained on, how often it read, and what it learnt."""
    set_seed(7)
    data: Any = {"map": Counted, "stream": CountedStream}[kind](num)
    seen: list[list[int]] = []

    class Noting(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            seen.append([row_of(data.rows, x) for x in inputs["x"]])
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    sharing = {**options.pop("sharing", {}), "dispatch_batches": dispatch}
    arguments = make_arguments(Path(folder), per_device_train_batch_size=2, accelerator_config=sharing, **options)
    trainer = Noting(Net(), arguments, train_dataset=data, callbacks=[StopAt(stop)])
    trainer.train(resume_from_checkpoint=resume)
    weights = [p.flatten().tolist() for p in trainer.model.parameters()]
    return {"seen": seen, "num_reads": data.num_reads, "weights": weights}


@pytest.mark.parametrize("options", [{"dataloader_drop_last": True}, {"gradient_accumulation_steps": 2}])
def test_dispatched_training_equals_that_of_ranks_that_read(
    tmp_path: Path, run_distributed: Any, options: dict[str, Any]
) -> None:
    # 22 samples in batches of 2: 11 batches, the last round of which one rank would miss.
    sent = run_distributed(train, folder=str(tmp_path / "a"), **options)
    read = run_distributed(train, folder=str(tmp_path / "b"), dispatch=False, **options)
    assert [each["seen"] for each in sent] == [each["seen"] for each in read]
    assert [each["weights"] for each in sent] == [each["weights"] for each in read]
    # Each process looks at one sample to check its columns.
    assert sent[1]["num_reads"] <= 1 < sent[0]["num_reads"]


def test_dispatched_training_resumes_exactly(tmp_path: Path, run_distributed: Any) -> None:
    for kind, options in (("map", {"num_train_epochs": 3}), ("stream", {"max_steps": 15})):
        options = {"kind": kind, "save_strategy": "steps", "save_steps": 100, **options}
        for whole, _, rest in run_distributed(in_parts, call="train", folder=str(tmp_path / kind), **options):
            assert rest["weights"] == whole["weights"]
            assert rest["seen"] == whole["seen"][8:]


def test_streams_are_read_by_the_main_process_unless_told_otherwise(tmp_path: Path, run_distributed: Any) -> None:
    both = run_distributed(train, folder=str(tmp_path), kind="stream", dispatch=None, max_steps=6)
    assert both[1]["num_reads"] == 0
    first_pass = [i for pair in zip(both[0]["seen"], both[1]["seen"], strict=True) for batch in pair for i in batch]
    assert sorted(set(first_pass[:22])) == list(range(22))
    assert both[0]["weights"] == both[1]["weights"]
    split = run_distributed(train, folder=str(tmp_path), kind="stream", max_steps=2, sharing={"split_batches": True})
    assert [len(batch) for each in split for batch in each["seen"]] == [1] * 4


def evaluate(folder: str, *, most: int) -> list[Any]:
    """Evaluate and predict on 1 to `most` samples that the main process alone reads."""
    set_seed(3)
    trainer = Trainer(
        Net(),
        make_arguments(Path(folder), per_device_eval_batch_size=2, accelerator_config={"dispatch_batches": True}),
        compute_metrics=lambda p: {"share": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    answers = []
    for number in range(1, most + 1):
        for data in (make_rows(number, seed=number), Stream(make_rows(number, seed=number))):
            metrics, prediction = trainer.evaluate(data), trainer.predict(data)
            answers.append([metrics["eval_loss"], metrics["eval_share"], prediction.predictions.tolist()])
    return answers


def test_dispatched_evaluation_counts_each_sample_once_and_keeps_the_order(
    tmp_path: Path, run_distributed: Any
) -> None:
    alone = evaluate(str(tmp_path), most=7)
    for both in run_distributed(evaluate, folder=str(tmp_path), most=7):
        for ours, theirs in zip(both, alone, strict=True):
            assert ours[:2] == pytest.approx(theirs[:2], rel=1e-5)
            torch.testing.assert_close(torch.tensor(ours[2]), torch.tensor(theirs[2]))


def fail_to_read(folder: str) -> str:
    """Train on data that cannot be read; say what this rank heard."""

    class Broken(Counted):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            if index:  # the first sample is looked at by every rank, before anything is launched
                raise OSError("disk gone")
            return super().__getitem__(index)

    arguments = make_arguments(Path(folder), accelerator_config={"dispatch_batches": True})
    try:
        Trainer(Net(), arguments, train_dataset=Broken(8)).train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_failing_reader_tells_the_other_ranks(tmp_path: Path, run_distributed: Any) -> None:
    class_and_text = run_distributed(fail_to_read, folder=str(tmp_path))
    assert class_and_text[0] == "OSError: disk gone"
    assert class_and_text[1].startswith("TaskError")
    assert "disk gone" in class_and_text[1]


class Words(Dataset[dict[str, Any]]):
    """Samples of different lengths; the first token is the sample's number."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.tensor([index] + [1] * ((index * 7) % 11)), "labels": torch.tensor(index)}


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "labels": torch.stack([row["labels"] for row in rows])}


class Reader(torch.nn.Module):
    """Notes what it reads, and predicts the sample's number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.seen.append(input_ids[:, 0].tolist())
        numbers = self.weight * input_ids[:, 0].float()
        return {"loss": numbers.mean(), "logits": numbers}


def sort(
    folder: str, *, stop: int | None = None, resume: bool = False, sampler: str | None = None, **options: Any
) -> dict[str, Any]:
    """Train, predict and evaluate with an order by length, or by a sampler of the user's own."""

    class Backwards(Sampler[int]):
        def __iter__(self) -> Any:
            return iter(range(22, -1, -1))

        def __len__(self) -> int:
            return 23

    class Drawn(Backwards):
        def __iter__(self) -> Any:
            left = list(range(23))
            while left:
                yield left.pop(random.randrange(len(left)))

    class Own(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            made = {"backwards": Backwards(), "drawn": Drawn()}
            return made[sampler] if sampler else super()._get_train_sampler(train_dataset)

    def collate(rows: Any) -> Any:
        random.sample(range(9), k=int(os.environ["RANK"]) + 1)  # so that the ranks' generators differ
        return pad(rows)

    model = Reader()
    arguments = make_arguments(
        Path(folder), arguments=Seq2SeqTrainingArguments, per_device_train_batch_size=2, per_device_eval_batch_size=2,
        learning_rate=0.0, save_strategy="steps", save_steps=100, **options,
    )  # fmt: skip
    trainer = Own(model, arguments, data_collator=collate, train_dataset=Words(), callbacks=[StopAt(stop)])
    trainer.train(resume_from_checkpoint=resume)
    seen = list(model.seen)
    output = trainer.predict(Words())
    assert output.label_ids is not None
    return {
        "seen": seen,
        "read": model.seen[len(seen) :],
        "predictions": output.predictions.tolist(),
        "labels": output.label_ids.tolist(),
    }


@pytest.mark.parametrize("options", [{"group_by_length": True}, {"sortish_sampler": True}])
def test_order_by_length_is_shared_out_and_resumed(
    tmp_path: Path, run_distributed: Any, options: dict[str, Any]
) -> None:
    whole, _, rest = zip(*run_distributed(in_parts, call="sort", folder=str(tmp_path), **options), strict=True)
    assert {i for each in whole for batch in each["seen"][:6] for i in batch} == set(range(23))
    assert [each["seen"] for each in rest] == [each["seen"][8:] for each in whole]
    for each in whole:
        assert each["predictions"] == each["labels"] == list(range(23))
    is_sorted = [len(Words()[batch[0]]["input_ids"]) for batch in whole[0]["read"]]
    assert (is_sorted == sorted(is_sorted, reverse=True)) == ("sortish_sampler" in options)


@pytest.mark.parametrize("sampler", ["backwards", "drawn"])
def test_samplers_of_the_user_are_shared_out_and_resumed(tmp_path: Path, run_distributed: Any, sampler: str) -> None:
    options = {"call": "sort", "folder": str(tmp_path), "sampler": sampler, "num_train_epochs": 2}
    both, _, rest = zip(*run_distributed(in_parts, **options), strict=True)
    rounds = [i for pair in zip(both[0]["seen"], both[1]["seen"], strict=True) for batch in pair for i in batch]
    # The last batch of a pass is filled up.
    assert [sorted(rounds[:23]), sorted(rounds[24:47])] == [list(range(23))] * 2
    assert (rounds[:23] == list(range(22, -1, -1))) == (sampler == "backwards")
    assert [each["seen"] for each in rest] == [each["seen"][8:] for each in both]


class Part(IterableDataset[Any]):
    def __init__(self, **attributes: int) -> None:
        vars(self).update(attributes)

    def __iter__(self) -> Any:
        return iter(make_rows(12)[torch.distributed.get_rank() :: 2])


class Half(Stream):
    """A stream with a length that its maker has cut."""

    def __len__(self) -> int:
        return len(self.rows)


def read_parts(folder: str) -> dict[str, Any]:
    """Train on streams that yield a part; return the rows of this rank, or the error."""
    rank, found, rows = int(os.environ["RANK"]), dict[str, Any](), make_rows(12)
    data: Any = {"says nothing": Part(), "declares": Part(rank=rank, world_size=2), "lengths": Half(rows[: 5 + rank])}
    for kind, dispatches in itertools.product(data, (True, False)):
        seen = found[f"{kind} {dispatches}"] = list[Any]()
        options = {"accelerator_config": {"dispatch_batches": dispatches}, "train_dataset": data[kind]}
        note = at("on_train_begin", lambda *args, seen=seen, model, **kwargs: model.register_forward_pre_hook(
            lambda _, args, kwargs: seen.extend(row_of(rows, each) for each in kwargs["x"]), with_kwargs=True
        ))  # fmt: skip
        try:
            with warnings.catch_warnings(record=True) as told:
                make_trainer(Path(folder), None, note, max_steps=2, per_device_train_batch_size=3, **options).train()
            found[f"told {kind} {dispatches}"] = [str(each.message) for each in told]
        except ConfigError as error:
            found[f"{kind} {dispatches}"] = str(error)
    return found


def test_streams_that_yield_a_part_are_read_as_they_declare(tmp_path: Path, run_distributed: Any) -> None:
    for rank, found in enumerate(run_distributed(read_parts, folder=str(tmp_path))):
        assert [len(found[f"told says nothing {dispatches}"]) for dispatches in (True, False)] == [1, 0]
        for dispatches in (True, False):
            assert found[f"told declares {dispatches}"] == []
            assert found[f"declares {dispatches}"] == list(range(rank, 12, 2))
            assert "Cannot split the Half among 2 processes" in found[f"lengths {dispatches}"]


# -- loaders that accelerate has prepared ------------------------------------------------------------------------------


class Parts(Trainer):
    """Reads, from each of its hooks, the part of this rank as a plain loader."""

    def part(self, data: Any) -> Any:
        rank, world_size = self.args.process_index, self.args.world_size
        if isinstance(data, IterableDataset):
            from datasets.distributed import split_dataset_by_node

            return DataLoader(split_dataset_by_node(data, rank, world_size), batch_size=2)
        generator = torch.Generator().manual_seed(rank)
        mine = Subset(data, range(rank, len(data), world_size))
        return DataLoader(mine, batch_size=2, shuffle=True, generator=generator)

    def get_train_dataloader(self) -> Any:
        return self.part(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.part(self.eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self.part(test_dataset)


class Inherited(Trainer):
    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return super().get_eval_dataloader(eval_dataset)


def read(folder: str, *, kind: str) -> dict[str, Any]:
    """Train an epoch and predict through overridden hooks; return the rows of this rank, and how many predictions."""
    from datasets import Dataset as HubDataset
    from datasets.distributed import split_dataset_by_node

    rows = make_rows(9)
    hub = HubDataset.from_list([{name: value.tolist() for name, value in row.items()} for row in rows])
    hub = hub.with_format("torch")
    data: Any = {
        "stream": lambda: hub.to_iterable_dataset(2),
        "split": lambda: split_dataset_by_node(hub, int(os.environ["RANK"]), 2),
        "halves": lambda: split_dataset_by_node(hub.select(range(8)), int(os.environ["RANK"]), 2),
        "subset": lambda: Subset(rows, range(int(os.environ["RANK"]), 8, 2)),
        "list": lambda: rows[int(os.environ["RANK"]) : 8 : 2],
        "tensors": lambda: TensorDataset(torch.arange(int(os.environ["RANK"]), 8, 2)),
    }.get(kind, lambda: rows)()
    seen: list[int] = []

    class Note(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            model.register_forward_pre_hook(lambda _, args, kwargs: self.note(model, **kwargs), with_kwargs=True)

        def note(self, model: Any, x: Any, **kwargs: Any) -> None:
            seen.extend(row_of(rows, each) for each in x if model.training)

    hooked = {"inherited": Inherited, "parts": Parts, "stream": Parts}.get(kind, Trainer)
    arguments = make_arguments(Path(folder), max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=2)
    trainer = hooked(Net(), arguments, train_dataset=data, eval_dataset=data, callbacks=[Note()])
    try:
        trainer.train()
    except ConfigError as error:
        with pytest.raises(ConfigError, match="split before"):
            trainer.evaluate()
        return {"error": str(error)}
    trainer.evaluate()
    return {"seen": seen, "predictions": sorted(trainer.predict(data).label_ids.tolist())}


def read_each(folder: str) -> dict[str, Any]:
    kinds = ("parts", "stream", "inherited", "split", "halves", "subset", "list", "tensors")
    return {kind: read(f"{folder}/{kind}", kind=kind) for kind in kinds}


def test_hooks_return_the_part_of_this_rank_as_it_is(tmp_path: Path, run_distributed: Any) -> None:
    pytest.importorskip("datasets")
    first, second = run_distributed(read_each, folder=str(tmp_path))
    labels = sorted(int(row["labels"]) for row in make_rows(9))
    # In the order of each rank's own generator.
    expected = []
    for rank in (0, 1):
        mine = range(rank, 9, 2)
        generator = torch.Generator().manual_seed(rank)
        expected.append([mine[int(i)] for i in DataLoader(range(len(mine)), 1, shuffle=True, generator=generator)][:4])
    assert [first["parts"]["seen"], second["parts"]["seen"]] == expected
    assert first["parts"]["predictions"] == first["stream"]["predictions"] == labels
    assert not set(first["stream"]["seen"]) & set(second["stream"]["seen"])
    assert not set(first["inherited"]["seen"]) & set(second["inherited"]["seen"])
    for kind in ("split", "halves", "subset", "list", "tensors"):
        assert "split before" in first[kind]["error"]
        assert "split before" in second[kind]["error"]


def prepare(accelerator: Any, data: Any, *, even: bool, dispatch: bool) -> Any:
    accelerator.even_batches = even
    accelerator.dataloader_config.dispatch_batches = dispatch
    return accelerator.prepare(DataLoader(data, batch_size=2, shuffle=not isinstance(data, IterableDataset)))


def train_prepared(
    folder: str,
    *,
    num: int = 20,
    kind: str = "map",
    even: bool = True,
    dispatch: bool = False,
    stop: int | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train on a loader that is shared out already; return this rank's rows, accelerate's own, and the weights."""
    set_seed(7)
    data: Any = {"map": Counted, "stream": Stream}[kind](num if kind == "map" else make_rows(num))
    seen: list[list[int]] = []

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return prepare(self.accelerator, data, even=even, dispatch=dispatch)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            seen.append([row_of(data.rows, x) for x in inputs["x"]])
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    arguments = make_arguments(Path(folder), per_device_train_batch_size=2, max_steps=12, save_steps=1000)
    trainer = Own(Net(dropout=0.2), arguments, train_dataset=data, callbacks=[StopAt(stop)])
    trainer.train(resume_from_checkpoint=resume)
    set_seed(arguments.seed)
    loader, expected = prepare(trainer.accelerator, data, even=even, dispatch=dispatch), []
    for epoch in range(4):
        loader.set_epoch(epoch)
        expected += [[row_of(data.rows, x) for x in batch["x"]] for batch in loader]
    weights = [p.flatten().tolist() for p in trainer.model.parameters()]
    return {"seen": seen, "expected": expected[:12], "weights": weights}


@pytest.mark.parametrize(
    "options", [{"num": 21}, {"even": False}, {"kind": "stream"}, {"dispatch": True, "num": 21}], ids=str
)
def test_prepared_loader_is_not_shared_out_twice_and_goes_on_exactly(
    tmp_path: Path, run_distributed: Any, options: dict[str, Any]
) -> None:
    for whole, cut, rest in run_distributed(in_parts, call="train_prepared", folder=str(tmp_path), **options):
        assert whole["seen"] == whole["expected"]
        assert [cut["seen"], rest["seen"]] == [whole["seen"][:8], whole["seen"][8:]]
        assert rest["weights"] == whole["weights"]


def train_unevenly(folder: str, *, strategy: str, is_prepared: bool, **options: Any) -> dict[str, Any]:
    """Train on 11 batches, 6 of which rank 0 gets."""
    set_seed(7)
    data = Counted(22)

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            if is_prepared:
                return prepare(self.accelerator, data, even=False, dispatch=False)
            return super().get_train_dataloader()

    arguments = make_arguments(
        Path(folder), per_device_train_batch_size=2, accelerator_config={"even_batches": False}, **options
    )
    trainer = Own(Net(), arguments, train_dataset=data, strategy=strategy)
    try:
        trainer.train()
    except ConfigError as error:
        return {"error": str(error), "step": trainer.state.global_step}
    weights = [p.flatten().tolist() for p in trainer.strategy.model_state(trainer.model_wrapped).values()]
    return {"step": trainer.state.global_step, "weights": weights}


def train_each_unevenly(folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train_unevenly(f"{folder}/{number}", **case) for number, case in enumerate(cases)]


def test_unequal_numbers_of_batches_train_right_or_end_at_once(tmp_path: Path, run_distributed: Any) -> None:
    prepared, halves = {"strategy": "ddp", "is_prepared": True}, {"gradient_accumulation_steps": 2}
    refused = [
        prepared,
        {**prepared, "max_steps": 14},
        {**prepared, "strategy": "fsdp"},
        {**prepared, **halves, "strategy": "fsdp"},
        {"strategy": "ddp", "is_prepared": False},
    ]
    trained = [{**prepared, **halves}, {**prepared, "max_steps": 5}, {**prepared, "strategy": "fsdp", "max_steps": 5}]
    both = run_distributed(train_each_unevenly, folder=str(tmp_path), cases=[*refused, *trained])
    for found in both:
        for case, each in zip(refused, found, strict=False):
            assert "6 on rank 0, 5 on rank 1" in each.get("error", ""), case
            assert each["step"] == 0, case
        assert [each["step"] for each in found[len(refused) :]] == [6, 5, 5]
    assert all(mine["weights"] == other["weights"] for mine, other in zip(both[0][-3:-1], both[1][-3:-1], strict=True))
