"""What golden tests share: the comparison."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.golden.frozen import Frozen
from tests.golden.frozen import frozen as compared

_DECIDING = ("numpy", "optuna", "peft", "scipy", "torch", "transformers")
"""Libraries of which other versions may well give other answers."""


@pytest.fixture(scope="session", autouse=True)
def as_pinned() -> None:
    """Skip all where a library is not the version that the answers were made with."""
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8").split()
    for name in _DECIDING:
        if (pin := f"{name}=={version(name).partition('+')[0]}") not in pins:
            pytest.skip(f"{pin} is not in constraints.txt")


@pytest.fixture
def frozen(pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]) -> Frozen:
    """Compare a value with the committed answer of a name, or write it under --regenerate."""

    def compare(name: str, value: Any) -> None:
        with capsys.disabled():
            compared(name, value, is_regenerated=pytestconfig.getoption("--regenerate"))

    return compare
