from __future__ import annotations

import pytest

from hftrain.callbacks import PrinterCallback
from hftrain.core.state import TrainerControl, TrainerState


@pytest.mark.parametrize(("is_zero", "printed"), [(True, "{'loss': 0.123456789, 'epoch': 1.0}\n"), (False, "")])
def test_printer_prints_in_full_precision_on_the_local_process_zero(capsys, is_zero, printed) -> None:
    logs = {"loss": 0.123456789, "epoch": 1.0, "total_flos": 1e15}
    state = TrainerState(is_local_process_zero=is_zero, is_world_process_zero=False)
    PrinterCallback().on_log(None, state, TrainerControl(), logs=logs)
    assert capsys.readouterr().out == printed
    assert "total_flos" in logs
