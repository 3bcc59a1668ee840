"""The results that docs/clients.md shows must be those of the clients, in the versions that are installed for them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from clients.cases import CLIENTS, ENVIRONMENTS, Client
from support.source import ROOT

FOLDER = ROOT / "tests/clients"


def results(environment: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"results/{environment}.json").read_text(encoding="utf-8"))
    return found


def pins(environment: str) -> dict[str, str]:
    text = (FOLDER / f"requirements-{environment}.txt").read_text(encoding="utf-8")
    return {name.lower().replace("_", "-"): version for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)$", text)}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_results_are_those_of_the_clients(environment: str) -> None:
    scripts = {client.script for client in CLIENTS if client.environment == environment}
    assert set(results(environment)) == scripts, f"run nox -s 'tests-clients(environment={environment!r})'"


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.id)
def test_result_is_that_of_the_client_as_it_is_now(client: Client) -> None:
    result = results(client.environment)[client.script]
    assert {name: result[name] for name in ("library", "what", "exception")} == {
        "library": client.library,
        "what": client.what,
        "exception": client.exception,
    }
    assert tuple(map(int, result["gaps"])) == client.accumulation
    versions = {name.lower(): version.partition("+")[0] for name, version in result["versions"].items()}
    assert versions == {name: pins(client.environment)[name] for name in versions}
