"""Our padding gives what that of transformers gives, and its masks are the same after a resume."""

from __future__ import annotations

import numpy
import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

import hftrain  # noqa: E402

pytestmark = pytest.mark.interop

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]


@pytest.fixture(params=["right", "left"])
def tokenizer(request):
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", padding_side=request.param,
    )  # fmt: skip


def make_features(tokenizer, *, num=4, **columns):
    texts = ["[CLS] a b c d e f g h [SEP]", "[CLS] a [SEP]", "[CLS] b c [SEP]", "d e"][:num]
    return [
        {**tokenizer(text), **{name: values[i] for name, values in columns.items()}} for i, text in enumerate(texts)
    ]


def assert_equal(ours, theirs):
    assert {name for name, value in theirs.items() if value is not None} == set(ours)
    for name, value in ours.items():
        expected = theirs[name]
        assert type(value) is type(expected), name
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, expected, rtol=0, atol=0)
        else:
            numpy.testing.assert_array_equal(value, expected)


def padded(package, tokenizer, features, **options):
    """Return a padded batch, or the message of the error, in which transformers and torch name the cause."""
    try:
        return package.DataCollatorWithPadding(tokenizer, **options)([dict(row) for row in features])
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


LENGTHS = [10, 3, 4, 2]
COLUMNS = {
    "no more": {},
    "a number": {"label": [1, 0, 1, 1]},
    "a real number": {"label": [1.5, 0.0, 1.0, 2]},
    "a truth": {"label": [True, False, True, True]},
    "numbers": {"labels": [[1, 2], [3, 4], [5, 6], [7, 8]]},
    "real numbers": {"weights": [[0.1, 2], [1e300, 4], [5, 6], [7, 1e-50]]},
    "whole, then real": {"weights": [[1, 2], [3, 4], [5, 6], [7, 0.1]]},
    "truths": {"flags": [[True, False]] * 4},
    "whole, then truths": {"flags": [[1, 0], [True, False], [2, 3], [False, 4]]},
    "numpy numbers": {"places": [[numpy.int32(1), 2], [3, 4], [5, 6], [7, numpy.int8(8)]]},
    "small numpy numbers": {"places": [[numpy.int32(1), numpy.int32(2)]] * 4},
    "arrays": {"places": [numpy.arange(3, dtype=numpy.int32)] * 4},
    "real arrays": {"places": [numpy.ones(3, dtype=numpy.float32)] * 4},
    "boxes": {"boxes": [[[1, 2], [3, 4]]] * 4},
    "nothing": {"extra": [[], [], [], []]},
    "types": {"token_type_ids": [[1] * length for length in LENGTHS]},
    "special": {"special_tokens_mask": [[1] + [0] * (length - 1) for length in LENGTHS]},
    "ids of arrays": {"input_ids": [numpy.arange(length) for length in LENGTHS]},
    "ids of real arrays": {"input_ids": [numpy.full(length, 0.1, dtype=numpy.float32) for length in LENGTHS]},
    "ids of tensors": {"input_ids": [torch.arange(length) for length in LENGTHS]},
    "ids of small numbers": {"input_ids": [[numpy.int32(2)] * length for length in LENGTHS]},
    "ids of lists of arrays": {"input_ids": [[numpy.array(0.1, dtype=numpy.float32)] * length for length in LENGTHS]},
    "real ids": {"input_ids": [[0.5] * length for length in LENGTHS]},
    "an empty row": {"input_ids": [[], [1], [2], [3]], "attention_mask": [[], [1], [1], [1]]},
    "empty rows": {"input_ids": [[]] * 4, "attention_mask": [[]] * 4},
    "unequal labels": {"labels": [[1, 2], [3], [4], [5]]},
    "too large": {"labels": [[2**64, 2]] * 4},
    "large": {"labels": [[2**63, 2], [1, -1], [1, 1], [1, 1]]},
    "None": {"labels": [[1, None]] * 4},
    "text": {"labels": [[1, "a"]] * 4},
    "no ids": {"input_ids": [None] * 4},
}


@pytest.mark.parametrize(
    "options",
    [{}, {"pad_to_multiple_of": 4}, {"padding": "max_length", "max_length": 12}, {"padding": False}],
)
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_padding_collator_equals_transformers(tokenizer, columns, options):
    features = make_features(tokenizer, **columns)
    batches = [padded(package, tokenizer, features, **options) for package in (hftrain, transformers)]
    if any("error" in batch for batch in batches):
        ours, theirs = (batch["error"] for batch in batches)
        assert ours == theirs or ours.startswith("TaskError: Cannot make a tensor of the labels")
        return
    assert_equal(*batches)
    assert list(batches[0]) == list(batches[1])
    assert type(batches[0]) is type(batches[1])
    assert [value.stride() for value in batches[0].values()] == [value.stride() for value in batches[1].values()]


def test_padding_collator_leaves_no_list_of_numbers_to_transformers(tokenizer, monkeypatch):
    # Which visits each number in Python: five times the rest of the batch.
    left = []
    convert = transformers.BatchEncoding.convert_to_tensors

    def spy(self, *args, **options):
        left.append([name for name, value in self.items() if isinstance(value, list)])
        return convert(self, *args, **options)

    features = make_features(tokenizer, label=[1, 0, 1, 1])
    monkeypatch.setattr(transformers.BatchEncoding, "convert_to_tensors", spy)
    hftrain.DataCollatorWithPadding(tokenizer)(features)
    assert left[-1] == ["label"]


def test_overridden_pad_is_asked_for_tensors():
    class Own(transformers.PreTrainedTokenizerFast):
        def pad(self, *args, return_tensors, **options):
            assert return_tensors == "pt"
            return super().pad(*args, return_tensors=return_tensors, **options)

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    own = Own(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    batch = hftrain.DataCollatorWithPadding(own)([{"input_ids": [1]}, {"input_ids": [1, 1]}])
    assert batch["input_ids"].tolist() == [[1, 0], [1, 1]]


class Halfway(hftrain.TrainerCallback):
    """Save and stop in the middle of the second epoch, unless the run goes on to its end."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 6:
            control.should_save = control.should_training_stop = True


def train_masked(folder, tokenizer, *callbacks, seed, num_workers, resumes=False):
    """Train a masked language model, and return its weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(WORDS), **sizes))
    args = hftrain.TrainingArguments(
        str(folder), per_device_train_batch_size=4, num_train_epochs=3, dataloader_num_workers=num_workers,
        report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", learning_rate=0.01,
    )  # fmt: skip
    collator = hftrain.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5, seed=seed)
    rows = [dict(tokenizer(" ".join("abcdefgh"[start : start + 5]))) for start in range(4)] * 4
    trainer = hftrain.Trainer(model, args, data_collator=collator, train_dataset=rows, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resumes)
    return model.state_dict()


@pytest.mark.parametrize("tokenizer", ["right"], indirect=True)
@pytest.mark.parametrize(("seed", "num_workers", "then"), [(None, 0, 0), (None, 2, 2), (7, 0, 2), (7, 2, 0)])
def test_masks_are_the_same_after_a_resume(tmp_path, tokenizer, seed, num_workers, then):
    whole = train_masked(tmp_path / "whole", tokenizer, seed=seed, num_workers=num_workers)
    train_masked(tmp_path / "cut", tokenizer, Halfway(), seed=seed, num_workers=num_workers)
    resumed = train_masked(tmp_path / "cut", tokenizer, seed=seed, num_workers=then, resumes=True)
    assert [name for name, value in whole.items() if not torch.equal(value, resumed[name])] == []
