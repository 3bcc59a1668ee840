"""Streams that only their package's loader can resume: with it, a run goes on exactly; without it, they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.resuming import StopAt, assert_same, outcome
from support.tiny import Net, make_arguments, make_rows

from hftrain import ConfigError, Trainer, set_seed

litdata = pytest.importorskip("litdata")
Cache = pytest.importorskip("litdata.streaming").Cache
pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore:The given buffer is not writable")]  # litdata's


class Own(Trainer):
    """Brings litdata's loader."""

    def get_train_dataloader(self) -> Any:
        folder = str(Path(self.args.output_dir).parent / "data")
        return litdata.StreamingDataLoader(litdata.StreamingDataset(folder, shuffle=True, seed=3), batch_size=4)


def train(folder: Path, stop: int | None = None, *, resume: bool = False) -> dict[str, Any]:
    set_seed(1)
    arguments = make_arguments(folder, max_steps=21, save_strategy="steps", save_steps=1000)
    trainer = Own(Net(dropout=0.2), arguments, callbacks=[StopAt(stop)])
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def test_litdata_goes_on_exactly(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path / "data"), chunk_size=8)
    for number, row in enumerate(make_rows(26)):
        cache[number] = row
    cache.done()
    cache.merge()
    with pytest.raises(ConfigError, match="StreamingDataLoader of litdata"):
        Trainer(Net(), make_arguments(tmp_path), train_dataset=litdata.StreamingDataset(str(tmp_path / "data")))
    whole = train(tmp_path / "whole")
    train(tmp_path / "parts", 3)
    train(tmp_path / "parts", 9, resume=True)
    assert_same(train(tmp_path / "parts", resume=True), whole)
