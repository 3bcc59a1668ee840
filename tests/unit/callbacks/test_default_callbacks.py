from __future__ import annotations

import pytest

from hftrain.callbacks import PrinterCallback, progress_callback
from hftrain.extras.progress.bars import ProgressCallback


@pytest.mark.parametrize(("disable_tqdm", "display"), [(True, PrinterCallback), (False, ProgressCallback)])
def test_progress_is_printed_where_bars_are_off(disable_tqdm, display) -> None:
    assert progress_callback(disable_tqdm=disable_tqdm) is display
