from __future__ import annotations

import subprocess
import sys

import pytest

from hftrain.cli.commands import main
from hftrain.precision.registry import precisions
from hftrain.strategies.registry import strategies


def blocks(text: str) -> dict[str, tuple[str, str]]:
    """Return what is said about each name: the summary and the verdict."""
    lines = text.splitlines()
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return {head.split()[0]: (head.split(maxsplit=1)[1], verdict.strip()) for head, verdict in pairs}


def test_strategies_say_what_runs_here_and_why_the_others_do_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "_entries", dict(strategies._entries))
    strategies.register("broken", "no_such_package.here:Strategy", summary="from a package that is absent")
    main(["strategies", "--cpu"])
    found = blocks(capsys.readouterr().out)
    assert list(found) == ["auto", *strategies.names()]
    assert found["auto"][1] == "here: single"
    assert found["fsdp1"][1].startswith("cpu: bf16, ")
    assert "use_cpu=True forbids it" in found["mps"][1]
    assert found["ddp"][0] == strategies.summary("ddp")
    assert found["single"][1].startswith("cpu: bf16, ")
    assert "tf32" not in found["single"][1]
    assert "not here: Cannot use strategy='data_parallel'. It copies the model to CUDA" in found["data_parallel"][1]
    assert "no_such_package" in found["broken"][1]
    assert "Received" not in str(found)


def test_names_that_people_swap_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    main(["strategies"])
    found = blocks(capsys.readouterr().out)
    wanted = "single ddp ddp_find_unused fsdp fsdp_offload fsdp_hybrid fsdp1 deepspeed xla xla_fsdp mps auto"
    stages = ("1", "2", "3", "3_offload")
    assert {*wanted.split(), *(f"deepspeed_stage_{stage}" for stage in stages)} <= found.keys()
    for name in ("mps", "data_parallel", "deepspeed_stage_3", "xla_fsdp"):
        assert ": " in found[name][1], "the precisions, or the reason"


def test_precisions_are_judged_with_the_automatic_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    main(["precisions", "--cpu"])
    found = blocks(capsys.readouterr().out)
    assert list(found) == precisions.names()
    assert found["bf16"][1] == "with single on cpu"
    assert "TF32 exists on CUDA devices only" in found["tf32"][1]


def test_strategy_that_no_precision_suits_names_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hftrain.cli.commands.check_legal", lambda *_: (_ for _ in ()).throw(ImportError("nothing")))
    main(["strategies", "--cpu"])
    assert blocks(capsys.readouterr().out)["single"][1] == "not here: nothing"


def test_command_is_installed() -> None:
    code = "import sys; from hftrain.cli.commands import main; sys.argv[1:] = ['strategies', '--cpu']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "single" in done.stdout
    with pytest.raises(SystemExit):
        main(["unknown"])
