from __future__ import annotations

import pytest

from qlora_sweep.sweep.running.device_info import ask_cuda, read_gpu


@pytest.mark.gpu
def test_the_gpu_is_the_one_that_torch_would_use() -> None:
    import torch

    gpu = read_gpu()
    assert gpu is not None
    assert gpu.product == torch.cuda.get_device_name(0)
    assert gpu.compute_capability == torch.cuda.get_device_capability(0)
    assert gpu.memory_bytes >= torch.cuda.get_device_properties(0).total_memory


@pytest.mark.gpu
def test_cudas_driver_tells_the_same_without_a_context() -> None:
    gpu, cuda = read_gpu(), ask_cuda()
    assert gpu is not None
    assert cuda is not None
    assert cuda.product == gpu.product
    assert cuda.compute_capability == gpu.compute_capability
    assert cuda.memory_bytes == pytest.approx(gpu.memory_bytes, rel=0.02)
