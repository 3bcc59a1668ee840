"""Streams that only their package's loader can resume: with it, a run goes on exactly; without it, they are refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.resuming import check_resumes
from support.tiny import Net, make_arguments, make_resumable, make_rows

from hftrain import ConfigError, Trainer

litdata = pytest.importorskip("litdata")
Cache = pytest.importorskip("litdata.streaming").Cache
pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore:The given buffer is not writable")]  # litdata's


class Own(Trainer):
    def get_train_dataloader(self) -> Any:
        folder = str(Path(self.args.output_dir).parent / "data")
        return litdata.StreamingDataLoader(litdata.StreamingDataset(folder, shuffle=True, seed=3), batch_size=4)


def test_litdata_goes_on_exactly(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path / "data"), chunk_size=8)
    for number, row in enumerate(make_rows(26)):
        cache[number] = row
    cache.done()
    cache.merge()
    with pytest.raises(ConfigError, match="StreamingDataLoader of litdata"):
        Trainer(Net(), make_arguments(tmp_path), train_dataset=litdata.StreamingDataset(str(tmp_path / "data")))
    check_resumes(partial(make_resumable, kind=Own, train_dataset=None, max_steps=21), tmp_path, [3, 9])
