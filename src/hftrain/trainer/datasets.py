"""What can be read as a dataset, and what is given in the place of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from hftrain.core.errors import ConfigError
from hftrain.core.lightning import lightning_base
from hftrain.trainer.eval_sets import EvalSet

_LOADERS = {
    "train_dataset": "get_train_dataloader",
    "eval_dataset": "get_eval_dataloader",
    "test_dataset": "get_test_dataloader",
}


def check_kind(dataset: Any, role: str) -> None:
    """Raise if something other than a dataset was given.

    Args:
        dataset: What was given; None passes.
        role: The argument: ``"train_dataset"``, ``"eval_dataset"`` or ``"test_dataset"``.

    Raises:
        ConfigError: It names what to give instead.
    """
    found = _find_problem(dataset, role)
    if found is not None:
        reason, remedy = found
        raise ConfigError(f"Cannot use a {type(dataset).__name__} as {role}:", reason, remedy)


def check_one_set(dataset: Any) -> None:
    """Raise where a dict of datasets, such as what load_dataset returns, stands where one of them belongs."""
    if isinstance(dataset, Mapping) and len(dataset) and 0 not in dataset:
        raise ConfigError(
            f"Cannot use a {type(dataset).__name__} as one dataset:",
            f"it has no sample 0, but the keys {', '.join(map(repr, dataset))}.",
            "Pass one of its values; eval_dataset and evaluate() alone take several sets.",
        )


def check_loader(loader: Any) -> None:
    """Raise where several loaders, as Lightning takes them, stand where one belongs."""
    members = list(loader.values()) if isinstance(loader, Mapping) else loader
    if isinstance(members, (list, tuple)) and any(isinstance(member, DataLoader) for member in members):
        raise ConfigError(
            f"Cannot read batches from a {type(loader).__name__} of loaders:",
            "batches come from one loader.",
            "Return one object with __len__ whose __iter__ yields the batches, such as zip(*loaders) or one loader "
            "after the other; or join the datasets.",
        )


def _find_problem(dataset: Any, role: str) -> tuple[str, str] | None:
    """Return why something cannot be read as a dataset, and what to give instead; None where it can."""
    loader = _LOADERS[role]
    if isinstance(dataset, DataLoader):
        return (
            "the Trainer builds the loaders, one per process.",
            "Pass the loader's dataset and data_collator=loader.collate_fn, and set the batch size in "
            f"TrainingArguments; or override {loader} to return the loader.",
        )
    if lightning_base(dataset) == "LightningDataModule":
        return (
            "a LightningDataModule builds loaders, which the Trainer does itself.",
            f"Pass one of its datasets, or override {loader} to return its loader.",
        )
    if isinstance(dataset, (str, bytes)):
        return "it is text, not a dataset.", "If it names a dataset, load it first."
    if hasattr(dataset, "iloc"):
        return "indexing it with a number does not return a row.", "Pass datasets.Dataset.from_pandas(frame)."
    if isinstance(dataset, Iterator) and not (isinstance(dataset, IterableDataset) or _is_map(dataset)):
        return "it can be read only once, and not by several processes.", "Pass a list, or an IterableDataset."
    if isinstance(dataset, (list, tuple)) and dataset and _is_set(dataset[0], num_elements=len(dataset)):
        if role == "eval_dataset":
            return "its elements are datasets themselves.", "Pass a dict of them: the names appear in the metrics."
        return "its elements are datasets themselves.", "Join them: torch.utils.data.ConcatDataset([...])."
    return None


def _has_shape(value: Any) -> bool:
    return hasattr(value, "shape") or isinstance(value, (int, float))


def _is_map(dataset: Any) -> bool:
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _is_set(element: Any, *, num_elements: int) -> bool:
    """Tell whether an element of a list is a dataset, and not a sample: a conversation, a pair, a tuple with a dict."""
    if isinstance(element, list):
        # Sets are few and have many samples; samples are many and have few parts.
        has_tensors = bool(element) and isinstance(element[0], Mapping) and any(map(_has_shape, element[0].values()))
        return has_tensors and len(element) > num_elements
    return isinstance(element, (Dataset, EvalSet)) or hasattr(element, "column_names")
