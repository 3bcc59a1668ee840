"""Our collators give what those of transformers give."""

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


class Shifting:
    """Makes decoder inputs as encoder-decoder models do."""

    def prepare_decoder_input_ids_from_labels(self, labels):
        return labels.roll(1, -1)


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("name", ["labels", "label"])
@pytest.mark.parametrize(
    "options", [{}, {"pad_to_multiple_of": 4}, {"padding": "max_length", "max_length": 12}, {"label_pad_token_id": 0}]
)
def test_seq2seq_collator_equals_transformers(tokenizer, options, name, kind):
    labels = [[5, 6, 7], [8], [9, 9, 9, 9, 9], [5, 5]]
    options = {**options, "return_tensors": kind, "model": Shifting() if kind == "pt" else None}
    ours = hftrain.DataCollatorForSeq2Seq(tokenizer, **options)(make_features(tokenizer, **{name: labels}))
    theirs = transformers.DataCollatorForSeq2Seq(tokenizer, **options)(make_features(tokenizer, **{name: labels}))
    assert_equal(ours, theirs)


def test_seq2seq_collator_without_labels_equals_transformers(tokenizer):
    for columns in ({}, {"labels": [None] * 4}):
        ours = hftrain.DataCollatorForSeq2Seq(tokenizer)(make_features(tokenizer, **columns))
        assert_equal(ours, transformers.DataCollatorForSeq2Seq(tokenizer)(make_features(tokenizer, **columns)))


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 4}, {"padding": "max_length", "max_length": 12}])
def test_token_classification_collator_equals_transformers(tokenizer, options, kind):
    options = {**options, "return_tensors": kind}
    labels = [list(range(10)), [1, 2, 3], [1, 2, 3, 4], [1, 2]]
    ours = hftrain.DataCollatorForTokenClassification(tokenizer, **options)(make_features(tokenizer, labels=labels))
    theirs = transformers.DataCollatorForTokenClassification(tokenizer, **options)(
        make_features(tokenizer, labels=labels)
    )
    assert_equal(ours, theirs)


@pytest.mark.parametrize("as_lists", [False, True])
def test_causal_collator_equals_transformers(tokenizer, as_lists):
    features = make_features(tokenizer)
    if as_lists:
        features = [row["input_ids"] for row in features]
    ours = hftrain.DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=4)(features)
    theirs = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=4)(features)
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mlm_probability": 0.9, "mask_replace_prob": 0.4, "random_replace_prob": 0.4},
        {"mask_replace_prob": 1, "random_replace_prob": 0},
    ],
)
@pytest.mark.parametrize("gives_special", [False, True])
def test_masking_collator_draws_as_transformers_does(tokenizer, options, gives_special):
    features = make_features(tokenizer)
    if gives_special:
        features = [{**row, "special_tokens_mask": [1] + [0] * (len(row["input_ids"]) - 1)} for row in features]
    batches = []
    for package in (hftrain, transformers):
        torch.manual_seed(3)
        collator = package.DataCollatorForLanguageModeling(tokenizer, **options)
        batches.append([collator([dict(row) for row in features]) for _ in range(5)])
    for ours, theirs in zip(*batches, strict=True):
        assert_equal(ours, theirs)
    assert any((batch["labels"] != -100).any() for batch in batches[0])


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("has_labels", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_position_ids": False, "separator_id": 0},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True, "position_ids_start": 2},
    ],
)
def test_flattening_collator_equals_transformers(options, has_labels, kind):
    features = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 10]}]
    if has_labels:
        features = [{**row, "labels": [i + 1 for i in row["input_ids"]]} for row in features]
    options = {**options, "return_tensors": kind}
    ours = hftrain.DataCollatorWithFlattening(**options)(features)
    assert_equal(ours, transformers.DataCollatorWithFlattening(**options)(features))
