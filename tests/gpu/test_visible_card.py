from __future__ import annotations

import pytest

from qlora_sweep.sweep.running.device_info import ask_cuda, read_gpu


@pytest.mark.gpu
def test_the_card_is_the_one_that_torch_would_use() -> None:
    import torch

    card = read_gpu()
    assert card is not None
    assert card.product == torch.cuda.get_device_name(0)
    assert card.compute_capability == torch.cuda.get_device_capability(0)
    assert card.memory_bytes >= torch.cuda.get_device_properties(0).total_memory


@pytest.mark.gpu
def test_cudas_driver_tells_the_same_without_a_context() -> None:
    card, cuda = read_gpu(), ask_cuda()
    assert card is not None
    assert cuda is not None
    assert cuda.product == card.product
    assert cuda.compute_capability == card.compute_capability
    assert cuda.memory_bytes == pytest.approx(card.memory_bytes, rel=0.02)
