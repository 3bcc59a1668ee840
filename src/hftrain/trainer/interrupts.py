"""What a training does when a signal or a clock asks for a checkpoint, or for the end."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from hftrain.checkpoint.layout import checkpoint_name
from hftrain.checkpoint.requests import SAVE, SharedRequests, StepRequests, strongest
from hftrain.checkpoint.signals import SignalHandlers, stopped_by
from hftrain.core.errors import StrategyError
from hftrain.core.log import get_logger, warn_once
from hftrain.storage.files import write_text
from hftrain.storage.remote import RemoteFolder

if TYPE_CHECKING:
    from hftrain.trainer.session import TrainSession
    from hftrain.trainer.trainer import Trainer

logger = get_logger(__name__)

MARKER = "requeue.json"


def saves_at_all(trainer: Trainer) -> bool:
    """Tell whether a run writes checkpoints, at whatever time."""
    policy = trainer.save_policy
    return trainer.args.save_strategy != "no" or policy.every_s is not None or policy.on_exception


class Interrupts:
    """Hear requests for as long as the context lasts, and do at the agreed step boundary what was asked.

    Args:
        session: The run.
        save: Commits a checkpoint of it; collective.
    """

    def __init__(self, session: TrainSession, *, save: Callable[[], None]) -> None:
        self.session = session
        self.save = save
        self.trainer = session.trainer
        self.requests = self._make_requests()
        self._open = ExitStack()
        self._is_stopped = False

    def _make_requests(self) -> StepRequests | None:
        policy, strategy, pending = self.trainer.save_policy, self.trainer.strategy, self.session.pending
        if not policy.on_signal and policy.every_s is None:
            return None
        if strategy.world_size == 1:
            return StepRequests(self.heed, pending, every_s=policy.every_s)
        try:
            board = strategy.make_board()
        except StrategyError as error:
            if policy.every_s is not None:
                raise
            warn_once(f"Signals act as if no training ran. {error}")
            return None
        return SharedRequests(
            self.heed,
            pending,
            board=board,
            rank=strategy.rank,
            world_size=strategy.world_size,
            progress=self.session.progress,
            every_s=policy.every_s,
        )

    def __enter__(self) -> Interrupts:
        if self.trainer.strategy.is_main:
            self._remove_marker()
        if self.requests is not None:
            self.requests.start()
            if self.trainer.save_policy.on_signal:
                self._open.enter_context(SignalHandlers(self.requests))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._open.close()
        if self.requests is not None:
            self.requests.close(is_failed=kind is not None and not self._is_stopped)
            late = self.requests.left_over()
            if late is not None and kind is None:
                # Noted after the last look: as if it had come a moment later.
                signal.raise_signal(signal.Signals[late])

    def note_save(self) -> None:
        """Hear that a checkpoint was saved."""
        if self.requests is not None:
            self.requests.note_save()

    def heed(self) -> None:
        """Do what was asked, if this is the step boundary for it; collective there, and may end the run.

        Comes before what callbacks have asked for at this boundary.
        """
        control, step = self.trainer.control, self.session.progress.step
        assert self.requests is not None
        if step >= self.trainer.state.max_steps or control.should_training_stop:
            # The run ends here by itself, as it does in the other processes: nobody may wait for them.
            return
        asked = self.requests.due(step)
        if asked == SAVE:
            self._save()
        elif asked is not None:
            self._save()
            self._stop(asked, f"after step {step} of {self.trainer.state.max_steps}")

    def settle(self) -> None:
        """End a run that is complete like one that was stopped, if the stop was asked for too late; collective."""
        if self.requests is not None and self.trainer.save_policy.on_signal:
            # A process may wait long for the main one, which finishes the run, and is to look only then.
            self.trainer.strategy.barrier()
            asked = strongest(self.trainer.strategy.gather_object(self.requests.left_over()))
            if asked is not None:
                self._stop(asked, "when it was complete", is_complete=True)

    def _save(self) -> None:
        control, args = self.trainer.control, self.trainer.args
        if not saves_at_all(self.trainer):
            warn_once(f"Nothing is saved as was asked: save_strategy={str(args.save_strategy)!r}.")
            return
        is_due = control.should_evaluate, control.should_save
        # What is due at this boundary, as far as it takes no time: the log.
        control.should_evaluate = control.should_save = False
        self.session.loop.end_step()
        control.should_evaluate, control.should_save = is_due
        if not control.should_evaluate:
            # This is the checkpoint that was due anyway. Before an evaluation, it notes what is left to do.
            control.should_save = False
        self.save()

    def _stop(self, name: str, when: str, *, is_complete: bool = False) -> None:
        trainer = self.trainer
        self._is_stopped = True
        # Nothing may be on its way to the disk any more.
        self.session.checkpoints.settle()
        step = self.session.checkpoints.saved_step
        saved = "No checkpoint was saved" if step is None else f"The last checkpoint is {checkpoint_name(step)}"
        message = f"{name} stopped the training {when}. {saved}."
        if trainer.strategy.is_main:
            logger.warning("%s", message)
            if step is not None:
                self._leave_marker(name, step)
        if not is_complete:
            trainer.callback_handler.fire("on_train_end")
        # Together, or a launcher would kill the slower ones.
        trainer.strategy.barrier()
        raise stopped_by(name, message)

    def _leave_marker(self, name: str, step: int) -> None:
        facts = {"signal": name, "step": step, "checkpoint": checkpoint_name(step), "stopped_at_s": time.time()}
        try:
            write_text(self._marker, json.dumps(facts, indent=1) + "\n")
        except OSError as error:
            # A full disk, say: the run stops as it was told to, and the others with it.
            logger.warning("%s is not there to ask for a requeue: %s", self._marker, error)
        self.trainer._output.publish_quietly()

    def _remove_marker(self) -> None:
        """Forget an earlier stop: from here on this run is what its folder is about."""
        url = self.trainer._output.url
        self._marker.unlink(missing_ok=True)
        if url is not None and saves_at_all(self.trainer):
            RemoteFolder(url).delete_file(MARKER)

    @property
    def _marker(self) -> Path:
        return Path(self.trainer._get_output_dir(self.trainer._trial)) / MARKER
