"""Pushes of a Trainer to the Hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.extras.hub.card import CardFacts, write_card
from hftrain.extras.hub.files import CARD, LAST_CHECKPOINT, model_files, output_files
from hftrain.extras.hub.uploads import Push, Uploads, reason, require_hub
from hftrain.run.output import Output
from hftrain.run.parts import TrainerHooks
from hftrain.storage.files import check_writable

logger = get_logger(__name__)

# The settings listed in a model card.
_LISTED = (
    "learning_rate", "train_batch_size", "eval_batch_size", "gradient_accumulation_steps", "seed", "optim",
    "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "lr_scheduler_type",
    "warmup_steps", "warmup_ratio", "label_smoothing_factor",
)  # fmt: skip


class TrainerHub:
    """Push the files that a Trainer saves; only the world's main process connects to the Hub.

    Attributes:
        uploads: Past and running pushes; None until one is needed.
    """

    def __init__(self, trainer: TrainerHooks, output: Output) -> None:
        self._trainer, self._output = trainer, output
        self.uploads: Uploads | None = None
        self._licenses: dict[str, str | None] = {}

    def open(self, *, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository, or find an existing one."""
        require_hub("push_to_hub")
        if not self._trainer.strategy.is_main:
            return
        check_writable(self._output.folder)
        uploads = self._get_uploads(private=private)
        try:
            uploads.open_repo(token=token)
        except ConfigError:
            raise
        except Exception as error:
            logger.warning(
                "The Hub cannot be reached to create %s: %s Training can start; the first push tries again.",
                uploads.model_id,
                reason(error),
            )

    def after_save(self, checkpoint: Path, *, step: int) -> None:
        """Push a committed checkpoint in the background according to `hub_strategy`; a failure only warns.

        Args:
            checkpoint: Its folder, which may be deleted after the call.
        """
        if not self._trainer.strategy.is_main:
            return
        with self._warn_on_failure(f"step {step}"):
            uploads, args = self._get_uploads(), self._trainer.args
            strategy = str(args.hub_strategy)
            if strategy == "end":
                return
            keeps_all = strategy == "all_checkpoints"
            if keeps_all or strategy == "checkpoint":
                uploads.remember(checkpoint.name if keeps_all else LAST_CHECKPOINT, checkpoint)
            # A skipped checkpoint may be deleted before the next push, so "all_checkpoints" never skips one.
            if uploads.newest is not None and not uploads.newest.done() and not (args.hub_always_push or keeps_all):
                logger.info("Skipped the push of step %d: the previous one has not ended.", step)
                return
            self._write_card_of_push({})
            files = {**model_files(checkpoint), CARD: self._output.folder / CARD}
            message = f"Training in progress, step {step}"
            uploads.submit(Push(message=message, files=files, revision=args.hub_revision, shows_progress=False))

    def after_save_model(self, *, message: str, folder: Path | None = None) -> None:
        """Push the model, which was just saved to `folder`, and wait; a failed push only warns.

        Collective: the model is first saved to the output folder, unless `folder` is that folder.
        """
        if folder is None or folder.resolve() != self._output.folder.resolve():
            self._trainer.save_model(_internal_call=True)
        if self._trainer.strategy.is_main:
            with self._warn_on_failure(message):
                self._push_output({}, message=message, blocking=True)

    def after_training(self) -> None:
        """Push the final model and files that earlier pushes left out; warn how many pushes failed. Collective."""
        self.after_save_model(message="End of training")
        if self.uploads is not None and self.uploads.num_failed:
            counts = self.uploads.num_failed, self.uploads.num_pushes
            logger.warning("%d of %d pushes to %s failed.", *counts, self.uploads.model_id)

    def push(
        self,
        *,
        message: str,
        blocking: bool,
        token: str | None,
        revision: str | None,
        private: bool | None,
        **card: Any,
    ) -> Any:
        """Save the model to the output folder and push that; collective. See `Trainer.push_to_hub`."""
        require_hub("push_to_hub()")
        if self._trainer.strategy.watch is not None:
            self._trainer.strategy.watch.meet("push_to_hub")
        self._trainer.save_model(_internal_call=True)
        if not self._trainer.strategy.is_main:
            return None
        self._get_uploads(private=private)
        return self._push_output(card, message=message, blocking=blocking, token=token, revision=revision)

    def write_card(self, **fields: Any) -> None:
        """Write `README.md` into the output folder; see `Trainer.create_model_card`."""
        require_hub("create_model_card()")
        trainer, folder, model = self._trainer, self._output.folder, self._trainer.model
        if not trainer.strategy.is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        config = getattr(model, "config", None)
        is_transformers = any(kind.__module__.split(".")[0] == "transformers" for kind in type(model).__mro__)
        name = getattr(config, "_name_or_path", None) or None  # by which it was loaded
        base_model = fields["finetuned_from"] or (None if name is None or Path(name).exists() else name)
        facts = CardFacts(
            model_name=fields["model_name"] or self._model_name(),
            library_name="transformers" if is_transformers else "hftrain",
            language=fields["language"],
            license=fields["license"] or self._license_of(base_model),
            tags=_as_list(fields["tags"]),
            finetuned_from=base_model,
            tasks=_as_list(fields["tasks"]),
            dataset_tags=_as_list(fields["dataset_tags"]),
            datasets=_as_list(fields["dataset"]),
            dataset_args=_as_list(fields["dataset_args"]),
            hyperparameters={
                **listed_hyperparameters(trainer.args),
                "total_train_batch_size": trainer.get_total_train_batch_size(trainer.args),
                "num_processes": trainer.strategy.world_size,
                "precision": trainer.precision.policy.name,
            },
            log_history=trainer.state.log_history,
        )
        write_card(folder / CARD, facts)
        update_card = getattr(model, "create_or_update_model_card", None)
        if update_card is not None:
            update_card(str(folder))  # PEFT adds its adapters' details

    def _get_uploads(self, *, private: bool | None = None) -> Uploads:
        if self.uploads is None:
            args, folder = self._trainer.args, self._output.folder
            model_id = args.hub_model_id or folder.resolve().name
            self.uploads = Uploads(folder, model_id, token=args.hub_token, private=args.hub_private_repo)
        if private is not None:
            self.uploads.private = private
        return self.uploads

    def _push_output(
        self, card: Mapping[str, Any], *, blocking: bool, revision: str | None = None, **options: Any
    ) -> Any:
        uploads = self._get_uploads()
        self._write_card_of_push(card)
        revision = revision or self._trainer.args.hub_revision
        push = Push(files=output_files(self._output.folder), revision=revision, **options)
        return uploads.upload(push) if blocking else uploads.submit(push)

    def _write_card_of_push(self, card: Mapping[str, Any]) -> None:
        self._trainer.callback_handler.fire("on_push_begin")
        tags = [*_as_list(getattr(self._trainer.model, "model_tags", None)), *_as_list(card.get("tags"))]
        self._trainer.create_model_card(**{"model_name": self._model_name(), **card, "tags": list(dict.fromkeys(tags))})

    @contextmanager
    def _warn_on_failure(self, description: str) -> Iterator[None]:
        """Turn the failure of a push into a warning: it must not end a training."""
        try:
            yield
        except Exception as error:
            logger.warning(
                "Could not push %r to %s: %s Nothing is lost, the files are in %s; try again with push_to_hub().",
                description,
                self.uploads.model_id if self.uploads is not None else "the Hub",
                reason(error),
                self._output.folder,
            )

    def _model_name(self) -> str:
        return (self._trainer.args.hub_model_id or self._output.folder.resolve().name).split("/")[-1]

    def _license_of(self, base_model: str | None) -> str | None:
        """Return the license on the base model's page on the Hub; None if there is none or the Hub does not answer."""
        if base_model is None or Path(base_model).exists():
            return None
        if base_model not in self._licenses:
            try:
                info = self._get_uploads().api.model_info(base_model, timeout=10.0)
                license_name = None if info.card_data is None else info.card_data.get("license")
                tags = [tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")]
                self._licenses[base_model] = license_name or (tags[0] if tags else None)
            except Exception as error:
                logger.info("The license of %s cannot be looked up: %s", base_model, error)
                self._licenses[base_model] = None
        return self._licenses[base_model]


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def listed_hyperparameters(args: Any) -> dict[str, Any]:
    """Return the settings to list in a model card: those that are set, and the length of the training."""
    settings = {name: getattr(args, name) for name in _LISTED if getattr(args, name)}
    length = {"max_steps": args.max_steps} if args.max_steps > 0 else {"num_train_epochs": args.num_train_epochs}
    return {**settings, **length}
