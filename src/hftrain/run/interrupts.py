"""Handle requests of signals or a clock to save or to stop."""

from __future__ import annotations

import json
import signal
import time
from contextlib import ExitStack
from typing import Any

from hftrain.checkpoint.manifest import checkpoint_name
from hftrain.checkpoint.writer import saves_at_all
from hftrain.core.errors import StrategyError
from hftrain.core.extras import extra
from hftrain.core.log import get_logger, warn_once
from hftrain.core.preserve import temporarily
from hftrain.preemption.consensus import SAVE, STOPS, Consensus, strongest
from hftrain.preemption.grace import GracePeriod
from hftrain.preemption.signals import SignalHandlers, TrainingStopped, stopped_by
from hftrain.run.parts import RunParts
from hftrain.run.saving import Saver
from hftrain.storage.files import staged_bytes, write_text

logger = get_logger(__name__)

MARKER = "requeue.json"


class Interrupts:
    """Receive requests within the context, and handle them at the agreed step boundary.

    Args:
        grace: Ends a run that SIGTERM cannot stop; closed by its owner after the last write.
    """

    def __init__(self, parts: RunParts, saver: Saver, grace: GracePeriod) -> None:
        self._parts, self._saver, self._grace, self.where = parts, saver, grace, parts.services.where
        self._args, self._policy = parts.args, parts.save_policy
        self.strategy, self._output, self._events = parts.strategy, parts.output, parts.events
        self._state, self._control, self._progress = parts.state, parts.control, parts.progress
        self._marker = saver.manager.output_dir / MARKER
        # The reason why there is no consensus, if one is needed.
        self.silence = ""
        self.consensus = self._make_consensus(parts)
        if self.consensus is not None:
            saver.on_begin = self.consensus.note_save
        self._handler_stack = ExitStack()
        self._is_stopped = False
        # The step at which the run started: 0 if new, otherwise from a checkpoint.
        self._first_step = 0

    def _make_consensus(self, parts: RunParts) -> Consensus | None:
        policy = self._policy
        if not (policy.on_signal or policy.every_s is not None or policy.save_async):
            return None
        try:
            board = self.strategy.make_board()
        except StrategyError as error:
            if policy.every_s is not None:
                raise
            if policy.on_signal:
                warn_once(f"Signals act as if no training ran. {error}")
            self.silence = str(error)
            return None
        return Consensus(
            self.act,
            parts.pending,
            group=self.strategy,
            board=board,
            progress=self._progress,
            timeout_s=parts.args.ddp_timeout,
            every_s=policy.every_s,
        )

    def __enter__(self) -> Interrupts:
        if self.strategy.is_main:
            self._marker.unlink(missing_ok=True)  # of an earlier stop
            if (url := self._output.url) is not None and saves_at_all(self._args, self._policy):
                extra("remote").RemoteFolder(url).delete_file(MARKER)
        self._first_step = self._progress.step
        if self.consensus is not None:
            self.consensus.start()
            if self._policy.on_signal:
                self.consensus.on_stop = self._grace.ring
                self.ask = self.consensus.ask
                self.handlers = SignalHandlers(self.consensus, lambda: self._grace.start(self))
                self._handler_stack.enter_context(self.handlers)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._handler_stack.close()  # first, so that a signal that is raised below reaches the program's own handler
        if isinstance(error, TrainingStopped) and error.is_early:
            logger.warning("%s. %s", error, self.last_words())
        if self.consensus is not None:
            self.consensus.close(is_failed=kind is not None and not self._is_stopped)
            late_signal = self.consensus.unhandled_stop()
            if late_signal is not None and kind is None:
                # Received after the last check: treat it as if it had come a moment later.
                signal.raise_signal(signal.Signals[late_signal])

    def act(self) -> None:
        """Handle a request, if this is the agreed step boundary; collective there, and may end the run.

        Runs before the requests of callbacks at this boundary.
        """
        control, step = self._control, self._progress.step
        assert self.consensus is not None
        if step >= self._state.max_steps or control.should_training_stop:
            # The run ends here on all processes anyway, so none may wait for the others.
            return
        request = self.consensus.due(step)
        if request == SAVE or request in STOPS:
            self._save()
        elif request is not None:
            self._saver.writer.finish(name=request)
        if request in STOPS:
            self._stop(request, f"after step {step} of {self._state.max_steps}")

    def stop_if_asked_late(self) -> None:
        """End a complete run like a stopped one, if the stop was requested too late; collective."""
        if self.consensus is not None and self._policy.on_signal:
            # The main process may take long to finish the run; the others must check for requests only afterwards.
            self.strategy.barrier()
            stop_signal = strongest(self.strategy.gather_object(self.consensus.unhandled_stop()))
            if stop_signal is not None:
                self._stop(stop_signal, "when it was complete", is_complete=True)

    def _save(self) -> None:
        if not saves_at_all(self._args, self._policy):
            warn_once(f"The requested save is skipped: save_strategy={str(self._args.save_strategy)!r}.")
            return
        # Of the actions due at this boundary, run only the log, which takes no time.
        with temporarily(self._control, should_evaluate=False, should_save=False):
            self._parts.loop.end_step()
        # It may be the checkpoint that was due anyway. Before an evaluation, it records what is still due.
        self._saver.save(is_planned=self._control.should_save)

    def _stop(self, signal_name: str, when: str, *, is_complete: bool = False) -> None:
        self._is_stopped = True
        # No write may be pending.
        self._saver.writer.finish()
        step = self._saver.saved_step
        outcome = "No checkpoint was saved" if step is None else f"The last checkpoint is {checkpoint_name(step)}"
        message = f"{signal_name} stopped the training {when}. {outcome}."
        if self.strategy.is_main:
            logger.warning("%s", message)
            if step is not None:
                self._leave_marker(signal_name, step)
        if not is_complete:
            self._events.fire("on_train_end")
        # Processes end together, because a launcher would kill the slower ones.
        self.strategy.barrier()
        raise stopped_by(signal_name, message)

    # -- for the grace period's thread, or another one that it can abandon ----------------------------------------

    def pulse(self) -> tuple[Any, ...]:
        """Return a value that changes whenever this process makes progress; fast."""
        parts = self._parts
        return self._progress.step, parts.losses.num_micro_steps, self._events.num_fired.value, parts.phase

    def share_pulse(self) -> list[str | None]:
        """Post the pulse, the bytes being written and whether it writes, and return the last note of each process."""
        assert self.consensus is not None
        return self.consensus.share([*self.pulse(), staged_bytes(self._marker.parent), self.is_saving()])

    def is_saving(self, notes: list[str | None] | None = None) -> bool:
        """Tell whether this process, or one of those with a note, writes a checkpoint."""
        is_under_way = self._parts.is_saving or staged_bytes(self._marker.parent) > 0
        is_here = is_under_way and self.consensus is not None and not self.consensus.is_waiting
        # A process that had ended before the signal has no note.
        return is_here or any(json.loads(note or "[false]")[-1] for note in notes or ())

    def last_words(self) -> str:
        """Write the marker of a run that ends within a step, and describe what is saved and what is lost."""
        step, end = self._saver.saved_step or self._first_step, self._progress.step
        if not step:
            return "There is no checkpoint."
        if self.strategy.is_main:
            self._leave_marker("SIGTERM", step)
        return f"The last checkpoint is {checkpoint_name(step)}; {max(end - step, 0)} whole steps after it are lost."

    def _leave_marker(self, signal_name: str, step: int) -> None:
        facts = {"signal": signal_name, "step": step, "checkpoint": checkpoint_name(step), "stopped_at_s": time.time()}
        try:
            write_text(self._marker, json.dumps(facts, indent=1) + "\n")
        except OSError as error:
            # For example a full disk: the run still stops, and the other processes with it.
            logger.warning("%s cannot request a requeue: %s", self._marker, error)
        self._output.publish_quietly()
