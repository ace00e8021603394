"""Input that says nothing sensible, and was once answered as if it did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import load_model_spec
from tests.sweep.typed import Sweep

pytestmark = pytest.mark.usefixtures("home")


def test_a_word_that_is_like_none_suggests_none(sweep: Sweep) -> None:
    assert "did you mean" not in sweep("plan", "a10", "--set", "nope=3")[2]
    assert "'compute_dtype'" in sweep("plan", "a10", "--set", "dtype=3")[2]


def test_more_layers_than_any_model_has(tmp_path: Path) -> None:
    config = dict(load_model_spec("tinyllama-1.1b").config)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 100_000}))
    with pytest.raises(InputError, match="num_hidden_layers"):
        load_model_spec(str(tmp_path))
