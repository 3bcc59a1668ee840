"""G7: one signal to any process stops all of them with a committed checkpoint, and the resume is exact."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.distributed import DistributedRun
from support.tiny import at, make_resumable, make_rows, on_tensor_ranks
from torch.distributed.tensor import DTensor

from hftrain import SavePolicy, Trainer, TrainerCallback
from hftrain.checkpoint.manifest import list_checkpoints, verify
from hftrain.preemption.signals import TrainingStopped
from hftrain.storage import files

MAX_STEPS = 14
STRIKE = 6
CASES = [
    *itertools.product(["SIGTERM"], ["train", "evaluate", "save"], ([0], [1], [0, 1])),
    ("SIGINT", "train", [1]),
]


class Strike(TrainerCallback):
    """Send signals in the middle of a phase; the first process sends them all.

    Args:
        sends: (seconds to wait before, receiving rank, name of the signal), in order.
        phase: During which; each takes a while here.
        pids: The processes, by rank.
        step: From which on.
    """

    def __init__(self, sends: list[tuple[float, int, str]], phase: str, pids: list[int], *, step: int = STRIKE) -> None:
        self.sends, self.phase, self.pids, self.step = sends, phase, pids, step
        self.is_done = False
        self.sender = threading.Thread(target=self._send)

    def strike(self, state: Any, phase: str) -> None:
        is_due = phase == self.phase and state.global_step >= self.step and not self.is_done
        if is_due and state.is_world_process_zero:
            self.sender.start()
        self.is_done = self.is_done or is_due
        if is_due or phase == "train":
            time.sleep(0.15 if self.is_done else 0.03)  # processes take up to half a second to agree

    def _send(self) -> None:
        for pause_s, rank, name in self.sends:
            time.sleep(pause_s)
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.Signals[name])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let every signal come before the training is over: later, it would end the process and with it the test."""
        if self.sender.ident is not None:
            self.sender.join()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.strike(state, "train")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.strike(state, "evaluate")


class SlowTrainer(Trainer):
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Strike):
                callback.strike(self.state, "save")


def make_trainer(
    folder: Path, *callbacks: TrainerCallback, save_policy: SavePolicy | None = None, **options: Any
) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": MAX_STEPS, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 3, "logging_steps": 2,
        "metric_for_best_model": "loss", "train_dataset": make_rows(46), **options,
    }  # fmt: skip
    # What a subclass writes itself cannot be written in the background.
    kind = SlowTrainer if save_policy is None else Trainer
    strategy = on_tensor_ranks() if settings.pop("mesh", False) else None
    return make_resumable(folder, *callbacks, seed=3, kind=kind, save_policy=save_policy, strategy=strategy, **settings)


def outcome(trainer: Trainer) -> list[Any]:
    """Return weights, optimizer and what was logged, without how long it took; exact in JSON."""
    clocks = ("runtime", "per_second", "preparation_time")
    history = [
        {name: value for name, value in entry.items() if not name.endswith(clocks)}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]
    assert trainer.optimizer is not None
    tensors = [*trainer.model.state_dict().values()]
    tensors += [v for s in trainer.optimizer.state_dict()["state"].values() for v in s.values()]
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [[tensor.double().tolist() for tensor in own], history, trainer.state.best_metric]


def stop(trainer: Trainer) -> int:
    """Train until a signal stops the run, and return the step of the checkpoint."""
    with pytest.raises((TrainingStopped, KeyboardInterrupt), match=r"stopped the training after step \d+ of 14"):
        trainer.train()
    step = trainer.state.global_step
    assert step < MAX_STEPS
    assert verify(trainer.output_dir / f"checkpoint-{step}").step == step
    return step


def all_moments(folder: str, cases: list[tuple[str, str, list[int]]], mesh: bool = False) -> dict[str, Any]:
    """Stop runs in every phase by signals to each process and to both, and resume each."""
    undisturbed = make_trainer(Path(folder) / "whole", mesh=mesh)
    undisturbed.train()
    whole, strategy = outcome(undisturbed), undisturbed.strategy
    pids = strategy.gather_object(os.getpid())
    found: dict[str, Any] = {}
    for name, phase, who in cases:
        case = f"{name} {phase} {who}"
        run = Path(folder) / case.replace(" ", "_")
        sends = [(0.25 * index, rank, name) for index, rank in enumerate(who)]
        step = stop(make_trainer(run, Strike(sends, phase, pids), mesh=mesh))
        marked = (run / "requeue.json").exists()
        resumed = make_trainer(run, mesh=mesh)
        resumed.train(resume_from_checkpoint="auto")
        found[case] = [
            step,
            strategy.gather_object(step),
            marked and not (run / "requeue.json").exists(),
            outcome(resumed) == whole,
            strategy.all_true(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL),
        ]
    if mesh:
        return found
    found["SIGUSR1"] = saved_in_passing(Path(folder) / "passing", pids, whole)
    found["finishing"] = stopped_while_the_main_process_finishes(Path(folder) / "finishing", pids)
    return found


def saved_in_passing(run: Path, pids: list[int], whole: list[Any]) -> list[Any]:
    """Let SIGUSR1 save one checkpoint more, and resume from it."""
    trainer = make_trainer(run, Strike([(0.0, 1, "SIGUSR1")], "train", pids), save_steps=100)
    done = trainer.train().global_step
    steps = [int(path.name.removeprefix("checkpoint-")) for path in list_checkpoints(run)]
    resumed = make_trainer(run, save_steps=100)
    resumed.train(resume_from_checkpoint=str(run / f"checkpoint-{steps[0]}"))
    return [done, steps, outcome(trainer) == whole, outcome(resumed) == whole]


def stopped_while_the_main_process_finishes(run: Path, pids: list[int]) -> list[Any]:
    """Signal a process that has trained all steps and waits for the main one."""

    class Finish(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                time.sleep(0.3)
                os.kill(pids[1], signal.SIGTERM)

    trainer = make_trainer(run, Finish())
    with pytest.raises(TrainingStopped, match=r"when it was complete\. The last checkpoint is checkpoint-14"):
        trainer.train()
    return trainer.strategy.gather_object(verify(run / "checkpoint-14").step)


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has other signals"),
]


def test_a_signal_to_any_process_at_any_moment_stops_all_and_the_resume_is_exact(
    run_distributed: Callable[..., list[Any]], tmp_path: Path
) -> None:
    answers = run_distributed(all_moments, folder=str(tmp_path), cases=CASES)
    assert answers[0] == answers[1]
    answer = answers[0]
    done, steps, is_same, is_resumed = answer.pop("SIGUSR1")
    assert (done, is_same, is_resumed, len(steps)) == (MAX_STEPS, True, True, 2)
    assert STRIKE <= steps[0] < steps[1] == MAX_STEPS
    assert answer.pop("finishing") == [MAX_STEPS] * 2
    assert_stopped(answer, CASES)


def assert_stopped(answer: dict[str, Any], cases: list[Any]) -> None:
    assert len(answer) == len(cases)
    for case, (step, steps, was_marked, is_same, is_back) in answer.items():
        assert steps == [step, step], case
        assert STRIKE <= step <= STRIKE + 7, case
        assert [was_marked, is_same, is_back] == [True] * 3, case


def test_tensor_ranks_stop_together_and_their_resume_is_exact(
    run_distributed: Callable[..., list[Any]], tmp_path: Path
) -> None:
    cases = [("SIGTERM", phase, [1]) for phase in ("train", "evaluate", "save")]
    answers = run_distributed(all_moments, folder=str(tmp_path), cases=cases, mesh=True)
    assert answers[0] == answers[1]
    assert_stopped(answers[0], cases)


def random_moments(folder: str, seed: int, num_rounds: int) -> dict[str, Any]:
    """Stop runs again and again at random moments, and let each go on until it is done; every other in the background.

    Writing in the background takes a while here, so that signals come during it.
    """
    undisturbed = make_trainer(Path(folder) / "whole")
    undisturbed.train()
    whole, strategy = outcome(undisturbed), undisturbed.strategy
    pids, random, random_pause = strategy.gather_object(os.getpid()), Random(seed), Random()
    num_stops, different, unheeded, ends = 0, [], [], []
    flush, policy = files.fsync_tree, SavePolicy(save_async=True)
    for number in range(num_rounds):
        run, is_done, num_starts = Path(folder) / f"round-{number}", False, 0
        while not is_done:
            sends = [
                (random.random() * 0.3, random.randrange(2), random.choice(["SIGTERM", "SIGUSR1"]))
                for _ in range(random.randint(1, 3))
            ]
            phase, step = random.choice(["train", "evaluate", "save"]), random.randrange(MAX_STEPS)
            strike = Strike(sends if num_starts < 4 else [], phase, pids, step=step)
            trainer = make_trainer(run, strike, save_policy=policy if number % 2 else None)

            def slow(staged: Path, trainer: Trainer = trainer, strike: Strike = strike) -> None:
                if threading.current_thread() is not threading.main_thread():
                    strike.strike(trainer.state, "save")
                    time.sleep(random_pause.random() * 0.1)
                flush(staged)

            files.fsync_tree = slow
            num_starts += 1
            try:
                trainer.train(resume_from_checkpoint="auto")
                is_done = True
                if strike.is_done and any(name == "SIGTERM" for _, _, name in strike.sends):
                    unheeded.append([number, strike.sends, phase, step])
            except TrainingStopped:
                num_stops += 1
                is_done = trainer.state.global_step == MAX_STEPS
            ends.append(strategy.gather_object(trainer.state.global_step))
            # What is there is whole.
            strategy.gather_object([verify(path).step for path in list_checkpoints(run)])
        if outcome(trainer) != whole:
            different.append(number)
    files.fsync_tree = flush
    parted = [steps for steps in ends if steps[0] != steps[1]]
    stops = strategy.gather_object(num_stops)
    return {"stops": stops, "different": different, "unheeded": unheeded, "parted": parted}


@pytest.mark.guarantees
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_signals_at_random_moments_stop_all_and_the_resumes_are_exact(
    run_distributed: Callable[..., list[Any]], tmp_path: Path, seed: int
) -> None:
    answers = run_distributed(random_moments, folder=str(tmp_path), seed=seed, num_rounds=40, timeout_s=1800)
    for answer in answers:
        assert answer["different"] == []
        assert answer["unheeded"] == []
        assert answer["parted"] == []
        assert answer["stops"] == [answers[0]["stops"][0]] * 2
        assert answer["stops"][0] >= 25


def struck(folder: str, sends: list[tuple[float, int, str]], **options: Any) -> None:
    """Train until signals end the process; the last of the receivers is torchrun."""
    import torch.distributed

    trainer = make_trainer(Path(folder), max_steps=40, save_steps=30, eval_steps=50, **options)
    trainer.strategy.launch()
    pids = [*trainer.strategy.gather_object(os.getpid()), os.getppid()]
    assert torch.distributed.is_initialized()
    trainer.add_callback(Strike(sends, "train", pids))
    trainer.train()


def continued(folder: str, **options: Any) -> list[Any]:
    """Resume a run, and compare it with one that was never disturbed."""
    settings = {"max_steps": 40, "save_steps": 30, "eval_steps": 50, **options}
    resumed = make_trainer(Path(folder), **settings)
    first: list[int] = []
    the_first = at("on_train_begin", lambda args, state, control, **kwargs: first.append(state.global_step))
    resumed.add_callback(the_first)
    resumed.train(resume_from_checkpoint="auto")
    undisturbed = make_trainer(Path(folder) / "whole", **settings)
    undisturbed.train()
    return [first[0], outcome(resumed) == outcome(undisturbed)]


def exit_codes(run: DistributedRun) -> list[int]:
    return [int(code) for code in re.findall(r"exitcode +: (-?\d+)", run.output)]


def test_a_signal_ends_the_processes_with_its_own_status(
    launch_distributed: Callable[..., DistributedRun], tmp_path: Path
) -> None:
    run = launch_distributed(struck, kwargs={"folder": str(tmp_path), "sends": [(0.0, 1, "SIGTERM")]}, timeout_s=120)
    # torchrun ends the process that is not gone yet when it sees that one is: by SIGTERM too.
    assert set(exit_codes(run)) <= {143, -15}, run.output
    assert 143 in exit_codes(run), run.output
    assert "SIGTERM stopped the training after step" in run.output
    (path,) = list_checkpoints(tmp_path)
    assert verify(path).step >= STRIKE


def test_a_signal_to_the_launcher_saves_with_workers_alive_and_the_resume_is_exact(
    launch_distributed: Callable[..., DistributedRun], run_distributed: Callable[..., list[Any]], tmp_path: Path
) -> None:
    # torchrun hands its signal on to the whole group of each process, loader workers included.
    kwargs = {"folder": str(tmp_path), "sends": [(0.0, 2, "SIGTERM")], "dataloader_num_workers": 1}
    run = launch_distributed(struck, kwargs=kwargs, timeout_s=120)
    assert run.returncode not in (0, None), run.output
    assert "DataLoader worker" not in run.output
    assert "Unable to shutdown" not in run.output, run.output
    (path,) = list_checkpoints(tmp_path)
    answers = run_distributed(continued, folder=str(tmp_path))
    assert answers == [[verify(path).step, True]] * 2


def test_the_second_interrupt_ends_at_once(launch_distributed: Callable[..., DistributedRun], tmp_path: Path) -> None:
    sends = [(0.0, 0, "SIGINT"), (0.02, 0, "SIGINT")]
    run = launch_distributed(struck, kwargs={"folder": str(tmp_path), "sends": sends}, timeout_s=120)
    assert run.returncode not in (0, None), run.output
    assert "Once more stops it at once" in run.output
    assert "KeyboardInterrupt" in run.output
