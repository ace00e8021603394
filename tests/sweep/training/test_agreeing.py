"""What the ranks of one configuration compare of each other."""

from __future__ import annotations

import pytest
import torch

from sweep.training.team import fingerprint


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_a_fingerprint_is_another_where_any_bit_is(dtype: torch.dtype) -> None:
    one = torch.tensor([[1, 4], [3, 8]], dtype=dtype)
    other = one.clone()
    other.view(torch.uint8)[1, 0] ^= 1
    assert fingerprint([one]) == fingerprint([one.clone()]) != fingerprint([other])


def test_two_tensors_with_the_same_sums_have_two_fingerprints() -> None:
    one = torch.tensor([5, 5, 5])
    # As many, and as many times their places.
    other = one + torch.tensor([1, -2, 1])
    assert fingerprint([one]) != fingerprint([other])
