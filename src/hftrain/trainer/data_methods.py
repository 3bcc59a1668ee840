"""Trainer methods that read data: loaders, samplers, columns and the length of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, SequentialSampler

from hftrain.adapter.data import length_config, loader_config, shard_plan
from hftrain.adapter.plan import train_plan
from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import ConfigError, TaskError, suggest
from hftrain.core.seed import preserved_rng
from hftrain.core.signatures import call_with
from hftrain.data.collators import makes_tensors
from hftrain.data.columns import ColumnPruner, TextRemover, known_columns, prune_columns, signature_columns
from hftrain.data.grouping import LengthConfig, check_lengths, length_sampler
from hftrain.data.loaders import build_loader, default_train_sampler
from hftrain.data.sharding import ShardPlan
from hftrain.data.shares import check_shares
from hftrain.data.sizes import has_length, num_examples
from hftrain.rules.data import check_eval_data, check_kind, check_loader, check_one_set, check_train_data
from hftrain.rules.evaluation import check_cadences
from hftrain.rules.saving import check_save_policy
from hftrain.rules.strategy import check_tensor_parallel
from hftrain.run.counting import count_tokens, token_counter
from hftrain.task.model_task import ModelTask
from hftrain.trainer.file_methods import FileMethods
from hftrain.trainer.rehearsal import cut_short


class DataMethods(FileMethods):
    """Create loaders and compute the length of a run."""

    def _check_data(self) -> None:
        """Raise if the training data does not work with the settings."""
        check_tensor_parallel(self.get_tp_size(), self.strategy, is_handled=self.is_deepspeed_enabled)
        if not self._is_overridden("get_train_dataloader"):
            check_train_data(self.args, self.train_dataset)
            self._check_columns(self.train_dataset, role="train_dataset")
            if not self._is_overridden("_get_train_sampler"):
                self._check_lengths(self.train_dataset, is_training=True)
        is_evaluated = self.args.eval_strategy != "no" and self.eval_dataset is not None
        if is_evaluated and not self._is_overridden("get_eval_dataloader"):
            is_dict = isinstance(self.eval_dataset, Mapping)
            for dataset in self.eval_dataset.values() if is_dict else [self.eval_dataset]:
                self._check_columns(dataset)
                if not self._is_overridden("_get_eval_sampler"):
                    self._check_lengths(dataset, is_training=False)

    def get_train_dataloader(self) -> Any:
        """Return this rank's training batches. Source: the documented `Trainer.get_train_dataloader`."""
        check_train_data(self.args, self.train_dataset)
        return self._get_dataloader(
            self.train_dataset,
            "training",
            self._train_batch_size,
            # An override may have the older signature without the dataset.
            sampler_fn=lambda dataset: call_with(self._get_train_sampler, {"train_dataset": dataset}),
            is_training=True,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return this rank's evaluation batches.

        Args:
            eval_dataset: A dataset, or the name of one in `self.eval_dataset`; None takes `self.eval_dataset`.

        Source: the documented `Trainer.get_eval_dataloader`.
        """
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if eval_dataset is None:
            eval_dataset = self.eval_dataset
        elif isinstance(eval_dataset, str):
            known = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
            if eval_dataset not in known:
                raise ConfigError(
                    f"Cannot evaluate on the set {eval_dataset!r}.",
                    "eval_dataset has no set of that name.",
                    suggest(eval_dataset, known) if known else "Pass a dict of datasets as eval_dataset.",
                )
            eval_dataset = known[eval_dataset]
        if eval_dataset is None:
            raise ConfigError("Cannot evaluate.", "There is no eval_dataset.", "Pass one to evaluate() or Trainer.")
        return self._eval_loader(eval_dataset, "evaluation", dataloader_key=name)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return this rank's test batches. Source: the documented `Trainer.get_test_dataloader`."""
        if test_dataset is None:
            raise ConfigError("Cannot predict:", "there is no dataset.", "Pass one: predict(test_dataset).")
        return self._eval_loader(test_dataset, "test")

    def _eval_loader(self, dataset: Any, description: str, *, dataloader_key: str | None = None) -> Any:
        self._check_columns(dataset, role="test_dataset" if description == "test" else "eval_dataset")
        return self._get_dataloader(
            dataset,
            description,
            self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
            dataloader_key=dataloader_key,
        )

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """Return this rank's batches of a dataset, training batches or evaluation batches.

        Args:
            dataset: The dataset to read.
            description: Its purpose, for messages.
            batch_size: Samples per process and batch.
            sampler_fn: Takes the dataset and returns its sampler; None reads it in its own order.
            is_training: Whether all ranks get equally many batches and a stream gets epochs.
            dataloader_key: Name under which to keep the loader if its workers persist.
        """
        has_accelerator = self.strategy.device_type not in ("cpu", "xla")
        config = loader_config(self.args, is_training=is_training, has_accelerator=has_accelerator)
        config = replace(config, batch_size=batch_size)

        def make() -> Any:
            pruned, collate = self._without_unused_columns(dataset, description=description)
            order = SequentialSampler if sampler_fn is None and has_length(dataset) else sampler_fn
            # A stream is read in its own order, even if it has a length.
            order = None if isinstance(dataset, IterableDataset) else order
            return build_loader(
                pruned,
                config,
                self._shard_plan(is_training=is_training),
                collate=collate,
                sampler=None if order is None else order(pruned if is_training else dataset),
            )

        if is_training or not config.persistent_workers:
            return make()
        self._loaders.limit = 1 + (len(self.eval_dataset) if isinstance(self.eval_dataset, Mapping) else 1)
        loader = self._loaders.get((dataset, self.data_collator, self._signature_columns, batch_size), make)
        if dataloader_key is not None:
            self._eval_dataloaders[dataloader_key] = loader
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the sampler of the training data: by length if the arguments ask for it, else shuffled.

        The order depends on seed and epoch. None for a stream.
        """
        dataset = self.train_dataset if train_dataset is None else train_dataset
        lengths = self._length_config(is_training=True)
        if lengths is not None:
            return length_sampler(dataset, lengths, is_training=True)
        if isinstance(dataset, IterableDataset):
            return None
        config = loader_config(self.args, is_training=True)
        return default_train_sampler(dataset, config, self._shard_plan(is_training=True))

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Return the sampler of evaluation data: by descending length if set, else sequential; None for a stream."""
        lengths = self._length_config(is_training=False)
        if lengths is not None:
            unit = self.args.eval_batch_size if self.args.dataloader_drop_last else 1
            return length_sampler(
                eval_dataset, lengths, is_training=False, world_size=self.strategy.world_size, unit=unit
            )
        is_ordered = has_length(eval_dataset) and not isinstance(eval_dataset, IterableDataset)
        return SequentialSampler(eval_dataset) if is_ordered else None

    def _length_config(self, *, is_training: bool) -> LengthConfig | None:
        size = self.get_total_train_batch_size(self.args)
        return length_config(self.args, tool=self.processing_class, batch_size=size, is_training=is_training)

    def _set_signature_columns_if_needed(self) -> None:
        """Determine the columns to keep, unless they are known; an override sets `self._signature_columns`."""
        if self._signature_columns is None and isinstance(self.task, ModelTask):
            self._find("_signature_columns", signature_columns(self.model, label_names=self.label_names))

    def _columns_to_keep(self) -> list[str] | None:
        if not self.args.remove_unused_columns:
            return None
        self._set_signature_columns_if_needed()
        return self._signature_columns

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Return a dataset without the columns that the model does not take, if it has columns."""
        about = self._about_columns(description or "given")
        return dataset if about is None else prune_columns(dataset, **about)

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        """Return a collator that first drops the columns that the model does not take."""
        about = self._about_columns(description or "given")
        if about is not None:
            return ColumnPruner(data_collator, **about)
        is_pruned = self.args.remove_unused_columns and makes_tensors(data_collator)
        return TextRemover(data_collator, description=description or "given") if is_pruned else data_collator

    def _without_unused_columns(self, dataset: Any, *, description: str) -> tuple[Any, Callable[[list[Any]], Any]]:
        pruned = self._remove_unused_columns(dataset, description=description)
        return pruned, self._get_collator_with_removed_columns(self.data_collator, description=description)

    def _about_columns(self, description: str) -> dict[str, Any] | None:
        keep = self._columns_to_keep()
        if keep is None:
            return None
        return {"keep": keep, "model_name": type(self.model).__name__, "description": description}

    def _check_columns(self, dataset: Any, *, role: str = "eval_dataset") -> None:
        """Raise, before anything is launched, for a non-dataset and for data without a column that the model takes."""
        check_kind(dataset, role)
        check_one_set(dataset)
        if self._is_overridden("_get_dataloader") or self._is_overridden("_remove_unused_columns"):
            return
        keep = self._columns_to_keep()
        names = None if keep is None or not has_length(dataset) or not len(dataset) else known_columns(dataset)
        if keep is None or names is None:
            return
        inputs = [name for name in keep if name not in (*self.label_names, "label", "label_ids")]
        if not set(names) & set(inputs):
            raise TaskError(
                f"Cannot use this dataset as {role}:",
                f"its columns ({', '.join(map(str, names))}) include none that "
                f"{type(self.model).__name__}.forward takes ({', '.join(inputs)}).",
                "Rename the columns, tokenize texts first (dataset.map), or set remove_unused_columns=False if your "
                "collator makes the inputs.",
            )

    def _check_lengths(self, dataset: Any, *, is_training: bool) -> None:
        """Raise, before anything is launched, if data cannot be ordered by length as the arguments ask."""
        config = self._length_config(is_training=is_training)
        if config is not None:
            check_lengths(dataset, config)

    def _shard_plan(self, *, is_training: bool, is_own: bool = True) -> ShardPlan:
        rank, world_size = self.strategy.rank, self.strategy.world_size
        return shard_plan(self.args, rank=rank, world_size=world_size, is_training=is_training, is_own=is_own)

    def _sharded(self, loader: Any, *, is_training: bool) -> Any:
        """Return what this rank reads of a loader that a hook returned. Collective."""
        check_loader(loader)
        share = self._shard_plan(is_training=is_training, is_own=False).own(loader)
        if self.strategy.world_size > 1:
            sets = self.eval_dataset.values() if isinstance(self.eval_dataset, Mapping) else [self.eval_dataset]
            check_shares(share, (self.train_dataset, *sets), gather_object=self.strategy.gather_object)
        return share if is_training else cut_short(share, self._num_rehearsed)

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of samples in a loader's dataset, estimated if it has no length."""
        return num_examples(dataloader, batch_size=self.args.train_batch_size)

    def num_tokens(self, train_dl: Any, max_steps: int | None = None) -> int:
        """Return the number of input tokens in a loader by iterating over it.

        Args:
            train_dl: A loader whose batches hold the model's main input.
            max_steps: Number of batches to count, restarting the loader if needed; None counts each batch once.

        Source: the documented `Trainer.num_tokens`.
        """
        with preserved_rng():
            return count_tokens(
                train_dl, token_counter(self.args, self.model, self.processing_class), max_batches=max_steps
            )

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any, total_train_batch_size: int
    ) -> tuple[int, int, int, int, bool, int | None, int]:
        """Return the run's length.

        Returns:
            (num_train_epochs, num_update_steps_per_epoch, num_examples, num_train_samples, epoch_based,
            len_dataloader, max_steps).

        Source: the documented `Trainer.set_initial_training_values`.
        """
        num_batches = len(dataloader) if has_length(dataloader) else None
        plan = train_plan(
            args,
            num_batches=num_batches,
            num_examples=self.num_examples(dataloader) if num_batches is not None else 0,
            total_batch_size=total_train_batch_size,
        )
        return (
            plan.num_epochs,
            plan.steps_per_epoch,
            plan.num_examples,
            plan.num_samples,
            args.max_steps <= 0,
            plan.num_batches,
            plan.max_steps,
        )

    def _check_eval_data(self) -> None:
        if not self._is_overridden("get_train_dataloader"):
            check_kind(self.train_dataset, "train_dataset")
        if not self._is_overridden("get_eval_dataloader"):
            sets = self.eval_dataset.values() if isinstance(self.eval_dataset, Mapping) else [self.eval_dataset]
            for dataset in sets:
                check_kind(dataset, "eval_dataset")
        check_save_policy(self.args, self.save_policy, self.strategy)
        check_cadences(self.args, self._eval_sets, eval_steps=self.args.eval_steps)
        has_own_loader = self._is_overridden("get_eval_dataloader")
        check_eval_data(self.args, self.eval_dataset, has_own_loader=has_own_loader)
