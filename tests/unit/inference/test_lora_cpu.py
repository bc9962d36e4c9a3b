"""Adapters on a CPU: each row gets its own adapter's, by the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kestrl_inference.inside.lora_cpu import add_embedding, add_lora, grouped

SLOTS = {7: 2, 5: 0, 9: 1}
PARTS, FEATURES, RANK = (6, 4, 4), 8, 3


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.06)])
@given(adapters=st.lists(st.sampled_from([0, *SLOTS]), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_every_row_gets_its_adapters_contribution(
    dtype: torch.dtype, bound: float, adapters: list[int], seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random).to(dtype) - 0.5

    inputs, output = some(len(adapters), FEATURES), some(len(adapters), sum(PARTS))
    a, b = [some(3, 1, RANK, FEATURES) for _ in PARTS], [some(3, 1, part, RANK) for part in PARTS]
    expected = output.double()
    for row, adapter in enumerate(adapters):
        if adapter:
            slot = SLOTS[adapter]
            said = [
                up[slot, 0].double() @ (down[slot, 0].double() @ inputs[row].double())
                for down, up in zip(a, b, strict=True)
            ]
            expected[row] += 0.5 * torch.cat(said)
    add_lora(output, inputs, grouped(adapters, SLOTS), a, b, PARTS, 0.5)
    assert output.dtype is dtype
    assert torch.allclose(output.double(), expected, atol=bound, rtol=0)


@given(adapters=st.lists(st.sampled_from([0, *SLOTS]), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_every_embedding_gets_its_adapters_contribution(adapters: list[int], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    looked_up, output = (torch.rand((len(adapters), width), generator=random) for width in (RANK, FEATURES))
    b = torch.rand((3, 1, FEATURES, RANK), generator=random)
    expected = output.double()
    for row, adapter in enumerate(adapters):
        if adapter:
            expected[row] += b[SLOTS[adapter], 0].double() @ looked_up[row].double()
    add_embedding(output, looked_up, grouped(adapters, SLOTS), b)
    assert torch.allclose(output.double(), expected, atol=1e-6, rtol=0)


@given(
    count=st.integers(2, 40),
    rank=st.sampled_from([8, 16]),
    width=st.sampled_from([64, 128, 576]),
    seed=st.integers(0, 99),
)
def test_a_rows_result_does_not_depend_on_other_rows(count: int, rank: int, width: int, seed: int) -> None:
    """To the last bit: else what is sampled would depend on what runs at the same time."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.rand((count, width), generator=random)
    a, b = [torch.rand((1, 1, rank, width), generator=random)], [torch.rand((1, 1, width, rank), generator=random)]

    def said(rows: torch.Tensor) -> torch.Tensor:
        output = torch.zeros(len(rows), width)
        add_lora(output, rows, grouped([1] * len(rows), {1: 0}), a, b, (width,), 1.0)
        return output

    assert torch.equal(said(inputs), torch.cat([said(row[None]) for row in inputs]))


def test_contiguous_rows_are_not_copied() -> None:
    assert grouped([7, 7, 0, 5], SLOTS) == ((2, slice(0, 2)), (0, slice(3, 4)))
    (scattered, together) = grouped([0, 9, 5, 9], SLOTS)
    assert isinstance(scattered.rows, torch.Tensor)
    assert (scattered.slot, scattered.rows.tolist()) == (1, [1, 3])
    assert together == (0, slice(2, 3))
    assert grouped([0, 0], SLOTS) == ()
