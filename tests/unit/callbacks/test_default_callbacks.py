from __future__ import annotations

import pytest

from hftrain.callbacks import DefaultFlowCallback, PrinterCallback, ProgressCallback, default_callbacks


@pytest.mark.parametrize(("disable_tqdm", "display"), [(True, PrinterCallback), (False, ProgressCallback)])
def test_default_callbacks_are_the_flow_and_a_display(disable_tqdm, display) -> None:
    assert [type(callback) for callback in default_callbacks(disable_tqdm=disable_tqdm)] == [
        DefaultFlowCallback,
        display,
    ]
