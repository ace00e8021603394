"""Names that other trainers have for what is set here."""

from __future__ import annotations

import pytest

from qlora_sweep.search_spaces.config import SETTINGS, parse_config
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.other_names import ALIKE, SAME, meant


@pytest.mark.parametrize("names", [SAME, ALIKE])
def test_each_is_of_a_setting_and_is_none_itself(names: dict[str, str]) -> None:
    assert set(names.values()) <= set(SETTINGS)
    assert not set(names) & set(SETTINGS)


def test_another_trainers_name_is_answered_by_the_one_here() -> None:
    with pytest.raises(InputError, match="here it is called 'seq_len'"):
        parse_config({"max_seq_length": 1024})
    with pytest.raises(InputError, match="a matter of 'effective_batch_size', whose values are"):
        parse_config({"gradient_accumulation_steps": 4})
    with pytest.raises(InputError, match="did you mean 'lora_rank'"):
        parse_config({"lora_rnk": 8})
    assert "called" not in meant("lr", ["seq_len"], lists="x")
