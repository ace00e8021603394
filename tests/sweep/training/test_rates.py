"""The learning rate that a child trains with is the one that its parent says."""

from __future__ import annotations

from types import SimpleNamespace

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.learning_rates import MIXTURE_WIDTH, learning_rate_of
from qlora_sweep.search_spaces.models import shipped_models
from qlora_sweep.sweep.training.step import rate_of


def test_a_built_models_rate_is_that_of_its_config() -> None:
    from transformers import AutoConfig

    config = TrialConfig(lora_rank=32)
    for spec in shipped_models():
        built = SimpleNamespace(config=AutoConfig.for_model(**spec.config))
        assert rate_of(config, built) == learning_rate_of(config, spec.config).value, spec.name


def test_a_narrow_mixture_of_experts_has_the_rate_of_a_wide_model() -> None:
    dense = {"hidden_size": 2048}
    wide = {"hidden_size": MIXTURE_WIDTH}
    config = TrialConfig()
    mixture = learning_rate_of(config, {**dense, "num_experts": 128})
    assert mixture == learning_rate_of(config, wide)
    assert mixture.value < learning_rate_of(config, dense).value
    assert learning_rate_of(config, {**dense, "num_experts": 0}).value > mixture.value
