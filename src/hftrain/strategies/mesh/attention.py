"""Attention over a sequence of which each rank holds a part: calls of `scaled_dot_product_attention` are answered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hftrain.core.errors import StrategyError
from hftrain.strategies.mesh.moves import exchange, join

KINDS = ("auto", "ulysses", "gather")


class SplitAttention(TorchFunctionMode):
    """Compute the attention of the whole sequence where code calls it with this rank's queries, keys and values.

    The masks stay whole, so that windows, padding and packed documents need nothing here. `num_calls` counts the
    calls.

    Args:
        mesh: The one-dimensional mesh of the ranks that hold the parts, all of the same length.
        kind: ``"ulysses"`` exchanges parts of the sequence for parts of the heads, which the ranks must divide.
            ``"gather"`` collects all keys and values. ``"auto"`` takes the first where it can.
        length: The length of the whole sequence. The parts may be longer together; what they append is not attended.
    """

    def __init__(self, mesh: DeviceMesh, kind: str, length: int) -> None:
        super().__init__()
        self._mesh = mesh
        self._kind = kind
        self._length = length
        self.num_calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer the calls of attention, and pass on all others."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.num_calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if not query.dim() == key.dim() == 4 or query.shape[2] != key.shape[2]:
            raise StrategyError(
                "Cannot split this attention over ranks.",
                "Its queries and keys are not of one sequence, as [batch, heads, sequence, width].",
                "Use cp_size=1 for this model.",
                query=tuple(query.shape),
                key=tuple(key.shape),
            )
        if attn_mask is not None and not self._is_whole(attn_mask):
            raise StrategyError(
                "Cannot split this attention over ranks.",
                f"Its mask is not one of the whole sequence of {self._length}: the layer itself makes or cuts it.",
                "Use cp_size=1 for this model, or transformers 5.3 or newer, whose layers leave it whole.",
                mask=tuple(attn_mask.shape),
            )
        divides = query.shape[1] % self._mesh.size() == 0
        if self._kind == "ulysses" and not divides:
            raise StrategyError(
                "Cannot use context parallelism of kind 'ulysses'.",
                f"{self._mesh.size()} ranks do not divide {query.shape[1]} heads.",
                "Use kind 'gather' or 'auto', or other sizes of the mesh.",
            )
        attend = self._by_heads if divides and self._kind != "gather" else self._by_rows
        return attend(query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, **options)

    def _is_whole(self, mask: torch.Tensor) -> bool:
        return mask.dim() >= 2 and mask.shape[-1] == self._length and mask.shape[-2] in (1, self._length)

    def _by_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        num = self._mesh.size()
        repeats = math.lcm(key.shape[1], num) // key.shape[1]
        parts = [query] + [x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (key, value)]
        query, key, value = (exchange(x, self._mesh, 2, 1)[:, :, : self._length] for x in parts)
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            heads = mask.shape[-3] // num
            mask = mask.narrow(-3, self._mesh.get_local_rank() * heads, heads)
        output = scaled_dot_product_attention(query, key, value, mask, **options)
        padding = parts[0].shape[2] * num - self._length
        return exchange(torch.nn.functional.pad(output, (0, 0, 0, padding)), self._mesh, 1, 2)

    def _by_rows(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        is_causal: bool,
        **options: Any,
    ) -> torch.Tensor:
        key, value = (join(x, self._mesh, 2, sums=True)[:, :, : self._length] for x in (key, value))
        # Rows that were appended take those of the last position.
        rows = torch.arange(query.shape[2], device=query.device) + self._mesh.get_local_rank() * query.shape[2]
        rows = rows.clamp(max=self._length - 1)
        if is_causal:
            mask = rows[:, None] >= torch.arange(self._length, device=query.device)
        elif mask is not None and mask.shape[-2] > 1:
            mask = mask.index_select(-2, rows)
        return scaled_dot_product_attention(query, key, value, mask, **options)
