"""Each kind of loss that transformers' models have: gradients do not depend on the split, nor `eval_loss` on the batch.

The reference is the model's own loss on all samples in one batch. What has none that could be taken apart (contrastive
losses, those with a part that mixes the samples) is weighed by samples. Where the loss is of no known kind, a model
that takes the item count is trained as by transformers' Trainer, which is the reference then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Rows, make_arguments
from torch import nn

transformers = pytest.importorskip("transformers")

import hftrain  # noqa: E402
from hftrain import Trainer, set_seed  # noqa: E402
from hftrain.core.tree import map_tensors  # noqa: E402

pytestmark = pytest.mark.interop

NUM_ROWS, LENGTH, VOCABULARY = 6, 8, 20

TINY: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
TEXT: dict[str, Any] = {**TINY, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 8, "initializer_range": 0.5,
}  # fmt: skip
SPEECH: dict[str, Any] = {
    **TINY, "vocab_size": VOCABULARY, "conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (4,),
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_proj_dropout": 0.0, "final_dropout": 0.0,
    "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0,
    "apply_spec_augment": False, "num_feat_extract_layers": 1, "feat_extract_norm": "layer", "classifier_proj_size": 8,
}  # fmt: skip
IMAGE: dict[str, Any] = {**TINY, "image_size": 8, "patch_size": 4, "num_channels": 3, "encoder_stride": 4}


def random(*shape: int, high: int | None = None, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if high is not None:
        return torch.randint(3, high, shape, generator=generator)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def ragged(labels: torch.Tensor, ignored: int = -100, *, from_left: bool = False) -> torch.Tensor:
    """Ignore the end of each sample's labels, another number of them each time; or their beginning."""
    labels = labels.clone()
    for index, row in enumerate(labels.flatten(1)):
        keep = 2 + index * 5 % (row.numel() - 2)
        row[slice(0, row.numel() - keep) if from_left else slice(keep, None)] = ignored
    return labels


def words(*, labels: torch.Tensor | None = None, high: int = VOCABULARY, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return padded sentences with a label for each word, or the labels given."""
    tokens = random(NUM_ROWS, LENGTH, high=VOCABULARY)
    if labels is None:
        labels = ragged(random(NUM_ROWS, LENGTH, high=high, seed=seed))
        return {"input_ids": tokens, "attention_mask": (labels != -100).long(), "labels": labels}
    return {"input_ids": tokens, "labels": labels}


def sounds(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_values": random(NUM_ROWS, 64), "labels": labels}


def images(**columns: Any) -> dict[str, Any]:
    return {"pixel_values": random(NUM_ROWS, 3, 8, 8), **columns}


def boxes() -> list[dict[str, torch.Tensor]]:
    """Return one to three boxes for each image."""
    return [
        {"class_labels": torch.arange(1 + index % 3) % 2, "boxes": random(1 + index % 3, 4, seed=index).sigmoid() / 2}
        for index in range(NUM_ROWS)
    ]


def transcripts() -> dict[str, torch.Tensor]:
    return sounds(ragged(random(NUM_ROWS, 7, high=VOCABULARY)))


def masks() -> torch.Tensor:
    return ragged(torch.ones(NUM_ROWS, 4, dtype=torch.long), 0) != 0


def make(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return getattr(transformers, name)(getattr(transformers, config)(**settings))

    return build


def segmenter() -> nn.Module:
    model = make(
        "SegformerForSemanticSegmentation", "SegformerConfig", num_encoder_blocks=1, depths=[1], sr_ratios=[1],
        hidden_sizes=[8], patch_sizes=[3], strides=[2], num_attention_heads=[1], mlp_ratios=[1], num_labels=5,
        decoder_hidden_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )()  # fmt: skip
    # Its statistics mix the samples of a batch.
    model.decode_head.batch_norm = nn.Identity()
    return model


def clip() -> nn.Module:
    text = {name: value for name, value in TEXT.items() if "prob" not in name}
    image = {name: value for name, value in IMAGE.items() if "prob" not in name}
    config = transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=8)
    return transformers.CLIPModel(config)


@dataclass(frozen=True)
class Kind:
    """A model, its samples as one batch, and in what its gradient and its loss are other than the whole batch's.

    A loss that is followed is of no known kind, so that its gradient is that of transformers' Trainer.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    gradient: float | None = 1.0
    loss: float | None = 1.0
    rel: float = 1e-6
    label_names: list[str] | None = None
    dtype: torch.dtype = torch.float64
    is_followed: bool = False


def classes(num: int = 3) -> torch.Tensor:
    return torch.arange(NUM_ROWS) % num


KINDS: dict[str, Kind] = {
    "causal": Kind(make("LlamaForCausalLM", "LlamaConfig", **DECODER), words),
    "causal, whose first labels are masked": Kind(
        make("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0,
             embd_pdrop=0.0, attn_pdrop=0.0),
        lambda: words(labels=ragged(random(NUM_ROWS, LENGTH, high=VOCABULARY), from_left=True)),
    ),
    # What its routers add mixes the samples: the labels are the nearest.
    "mixture of experts": Kind(
        make("MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=2, output_router_logits=True,
             router_aux_loss_coef=1e-3, experts_implementation="eager"),
        words, rel=5e-3,
    ),
    "masked": Kind(make("BertForMaskedLM", "BertConfig", **TEXT), words),
    "sequence to sequence": Kind(
        make("T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=8, num_layers=1,
             num_heads=2, dropout_rate=0.0, decoder_start_token_id=0),
        words,
    ),
    "one class": Kind(make("BertForSequenceClassification", "BertConfig", **TEXT, num_labels=3),
                      lambda: words(labels=classes())),
    "several classes": Kind(
        make("BertForSequenceClassification", "BertConfig", **TEXT, num_labels=3,
             problem_type="multi_label_classification"),
        lambda: words(labels=(random(NUM_ROWS, 3) > 0).double()),
    ),
    "regression": Kind(make("BertForSequenceClassification", "BertConfig", **TEXT, num_labels=1),
                       lambda: words(labels=random(NUM_ROWS))),
    "tokens": Kind(make("BertForTokenClassification", "BertConfig", **TEXT, num_labels=VOCABULARY), words),
    "spans": Kind(
        make("BertForQuestionAnswering", "BertConfig", **TEXT),
        lambda: {"input_ids": random(NUM_ROWS, LENGTH, high=VOCABULARY), "start_positions": classes(),
                 "end_positions": classes() + 1},
    ),
    "multiple choice": Kind(
        make("BertForMultipleChoice", "BertConfig", **TEXT),
        lambda: {"input_ids": random(NUM_ROWS, 3, LENGTH, high=VOCABULARY), "labels": classes()},
    ),
    "next sentence": Kind(make("BertForNextSentencePrediction", "BertConfig", **TEXT),
                          lambda: words(labels=classes(2))),
    "CTC, mean": Kind(make("Wav2Vec2ForCTC", "Wav2Vec2Config", **SPEECH, ctc_loss_reduction="mean"), transcripts,
                      is_followed=True),
    "CTC, sum": Kind(make("Wav2Vec2ForCTC", "Wav2Vec2Config", **SPEECH, ctc_loss_reduction="sum"), transcripts,
                     loss=None, is_followed=True),
    "speech to text": Kind(
        make("WhisperForConditionalGeneration", "WhisperConfig", vocab_size=VOCABULARY, d_model=8, encoder_layers=1,
             decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8,
             decoder_ffn_dim=8, num_mel_bins=4, max_source_positions=8, max_target_positions=16, dropout=0.0,
             pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
        lambda: {"input_features": random(NUM_ROWS, 4, 16), "labels": ragged(random(NUM_ROWS, 7, high=VOCABULARY))},
    ),
    "classes of sounds": Kind(make("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **SPEECH, num_labels=3),
                              lambda: sounds(classes())),
    "classes of images": Kind(make("ViTForImageClassification", "ViTConfig", **IMAGE, num_labels=3),
                              lambda: images(labels=classes())),
    # The loss is that of enlarged logits, or of pixels, which the outputs do not give: as in transformers.
    "segmentation": Kind(segmenter, lambda: images(labels=ragged(random(NUM_ROWS, 8, 8, high=5), 255)), loss=None,
                         is_followed=True),
    "masked images": Kind(make("ViTForMaskedImageModeling", "ViTConfig", **IMAGE),
                          lambda: images(bool_masked_pos=masks()), None, None, label_names=["bool_masked_pos"]),
    # Divided by the boxes of a batch, and by weights of classes.
    "boxes": Kind(
        make("YolosForObjectDetection", "YolosConfig", **{**IMAGE, "image_size": [8, 8]}, num_detection_tokens=3,
             num_labels=2),
        lambda: images(labels=boxes()), None, None, rel=1e-5, dtype=torch.float32,
    ),
    # No sample has a loss that the others do not change.
    "contrastive": Kind(clip, lambda: images(input_ids=random(NUM_ROWS, LENGTH, high=VOCABULARY)), None, None,
                        label_names=["pixel_values"]),
}  # fmt: skip


def make_model(kind: Kind) -> nn.Module:
    set_seed(0)
    return kind.model().to(kind.dtype)


def rows_of(kind: Kind) -> Rows:
    batch = map_tensors(kind.batch(), lambda value: value.to(kind.dtype) if value.is_floating_point() else value)
    return [{name: column[index] for name, column in batch.items()} for index in range(NUM_ROWS)]


def collate(rows: Rows) -> dict[str, Any]:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    batch: dict[str, Any] = {
        name: torch.stack(column) if isinstance(column[0], torch.Tensor) else column for name, column in columns.items()
    }
    return {**batch, "return_loss": True} if {"pixel_values", "input_ids"} <= batch.keys() else batch


def gradient_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def by_hand(kind: Kind, *, size: int) -> tuple[float, torch.Tensor]:
    """Return the mean over batches of a size, which divides the number of samples, and its gradient."""
    model, rows = make_model(kind).train(), rows_of(kind)
    losses = []
    for start in range(0, NUM_ROWS, size):
        loss = model(**collate(rows[start : start + size])).loss * size / NUM_ROWS
        loss.backward()
        losses.append(loss.item())
    return sum(losses), gradient_of(model)


def train(kind: Kind, folder: Path, library: Any = hftrain, **options: Any) -> torch.Tensor:
    """Return the gradient of a step of three micro-batches, over all samples in order."""
    found: list[torch.Tensor] = []

    class Keep(library.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            found.append(gradient_of(model))

    class Ordered(library.Trainer):  # type: ignore[misc,name-defined]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = library.TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=1, max_grad_norm=0.0,
        learning_rate=0.0, label_names=kind.label_names, report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    rows = rows_of(kind)
    Ordered(
        make_model(kind), arguments, train_dataset=rows, data_collator=collate, callbacks=[Keep()], **options
    ).train()
    return found[0]


@pytest.mark.parametrize("name", KINDS)
def test_gradient_is_that_of_the_whole_batch(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    kind = KINDS[name]
    if kind.is_followed:
        expected = train(kind, tmp_path, transformers)
    else:
        _, expected = by_hand(kind, size=2 if kind.gradient is None else NUM_ROWS)
        expected = expected * (1.0 if kind.gradient is None else kind.gradient)
    scale = float(expected.abs().max())
    torch.testing.assert_close(train(kind, tmp_path), expected, rtol=kind.rel, atol=kind.rel * scale)
    assert ("with 3 micro-batches and 1 process(es) it is 3 times a mean" in caplog.text) == kind.is_followed


def test_a_declared_mean_over_samples_has_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    kind = KINDS["CTC, mean"]
    _, expected = by_hand(kind, size=NUM_ROWS)
    torch.testing.assert_close(train(kind, tmp_path, count_items="samples"), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_eval_loss_does_not_depend_on_the_batch_size(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    for size in (1, 2, 3, NUM_ROWS):
        expected, _ = by_hand(kind, size=size if kind.loss is None else NUM_ROWS)
        arguments = make_arguments(tmp_path, per_device_eval_batch_size=size, label_names=kind.label_names)
        trainer = Trainer(make_model(kind), arguments, eval_dataset=rows_of(kind), data_collator=collate)
        found = trainer.evaluate()["eval_loss"]
        assert found == pytest.approx(expected * (1.0 if kind.loss is None else kind.loss), rel=kind.rel), size


@pytest.mark.parametrize("size", [1, 2, 6])
def test_eval_loss_of_a_mean_over_samples_is_that_of_transformers(tmp_path: Path, size: int) -> None:
    kind = KINDS["CTC, mean"]
    arguments = {"per_device_eval_batch_size": size, "report_to": "none", "use_cpu": True}
    model, rows = make_model(kind), rows_of(kind)
    ours = Trainer(model, make_arguments(tmp_path, **arguments), eval_dataset=rows, data_collator=collate)
    theirs = transformers.Trainer(
        model, transformers.TrainingArguments(str(tmp_path), **arguments), eval_dataset=rows, data_collator=collate
    )
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-6)
