from __future__ import annotations

import numpy
import pytest
import torch
from support.loading import build

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from hftrain.core.errors import ConfigError  # noqa: E402
from hftrain.data.collators import default_data_collator  # noqa: E402
from hftrain.data.columns import RemoveColumnsCollator, prune_columns, removable_columns, signature_columns  # noqa: E402
from hftrain.data.feed import TrainFeed  # noqa: E402

pytestmark = pytest.mark.interop


class Recorder(torch.nn.Module):
    """A model that remembers the samples of each batch it was trained on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def forward(self, index, labels=None):
        if self.training:
            self.seen.append(index.tolist())
        return {"loss": self.weight * index.float().mean()}


@pytest.fixture
def table():
    rows = {"index": list(range(8)), "text": ["a"] * 8, "label": [0, 1] * 4}
    return datasets.Dataset.from_dict(rows)


@pytest.mark.parametrize(
    "features",
    [
        [{"x": [1, 2], "label": 0}, {"x": [3, 4], "label": 1}],
        [{"x": 0.5, "label": 0.5, "text": "a", "none": None}] * 2,
        [{"x": torch.ones(2), "label_ids": [1, 2]}] * 2,
        [{"x": numpy.ones(2), "label_ids": torch.tensor([1.0])}] * 2,
        [{"labels": [1, -100], "label": None}] * 2,
    ],
)
def test_default_collator_equals_transformers(features):
    ours, theirs = default_data_collator(features), transformers.default_data_collator(features)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0)


def test_columns_of_a_table_are_pruned(table):
    keep = signature_columns(Recorder(), label_names=["labels"])
    options = {"keep": keep, "model_name": "Recorder", "description": "training"}
    assert prune_columns(table, **options).column_names == ["index", "label"]
    assert table.column_names == ["index", "text", "label"]
    assert prune_columns(table.to_iterable_dataset(), **options).column_names == ["index", "label"]
    with pytest.raises(ConfigError, match=r"columns=\['text'\]"):
        prune_columns(table.select_columns(["text"]), **options)


def test_columns_made_on_the_fly_are_left_to_the_collator(table):
    transformed = table.with_transform(
        lambda rows: {"index": [len(text) for text in rows["text"]], "more": rows["text"]}
    )
    unknown = table.to_iterable_dataset().map(lambda row: {"more": row["index"]})
    for dataset in (transformed, unknown):
        assert removable_columns(dataset) is None
    pruner = RemoveColumnsCollator(default_data_collator, ["index"], None, "Recorder", description="training")
    loader = build(transformed, batch_size=8, is_training=False, collate=pruner)
    assert [batch["index"].tolist() for batch in loader] == [[1] * 8]


def test_transformers_models_name_their_columns():
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    columns = signature_columns(transformers.BertForSequenceClassification(config), label_names=["labels"])
    assert {"input_ids", "attention_mask", "labels", "label"} <= set(columns)
    assert "kwargs" not in columns


@pytest.mark.parametrize("num_workers", [0, 2])
def test_hub_streams_are_shuffled_by_epoch_and_resumed(table, num_workers):
    def feed():
        stream = table.to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=8)
        workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        return TrainFeed(build(stream, batch_size=2, **workers), seed=42)

    def order(batches):
        return [row["index"] for batch in batches for row in batch]

    steady = feed()
    epochs = [order(steady.open(epoch)) for epoch in (0, 1)]
    assert epochs[0] != epochs[1]
    assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 2
    assert order(feed().open(1, skip=1)) == epochs[1][2:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_hub_streams_are_evaluated_once_by_all_ranks(table, num_workers):
    seen = []
    for rank in (0, 1):
        stream = table.to_iterable_dataset(num_shards=2)
        loader = build(stream, batch_size=3, num_workers=num_workers, is_training=False, rank=rank, world_size=2)
        seen += [row["index"] for batch in loader for row in batch]
    assert sorted(seen) == list(range(8))
