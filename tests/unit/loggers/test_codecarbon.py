"""What CodeCarbon writes. It guesses the country where it cannot ask for it."""

from __future__ import annotations

import csv
from pathlib import Path

from support.trackers import needs, train

pytestmark = needs("codecarbon")


def test_emissions_of_a_run_are_written(tmp_path: Path) -> None:
    train(tmp_path, env={"CODECARBON_LOG_LEVEL": "error"}, report_to="codecarbon")
    with (tmp_path / "out" / "emissions.csv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert float(row["duration"]) > 0
    assert float(row["energy_consumed"]) > 0
