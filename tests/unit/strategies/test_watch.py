"""Failures and whereabouts told by notes; real processes: tests/guarantees/test_g8_errors.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from hftrain.preemption.consensus import Board
from hftrain.strategies import watch
from hftrain.strategies.watch import RankWatch, is_broken_exchange

GONE = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:45787.")
LATE = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete")


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RankWatch, RankWatch]]:
    """Two ranks' watches in one process, which share a board; torch's hook prints nothing here."""
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: print(f"Traceback of {error}", file=sys.stderr))
    board = Board()
    first = RankWatch(lambda: board, rank=0, world_size=2)
    second = RankWatch(lambda: board, rank=1, world_size=2)
    yield first, second
    second.stop()
    first.stop()


@pytest.mark.parametrize(
    ("error", "is_broken"),
    [
        (GONE, True),
        (LATE, True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("Cannot write checkpoint-4. Another process failed; see its error."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
    ],
)
def test_broken_exchange_is_told_from_errors_of_ones_own(error: Exception, is_broken: bool) -> None:
    assert is_broken_exchange(error) is is_broken


def test_failed_process_stays_until_the_others_have_looked(
    watches: tuple[RankWatch, RankWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = watches
    monkeypatch.setattr(watch, "_HEARD_S", 60.0)
    first._report(ValueError, ValueError("boom"), None)
    assert second._read("heard 1") is not None


def test_failure_is_known_after_whoever_keeps_the_notes_is_gone(
    watches: tuple[RankWatch, RankWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = watches
    first._report(ValueError, ValueError("boom"), None)
    assert second.failure_elsewhere(wait_s=5.0) is not None
    monkeypatch.setattr(second._board, "read", lambda key: None)
    assert second.failure_elsewhere() == "rank 0 failed: ValueError: boom"


def test_failed_process_does_not_wait_for_ever_for_one_that_is_gone(
    watches: tuple[RankWatch, RankWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = watches
    second.stop()
    monkeypatch.setattr(watch, "_HEARD_S", 0.2)
    first._report(ValueError, ValueError("boom"), None)
    assert first._read("heard 1") is None


def test_broken_exchange_without_a_failure_is_printed_as_it_is(
    watches: tuple[RankWatch, RankWatch], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_ANSWER_S", 0.1)
    watches[1].stop()
    watches[0]._report(RuntimeError, GONE, None)
    assert "Traceback of [gloo" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["failure", "link"])
def test_something_can_be_written_before_a_process_is_ended(
    watches: tuple[RankWatch, RankWatch], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    first, second = watches
    done: list[str] = []

    def write() -> None:
        done.append("written")
        raise OSError("No space left on device")

    monkeypatch.setattr(watch, "_GRACE_S", 0.0)
    monkeypatch.setattr(watch, "_NOTICE_S", 0.0)
    monkeypatch.setattr(watch, "end_process", lambda status: done.append(f"ended {status}"))
    second.before_end = write
    if way == "link":
        second._lose("rank 0 is gone")
    else:
        first._report(ValueError, ValueError("boom"), None)
        second._thread.join(30)
    assert done == ["written", "ended 1"]
    assert "[rank1]: ended, because rank 0 " in capsys.readouterr().err


def test_timeout_tells_who_did_not_come_and_where_they_are(watches: tuple[RankWatch, RankWatch]) -> None:
    first, second = watches
    first.where, second.where = lambda: "evaluate", lambda: "train step 3"
    error = first.late(LATE, timeout_s=5.0)
    assert str(error).startswith("Rank 0 waited in 'evaluate' for the other ranks. Rank 1 did not come within 5 s: ")
    assert "rank 1 is in 'train step 3', at " in str(error)


def test_rank_that_does_not_answer_did_not_come(
    watches: tuple[RankWatch, RankWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_ANSWER_S", 0.1)
    watches[1].stop()
    assert "rank 1 does not answer" in str(watches[0].late(LATE, timeout_s=5.0))


def test_store_that_is_gone_ends_the_watch() -> None:
    class Gone(Board):
        def read(self, key: str) -> str | None:
            raise RuntimeError("Broken pipe")

    hook = sys.excepthook
    alone = RankWatch(Gone, rank=0, world_size=2)
    assert alone.failure_elsewhere() is None
    alone.stop()
    alone.stop()
    assert sys.excepthook is hook
