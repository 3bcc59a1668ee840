from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.source import ROOT

from hftrain.cli.commands import main
from hftrain.strategies.registry import strategies


def groups(text: str) -> dict[str, list[str]]:
    """Return the names and summaries in each group, by the group's heading."""
    found: dict[str, list[str]] = {}
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        # What can run stands below its verdict; what cannot stands above it.
        names = [line for line in lines if line.startswith("  ") and not line.startswith("    ")]
        found[" ".join(line.strip() for line in lines if line not in names)] = [line.strip() for line in names]
    return found


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


def test_strategies_are_grouped_by_what_runs_here_and_why_the_others_do_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "_entries", dict(strategies._entries))
    strategies.register("broken", "no_such_package.here:Strategy", summary="from a package that is absent")
    main(["strategies", "--cpu"])
    found = groups(capsys.readouterr().out)
    first, second, *others = found
    assert "Not available here:" in others
    assert first == 'strategy="auto", the default, is "single" here.'
    assert second == "Available on cpu with bf16, bf16_true, fp16, fp16_true, fp32, fp64:"
    assert {line.split()[0] for line in found[second]} >= {"single", "ddp", "fsdp", "fsdp1"}
    assert any(line.split(maxsplit=1) == ["ddp", strategies.summary("ddp")] for line in found[second])
    assert sorted(line.split()[0] for lines in found.values() for line in lines) == sorted(strategies.names())
    assert not any(heading.startswith("Available") for heading in others), "what can run comes first"
    reason = {line.split()[0]: heading for heading, lines in found.items() for line in lines}
    assert "use_cpu=True forbids it" in reason["mps"]
    assert reason["data_parallel"].startswith("Cannot use strategy='data_parallel'. It copies the model to CUDA")
    assert "no_such_package" in reason["broken"]
    assert "Received" not in str(found)


def test_strategy_that_no_precision_suits_names_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hftrain.cli.listing.check_legal", lambda *_: (_ for _ in ()).throw(ImportError("nothing")))
    main(["strategies", "--cpu"])
    assert "single" in str(groups(capsys.readouterr().out)["nothing"])


def test_help_and_version_import_no_torch() -> None:
    code = """
import sys
from hftrain.cli.commands import main
for words in ([], ["--version"], ["checkpoints", "--help"]):
    try:
        main(words)
    except SystemExit as ended:
        assert ended.code == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("strategies", "precisions", "checkpoints", "plan", "completion", "hftrain 0."):
        assert name in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_folders(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    shtab = pytest.importorskip("shtab")
    main(["completion", shell])
    script = capsys.readouterr().out
    for word in ("strategies", "checkpoints", "--verify" if shell != "fish" else "verify"):
        assert word in script
    assert shtab.DIRECTORY[shell] in script


@pytest.mark.parametrize("shell", ["| true", ">/dev/null"])
def test_closed_pipe_and_narrow_encoding_end_without_a_traceback(shell: str, tmp_path: Path) -> None:
    pytest.importorskip("plotext")
    (tmp_path / "trainer_state.json").write_text(
        '{"global_step": 2, "log_history": [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]}'
    )
    code = "from hftrain.cli.commands import main; main(['curves', '.'])"
    asked = f'PYTHONIOENCODING=ascii {sys.executable} -c "{code}" {shell}'
    done = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not done.stderr


def test_command_is_installed() -> None:
    code = "import sys; from hftrain.cli.commands import main; sys.argv[1:] = ['strategies', '--cpu']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "single" in done.stdout
    with pytest.raises(SystemExit):
        main(["unknown"])


def test_page_on_the_command_line_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    commands = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `hftrain (\w+)", page, re.MULTILINE) == commands
