"""Copies of frozen records."""

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.frozen import replaced


def test_a_copy_takes_no_field_that_the_record_does_not_have() -> None:
    config = TrialConfig(seq_len=64)
    assert replaced(config, lora_rank=8) == TrialConfig(seq_len=64, lora_rank=8)
    with pytest.raises(TypeError, match="sequence_length"):
        replaced(config, lora_rank=8, sequence_length=128)
