"""Checks of datasets and loaders: their kind, size and columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from hftrain.adapter.data import require_max_steps
from hftrain.arguments.training import TrainingArguments
from hftrain.core.elsewhere import lightning_base
from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.extras import extra
from hftrain.core.notes import describe
from hftrain.data.collators import default_data_collator
from hftrain.data.columns import known_columns
from hftrain.data.datasets import EvalSet, has_length, needs_own_loader
from hftrain.data.loaders import Limits
from hftrain.task.introspect import forward_parameters
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule

_LOADERS = {
    "train_dataset": "get_train_dataloader",
    "eval_dataset": "get_eval_dataloader",
    "test_dataset": "get_test_dataloader",
}
_COLLATORS = {"train_dataset": "data_collator"}


# A list of arrays is taken for columns only if it is this short.
_MAX_COLUMNS = 4


def check_kind(dataset: Any, role: str) -> None:
    """Raise if something other than a dataset, or None, was given as `role`: ``"train_dataset"`` and so on."""
    problem = _find_problem(dataset, role)
    if problem is not None:
        reason, remedy = problem
        raise ConfigError(f"Cannot use a {type(dataset).__name__} as {role}:", reason, remedy)


def check_train_data(args: TrainingArguments, dataset: Any, limits: Limits) -> None:
    """Raise unless there is a non-empty dataset, and the length of the run is known."""
    remedy = "Pass train_dataset to the Trainer or override get_train_dataloader."
    if dataset is None:
        raise ConfigError("Cannot train:", "there is no train_dataset.", remedy)
    if not has_length(dataset):
        if not limits.of_training or limits.num_train(None) is None:
            require_max_steps(args)
    elif len(dataset) == 0:
        raise ConfigError("Cannot train.", "train_dataset is empty.", "Pass a dataset with at least one sample.")


def check_with_datasets(args: TrainingArguments, task: TaskModule, collator: Any, datasets: Iterable[Any]) -> None:
    """Let datasets that have `check_run`, also within torch's Subset and the like, refuse a run; and packed batches."""
    if "DataCollatorWithFlattening" in (base_class.__name__ for base_class in type(collator).__mro__):
        extra("packing").check_flattening(args, task, collator)
    for dataset in datasets:
        if hasattr(dataset, "check_run"):
            dataset.check_run(args, task.model, collator)
        elif isinstance(dataset, Dataset):
            inner_datasets = (getattr(dataset, "dataset", None), *getattr(dataset, "datasets", ()))
            check_with_datasets(args, task, collator, inner_datasets)


def check_eval_data(args: TrainingArguments, eval_dataset: Any, *, has_own_loader: bool) -> None:
    """Raise if evaluations are planned without data, or on an empty set."""
    if args.eval_strategy == "no":
        return
    problem = f"Cannot use eval_strategy={str(args.eval_strategy)!r}."
    sets = eval_dataset if isinstance(eval_dataset, Mapping) else {"eval_dataset": eval_dataset}
    for name, dataset in sets.items():
        if has_length(dataset) and len(dataset) == 0:
            raise ConfigError(problem, f"{name} is empty.", "Pass a dataset with at least one sample.")
    if (eval_dataset is None or not sets) and not has_own_loader:
        remedy = "Pass eval_dataset, override get_eval_dataloader, or set eval_strategy='no'."
        raise ConfigError(problem, "There is no eval_dataset to evaluate on.", remedy)


def check_one_set(dataset: Any) -> None:
    """Raise if a dict of datasets or columns, such as the result of load_dataset, was given as one dataset."""
    if isinstance(dataset, Mapping) and len(dataset) and 0 not in dataset:
        raise ConfigError(
            f"Cannot use a {type(dataset).__name__} as one dataset:",
            f"it has no sample 0, but the keys {', '.join(map(repr, dataset))}.",
            "Make rows of its columns: datasets.Dataset.from_dict(...)."
            if all(_is_column(value) for value in dataset.values())
            else f"Pass one of its values, such as [{next(iter(dataset))!r}]; eval_dataset and evaluate() alone take "
            "several sets.",
        )


def check_loader(loader: Any) -> None:
    """Raise if the loader is None, or a collection of several loaders, which Lightning accepts."""
    if loader is None:
        raise TaskError(
            "Cannot read batches from None:",
            "get_train_dataloader() or get_eval_dataloader() returned it.",
            "Let the override return a loader.",
        )
    members = list(loader.values()) if isinstance(loader, Mapping) else loader
    if isinstance(members, (list, tuple)) and any(isinstance(member, DataLoader) for member in members):
        raise ConfigError(
            f"Cannot read batches from a {type(loader).__name__} of loaders:",
            "batches come from one loader.",
            "Return one object with __len__ whose __iter__ yields the batches, such as zip(*loaders) or one loader "
            "after the other; or join the datasets.",
        )
    # Opacus' BatchMemoryManager: the optimizer steps once for all parts of a batch.
    splitter = getattr(loader, "batch_sampler", None)
    if hasattr(getattr(splitter, "optimizer", None), "signal_skip_step") and not isinstance(
        getattr(splitter, "sampler", None), BatchSampler
    ):
        raise ConfigError(
            f"Cannot count the updates of a {type(splitter).__name__} with Poisson sampling:",
            "into how many parts its batches are split is known only when they are drawn, so the training would end "
            "after another number of updates than was planned.",
            "Leave BatchMemoryManager out, or set poisson_sampling=False in make_private.",
        )


def batch_columns(task: TaskModule, dataset: Any, collator: Any) -> set[str] | None:
    """Return a batch's keys for a plain model with the default collator; None if not known in advance."""
    columns = known_columns(dataset) if collator is default_data_collator and isinstance(task, ModelTask) else None
    if columns is None:
        return None
    names = set(columns)
    if type(dataset) in (list, tuple):
        names = {name for name, value in dataset[0].items() if value is not None and not isinstance(value, str)}
    return names | ({"labels"} if names & {"label", "label_ids"} else set())


def check_inputs(model: nn.Module, columns: Iterable[str]) -> None:
    """Raise if the model needs an input that is not a column of the training data."""
    missing_inputs = [
        name
        for name, parameter in forward_parameters(model).items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in columns
    ]
    if missing_inputs:
        raise TaskError(
            "Cannot train on this dataset:",
            f"{type(model).__name__}.forward needs {', '.join(missing_inputs)}, and the columns that make a batch "
            f"are {', '.join(sorted(columns))}.",
            "Add the column, rename one, or pass a data_collator that makes it.",
        )


def _find_problem(dataset: Any, role: str) -> tuple[str, str] | None:
    """Return why an object cannot be used as a dataset, and what to pass instead; None if it can."""
    loader = _LOADERS[role]
    if isinstance(dataset, DataLoader):
        return (
            "the Trainer builds the loaders, one per process.",
            f"Pass the loader's dataset and {_COLLATORS.get(role, 'eval_collator')}=loader.collate_fn, and set the "
            f"batch size in TrainingArguments; or override {loader} to return the loader.",
        )
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    is_data = is_map or isinstance(dataset, IterableDataset)
    if not is_data and lightning_base(dataset) == "LightningDataModule":
        return (
            "a LightningDataModule builds loaders, which the Trainer does itself.",
            f"Pass one of its datasets, or override {loader} to return its loader.",
        )
    if role == "train_dataset" and needs_own_loader(dataset):
        package = type(dataset).__module__.partition(".")[0]
        remedy = f"Override {loader} to return it, such as a StreamingDataLoader of {package}."
        return "its state_dict() must be told how much was read, which only its own loader counts.", remedy
    if isinstance(dataset, (str, bytes)):
        return "it is text, not a dataset.", "If it names a dataset, load it first."
    if hasattr(dataset, "iloc"):
        return "indexing it with a number does not return a row.", "Pass datasets.Dataset.from_pandas(frame)."
    if isinstance(dataset, type):
        return "it is a class.", f"Pass an instance: {dataset.__name__}(...)."
    if callable(dataset) and not is_data:
        return "it is a function.", "Pass what it returns, as a list; or write an IterableDataset around it."
    if isinstance(dataset, (set, frozenset)):
        return "its samples have no order.", "Pass a list."
    if isinstance(dataset, Iterator) and not is_data:
        return "it can be read only once, and not by several processes.", "Pass a list, or an IterableDataset."
    if isinstance(dataset, (list, tuple)) and _are_columns(dataset):
        return (
            f"it holds whole columns ({', '.join(map(describe, dataset))}), not samples.",
            "Join them: torch.utils.data.TensorDataset(*columns), of tensors (torch.as_tensor); for samples with names "
            "make a list of dicts.",
        )
    if isinstance(dataset, (list, tuple)) and dataset and _is_set(dataset[0], num_elements=len(dataset)):
        if role == "eval_dataset":
            return "its elements are datasets themselves.", "Pass a dict of them: the names appear in the metrics."
        return "its elements are datasets themselves.", "Join them: torch.utils.data.ConcatDataset([...])."
    return None


def _are_columns(dataset: list[Any] | tuple[Any, ...]) -> bool:
    """Tell whether a list is (X, Y): as many rows in each, of different dimensions, which no two samples have."""
    shapes = [tuple(getattr(value, "shape", ())) for value in dataset[:_MAX_COLUMNS]]
    is_long = bool(shapes) and len(dataset) <= _MAX_COLUMNS and shapes[0][:1] > (len(dataset),)
    return is_long and len({shape[:1] for shape in shapes}) == 1 and len({len(shape) for shape in shapes}) > 1


def _is_column(value: Any) -> bool:
    if hasattr(value, "column_names"):
        return False
    is_list = isinstance(value, (list, tuple)) and not any(isinstance(element, Mapping) for element in value[:1])
    return is_list or hasattr(value, "shape")


def _is_set(element: Any, *, num_elements: int) -> bool:
    """Tell whether an element of a list is a dataset, and not a sample, such as a conversation or a pair."""
    if isinstance(element, list):
        # A list of datasets is short, with long elements; a list of samples is long, with short elements.
        values = element[0].values() if element and isinstance(element[0], Mapping) else ()
        has_tensors = any(hasattr(value, "shape") or isinstance(value, (int, float)) for value in values)
        return has_tensors and len(element) > num_elements
    return isinstance(element, (Dataset, EvalSet)) or hasattr(element, "column_names")
