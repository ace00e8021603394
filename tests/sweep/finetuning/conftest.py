"""What every test of a training needs."""

from __future__ import annotations

from tests.sweep.frozen import frozen_libraries  # noqa: F401
