"""Owns which architectures keep weights out of reach of 4-bit quantization, and how many those are.

bitsandbytes replaces `torch.nn.Linear` and nothing else, and transformers 5 keeps all experts of a
layer in one three-dimensional tensor: they stay in 16 bits, and nothing says so. From the config
alone: nothing is loaded. What the real modules hold is counted by `sweep.training.model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from search_spaces.models import ModelSpec

LEAST_QUANTIZED_SHARE = 0.95
"""Of the matrices' weights, how many must be in 4 bits for a base to be called a 4-bit one.

What a decoder holds besides linear layers and experts (gates of recurrent layers) is below 5 %.
"""


def _by_type(**types: str) -> dict[str, str]:
    """Return a key's name by each of the model types that it is given."""
    return {kind: key for key, kinds in types.items() for kind in kinds.split()}


_FUSED = _by_type(
    moe_num_experts="aria_text dbrx ernie4_5_moe",
    n_routed_experts="""
        axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1 glm4_moe glm4_moe_lite
        glm_moe_dsa hy_v4 inkling_text longcat_flash mimo_v2_flash solar_open
    """,
    num_experts="""
        afmoe cohere2_moe exaone_moe flex_olmo hunyuan_v1_moe hy_v3 jamba kimi_linear laguna
        lfm2_moe mellum olmoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen4_exp_text
        zaya
    """,
    num_local_experts="""
        gpt_oss granitemoe granitemoe_swa granitemoeshared jetmoe llama4_text minimax minimax_m2
        minimax_m3_vl_text mixtral phimoe
    """,
)
"""Model types whose experts are fused, with the key that says how many a layer has.

Each was built by transformers 5.17 without data and its modules counted.
"""
_SOMETIMES_FUSED = {
    "gemma4_text": "num_experts",
    "granitemoehybrid": "num_local_experts",
    "nemotron_h": "n_routed_experts",
}
"""Types that have experts only where their config says so."""
_OWN_LINEAR_CLASS = frozenset({"falcon"})
"""Types whose linear layers are of a class of their own, which is not replaced."""

_WIDTHS = _by_type(
    intermediate_size="""
        flex_olmo gpt_oss granitemoe granitemoeshared minimax minimax_m2 mixtral olmoe phimoe
    """,
    moe_intermediate_size="""
        deepseek_v2 deepseek_v3 glm4_moe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next
    """,
)
"""The key of an expert's inner width, for types whose experts are gated and counted here."""
_PLAIN_ATTENTION = frozenset(
    {
        "flex_olmo",
        "gpt_oss",
        "granitemoe",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_moe",
    }
)
"""Types whose every layer has q, k, v and o, so that the other matrices can be counted too."""
_GATED_MATRICES = 3
_DENSE_KEY = "first_k_dense_replace"
_DENSE_FIRST = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe"})
"""Types whose first layers have no experts, as many as a default says that is theirs alone."""


@dataclass(frozen=True)
class Unquantized:
    """The weights that 4-bit quantization leaves in 16 bits."""

    what: str
    """In a sentence: what they are and why they are left."""
    weights: int | None
    """How many; None where the config does not tell."""
    share: float | None
    """Of all matrices' weights, how many would be in 4 bits; None where the config does not tell.
    """


def unquantized(model: ModelSpec) -> Unquantized | None:
    """Return what 4-bit quantization would leave as it is, where that is most of the model.

    None where nothing is known to be left; the real modules are counted before they train.
    """
    kind = model.model_type
    if kind in _OWN_LINEAR_CLASS:
        return Unquantized("its linear layers are of a class of their own", None, 0.0)
    key = _FUSED.get(kind) or _SOMETIMES_FUSED.get(kind)
    if key is None:
        return None
    count = model.config.get(key)
    if count == 0 or (count is None and kind in _SOMETIMES_FUSED):
        return None
    if kind == "gemma4_text" and not model.config.get("enable_moe_block"):
        return None
    weights = expert_weights(model)
    return Unquantized("its experts are one tensor a layer", weights, _share(model, weights))


def expert_weights(model: ModelSpec) -> int | None:
    """Return the weights of all fused experts; None where type or config does not tell."""
    kind, config = model.model_type, model.config
    width, count = _size(config, _WIDTHS.get(kind)), _size(config, _FUSED.get(kind))
    if not width or not count or (kind in _DENSE_FIRST and _DENSE_KEY not in config):
        return None
    layers = _expert_layers(config, model.hidden_layers)
    return layers * count * _GATED_MATRICES * model.hidden_size * width


def _expert_layers(config: dict[str, Any], layers: int) -> int:
    """Return how many layers have experts; the others have one feed-forward block."""
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return sum(kind == "sparse" for kind in kinds)
    first = config.get(_DENSE_KEY) or 0
    step = config.get("decoder_sparse_step") or 1
    dense = config.get("mlp_only_layers") or ()
    return sum((i + 1) % step == 0 and i not in dense for i in range(first, layers))


def _share(model: ModelSpec, experts: int | None) -> float | None:
    """Return the share in 4 bits: attention, shared experts and dense layers over everything."""
    config, heads = model.config, _size(model.config, "num_attention_heads")
    if not experts or not heads or model.model_type not in _PLAIN_ATTENTION:
        return None
    hidden, layers = model.hidden_size, model.hidden_layers
    head_dim = _size(config, "head_dim") or hidden // heads
    keys = _size(config, "num_key_value_heads") or heads
    attention = 2 * hidden * head_dim * (heads + keys)
    sparse = _expert_layers(config, layers)
    shared = sparse * _size(config, "shared_expert_intermediate_size")
    dense = (layers - sparse) * _size(config, "intermediate_size")
    linear = layers * attention + _GATED_MATRICES * hidden * (shared + dense)
    return linear / (linear + experts)


def _size(config: dict[str, Any], key: str | None) -> int:
    """Return a size that the config states; 0 where it does not."""
    value = config.get(key) if key is not None else None
    return value if isinstance(value, int) else 0
