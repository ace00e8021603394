"""Options and markers shared by every test."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How fast examples come depends on what else the machine does.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail instead of skipping where there is no GPU"
    )


def _has_gpu() -> bool:
    # Imported here: most of the suite never needs torch.
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted or config.getoption("markexpr", "") == "not gpu" or _has_gpu():
        return
    if config.getoption("--require-gpu"):
        raise pytest.UsageError("--require-gpu: torch finds no CUDA device")
    for item in wanted:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
