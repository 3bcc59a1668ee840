"""The simulated accelerator for the tests of this folder, which have a process of their own: `nox -s tests-sim`.

Once a process has the device, whatever looks for an accelerator there finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.torch_sim import load


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip where other tests run in the same process."""
    here = Path(__file__).parent
    if all(here in item.path.parents for item in items):
        return
    alone = pytest.mark.skip(reason="the device would be there for the other tests, too: pytest tests/sim")
    for item in items:
        if here in item.path.parents:
            item.add_marker(alone)


@pytest.fixture(autouse=True)
def sim(leave_no_trace: None) -> Iterator[Any]:
    """Return `torch.sim`; the test fails if there was a race that it does not forget."""
    device = load()
    device.manual_seed_all(0)
    for index in range(device.device_count()):
        device.synchronize(index)
    device.forget_races()
    with device.record_races() as races:
        yield device
    assert device.num_races() == 0, "\n".join(map(str, races))
