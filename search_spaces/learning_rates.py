"""The learning rate of a configuration that names none, with its range and what both rest on.

The numbers are in ``learning_rates.yaml``, and docs/learning_rates.md derives them from what was
measured and published. Neither speed nor memory depends on a learning rate; what is learned does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.documents import Strict, shipped
from qlora_sweep.search_spaces.kinds import Method

Quantity = Literal["alpha", "rank", "width", "tokens"]
"""What a rate depends on: LoRA's alpha and rank, the model's hidden size, and the tokens of an
optimizer step."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MODEL_KEYS = ("hidden_size",) + _EXPERTS
"""Of a model's config, what a rate depends on."""
MIXTURE_WIDTH = 4096
"""How wide a mixture of experts counts at least: the best rates of narrow ones are as those of
wide models."""
_ATTENTION = frozenset(
    {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "out_proj",
        "qkv_proj",
        "c_attn",
        "query_key_value",
        "Wqkv",
    }
)
"""Linear layers of attention, by the names that most models have for them."""


class Factor(Strict):
    """How a rate depends on one quantity: by a power of it, within what was measured."""

    at: PositiveFloat
    """The quantity's value at which the factor is 1."""
    exponent: float
    low: PositiveFloat
    high: PositiveFloat

    def of(self, value: float) -> float:
        """Return the factor at a value; outside of ``low`` to ``high`` that of the nearer end."""
        inside = min(max(value, self.low), self.high)
        return float((inside / self.at) ** self.exponent)


class Rule(Strict):
    """What the learning rates of one method follow from."""

    rate: PositiveFloat
    """Where every factor is 1."""
    spread: float = Field(gt=1)
    """How many times the rate its range reaches down and up."""
    basis: str
    """What the rule rests on, as the end of a sentence."""
    factors: dict[Quantity, Factor]
    attention: PositiveFloat = 1.0
    """A further factor where attention alone has adapters."""

    def rate_of(self, config: TrialConfig, model: Mapping[str, Any]) -> float:
        """Return the rate of a configuration on a model, by the model's config."""
        quantities: dict[Quantity, float | None] = {
            "alpha": config.alpha,
            "rank": config.lora_rank,
            "width": _width(model),
            "tokens": config.tokens_per_step,
        }
        rate = self.rate
        for quantity, factor in self.factors.items():
            value = quantities[quantity]
            if value is not None:
                rate *= factor.of(value)
        if _is_on_attention_alone(config.target_modules):
            rate *= self.attention
        return rate


class _Rules(Strict):
    sft: Rule
    dpo: Rule
    grpo: Rule


class LearningRate(BaseModel):
    """A learning rate, and what the rule recommends of the same configuration."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    value: PositiveFloat
    """That it trains with."""
    source: Literal["rule", "given"]
    """Whether it is the rule's, or was named for this configuration."""
    recommended: PositiveFloat
    """The rule's."""
    low: PositiveFloat
    """The lower end of the rule's range, in which the best rate is expected."""
    high: PositiveFloat
    """The upper end."""
    basis: str
    """What the rule rests on, as the end of a sentence."""

    @property
    def brief(self) -> str:
        """The rate with the rule's range."""
        between = f"range {in_words(self.low)} to {in_words(self.high)}"
        if self.source == "rule":
            return f"{in_words(self.value)} ({between})"
        rule = f"{in_words(self.recommended)} ({between})"
        return f"{in_words(self.value)}, as given; recommended {rule}"

    @property
    def words(self) -> str:
        """The rate with the rule's range and its basis, as the end of a sentence."""
        return f"{self.brief}, by {self.basis}"


@cache
def rules() -> Mapping[Method, Rule]:
    """Return the rule of each method."""
    known = shipped("learning_rates.yaml", _Rules)
    return {method: getattr(known, method) for method in get_args(Method)}


def learning_rate_of(config: TrialConfig, model: Mapping[str, Any]) -> LearningRate:
    """Return the learning rate that a configuration trains with.

    Args:
        config: the configuration; a rate that it names is kept.
        model: the model's config, of which `MODEL_KEYS` count. Where it does not say how wide the
            model is, it counts as the rule's reference width.
    """
    rule = rules()[config.method]
    rate = rule.rate_of(config, model)
    recommended = _rounded(rate)
    value = recommended
    source: Literal["rule", "given"] = "rule"
    if config.learning_rate is not None:
        value = config.learning_rate
        source = "given"
    return LearningRate(
        value=value,
        source=source,
        recommended=recommended,
        low=_rounded(rate / rule.spread),
        high=_rounded(rate * rule.spread),
        basis=rule.basis,
    )


def _width(model: Mapping[str, Any]) -> int | None:
    """Return the hidden size as it counts; None where the config does not say it."""
    if model.get("hidden_size") is None:
        return None
    width = int(model["hidden_size"])
    if any(model.get(key) for key in _EXPERTS):
        return max(width, MIXTURE_WIDTH)
    return width


def _is_on_attention_alone(targets: str | tuple[str, ...]) -> bool:
    if isinstance(targets, str):
        return targets != "all-linear"
    return _ATTENTION.issuperset(targets)


def in_words(rate: float) -> str:
    """Return a learning rate as people write it: ``2e-4``."""
    digits, exponent = f"{rate:.3e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def _rounded(rate: float) -> float:
    """Return a rate with two digits; more are not known."""
    return float(f"{rate:.1e}")
