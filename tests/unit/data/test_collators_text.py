from __future__ import annotations

import pickle

import numpy
import pytest
import torch
from support.loading import build
from torch.utils.data import DataLoader

from hftrain import ConfigError, TaskError
from hftrain.data.collators_masked import DataCollatorForPermutationLanguageModeling
from hftrain.data.collators_text import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
)
from hftrain.data.columns import RemoveColumnsCollator
from hftrain.data.feed import TrainFeed


class Tokenizer:
    """Has what the collators ask for, and no more; the real ones are in the interop tests."""

    pad_token_id = 0
    mask_token_id = 1
    vocab_size = 30

    def pad(self, features, *, padding=True, max_length=None, pad_to_multiple_of=None, return_tensors="pt"):
        width = max(len(row["input_ids"]) for row in features)
        rows = [row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in features]
        return {"input_ids": torch.tensor(rows)}


class MasklessTokenizer(Tokenizer):
    mask_token_id = None


ROWS = [{"input_ids": list(range(2, 2 + length))} for length in range(12, 22)]


def masks(**options):
    collator = DataCollatorForLanguageModeling(Tokenizer(), seed=7)
    return TrainFeed(build(ROWS, collate=collator, batch_size=3, **options), seed=1)


def read(batches):
    return [(batch["input_ids"].tolist(), batch["labels"].tolist()) for batch in batches]


def test_masks_leave_padding_and_hide_most_of_what_is_to_be_predicted():
    batch = DataCollatorForLanguageModeling(Tokenizer(), mlm_probability=0.5, seed=0)(
        [{"input_ids": [5] * 200}, {"input_ids": [5] * 100}]
    )
    chosen = batch["labels"] != -100
    assert not chosen[1, 100:].any()
    assert (batch["labels"][chosen] == 5).all()
    assert 0.4 < chosen.sum() / 300 < 0.6
    assert 0.7 < (batch["input_ids"][chosen] == 1).float().mean() < 0.9
    assert (batch["input_ids"][~chosen][batch["input_ids"][~chosen] != 0] == 5).all()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_seeded_masks_depend_on_epoch_and_content_alone(num_workers):
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    steady = masks(**workers)
    epochs = [read(steady.open(epoch)) for epoch in (0, 1)]
    torch.manual_seed(99)
    alone = masks()
    assert [read(alone.open(epoch)) for epoch in (0, 1)] == epochs
    assert read(masks(**workers).open(1, skip=2)) == epochs[1][2:]


def test_seeded_masks_differ_between_epochs_and_seeds():
    collator = DataCollatorForLanguageModeling(Tokenizer(), seed=7)
    seen = []
    for epoch in (0, 1, 0):
        RemoveColumnsCollator(collator, ["input_ids"], None, "Net", description="training").set_epoch(epoch)
        seen.append(read([collator(ROWS)]))
    other = read([DataCollatorForLanguageModeling(Tokenizer(), seed=8)(ROWS)])
    assert seen[0] == seen[2]
    assert len({str(each) for each in (seen[0], seen[1], other)}) == 3


def test_unseeded_masks_come_from_the_process():
    collator = DataCollatorForLanguageModeling(Tokenizer())
    torch.manual_seed(0)
    first = read([collator(ROWS)])
    torch.manual_seed(0)
    assert read([collator(ROWS)]) == first != read([collator(ROWS)])


def test_special_tokens_of_a_duck_are_not_masked():
    class Known(Tokenizer):
        all_special_ids = (0, 5)

    batch = DataCollatorForLanguageModeling(Known(), mlm_probability=1.0)([[5, 6, 5, 7]])
    assert (batch["labels"] != -100).tolist() == [[False, True, False, True]]


def test_collators_can_be_pickled():
    for collator in (DataCollatorForLanguageModeling(Tokenizer(), seed=1), DataCollatorForSeq2Seq(Tokenizer())):
        assert read([pickle.loads(pickle.dumps(collator))([{**ROWS[0], "labels": [1]}])])[0][0]


def test_labels_of_any_type_are_padded_in_a_worker_too():
    rows = [{"input_ids": [2, 3], "label_ids": numpy.array([4])}, {"input_ids": [2], "label_ids": numpy.array([4, 5])}]
    loader = DataLoader(rows, batch_size=2, collate_fn=DataCollatorForSeq2Seq(Tokenizer()), num_workers=1)
    assert next(iter(loader))["labels"].tolist() == [[4, -100], [4, 5]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataCollatorForLanguageModeling(MasklessTokenizer()), "no mask token"),
        (lambda: DataCollatorForLanguageModeling(Tokenizer(), mlm_probability=2.0), "lie in"),
        (lambda: DataCollatorForLanguageModeling(Tokenizer(), random_replace_prob=0.5), "add up"),
        (lambda: DataCollatorForSeq2Seq(object()), "no pad method"),
        (lambda: DataCollatorForTokenClassification(object()), "no pad method"),
        (lambda: DataCollatorForSeq2Seq(Tokenizer(), return_tensors="tf")(ROWS[:1]), "'tf'"),
    ],
)
def test_collators_refuse(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_labels_that_do_not_fit_are_refused():
    rows = [{"input_ids": [2, 3], "labels": [1]}, {"input_ids": [2, 3], "labels": [1, 2]}]
    with pytest.raises(TaskError, match="do not fit"):
        DataCollatorForSeq2Seq(Tokenizer(), padding=False)(rows)
    with pytest.raises(TaskError, match="one label per token"):
        DataCollatorForTokenClassification(Tokenizer())([{"input_ids": [2], "labels": [1, 2]}])


def test_whole_words_need_offsets_and_masking() -> None:
    with pytest.raises(ConfigError, match="mlm=False"):
        DataCollatorForLanguageModeling(Tokenizer(), mlm=False, whole_word_mask=True)
    with pytest.raises(TaskError, match="no offset_mapping"):
        DataCollatorForLanguageModeling(Tokenizer(), whole_word_mask=True)([{"input_ids": [5, 6]}])


def test_permuted_sequences_have_an_even_length():
    with pytest.raises(ConfigError, match="9 tokens") as error:
        DataCollatorForPermutationLanguageModeling(Tokenizer())([{"input_ids": list(range(2, 11))}])
    assert isinstance(error.value, ValueError)
