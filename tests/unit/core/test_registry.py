"""Names to classes: presets, lazy targets, and the entry points of other packages."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, make_arguments, make_trainer, train

from hftrain import MissingDependencyError, Trainer
from hftrain.loggers.registry import available_loggers, loggers
from hftrain.loops.contract import loops
from hftrain.precision.registry import precisions
from hftrain.step.legality import legality_table
from hftrain.strategies.registry import strategies

# -- another package's entry points ----------------------------------------------------------------------------------

PACKAGE = """
from hftrain import FitLoop, Logger, Precision
from hftrain.precision.base import FullPrecision
from hftrain.strategies.single import SingleDeviceStrategy


class Cluster(SingleDeviceStrategy):
    name = "toy_cluster"
    setups = 0

    def setup(self, *args, **kwargs):
        type(self).setups += 1
        return super().setup(*args, **kwargs)


class Outer:
    class Careful(FullPrecision):
        steps = 0

        def __init__(self):
            super().__init__(matmul=None)

        def step(self, optimizer):
            type(self).steps += 1
            return super().step(optimizer)


class Folds(FitLoop):
    steps = 0

    def run_step(self, window, num_items):
        type(self).steps += 1
        super().run_step(window, num_items)


class Rival(SingleDeviceStrategy):
    name = "rival"


class Tracker(Logger):
    name = "toy_tracker"
    seen = []

    def log(self, metrics, step):
        self.seen.append(step)
"""
ENTRY_POINTS = """
[hftrain.strategies]
toy_cluster = toy_cluster_package:Cluster

[hftrain.precisions]
toy_careful = toy_cluster_package:Outer.Careful [extra]
toy_broken = toy_package_that_is_not_there:Gone

[hftrain.loops]
toy_folds = toy_cluster_package:Folds
toy_broken_loop = toy_package_that_is_not_there:Gone

[hftrain.loggers]
toy_tracker = toy_cluster_package:Tracker
toy_broken_tracker = toy_package_that_is_not_there:Gone
"""
ODD_ENTRY_POINTS = """
[hftrain.strategies]
ddp = toy_cluster_package:Rival

[hftrain.precisions]
toy_malformed = not a module!
"""
BROKEN = "'toy_broken_tracker = toy_package_that_is_not_there:Gone' of toy-cluster-package 1.0"


def install(site: Path, name: str, entry_points: str) -> None:
    """Leave a package's metadata the way pip does: a dist-info folder on the import path."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an import path's folder, in what looks like a process that starts now."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    for names in (strategies, precisions, loggers, loops):
        monkeypatch.setattr(names, "_entries", dict(names._entries))
        monkeypatch.setattr(names, "_has_entry_points", False)
    return folder


@pytest.fixture
def other_package(site: Path) -> Any:
    """Install a package with entry points, one of which names a module that is not there."""
    install(site, "toy-cluster-package", ENTRY_POINTS)
    (site / "toy_cluster_package.py").write_text(PACKAGE)
    yield lambda: importlib.import_module("toy_cluster_package")
    sys.modules.pop("toy_cluster_package", None)


def test_installed_package_adds_names_without_being_imported(other_package: Any) -> None:
    assert "toy_cluster" in strategies.names()
    assert {"toy_careful", "toy_broken"} <= set(precisions.names())
    assert strategies.summary("toy_cluster") == "from toy_cluster_package:Cluster"
    assert "toy_cluster_package" not in sys.modules


def test_installed_package_cannot_replace_a_name(site: Path) -> None:
    install(site, "toy-odd", ODD_ENTRY_POINTS)
    with pytest.warns(UserWarning, match=r"'ddp = toy_cluster_package:Rival' of toy-odd 1.0 .* is taken"):
        strategies.names()
    assert strategies.resolve("ddp")[0].__name__ == "DDPStrategy"


def test_entry_point_that_cannot_be_imported_is_named_by_who_asks_for_it(other_package: Any) -> None:
    with pytest.raises(MissingDependencyError, match=r"'toy_broken = .*' of toy-cluster-package 1.0 .*ModuleNotFound"):
        precisions.create("toy_broken")


def test_entry_point_that_cannot_be_read_is_skipped_with_its_name(site: Path) -> None:
    install(site, "toy-odd", ODD_ENTRY_POINTS)
    with pytest.warns(UserWarning, match=r"'toy_malformed = not a module!' of toy-odd 1.0"):
        assert "toy_malformed" not in precisions.names()


def test_installed_tracker_reports_only_where_it_is_named(other_package: Any, tmp_path: Path) -> None:
    assert not {"toy_tracker", "toy_broken_tracker"} & {*available_loggers()}
    for asked in (None, "all", "none"):
        trainer = make_trainer(tmp_path, report_to=asked)
        assert "toy_tracker" not in trainer.args.report_to
        assert "toy_cluster_package" not in sys.modules
    trainer = train(tmp_path, max_steps=2, report_to="toy_tracker")
    assert other_package().Tracker.seen[:2] == [1, 2]


def test_tracker_that_cannot_be_imported_ends_the_run_of_who_asks_for_it_alone(
    other_package: Any, tmp_path: Path
) -> None:
    with pytest.raises(MissingDependencyError, match=re.escape(BROKEN)):
        Trainer(Net(), make_arguments(tmp_path, report_to="toy_broken_tracker"))
    with pytest.raises(MissingDependencyError, match=re.escape(BROKEN)):
        Trainer(Net(), make_arguments(tmp_path), loggers="toy_broken_tracker")


def test_trainer_uses_the_parts_of_an_installed_package_by_name(other_package: Any, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path / "out", strategy="toy_cluster", precision="toy_careful", loop="toy_folds", max_steps=3
    )
    assert trainer.train().global_step == 3
    package = other_package()
    assert type(trainer.strategy) is package.Cluster
    assert type(trainer.precision) is package.Outer.Careful
    assert (package.Cluster.setups, package.Outer.Careful.steps, package.Folds.steps) == (1, 3, 3)


def test_loop_that_cannot_be_imported_is_skipped_and_ends_the_run_of_who_asks_for_it(
    other_package: Any, tmp_path: Path
) -> None:
    point = "'toy_broken_loop = toy_package_that_is_not_there:Gone' of toy-cluster-package 1.0"
    with pytest.warns(UserWarning, match=re.escape(point)):
        assert "toy_broken_loop" not in loops.usable_names()
    assert "toy_folds" in loops.usable_names()
    with pytest.raises(MissingDependencyError, match=re.escape(point)):
        Trainer(Net(), make_arguments(tmp_path), loop="toy_broken_loop")


def test_installed_strategy_has_its_rows_in_the_legality_table(other_package: Any) -> None:
    with pytest.warns(UserWarning, match="'toy_broken = .* is skipped"):
        table = legality_table()
    rows = [row for row in table if row.strategy == "toy_cluster" and row.device == "cpu"]
    assert {row.precision: row.reason is None for row in rows}["toy_careful"]
