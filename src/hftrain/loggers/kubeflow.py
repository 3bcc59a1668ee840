"""Progress reports to the server of a Kubeflow TrainJob."""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from hftrain.loggers.base import Logger, RunFacts

_URL = "KUBEFLOW_TRAINER_SERVER_URL"
_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
_CERTIFICATE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
# The interval between two reports and the timeout of one, in seconds.
_INTERVAL = 5.0
_TIMEOUT = 5.0


class KubeflowLogger(Logger):
    """Report progress, remaining time and metrics to the run's TrainJob.

    Kubeflow sets KUBEFLOW_TRAINER_SERVER_URL, _TOKEN and _CA_CERT to its server, token file and certificate file. A
    thread sends at most one report every five seconds. DISABLE_KUBEFLOW_INTEGRATION=TRUE disables reports.

    Source: the documented `KubeflowCallback`.
    """

    name = "kubeflow"
    off_switch = "DISABLE_KUBEFLOW_INTEGRATION"

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._begun = (0.0, 0)
        self._sent = 0.0
        self._executor: ThreadPoolExecutor | None = None
        self._sending: Future[None] | None = None

    @classmethod
    def why_off(cls) -> str | None:
        """Return the reason if the logger is disabled or the run is not part of a TrainJob."""
        is_absent = None if os.environ.get(_URL) else f"{_URL} is not set, as it is in a Kubeflow TrainJob"
        return super().why_off() or is_absent

    def start(self, run: RunFacts) -> None:
        """Discard the metrics of an earlier run."""
        self._metrics, self._sending = {}, None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kubeflow")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Store metrics for the next report."""
        self._metrics.update(metrics)

    def log_progress(self, step: int, max_steps: int, epoch: float | None, is_first: bool = False) -> None:
        """Report progress, unless the last report was sent less than five seconds ago.

        Args:
            is_first: Whether training starts here: start the clock and always send the report.
        """
        now = time.monotonic()
        if is_first:
            self._begun = now, step
        elif now - self._sent < _INTERVAL:
            return
        began, first = self._begun
        remaining = (now - began) / (step - first) * (max_steps - step) if step > first else None
        steps = {"current_step": step, "total_steps": max_steps, "current_epoch": round(epoch or 0, 2)}
        # Only the end of training is reported as 100.
        self._send(min(99, 100 * step // max(1, max_steps)), remaining, {**self._metrics, **steps})

    def finish_training(self) -> None:
        """Report the end of training and wait until the report has arrived."""
        self._send(100, 0, self._metrics)
        if self._sending is not None:
            sending, self._sending = self._sending, None
            sending.result()

    def close(self) -> None:
        """End the thread."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _send(self, percent: int, remaining: float | None, metrics: Mapping[str, Any]) -> None:
        """Send a report in the background; raise the error of the previous report, if any."""
        assert self._executor is not None
        status: dict[str, Any] = {
            "lastUpdatedTime": datetime.now(timezone.utc).isoformat(),
            "progressPercentage": percent,
            "metrics": [{"name": name, "value": str(value)} for name, value in metrics.items()],
        }
        if remaining is not None:
            status["estimatedRemainingSeconds"] = int(remaining)
        self._sent = time.monotonic()
        last, self._sending = self._sending, self._executor.submit(_post, {"trainerStatus": status})
        if last is not None and last.done():
            last.result()


def _post(report: dict[str, Any]) -> None:
    # Read the token each time: Kubernetes renews the file.
    token = Path(os.environ[_TOKEN]).read_text(encoding="utf-8").strip()
    request = urllib.request.Request(
        os.environ[_URL],
        data=json.dumps(report).encode(),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        method="POST",
    )
    context = ssl.create_default_context(cafile=os.environ.get(_CERTIFICATE))
    try:
        urllib.request.urlopen(request, timeout=_TIMEOUT, context=context).close()
    except HTTPError as error:
        error.close()
        raise
