"""Trackers that transformers' callbacks report to, with stand-ins for their servers."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import tiny

pytest.importorskip("transformers")

from transformers.integrations import integration_utils

import hftrain
from hftrain import ConfigError, MissingDependencyError
from hftrain.extras.trackers.callbacks import tracker_callback
from hftrain.extras.trackers.choice import tracker_callbacks
from hftrain.loggers import base
from hftrain.loggers.registry import create_logger, loggers

pytestmark = pytest.mark.interop


class Server(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append({"token": self.headers["Authorization"], **report["trainerStatus"]})
        self.send_response(200)
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


def test_train_job_is_told_of_its_progress_whatever_report_to_is(tmp_path: Path, job: Server) -> None:
    trainer = make(tmp_path, report_to="none")
    assert hftrain.KubeflowCallback in {type(callback) for callback in trainer.callback_handler.callbacks}
    trainer.train()
    assert [report["progressPercentage"] for report in job.got] == [0, 100]
    assert {report["token"] for report in job.got} == {"Bearer secret"}


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


def test_train_job_without_transformers_is_warned_of(
    tmp_path: Path, job: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_is_installed", lambda package: package != "transformers")
    with pytest.warns(UserWarning, match="install transformers"):
        make(tmp_path, report_to="none").train()
    assert job.got == []


def test_name_outside_a_train_job_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    with pytest.warns(UserWarning, match="KUBEFLOW_TRAINER_SERVER_URL is not set"):
        make(tmp_path, report_to="kubeflow")


class Run:
    """What of an Azure ML run is used: its package asks for the service as soon as a run is opened."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float]] = []

    def log(self, name: str, value: float, description: str = "") -> None:
        self.rows.append((name, value))


def test_callback_of_transformers_hears_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    for name in ("azureml", "azureml.core", "azureml.core.run"):
        module: Any = ModuleType(name)
        module.__path__ = []
        module.__spec__ = object()
        module.Run = type("Run", (), {"get_context": staticmethod(lambda: run)})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(integration_utils, "is_azureml_available", lambda: True)
    trainer = make(tmp_path / "out", report_to="azure_ml")
    assert (tmp_path / "out").is_dir()
    trainer.train()
    assert [value for name, value in run.rows if name == "loss"] == [
        entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    ]


def test_names_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_is_installed", lambda package: True)
    for name in ("azure_ml", "codecarbon", "dagshub", "flyte", "kubeflow", "neptune"):
        theirs = integration_utils.INTEGRATION_TO_CALLBACK[name]
        assert tracker_callback(name) is theirs
        assert getattr(hftrain, theirs.__name__) is theirs
        assert tracker_callbacks([name], besides=[theirs]) == []
        with pytest.raises(ConfigError, match="Only transformers' callback reports to it"):
            create_logger(name)
    monkeypatch.delitem(integration_utils.INTEGRATION_TO_CALLBACK, "kubeflow")
    with pytest.raises(MissingDependencyError, match="the installed transformers has no callback for it"):
        tracker_callback("kubeflow")


def test_rehearsal_leaves_them_out(tmp_path: Path, job: Server) -> None:
    trainer = make(tmp_path, report_to="none", fast_dev_run=2)
    assert hftrain.KubeflowCallback not in {type(callback) for callback in trainer.callback_handler.callbacks}


def test_install_line_is_that_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_is_installed", lambda package: package != "transformers")
    with pytest.raises(MissingDependencyError, match=r"it needs transformers, .*pip install 'hftrain\[neptune\]'"):
        tracker_callback("neptune")
    assert loggers.resolve("neptune")[0].joins_all() is False
