from __future__ import annotations

from search_spaces.config import parse_config
from tests.bench.several_cards import SERIES, identity, key_of
from tests.sweep.predict.rows import SEVERAL_CARDS


def test_the_committed_rows_are_those_that_the_command_measures() -> None:
    series = (one for name, one in SERIES.items() if name != "cpu")
    asked = {key_of(identity(one, parse_config(knobs))) for one in series for knobs in one.configs}
    assert {key_of(row) for row in SEVERAL_CARDS} == asked
