"""How much is done for a study's page and ranking grows with its trials, and not faster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from reports.page import render
from reports.view import view_of
from search_spaces.config import canonical
from storage.definition import StudySnapshot
from tests.bench.long_study import a_definition, a_space, records

FEW = 150


def calls(action: Callable[[], object]) -> int:
    """Return how many functions were called meanwhile, Python's own included."""
    known = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal known
        known += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return known


def a_study(trials: int) -> StudySnapshot:
    canonical.cache_clear()
    space = a_space()
    known = tuple(records(space, trials))
    return StudySnapshot("long", a_definition(space), {}, known)


@pytest.mark.parametrize("made", [view_of, render])
def test_twice_the_trials_take_at_most_a_little_more_than_twice_the_work(
    made: Callable[[StudySnapshot], object],
) -> None:
    made(a_study(20))  # what is imported and read once is no work of a trial's
    few, many = (a_study(trials) for trials in (FEW, 2 * FEW))
    canonical.cache_clear()
    of_few = calls(lambda: made(few))
    canonical.cache_clear()
    of_many = calls(lambda: made(many))
    assert of_many < 2.4 * of_few
