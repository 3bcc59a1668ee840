"""Stacks that processes write, and the groups that they form."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Noisy, make_arguments, make_rows

from hftrain import ConfigError, FlightLog, Trainer, TrainerCallback
from hftrain.cli.hangs import show_hangs
from hftrain.extras.flight.stacks import Phase, read_phases

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGQUIT"), reason="Windows has no SIGQUIT")


class Sleepy(TrainerCallback):
    def __init__(self, *, sends: bool) -> None:
        self.sends = sends

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.stand_here(Path(args.output_dir) / "flight" / "place-rank0.json")

    def stand_here(self, place: Path) -> None:
        if self.sends:
            os.kill(os.getpid(), signal.SIGQUIT)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (place.exists() and '"step 4"' in place.read_text()):
            time.sleep(0.02)


@pytest.mark.parametrize("timeout_s", [None, 0.5])
def test_a_process_tells_where_it_stands(tmp_path: Path, timeout_s: float | None) -> None:
    other, before = threading.Event(), signal.getsignal(signal.SIGQUIT)
    thread = threading.Thread(target=other.wait, daemon=True)
    thread.start()
    log = FlightLog(hang_timeout_s=timeout_s)
    args = make_arguments(tmp_path, max_steps=5)
    callbacks = [Sleepy(sends=timeout_s is None)]
    Trainer(Net(), args, train_dataset=make_rows(20), callbacks=callbacks, flight_log=log).train()
    other.set()
    text = "\n".join(show_hangs(str(tmp_path)))
    assert "rank 0:\n    step 4; collective: none\n" in text
    assert "stand_here  test_stacks.py" in text
    # Nothing waits any more, and the signal is as before.
    assert signal.getsignal(signal.SIGQUIT) is before
    assert not [each for each in threading.enumerate() if each.name == "hftrain-flight"]


WAITING, LOADING = ("ops.py", 3, "all_reduce"), ("loader.py", 7, "fetch")


def write_place(folder: Path, rank: int, frame: tuple[str, int, str], **place: Any) -> None:
    """Write what a process leaves behind; its place is up to date unless it says otherwise."""
    folder.mkdir(exist_ok=True)
    same = 'Thread 0x01 (most recent call first):\n  File "x.py", line 1 in wait\n\n'
    main = f'Current thread 0x02 (most recent call first):\n  File "{frame[0]}", line {frame[1]} in {frame[2]}\n'
    size = (folder / f"stacks-rank{rank}.txt").write_text(same + main)
    (folder / f"phase-rank{rank}.txt").write_text("step 7, backward".ljust(64))
    if place:
        (folder / f"place-rank{rank}.json").write_text(json.dumps({"size": size, **place}))


def begin(folder: Path, *ms: dict[str, float], world_size: int, steps: int = 0) -> None:
    """Write the flight logs of ranks whose steps all take equally long."""
    folder.mkdir(exist_ok=True)
    for rank, each in enumerate(ms):
        lines = [{"begin": 0, "world_size": world_size}, *({"step": step, "ms": each} for step in range(1, steps + 1))]
        (folder / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_ranks_that_stand_apart_are_named(tmp_path: Path) -> None:
    for rank in range(4):
        write_place(tmp_path / "flight", rank, LOADING if rank == 2 else WAITING)
    answer = show_hangs(str(tmp_path))
    assert [each["ranks"] for each in answer.data["stacks"]] == [[0, 1, 3], [2]]
    assert "rank 2, apart from the others:" in answer
    assert "    fetch  loader.py:7" in answer
    # Nothing told the collective, as if the GIL was held; the phase is there nevertheless.
    assert "    step 7, backward; collective: unknown" in answer


def test_equal_stacks_in_another_collective_or_phase_stand_apart(tmp_path: Path) -> None:
    folder, now = tmp_path / "flight", "step 8, backward"
    for rank, (phase, pending) in enumerate([(now, 7), (now, 7), (now, 6), ("step 9, forward", 7), (now, 7)]):
        write_place(folder, rank, WAITING, phase=phase, collectives=[f"gloo:all_reduce {pending}", "later"])
    begin(folder, {}, world_size=7)
    (folder / "phase-rank5.txt").write_text("step 3, data".ljust(64))
    answer = show_hangs(str(tmp_path))
    assert [each["ranks"] for each in answer.data["stacks"]] == [[0, 1, 4], [2], [3]]
    assert "ranks 0, 1, 4:" in answer
    assert "    step 8, backward; collective: gloo:all_reduce 6" in answer
    assert "rank 3, apart from the others:" in answer
    assert answer.data["silent"] == {5: "step 3, data", 6: "unknown"}
    assert "rank 5 has written no stack. Its last phase: step 3, data." in answer


def test_stacks_of_an_earlier_session_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "flight"
    for rank in range(2):
        write_place(folder, rank, WAITING)
    begin(folder, {}, world_size=2)
    at = (folder / "stacks-rank1.txt").stat().st_mtime
    (folder / "rank0.jsonl").write_text(json.dumps({"begin": 4, "world_size": 2, "at": at}) + "\n")
    os.utime(folder / "stacks-rank0.txt", (at - 1, at - 1))
    data = show_hangs(str(tmp_path)).data
    assert [each["ranks"] for each in data["stacks"]] == [[1]]
    assert list(data["silent"]) == [0]


def test_of_two_ranks_the_one_in_no_collective_stands_apart(tmp_path: Path) -> None:
    for rank, pending in enumerate([[], ["gloo:all_reduce 7"]]):
        write_place(tmp_path / "flight", rank, WAITING, phase="step 8, backward", collectives=pending)
    answer = show_hangs(str(tmp_path))
    assert "rank 1:" in answer
    assert "rank 0, apart from the others:" in answer


def test_a_place_that_is_older_than_the_stack_is_left_out(tmp_path: Path) -> None:
    write_place(tmp_path / "flight", 0, WAITING, phase="step 1, data", collectives=["gloo:barrier 1"], size=3)
    assert "    step 7, backward; collective: unknown" in show_hangs(str(tmp_path))


FAST = {"data": 3.0, "forward": 10.0, "backward": 60.0, "step": 2.0}


@pytest.mark.parametrize(
    ("slow", "phase", "told"),
    [
        ({**FAST, "data": 53.0, "backward": 10.0}, "data", "in data: 53 ms, the others 3 ms."),
        ({**FAST, "forward": 60.0, "backward": 10.0}, "forward", "in forward: 60 ms, the others 10 ms."),
        ({**FAST, "step": 52.0, "backward": 10.0}, "step", "in step: 52 ms, the others 2 ms."),
        ({**FAST, "backward": 10.0}, "between", "between the steps: 50 ms, the others 0 ms."),
        # Under FSDP the others wait in the forward pass, too.
        ({"data": 43.0, "forward": 5.0, "backward": 25.0, "step": 2.0}, "data", "in data: 43 ms, the others 3 ms."),
        ({**FAST, "data": 8.0, "backward": 55.0}, None, ""),  # 5 of 75 ms: that is nothing
    ],
)
def test_the_rank_that_was_waited_for_is_named(tmp_path: Path, slow: dict[str, float], phase: str, told: str) -> None:
    begin(tmp_path / "flight", FAST, slow, FAST, world_size=3, steps=120)
    answer = show_hangs(str(tmp_path))
    waited = answer.data["split"]["waited"]
    assert answer.data["split"]["steps"] == 100
    assert (waited and (waited["rank"], waited["phase"], waited["steps"])) == (phase and (1, phase, 100))
    assert [line for line in answer if "waited" in line] == [
        f"rank 1 was waited for in 100 of 100 steps, {told}"
    ] * bool(phase)
    assert answer[3].split() == ["rank", "data", "forward", "backward", "step", "between"]
    assert answer[5].split()[:2] == ["1", f"{slow['data']:.1f}"]


def test_no_rank_is_named_after_few_steps_or_if_they_take_turns(tmp_path: Path) -> None:
    slow = {**FAST, "data": 53.0, "backward": 10.0}
    begin(tmp_path / "flight", FAST, slow, world_size=2, steps=9)
    assert show_hangs(str(tmp_path)).data["split"]["waited"] is None
    begin(tmp_path / "flight", FAST, slow, world_size=2, steps=10)
    assert show_hangs(str(tmp_path)).data["split"]["waited"]["steps"] == 10
    lines = [[{"begin": 0, "world_size": 2}], [{"begin": 0, "world_size": 2}]]
    for step in range(1, 21):  # two of three
        for rank in range(2):
            lines[rank].append({"step": step, "ms": slow if (step % 3 == 0) == (rank == 0) else FAST})
    for rank in range(2):
        (tmp_path / "flight" / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[rank]))
    assert show_hangs(str(tmp_path)).data["split"]["waited"] is None


def test_phases_are_told_while_they_go_on_and_outlive_the_process(tmp_path: Path) -> None:
    folder, seen = tmp_path / "run" / "flight", []

    class Look(TrainerCallback):
        def note(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(read_phases(folder)[0])

        on_step_begin = on_pre_optimizer_step = on_prediction_step = on_step_end = note

    class Seen(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
            seen.append(read_phases(folder)[0])
            found = super().forward(x, labels)
            if found[0].requires_grad:
                found[0].register_hook(lambda _: seen.append(read_phases(folder)[0]))
            return found

    class Rows(Noisy):
        def __getitem__(self, index: Any) -> Any:
            seen.append(read_phases(folder)[0])
            return super().__getitem__(index)

    args = make_arguments(tmp_path / "run", max_steps=2, per_device_train_batch_size=1, eval_steps=2, save_steps=2,
                          eval_strategy="steps", save_strategy="steps")  # fmt: skip
    Trainer(
        Seen(), args, train_dataset=Rows(make_rows(4)), eval_dataset=make_rows(2), callbacks=[Look()], flight_log=True
    ).train()
    steps = [f"step {step}{phase}" for step in (1, 2) for phase in (", data", "", ", forward", ", backward", "")]
    assert [each for each, _ in groupby(seen)] == [*steps, "step 2, evaluate"]
    assert read_phases(folder) == {0: "step 2, ended"}


def test_a_full_disk_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Phase, "open", full)
    args = make_arguments(tmp_path, max_steps=2)
    trainer = Trainer(Net(), args, train_dataset=make_rows(8), flight_log=True)
    with pytest.warns(UserWarning, match="No space left on device"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_runs_without_stacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SIGQUIT"):
        show_hangs(str(tmp_path))
