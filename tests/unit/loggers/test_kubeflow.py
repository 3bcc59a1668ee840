"""Reports to the server of a Kubeflow TrainJob, which a real one on this machine receives."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support import tiny

from hftrain import KubeflowCallback, TrainerCallback
from hftrain.loggers import kubeflow


class Server(HTTPServer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[dict[str, Any]] = []
        self.status = 200
        self.answers = threading.Event()
        self.answers.set()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        assert self.server.answers.wait(30)
        report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append({"token": self.headers["Authorization"], **report["trainerStatus"]})
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        (tmp_path / "token").write_text("secret\n", encoding="utf-8")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_port}/status")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
        yield server
        server.shutdown()
        thread.join()


make = partial(tiny.make_trainer, max_steps=4)


def metrics(report: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in report["metrics"]}


def test_train_job_is_told_of_begin_progress_and_end(
    tmp_path: Path, job: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubeflow, "_INTERVAL", 0.0)
    trainer = make(tmp_path, report_to="none")
    assert KubeflowCallback in {type(callback) for callback in trainer.callback_handler.callbacks}
    trainer.train()
    assert [report["progressPercentage"] for report in job.got] == [0, 25, 50, 75, 99, 100]
    assert {report["token"] for report in job.got} == {"Bearer secret"}
    first, last = job.got[0], job.got[-1]
    assert "estimatedRemainingSeconds" not in first
    assert last["estimatedRemainingSeconds"] == 0
    assert metrics(first) == {"current_step": "0", "total_steps": "4", "current_epoch": "0"}
    assert metrics(job.got[2])["loss"] == str(trainer.state.log_history[0]["loss"])
    assert metrics(last)["train_loss"] == str(trainer.state.log_history[-1]["train_loss"])


def test_reports_are_five_seconds_apart(tmp_path: Path, job: Server) -> None:
    make(tmp_path, max_steps=20).train()
    assert [report["progressPercentage"] for report in job.got] == [0, 100]


def test_resumed_run_tells_where_it_is(tmp_path: Path, job: Server) -> None:
    make(tmp_path, save_strategy="steps", save_steps=2).train()
    job.got.clear()
    make(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [report["progressPercentage"] for report in job.got] == [50, 100]


def test_training_does_not_wait_for_the_server(tmp_path: Path, job: Server) -> None:
    class Release(TrainerCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append(len(job.got))
            job.answers.set()

    job.answers.clear()
    seen: list[int] = []
    trainer = make(tmp_path, report_to="none")
    # Before the tracker's, which waits at the end.
    trainer.callback_handler.callbacks.insert(0, Release())
    trainer.callback_handler.refresh()
    trainer.train()
    assert seen == [0]
    assert len(job.got) == 2


def test_refused_report_is_warned_of_and_training_goes_on(
    tmp_path: Path, job: Server, caplog: pytest.LogCaptureFixture
) -> None:
    job.status = 403
    trainer = make(tmp_path)
    trainer.train()
    assert trainer.state.global_step == 4
    assert "Tracker kubeflow failed" in caplog.text
    assert "403" in caplog.text


@pytest.mark.parametrize("is_asked", [False, True])
def test_nothing_is_reported_where_the_user_says_so(
    tmp_path: Path, job: Server, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "TRUE")
    if is_asked:
        with pytest.warns(UserWarning, match="DISABLE_KUBEFLOW_INTEGRATION is set: nothing is reported"):
            make(tmp_path, report_to="kubeflow").train()
    else:
        make(tmp_path, report_to="none").train()
    assert job.got == []


def test_name_outside_a_train_job_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    with pytest.warns(UserWarning, match="KUBEFLOW_TRAINER_SERVER_URL is not set"):
        make(tmp_path, report_to="kubeflow")
