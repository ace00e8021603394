"""Where the studies of a test are, unless it says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def url(home: Path) -> str:
    return f"sqlite:///{home}/sweep.db"
