"""The tracing child, started once for all tests that trace real models, and its cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sweep.predict.child import TracingChild


@pytest.fixture(scope="session")
def tracing_child() -> Iterator[TracingChild]:
    child = TracingChild()
    yield child
    child.close()


@pytest.fixture(scope="session")
def profile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")
