"""Random numbers where ranks hold different parts of one tensor, and must not draw the same numbers for them."""

from __future__ import annotations

from typing import Any

import torch

# A large odd number, so that the seeds of different coordinates are far apart.
_STEP = 0x9E3779B97F4A7C15
_MAX = 2**63


class Apart:
    """Let the ranks of a region draw different numbers, and go on in step after it.

    The ranks have the same random state before `enter` and after `leave`. Between the two, each has one that follows
    from the shared state and its coordinate, so that a recomputed forward pass, which starts from the shared state,
    draws the same numbers again.

    Args:
        coordinate: This rank's place among those that share a state.
        device: The device on which the numbers are drawn.
    """

    def __init__(self, coordinate: int, device: torch.device) -> None:
        self._coordinate = coordinate
        self._device = device
        self._shared: list[torch.Tensor] = []
        self._seed: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether numbers are drawn apart now.

        The generator itself tells: recomputation that ends early, or an error, restores it without calling `leave`.
        """
        return bool(self._shared) and self._module().initial_seed() == self._seed

    def enter(self) -> None:
        """Draw different numbers from here on; regions may be nested."""
        # Drawn on the host: the same on all ranks, and without waiting for a device.
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        self._shared.append(self._module().get_rng_state())
        self._seed = seed_apart(seed, self._coordinate + 1)
        self._module().manual_seed(self._seed)

    def leave(self) -> None:
        """Draw the same numbers as the other ranks again."""
        self._module().set_rng_state(self._shared.pop())

    def open(self) -> None:
        """Enter the one region that `close` ends; nothing if numbers are drawn apart already."""
        if not self.is_open:
            self._shared.clear()  # of regions that were never left
            self.enter()

    def close(self) -> None:
        """End the region that `open` began; nothing if there is none."""
        if self.is_open:
            self.leave()

    def _module(self) -> Any:
        return torch.random if self._device.type == "cpu" else torch.get_device_module(self._device)


def seed_apart(seed: int, coordinate: int) -> int:
    """Return a seed for a coordinate, far from those of the others."""
    return (seed + coordinate * _STEP) % _MAX
