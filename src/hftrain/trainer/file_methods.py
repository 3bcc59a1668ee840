"""Trainer methods that write the model, logs, metrics and the repository on the Hub."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.parcels import Parcels
from hftrain.core.log import get_logger, warn_once
from hftrain.core.speed import speed_metrics
from hftrain.optim.weight_modes import evaluation_weights
from hftrain.run.capture import saved_tool, write_model
from hftrain.run.writing import make_manager
from hftrain.task.module import task_state
from hftrain.trainer.fields import TrainerFields
from hftrain.trainer.reports import metrics_format, metrics_table, store_metrics, to_plain

logger = get_logger(__name__)


class FileMethods(TrainerFields):
    """Write files, logs and the repository on the Hub."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model with the files needed to reload it; the main process writes.

        A transformers model can be reloaded with `from_pretrained`. Collective if the strategy shards the model. With
        `push_to_hub=True` the model is also pushed from `args.output_dir`, and the call waits for the push.

        Args:
            output_dir: The folder, local or remote; None takes `args.output_dir`.

        Raises:
            CheckpointError: A remote folder cannot be written to; the files are in its local mirror.

        Source: the documented `Trainer.save_model`.
        """
        folder = self._output.locate(output_dir) if output_dir else self.output_dir
        # In a checkpoint each process may write its own part; a model saved by the user is always whole.
        is_split = _internal_call and self.strategy.model_shards(self.model_wrapped) is not None
        with evaluation_weights(self.optimizer):
            weights = {} if is_split else self.strategy.model_state(self.model_wrapped)
            if self.args.should_save:
                folder.mkdir(parents=True, exist_ok=True)
                if not _internal_call:
                    logger.info("Saving model checkpoint to %s", folder)
                self._save(str(folder), state_dict=weights)
        if not (_internal_call and output_dir):
            self._output.publish_together(output_dir)
        if not _internal_call:
            self.strategy.barrier()
            if self.args.push_to_hub:
                self._hub.after_save_model(message="Model save", folder=folder)

    def _save(self, output_dir: str, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        write_model(
            Path(output_dir),
            model=self.model,
            weights=state_dict,
            own=task_state(self.task),
            tool=saved_tool(self.processing_class, self.data_collator),
            arguments=self.args.to_dict(),
        )

    def save_state(self) -> None:
        """Write `trainer_state.json` into `output_dir`; the main process writes."""
        if self.args.should_save:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(self.output_dir / "trainer_state.json"))
            self._output.publish()

    def checkpoint_objects(self) -> Mapping[str, Any]:
        """Return objects of yours to save with each checkpoint and to restore on a resume, by name.

        They need `state_dict()` and `load_state_dict()`, as optimizers, schedules, gradient scalers and modules have,
        or are tensors or random generators. A task and a callback may have this method, too. It is called at each save,
        when training has begun, and, until a resumed run has found everything, at each optimizer step: leave out what
        does not exist yet. Generators are saved for each process, the rest by the main process.

        Example:
            >>> from hftrain import Trainer
            >>> class TwoOptimizers(Trainer):
            ...     def checkpoint_objects(self):
            ...         return {"critic": self.critic_optimizer}
        """
        return {}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add `logs` to the history and call the callbacks.

        Args:
            logs: Numbers by name.
            start_time: A `time.time()` value; adds the speed since then if tokens are counted
                (`include_num_input_tokens_seen`).

        Source: the documented `Trainer.log`.
        """
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen:
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                start_s = start_time - time.time() + time.perf_counter()
                num_tokens = None if self._session is None else self._session.counts.num_tokens()
                logs.update(speed_metrics("train", start_s, num_tokens=num_tokens))
        entry = {**to_plain(logs), "step": self.state.global_step}
        self.state.log_history.append(entry)
        self._journal.log(entry)
        self.callback_handler.fire("on_log", logs=logs)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics as an aligned table; the main process prints."""
        if self.is_world_process_zero():
            print(metrics_table(split, metrics))

    def metrics_format(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return a readable copy of metrics."""
        return metrics_format(metrics)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write ``<split>_results.json`` and add to ``all_results.json``; the main process writes."""
        if self.is_world_process_zero():
            store_metrics(self.output_dir, split, metrics, combined=combined)
            self._output.publish()

    @property
    def hub_model_id(self) -> str | None:
        """The full name of the repository on the Hub, once created or found; set on the main process only."""
        return None if self._hub.uploads is None else self._hub.uploads.repo_id

    @property
    def push_in_progress(self) -> Any:
        """The future of the newest background push, possibly done; None before the first push."""
        return None if self._hub.uploads is None else self._hub.uploads.newest

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create or find the repository on the Hub, on the main process.

        Args:
            token: Access token for this call; None takes `args.hub_token` or the stored login.
            private: Whether a new repository is private; None takes `args.hub_private_repo`.

        Raises:
            ConfigError: The Hub refuses the name or the token. If the Hub does not answer, only a warning is issued.
            MissingDependencyError: huggingface_hub is not installed.

        Source: the documented `Trainer.init_hf_repo`.
        """
        self._hub.open(token=token, private=private)

    def init_git_repo(self, at_init: bool = False) -> None:
        """Same as `init_hf_repo`; pushes need no git clone, and no file is ever deleted.

        Source: the documented `Trainer.init_git_repo` (4.24).
        """
        warn_once("init_git_repo is deprecated; use init_hf_repo.", FutureWarning)
        self.init_hf_repo()

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write a draft of a model card, `README.md` in `output_dir`; the main process writes.

        An existing card keeps its tags and manually written text.

        Args:
            language: Language of the model.
            license: License; None takes that of the base model's page on the Hub.
            tags: Tags to add to the card's.
            model_name: Name of the model; None takes the repository's name.
            finetuned_from: The base model; None takes the name the model was loaded by.
            tasks: The Hub's names of tasks; with a dataset they make the metrics readable for the Hub.
            dataset_tags: The Hub's names of datasets.
            dataset: Display names of datasets.
            dataset_args: The part of each dataset that was used.

        Raises:
            MissingDependencyError: huggingface_hub is not installed.

        Source: the documented `Trainer.create_model_card`.
        """
        self._hub.write_card(
            log_history=self.state.log_history,
            hyperparameters={
                "total_train_batch_size": self.get_total_train_batch_size(self.args),
                "num_processes": self.strategy.world_size,
                "precision": self.precision.policy.name,
            },
            language=language,
            license=license,
            tags=tags,
            model_name=model_name,
            finetuned_from=finetuned_from,
            tasks=tasks,
            dataset_tags=dataset_tags,
            dataset=dataset,
            dataset_args=dataset_args,
        )
        self._output.publish()

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model and a model card into `output_dir` and push the folder; collective, the main process pushes.

        Works without `args.push_to_hub` too. Checkpoints, optimizer states and hidden files are left out.

        Args:
            commit_message: Message of the commit.
            blocking: Wait until the push ends.
            token: Access token for this push; None takes `args.hub_token` or the stored login.
            revision: Branch for this push, created if absent; None takes `args.hub_revision`, then the main branch.
            private: Whether a new repository is private; None takes `args.hub_private_repo`.
            **kwargs: For `create_model_card`; `tags` are added to those of the model and of the card.

        Returns:
            The commit's `CommitInfo` if `blocking`, else its `Future`; None on other processes than the main one. (One
            text of the documentation has this reversed.)

        Raises:
            ConfigError: The Hub refuses the name or the token.
            MissingDependencyError: huggingface_hub is not installed.
            Exception: The push failed in huggingface_hub; with ``blocking=False`` the future holds the exception.

        Source: the documented `Trainer.push_to_hub`.
        """
        if self._session is not None:
            self._session.checkpoints.settle()
        return self._hub.push(
            message=commit_message, blocking=blocking, token=token, revision=revision, private=private, **kwargs
        )

    def _get_output_dir(self, trial: Any = None) -> str:
        """Return the folder for checkpoints; during a search, `output_dir` is the trial's own folder."""
        return str(self.output_dir)

    def _make_manager(self, parcels: Parcels | None = None) -> CheckpointManager:
        folder = Path(self._get_output_dir(self._trial))
        return make_manager(self.args, self.strategy, self._output, self.save_policy, folder, parcels)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a just committed checkpoint in the background; called only with `push_to_hub`.

        An override may add files to the folder `output_dir` and call this method.
        """
        self._hub.after_save(Path(checkpoint_folder), step=self.state.global_step)
