"""Fingerprints: every bit and every place counts, and all elements have their turn."""

from __future__ import annotations

import pytest
import torch

from hftrain.extras.flight.fingerprint import Fingerprint


def total(prints: Fingerprint) -> int:
    return sum(int(prints.text_of(step, int(prints.of(step)[0])), 16) for step in range(prints.num_parts)) % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_each_bit_of_each_element_counts(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 5), (11,), ())]
    before = total(Fingerprint(tensors, size=13, max_tensors=2))
    for tensor in tensors:
        for index in range(tensor.numel()):
            bits = tensor.view(-1)[index : index + 1].view(torch.uint8)
            for bit in (1, 64):
                bits[-1] ^= bit
                assert total(Fingerprint(tensors, size=13, max_tensors=2)) != before
                bits[-1] ^= bit
    assert total(Fingerprint(tensors, size=13, max_tensors=2)) == before


def test_an_exchange_of_two_elements_counts_and_the_cut_into_parts_does_not() -> None:
    tensor = torch.arange(40.0)
    before = total(Fingerprint([tensor], size=7))
    assert before == total(Fingerprint([tensor], size=1000)) == total(Fingerprint([tensor], size=1))
    tensor[[3, 30]] = tensor[[30, 3]]
    assert total(Fingerprint([tensor], size=7)) != before


def test_gradients_and_frozen_parameters() -> None:
    parameter, other = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    prints = Fingerprint([parameter, other])
    assert prints.of(0).shape == (1,)
    (parameter.sum() * 2).backward()
    assert int(prints.of(0)[1]) != 0
    assert Fingerprint([]).num_parts == 0
    assert Fingerprint([]).of(3).tolist() == [0, 0]
