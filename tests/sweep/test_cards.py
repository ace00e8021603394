from __future__ import annotations

import pytest

from sweep.cards import read_card


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_card_that_is_hidden_from_cuda_is_not_there(
    hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert read_card() is None


@pytest.mark.gpu
def test_the_card_is_the_one_that_torch_would_use() -> None:
    import torch

    card = read_card()
    assert card is not None
    assert card.product == torch.cuda.get_device_name(0)
    assert card.compute_capability == torch.cuda.get_device_capability(0)
    assert card.memory_bytes >= torch.cuda.get_device_properties(0).total_memory
