"""Wrappers of collators, and the removal of dataset columns that the model cannot use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch

from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.core.tree import uncompiled
from hftrain.data.datasets import tell_epoch

_logger = get_logger(__name__)


def signature_columns(model: Any, *, label_names: Iterable[str]) -> list[str] | None:
    """Name the columns that a model's forward can take; adapters and compiled models are unwrapped.

    These are the parameters of `forward`, then the label names and ``"label"``, ``"label_ids"``, which collators
    rename. None means all columns: forward's signature names none or cannot be read, or it takes ``**kwargs`` and
    the model is not a transformers model (it has no `config`), so it may use any column.

    Example:
        >>> signature_columns(torch.nn.Linear(1, 1), label_names=["labels"])
        ['input', 'labels', 'label', 'label_ids']
    """
    model = uncompiled(model)  # the signature of torch.compile's wrapper takes anything
    if callable(getattr(model, "get_base_model", None)):
        model = model.get_base_model()
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not names or (takes_any and not hasattr(model, "config")):
        return None
    return list(dict.fromkeys([*names, *label_names, "label", "label_ids"]))


def removable_columns(dataset: Any) -> list[str] | None:
    """List the columns of a `datasets` dataset that can be removed before it is read.

    None for other datasets, for a stream whose columns are unknown, and if a custom transform makes the
    model's columns from the stored ones. `RemoveColumnsCollator` handles those.
    """
    names = getattr(dataset, "column_names", None)
    format_ = getattr(dataset, "format", None)
    is_transformed = isinstance(format_, Mapping) and format_.get("type") == "custom"
    if not isinstance(names, list) or not callable(getattr(dataset, "remove_columns", None)) or is_transformed:
        return None
    return names


def known_columns(dataset: Any) -> list[str] | None:
    """List the columns of a dataset, if that calls no user code: of `datasets`, or of a plain list of samples."""
    if type(dataset) in (list, tuple):
        return list(dataset[0]) if dataset and isinstance(dataset[0], Mapping) else None
    return removable_columns(dataset)


def prune_columns(dataset: Any, *, keep: Iterable[str], model_name: str, description: str) -> Any:
    """Return a `datasets` dataset with only the columns in `keep`; other datasets are returned unchanged."""
    names = removable_columns(dataset)
    if names is None:
        return dataset
    keep = list(keep)
    dropped = [name for name in names if name not in keep]
    if not dropped:
        return dataset
    if len(dropped) == len(names):
        raise _nothing_left(names, keep, model_name=model_name, description=description)
    _report(_logger, _message(dropped, model_name=model_name, description=description))
    return dataset.remove_columns(dropped)


class CollatorWrapper:
    """A step before or after another collator, which shares its epoch."""

    def __init__(self, data_collator: Callable[[list[Any]], Any]) -> None:
        self.data_collator = data_collator

    def set_epoch(self, epoch: int) -> None:
        """Forward the epoch to a collator that has `set_epoch`."""
        tell_epoch(self.data_collator, epoch)


class _CollatorStep(CollatorWrapper):
    """A step before a collator; `description` is the dataset's role in messages (``"training"``)."""

    logger: Any = _logger

    def __init__(self, data_collator: Callable[[list[Any]], Any], *, description: str) -> None:
        super().__init__(data_collator)
        self.description = description
        # Shared memory, because each worker has its own copy of this object.
        self._has_reported = torch.tensor(False, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    def _log_once(self, message: str) -> None:
        """Log a message, once for all workers."""
        if self.logger is not None and not self._has_reported:
            self._has_reported.fill_(True)
            _report(self.logger, message)


class RemoveColumnsCollator(_CollatorStep):
    """Remove columns from the samples before they are collated; can be pickled if the collator can.

    Args:
        data_collator: The collator to call.
        signature_columns: The columns to keep.
        logger: Logs once which columns were removed.
        model_name: The name in that message; without it nothing is logged.
        description: The name of the dataset in that message.

    Source: the documented `RemoveColumnsCollator`.

    Example:
        >>> RemoveColumnsCollator(list, ["x"])([{"x": 1, "text": "a"}])
        [{'x': 1}]
    """

    def __init__(
        self,
        data_collator: Callable[[list[Any]], Any],
        signature_columns: Iterable[str],
        logger: Any = None,
        model_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(data_collator, description=description or "data")
        self.signature_columns = frozenset(signature_columns)
        self.logger = None if model_name is None else logger
        self.model_name = model_name

    def __call__(self, features: list[Any]) -> Any:
        """Collate the samples without the removed columns; samples that are not mappings are not changed."""
        keep = self.signature_columns
        # Two calls in C for the usual case, since this runs for every sample.
        if set(map(type, features)) != {dict} or not all(map(keep.issuperset, features)):
            features = [self._prune(each) if isinstance(each, Mapping) else each for each in features]
        return self.data_collator(features)

    def _prune(self, feature: Mapping[str, Any]) -> Mapping[str, Any]:
        columns = {name: value for name, value in feature.items() if name in self.signature_columns}
        if len(columns) == len(feature):
            return feature
        names = {"model_name": self.model_name or "model", "description": self.description}
        if not columns:
            raise _nothing_left(feature, sorted(self.signature_columns), **names)
        self._log_once(_message([name for name in feature if name not in columns], **names))
        return columns


class TextRemover(_CollatorStep):
    """Drop values that cannot become tensors before a collator sees them; can be pickled if the collator can.

    For data whose useful columns are unknown, such as that of a task.
    """

    def __call__(self, features: list[Any]) -> Any:
        """Collate the features without text columns, which are found in the first feature."""
        first_feature = features[0]
        # The second test is cheap and covers the usual case.
        if not isinstance(first_feature, (dict, Mapping)) or _PLAIN_TYPES.issuperset(map(type, first_feature.values())):
            return self.data_collator(features)
        texts = text_columns(first_feature)
        if not texts:
            return self.data_collator(features)
        names = ", ".join(texts)
        if len(texts) == len(first_feature):
            raise ConfigError(
                f"Cannot make batches of the {self.description} set:",
                f"its columns cannot be made into tensors ({names}).",
                "Tokenize the texts first (dataset.map), or pass a data_collator that does.",
            )
        self._log_once(
            f"Columns of the {self.description} set are left out, because they cannot become tensors: {names}. A "
            "data_collator of your own gets them."
        )
        return self.data_collator([{name: value for name, value in f.items() if name not in texts} for f in features])


_PLAIN_TYPES = frozenset({torch.Tensor, int, float, bool})


def text_columns(feature: Mapping[str, Any]) -> list[str]:
    """Name the columns of a sample that contain text, also in lists and mappings.

    Example:
        >>> text_columns({"x": [1, 2], "text": "a", "tokens": ["a", "b"], "answers": {"text": ["a"], "start": [0]}})
        ['text', 'tokens', 'answers']
    """
    return [name for name, value in feature.items() if _is_text(value)]


def _is_text(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and _is_text(value[0])
    if isinstance(value, Mapping):
        return any(map(_is_text, value.values()))
    return isinstance(value, (str, bytes))


def _message(dropped: Iterable[str], *, model_name: str, description: str) -> str:
    return (
        f"Columns of the {description} set that {model_name}.forward has no argument for are left out: "
        f"{', '.join(dropped)}. Set remove_unused_columns=False to keep them."
    )


@cache
def _report(logger: Any, message: str) -> None:
    logger.info("%s", message)


def _nothing_left(
    columns: Iterable[str], signature: Iterable[str], *, model_name: str, description: str | None
) -> ConfigError:
    return ConfigError(
        f"Unused columns of the {description} set were to be removed.",
        f"Nothing would be left: {model_name}.forward takes none of its columns.",
        "Rename the columns, or set remove_unused_columns=False if your collator needs them.",
        columns=list(columns),
        signature=list(signature),
    )
