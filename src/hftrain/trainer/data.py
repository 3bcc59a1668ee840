"""A Trainer's data: loaders, samplers, columns, and the checks of what was given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from operator import is_
from typing import Any

from torch.utils.data import IterableDataset, SequentialSampler

from hftrain.adapter.data import (
    TrainPlan,
    length_config,
    loader_options,
    read_accelerator_config,
    shard_plan,
    train_plan,
)
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import ConfigError, TaskError, suggest
from hftrain.core.extras import extra
from hftrain.core.log import get_logger
from hftrain.core.preserve import temporarily
from hftrain.core.signatures import Hooks, call_with
from hftrain.data.collators import makes_tensors
from hftrain.data.columns import RemoveColumnsCollator, TextRemover, known_columns, prune_columns
from hftrain.data.datasets import has_length
from hftrain.data.loaders import build_loader, default_train_sampler, first_batches
from hftrain.data.seeding import SeededCollator, draws_from_own_seed
from hftrain.data.sharding import ShardPlan
from hftrain.rules.data import check_eval_data, check_kind, check_loader, check_one_set, check_train_data
from hftrain.rules.strategy import check_tensor_parallel
from hftrain.run.parts import TrainerHooks

_logger = get_logger(__name__)


class TrainerData:
    """Make loaders and samplers from a Trainer's datasets, and check these before anything is launched."""

    def __init__(self, trainer: TrainerHooks, hooks: Hooks) -> None:
        self._trainer, self._hooks = trainer, hooks
        # What the loaders in `_eval_dataloaders`, whose workers persist, were made of.
        self._loader_parts: dict[str, tuple[Any, ...]] = {}
        self._seeded: dict[int, SeededCollator] = {}

    @property
    def eval_sets(self) -> list[Any]:
        """The evaluation datasets, without their names."""
        dataset = self._trainer.eval_dataset
        return list(dataset.values()) if isinstance(dataset, Mapping) else [dataset]

    def close(self) -> None:
        """Drop the loaders that were kept, whose workers then end."""
        self._loader_parts.clear()
        self._hooks.eval_dataloaders.clear()

    # -- checks ----------------------------------------------------------------------------------------------------

    def check_kinds(self) -> None:
        """Raise if what was given cannot be read."""
        trainer, has_own_loader = self._trainer, self._hooks.is_overridden("get_eval_dataloader")
        if not self._hooks.is_overridden("get_train_dataloader"):
            check_kind(trainer.train_dataset, "train_dataset")
        for dataset in () if has_own_loader else self.eval_sets:
            check_kind(dataset, "eval_dataset")
        check_eval_data(trainer.args, trainer.eval_dataset, has_own_loader=has_own_loader)

    def check_training(self) -> None:
        """Raise if the training data does not work with the settings."""
        trainer, args = self._trainer, self._trainer.args
        dataset, events = trainer.train_dataset, trainer.callback_handler
        if isinstance(dataset, TrainerCallback) and dataset not in events.callbacks:
            events.add(dataset)
        check_tensor_parallel(
            trainer.get_tp_size(),
            trainer.strategy,
            is_handled=trainer.is_deepspeed_enabled or bool(trainer.strategy.sizes),
        )
        if not self._hooks.is_overridden("get_train_dataloader"):
            check_train_data(args, trainer.train_dataset, trainer.limits)
            self._check_columns(trainer.train_dataset, role="train_dataset")
            if not self._hooks.is_overridden("_get_train_sampler"):
                self._check_lengths(trainer.train_dataset, is_training=True)
        is_evaluated = args.eval_strategy != "no" and trainer.eval_dataset is not None
        if is_evaluated and not self._hooks.is_overridden("get_eval_dataloader"):
            for dataset in self.eval_sets:
                self._check_columns(dataset, role="eval_dataset")
                if not self._hooks.is_overridden("_get_eval_sampler"):
                    self._check_lengths(dataset, is_training=False)

    def _check_columns(self, dataset: Any, *, role: str) -> None:
        """Raise for a non-dataset, and for data without a column that the model takes."""
        check_kind(dataset, role)
        check_one_set(dataset)
        trainer = self._trainer
        if self._hooks.is_overridden("_get_dataloader", "_remove_unused_columns"):
            return
        kept_columns = self._columns_to_keep()
        names = None if kept_columns is None or not has_length(dataset) or not len(dataset) else known_columns(dataset)
        if kept_columns is None or names is None:
            return
        input_names = [name for name in kept_columns if name not in (*trainer.label_names, "label", "label_ids")]
        if not set(names) & set(input_names):
            raise TaskError(
                f"Cannot use this dataset as {role}:",
                f"its columns ({', '.join(map(str, names))}) include none that "
                f"{type(trainer.model).__name__}.forward takes ({', '.join(input_names)}).",
                "Rename the columns, tokenize texts first (dataset.map), or set remove_unused_columns=False if your "
                "collator makes the inputs.",
            )

    def _check_lengths(self, dataset: Any, *, is_training: bool) -> None:
        """Raise if data cannot be ordered by length as the arguments ask."""
        config = self.length_config(is_training=is_training)
        if config is not None:
            extra("grouping").check_lengths(dataset, config)

    # -- loaders ---------------------------------------------------------------------------------------------------

    def find_eval_set(self, dataset: Any) -> Any:
        """Return the dataset to evaluate on: `dataset`, the one of that name, or the Trainer's own for None."""
        eval_dataset = self._trainer.eval_dataset
        if isinstance(dataset, str):
            datasets = eval_dataset if isinstance(eval_dataset, Mapping) else {}
            if dataset not in datasets:
                raise ConfigError(
                    f"Cannot evaluate on the set {dataset!r}.",
                    "eval_dataset has no set of that name.",
                    suggest(dataset, datasets) if datasets else "Pass a dict of datasets as eval_dataset.",
                )
            return datasets[dataset]
        selected = eval_dataset if dataset is None else dataset
        if selected is None:
            raise ConfigError("Cannot evaluate.", "There is no eval_dataset.", "Pass one to evaluate() or Trainer.")
        return selected

    def eval_loader(self, dataset: Any, description: str, *, key: str | None = None) -> Any:
        """Return this rank's batches of an evaluation or a prediction, through the documented hooks."""
        trainer = self._trainer
        self._check_columns(dataset, role="test_dataset" if description == "test" else "eval_dataset")
        size, order = trainer.args.eval_batch_size, self._hooks.get_eval_sampler
        return self._hooks.get_dataloader(dataset, description, size, sampler_fn=order, dataloader_key=key)

    def loader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        *,
        order: Callable[[Any], Any] | None,
        is_training: bool,
        key: str | None,
    ) -> Any:
        """Return this rank's batches of a dataset; the arguments are those of the documented `_get_dataloader`."""
        trainer = self._trainer
        has_accelerator = trainer.strategy.device_type not in ("cpu", "xla")
        options = loader_options(trainer.args, is_training=is_training, has_accelerator=has_accelerator)
        options["batch_size"] = batch_size

        def make() -> Any:
            pruned_dataset = self._hooks.remove_unused_columns(dataset, description=description)
            collate = self._hooks.get_collator_with_removed_columns(
                self._collator(is_training=is_training), description=description
            )
            # A stream is read in its own order, even if it has a length.
            sampler = None if isinstance(dataset, IterableDataset) else order
            return build_loader(
                pruned_dataset,
                self._shard_plan(is_training=is_training),
                collate=collate,
                sampler=None if sampler is None else sampler(pruned_dataset if is_training else dataset),
                **options,
            )

        if is_training or key is None or not options["persistent_workers"]:
            return make()
        parts = dataset, trainer.eval_collator, trainer.data_collator, self._hooks.signature_columns, batch_size
        loaders = self._hooks.eval_dataloaders
        if key not in loaders or not all(map(is_, self._loader_parts.get(key, (None,)), parts)):
            # Removed first, so that its workers end before others start.
            loaders.pop(key, None)
            loaders[key], self._loader_parts[key] = make(), parts
        return loaders[key]

    def _collator(self, *, is_training: bool) -> Callable[[list[Any]], Any]:
        """Return the Trainer's collator, or one for all its loaders that makes its masks repeatable."""
        trainer = self._trainer
        collator: Any = None if is_training else trainer.eval_collator
        collator = collator or trainer.data_collator
        if not draws_from_own_seed(collator):
            return collator  # type: ignore[no-any-return]
        if id(collator) not in self._seeded:
            self._seeded[id(collator)] = SeededCollator(collator)
        return self._seeded[id(collator)]

    def train_loader(self) -> Any:
        """Return this rank's training batches, through the documented hooks."""
        trainer, hooks = self._trainer, self._hooks
        check_train_data(trainer.args, trainer.train_dataset, trainer.limits)
        return hooks.get_dataloader(
            trainer.train_dataset,
            "training",
            hooks.train_batch_size,
            # An override may have the older signature without the dataset.
            sampler_fn=lambda dataset: call_with(hooks.get_train_sampler, {"train_dataset": dataset}),
            is_training=True,
        )

    def run_length(self, args: TrainingArguments, loader: Any, total_batch_size: int) -> TrainPlan:
        """Return the length of a run over a loader, as far as the limits let it be read."""
        limits, length = self._trainer.limits, len(loader) if has_length(loader) else None
        num_batches = limits.num_train(length) if limits.of_training else length
        num_examples = 0 if length is None else self._trainer.num_examples(loader)
        if num_batches is not None and num_batches != length:
            per_batch = total_batch_size // args.gradient_accumulation_steps
            num_examples = min(num_examples or sys.maxsize, num_batches * per_batch)
        return train_plan(args, num_batches=num_batches, num_examples=num_examples, total_batch_size=total_batch_size)

    def training_share(self, *dataset: Any) -> Any:
        """Return this rank's training batches, or those of another dataset if one is given. Collective."""
        with temporarily(self._trainer, train_dataset=dataset[0]) if dataset else nullcontext():
            return self.share_of(self._trainer.get_train_dataloader(), is_training=True)

    def eval_share(self, dataset: Any) -> Any:
        """Return this rank's batches of an evaluation. Collective."""
        return self.share_of(self._trainer.get_eval_dataloader(dataset), is_training=False)

    def share_of(self, loader: Any, *, is_training: bool) -> Any:
        """Return what this rank reads of a loader that a hook returned. Collective."""
        trainer = self._trainer
        check_loader(loader)
        share = self._shard_plan(is_training=is_training, is_own=False).own(loader)
        data = trainer.strategy.data
        if data is not trainer.strategy:
            extra("shares").check_copies(share, rank=data.rank, gather_object=trainer.strategy.gather_object)
        if data.world_size > 1:
            datasets = trainer.train_dataset, *self.eval_sets
            extra("shares").check_shares(share, datasets, gather_object=data.gather_object)
        is_unlimited = is_training or not trainer.fast_dev_run
        return share if is_unlimited else first_batches(share, trainer.fast_dev_run)

    def _shard_plan(self, *, is_training: bool, is_own: bool = True) -> ShardPlan:
        return shard_plan(self._trainer.args, self._trainer.strategy.data, is_training=is_training, is_own=is_own)

    # -- samplers --------------------------------------------------------------------------------------------------

    def train_sampler(self, dataset: Any) -> Any:
        """Return the sampler of the training data, None for a stream."""
        lengths, args = self.length_config(is_training=True), self._trainer.args
        plan, shuffle = self._shard_plan(is_training=True), args.train_sampling_strategy != "sequential"
        if callable(make := getattr(dataset, "train_sampler", None)) and not isinstance(dataset, IterableDataset):
            if lengths is not None:
                raise ConfigError(
                    f"Cannot group the samples of a {type(dataset).__name__} by length.",
                    "Its train_sampler decides their order.",
                    "Leave train_sampling_strategy='group_by_length' out.",
                )
            return make(seed=plan.seed, shuffle=shuffle)
        if lengths is not None:
            return extra("grouping").length_sampler(dataset, lengths, is_training=True)
        if isinstance(dataset, IterableDataset):
            return None
        return default_train_sampler(
            dataset,
            plan,
            shuffle=shuffle,
            use_seedable_sampler=bool(read_accelerator_config(args).get("use_seedable_sampler", True)),
        )

    def eval_sampler(self, dataset: Any) -> Any:
        """Return the sampler of evaluation data, None for a stream."""
        lengths, args = self.length_config(is_training=False), self._trainer.args
        if lengths is not None:
            unit = args.eval_batch_size if args.dataloader_drop_last else 1
            world_size = self._trainer.strategy.data.world_size
            return extra("grouping").length_sampler(
                dataset, lengths, is_training=False, world_size=world_size, unit=unit
            )
        is_ordered = has_length(dataset) and not isinstance(dataset, IterableDataset)
        return SequentialSampler(dataset) if is_ordered else None

    def length_config(self, *, is_training: bool) -> Any:
        """Return how samples are ordered by length, None if they are not."""
        trainer = self._trainer
        size = trainer.get_total_train_batch_size(trainer.args)
        return length_config(trainer.args, tool=trainer.processing_class, batch_size=size, is_training=is_training)

    # -- columns ---------------------------------------------------------------------------------------------------

    def prune(self, dataset: Any, description: str) -> Any:
        """Return a dataset without the columns that the model does not take, if it has columns."""
        keep, model = self._columns_to_keep(), self._trainer.model
        if keep is None:
            return dataset
        return prune_columns(dataset, keep=keep, model_name=type(model).__name__, description=description)

    def prune_in(self, collator: Callable[[list[Any]], Any], description: str) -> Callable[[list[Any]], Any]:
        """Return a collator that first drops the columns that the model does not take."""
        keep, model = self._columns_to_keep(), self._trainer.model
        if keep is not None:
            return RemoveColumnsCollator(collator, keep, _logger, type(model).__name__, description)
        is_pruned = self._trainer.args.remove_unused_columns and makes_tensors(collator)
        return TextRemover(collator, description=description) if is_pruned else collator

    def _columns_to_keep(self) -> list[str] | None:
        if not self._trainer.args.remove_unused_columns:
            return None
        self._hooks.set_signature_columns_if_needed()
        columns: list[str] | None = self._hooks.signature_columns
        return columns
