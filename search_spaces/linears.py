"""Which linear layers and experts the known architectures have, and counts that follow from shapes.

From the config alone: nothing is loaded. An architecture that is not known here gives None, and the
worker, which has the real model, answers instead. Tables were read in transformers 5.17.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Shape = tuple[int, int]
"""Input and output features of a linear layer."""
Quantity = TypeVar("Quantity", float, "NDArray[np.float64]")
"""One configuration's number, or the numbers of several."""

LEAST_QUANTIZED_SHARE = 0.95
"""Of the matrices' weights, how many must be in 4 bits for a base to be called a 4-bit one.

What a decoder holds besides linear layers and experts (gates of recurrent layers) is below 5 %.
"""


def types(names: str) -> frozenset[str]:
    """Return model types that are listed in a text."""
    return frozenset(names.split())


def _by_type(**types: str) -> dict[str, str]:
    """Return a key's name by each of the model types that it is given."""
    return {kind: key for key, kinds in types.items() for kind in kinds.split()}


# A decoder layer's linear layers, as PEFT matches them: by the end of their path.

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_QV = ("q_proj", "v_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")
_FUSED_GATED = ("gate_up_proj", "down_proj")
_UNGATED = ("up_proj", "down_proj")
_OUT = ("q_proj", "k_proj", "v_proj", "out_proj")
_QUERY_KEY_VALUE = ("query_key_value", "dense")
# The name alone would be the feed-forward block's as well.
_C_ATTN = ("c_attn", "attn.c_proj")
# The name alone would be the short convolution's as well.
_OF_LFM2 = ("q_proj", "k_proj", "v_proj", "self_attn.out_proj")
_UP_DOWN = ("dense_h_to_4h", "dense_4h_to_h")

_SHAPED = types(
    "gemma gemma2 gemma3_text granite llama ministral mistral olmo2 phi3 qwen2 qwen3 smollm3"
)
"""Types whose linear layers have sizes that `linear_shapes` knows."""
_USUAL = types("cohere cohere2 ernie4_5 exaone4 helium ministral3 olmo olmo3 seed_oss stablelm")
_NAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(_USUAL | _SHAPED, (_ATTENTION, _GATED)),
    **dict.fromkeys(("apertus", "arcee", "nemotron"), (_ATTENTION, _UNGATED)),
    **dict.fromkeys(
        types("bloom falcon gpt_neox gpt_neox_japanese persimmon"), (_QUERY_KEY_VALUE, _UP_DOWN)
    ),
    **dict.fromkeys(("biogpt", "xglm"), (_OUT, ("fc1", "fc2"))),
    "codegen": (("qkv_proj", "out_proj"), ("fc_in", "fc_out")),
    **dict.fromkeys(("glm", "glm4"), (_ATTENTION, _FUSED_GATED)),
    "lfm2": (_OF_LFM2, ("conv.in_proj", "conv.out_proj", "w1", "w2", "w3")),
    **dict.fromkeys(types("gpt-sw3 gpt2 gpt_bigcode openai-gpt"), (_C_ATTN, ("c_fc", "c_proj"))),
    # Without those of `READ_BY_CODE` and the router before them, which has four outputs.
    "gemma3n_text": (
        _ATTENTION,
        _GATED + ("linear_left", "linear_right", "per_layer_input_gate", "per_layer_projection"),
    ),
    "gpt_neo": (_OUT, ("c_fc", "c_proj")),
    "gptj": (_OUT, ("fc_in", "fc_out")),
    "modernbert-decoder": (("q_proj", "k_proj", "v_proj", "attn.Wo"), ("Wi", "mlp.Wo")),
    "mpt": (("Wqkv", "out_proj"), _UNGATED),
    "opt": (_OUT, ("fc1", "fc2")),
    "phi": (("q_proj", "k_proj", "v_proj", "dense"), ("fc1", "fc2")),
    "phi3": (("qkv_proj", "o_proj"), _FUSED_GATED),
    "starcoder2": (_ATTENTION, ("c_fc", "c_proj")),
}
"""Layers of attention and of the feed-forward block, by transformers' model type."""

_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_INDEXED = types("axk2 deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4")
"""Types whose attention has linear layers that choose tokens, and so get no gradient."""
_LATENT_TYPES = types(
    """
    axk1 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4 longcat_flash
    minicpm3 youtu
    """
)
"""Types with multi-head latent attention: queries, and keys with values, through a low rank."""
_OTHER_ATTENTION: dict[str, tuple[str, ...]] = {
    "axk2": ("q_a_proj", "q_gate_proj") + _LATENT[2:],
    "cpmant": ("project_q", "project_k", "project_v", "attention_out"),
    "ctrl": ("Wq", "Wk", "Wv", "multi_head_attention.dense"),
    "dbrx": ("Wqkv", "out_proj"),
    "deepseek_v4": ("q_a_proj", "self_attn.q_b_proj", "self_attn.kv_proj", "o_b_proj"),
    "lfm2_moe": _OF_LFM2,
    "moshi": ("q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.linear"),
    "phi4_multimodal": ("qkv_proj", "self_attn.o_proj"),
    "xlm": ("q_lin", "k_lin", "v_lin", "out_lin"),
}
"""Layers of attention of types whose other linear layers are PEFT's to find."""
_NOT_EVERY_LINEAR = types("falcon_h1 llama4_text nemotron_h phimoe") | _INDEXED
"""Types with a linear layer that no adapter can go on: a router that returns more than a tensor, or
a state space's output, which PEFT refuses; or what gets no gradient.
"""
READ_BY_CODE: dict[str, tuple[str, ...]] = {
    "gemma3n_text": ("correction_coefs", "prediction_coefs"),
}
"""Linear layers, by type, whose weight the model's code reads itself, so that it cannot be packed:
transformers clamps these two in training. They are 4 x 4 and 4 x 16, and stay in 16 bits."""
_HEADS_DEFAULT_TO_QUERIES = frozenset({"granite", "llama", "olmo2", "phi3"})
"""Types whose keys and values have as many heads as the queries where the config does not say.
Others have a default of their own, which only transformers knows."""
_OWN_HEAD_DIM = frozenset({"gemma", "gemma2", "gemma3_text", "qwen3"})
"""Types whose heads have a width of their own where the config does not say."""

_COUNTED = frozenset({"gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"})
"""Model types whose biases and norms `parameters` knows."""
_COUNTED_EXPERTS = frozenset({"gpt_oss", "qwen3_moe"})
"""The same of types whose feed-forward blocks are experts."""
_NORMED_HEADS = frozenset({"gemma3_text", "qwen3", "qwen3_moe"})
"""Types that normalize the queries and keys of every head with one weight vector each."""
_TIED = frozenset({"gemma", "gemma2", "gemma3_text", "smollm3"})
"""Types whose head is the embedding where the config does not say."""
_FOUR_NORMS = frozenset({"gemma3_text"})
"""Types that normalize after attention and feed-forward as well as before."""


def known_linear_modules(model: ModelSpec) -> tuple[str, ...] | None:
    """Return the names of a decoder layer's linear layers; None where the type is not known."""
    names = _NAMES.get(model.model_type)
    if names is None:
        return None
    return names[0] + names[1]


def target_sets(model: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Return the module names of every target set that the architecture can have.

    ``all-linear`` of a type that is not known stays as it is: PEFT resolves it on the real model.
    """
    kind = model.model_type
    attention: tuple[str, ...] = _OTHER_ATTENTION.get(kind, _ATTENTION)
    every: tuple[str, ...] = ("all-linear",)
    if kind in _LATENT_TYPES:
        attention = _LATENT
        if model.config.get("q_lora_rank", True) is None:
            # Without a rank for the queries they have one matrix.
            attention = ("q_proj",) + _LATENT[2:]
    elif kind in _NAMES:
        attention, feed_forward = _NAMES[kind]
        every = attention + feed_forward
    sets: dict[str, tuple[str, ...]] = {"attention": attention}
    # One matrix may hold queries, keys and values.
    if set(_QV) <= set(attention):
        sets = {"qv": _QV, "attention": attention}
    if kind not in _NOT_EVERY_LINEAR:
        sets["all-linear"] = every
    return sets


def resolve_targets(config: TrialConfig, model: ModelSpec) -> tuple[str, ...]:
    """Return the module names that ``config`` puts adapters on, in the order of the decoder layer.

    For a model type that is not known, ``all-linear`` stays as it is (PEFT resolves it on the real
    model) and the other sets get the names that most architectures use. A set that the architecture
    cannot have (q and v where one matrix holds q, k and v) gives names that it has no modules for.
    """
    wanted = config.target_modules
    if not isinstance(wanted, str):
        return tuple(wanted)
    if wanted == "qv":
        return _QV
    return target_sets(model).get(wanted, (wanted,))


@dataclass(frozen=True)
class CapacityClass:
    """What decides how much an adapter can learn, and costs speed: speeds compare within one."""

    lora_rank: int
    modules: tuple[str, ...]
    """Names of the layers with an adapter, however the configuration spells them."""

    @classmethod
    def of(cls, config: TrialConfig, model: ModelSpec) -> CapacityClass:
        """Return the class of a configuration on a model."""
        return cls(config.lora_rank, tuple(sorted(resolve_targets(config, model))))


def standard_capacity(model: ModelSpec) -> CapacityClass:
    """Return the class of the standard recipe: rank 16 on q, k, v and o."""
    return CapacityClass.of(TrialConfig(), model)


def nearest_capacity(classes: Iterable[CapacityClass], model: ModelSpec) -> CapacityClass | None:
    """Return the class that is recommended from: the nearest to the standard recipe's; None where
    there is no class.

    The same target modules come first, then the nearest number of trainable parameters (the nearest
    rank, where the architecture does not tell), then more of them.
    """
    standard = standard_capacity(model)
    own = _capacity_size(standard, model)

    def distance(capacity: CapacityClass) -> tuple[bool, float, float]:
        size = _capacity_size(capacity, model)
        if own is None or size is None:
            times = capacity.lora_rank / standard.lora_rank
        else:
            times = size / own
        # Rounded, so that half and twice the parameters are equally near.
        apart = round(abs(math.log(times)), 6)
        return capacity.modules != standard.modules, apart, -times

    return min(classes, key=distance, default=None)


def _capacity_size(capacity: CapacityClass, model: ModelSpec) -> int | None:
    """Return the trainable parameters of a class; None where not known."""
    config = TrialConfig(lora_rank=capacity.lora_rank, target_modules=capacity.modules)
    return lora_parameters(config, model)


def linear_shapes(model: ModelSpec) -> dict[str, Shape] | None:
    """Return in and out features of a decoder layer's linear layers; None where not known."""
    kind = model.model_type
    config = model.config
    # A size that the config leaves to a default of transformers is not guessed.
    needed = set()
    if kind not in _HEADS_DEFAULT_TO_QUERIES:
        needed.add("num_key_value_heads")
    if kind in _OWN_HEAD_DIM:
        needed.add("head_dim")
    if kind not in _SHAPED or not needed <= config.keys() or not config.get("intermediate_size"):
        return None
    return _shapes(model, known_linear_modules(model) or ())


def _shapes(model: ModelSpec, names: Sequence[str]) -> dict[str, Shape]:
    config = model.config
    hidden = model.hidden_size
    heads = int(config["num_attention_heads"])
    queries = attention_width(hidden=hidden, heads=heads, head_dim=config.get("head_dim"))
    # Grouped-query attention: fewer heads for keys and values than for queries.
    keys = int(config.get("num_key_value_heads") or heads) * (queries // heads)
    inner = _size(config, "intermediate_size")
    shapes = {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "qkv_proj": (hidden, queries + 2 * keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "gate_up_proj": (hidden, 2 * inner),
        "down_proj": (inner, hidden),
    }
    return {name: shapes[name] for name in names}


def lora_parameters(config: TrialConfig, model: ModelSpec) -> int | None:
    """Return the trainable parameters of ``config``'s adapters; None where not known.

    An adapter pair of rank r on a layer with i inputs and o outputs has r x (i + o) parameters.
    """
    shapes = linear_shapes(model)
    targets = resolve_targets(config, model)
    if shapes is None or not set(targets) <= set(shapes):
        return None
    per_layer = sum(sum(shapes[name]) for name in targets)
    return model.hidden_layers * config.lora_rank * per_layer


def attention_width(*, hidden: int, heads: int, head_dim: int | None) -> int:
    """Return the width of all heads' queries.

    Where the config says how wide a head is, all heads need not be as wide as the residual stream.
    """
    return heads * (head_dim or hidden // heads)


def training_flops_per_token(
    *,
    frozen: float,
    adapters: Quantity,
    layers: int,
    attention_width: float,
    seq_len: Quantity,
    references: Quantity | float = 0.0,
) -> Quantity:
    """Return the FLOPs that a step of a frozen base with trained adapters needs for each token.

    What checkpointing does again is not counted. A frozen weight costs 2 forward and 2 for its
    input's gradient, an adapter's 2 more for its own. Causal attention is two products of half the
    sequence by all heads forward, and twice that backward.

    Args:
        frozen: weights that tokens are multiplied with, the head's among them, also where it is
            tied to the embedding (which itself multiplies nothing).
        adapters: weights of the adapters.
        layers: decoder layers.
        attention_width: of all heads' queries (see `attention_width`).
        seq_len: tokens of a sequence.
        references: further passes forward, through the base alone.
    """
    scores = layers * seq_len * attention_width
    return (4.0 + 2.0 * references) * frozen + 6.0 * adapters + (6.0 + 2.0 * references) * scores


def parameters(model: ModelSpec) -> int | None:
    """Return the parameters of the whole model; None where the architecture is not known."""
    return _counted(model) or _shipped_counts().get(model.fingerprint)


@cache
def _shipped_counts() -> dict[str, int]:
    """Return what shipped models of types that are not counted here have, by fingerprint: as
    transformers builds them."""
    named = files("qlora_sweep.search_spaces").joinpath("parameter_counts.json").read_text("utf-8")
    return {load_model_spec(name).fingerprint: n for name, n in json.loads(named).items()}


def _counted(model: ModelSpec) -> int | None:
    """Return the parameters that follow from shapes; None where the type is not known."""
    kind = model.model_type
    config = model.config
    experts = 0
    shapes = None
    if kind in _COUNTED:
        shapes = linear_shapes(model)
    elif kind in _COUNTED_EXPERTS and {"head_dim", "num_key_value_heads"} <= config.keys():
        shapes = _shapes(model, _ATTENTION)
        weights = expert_weights(model)
        if weights is None:
            return None
        experts = weights + model.hidden_layers * _routing(model)
    if shapes is None:
        return None
    hidden = model.hidden_size
    layers = model.hidden_layers
    embeddings = model.vocab_size * hidden
    if not is_tied(model):
        embeddings *= 2
    linears = sum(rows * columns for rows, columns in shapes.values())
    norms = 2 * hidden
    if kind in _FOUR_NORMS:
        norms = 4 * hidden
    if kind in _NORMED_HEADS:
        norms += 2 * int(config["head_dim"])
    biased: tuple[str, ...] = ()
    if kind == "qwen2":
        biased = ("q_proj", "k_proj", "v_proj")
    elif config.get("attention_bias"):
        biased = _ATTENTION
    if config.get("mlp_bias"):
        biased += _GATED
    biases = sum(shapes[name][1] for name in biased if name in shapes)
    return embeddings + layers * (linears + biases + norms) + experts + hidden


def is_tied(model: ModelSpec) -> bool:
    """Whether the head and the embedding are one matrix; some types are where nothing is said."""
    return bool(model.config.get("tie_word_embeddings", model.model_type in _TIED))


def _size(config: dict[str, Any], key: str | None) -> int:
    """Return a size that the config states; 0 where it does not."""
    value = config.get(key or "")
    if not isinstance(value, int):
        return 0
    return value


# Experts. transformers 5 keeps all experts of a layer in one three-dimensional tensor, which
# bitsandbytes leaves in 16 bits. Those that multiply by transformers' own functions are packed in 4
# bits here (`sweep.training.experts`).

_FUSED = _by_type(
    moe_num_experts="aria_text dbrx ernie4_5_moe",
    n_routed_experts="""
        axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1 glm4_moe glm4_moe_lite
        glm_moe_dsa hy_v4 inkling_text longcat_flash mimo_v2_flash nemotron_h solar_open
    """,
    num_experts="""
        afmoe cohere2_moe exaone_moe flex_olmo gemma4_text hunyuan_v1_moe hy_v3 jamba kimi_linear
        laguna lfm2_moe mellum olmoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen4_exp_text
        zaya
    """,
    num_local_experts="""
        gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared jetmoe llama4_text
        minimax minimax_m2 minimax_m3_vl_text mixtral phimoe
    """,
)
"""Model types whose experts are fused, with the key that says how many a layer has.

Each was built without data and its modules counted.
"""
_SOMETIMES_FUSED = frozenset({"gemma4_text", "granitemoehybrid", "nemotron_h"})
"""Types that have experts only where their config says so."""
FUSED_EXPERTS = "gate_up_proj"
EXPERT_WEIGHTS = frozenset({FUSED_EXPERTS, "up_proj", "down_proj"})
"""What models call the weights of experts, which adapters may go on."""
_EXPERTS_IN_ALL_LINEAR = types(
    """
    afmoe cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe flex_olmo
    glm4_moe glm4_moe_lite glm_moe_dsa hunyuan_v1_moe longcat_flash mellum minimax minimax_m2
    mixtral olmoe qwen3_moe qwen3_next solar_open
    """
)
"""Types of which PEFT 0.21 puts adapters on experts and router where it is told ``all-linear``, and
on experts in the place of linear layers that are called as theirs once were."""
_OWN_EXPERTS = types("aria_text dbrx jetmoe llama4_text longcat_flash")
"""Types whose experts multiply in a way of their own."""
_LEFT = {
    "falcon": "linear layers of a class of their own",
    "jamba": "a state space that reads the weights of its linear layers itself",
}
"""What of a type no quantization takes."""

_WIDTHS = _by_type(
    intermediate_size="""
        flex_olmo gpt_oss granitemoe granitemoeshared minimax minimax_m2 mixtral olmoe phimoe
    """,
    moe_intermediate_size="""
        deepseek_v2 deepseek_v3 glm4_moe glm4_moe_lite lfm2_moe qwen2_moe qwen3_5_moe_text qwen3_moe
        qwen3_next
    """,
)
"""The key of an expert's inner width, for types whose experts are gated and counted here."""
_GATED_MATRICES = 3
_DENSE_FIRST = _by_type(
    first_k_dense_replace="deepseek_v2 deepseek_v3 glm4_moe glm4_moe_lite",
    num_dense_layers="lfm2_moe",
)
"""Types whose first layers have no experts, with the key that says how many; its default is theirs
alone."""


def has_experts(model: ModelSpec) -> bool:
    """Whether the model has experts that are one tensor a layer."""
    kind = model.model_type
    count = model.config.get(_FUSED.get(kind, ""))
    if kind not in _FUSED or count == 0 or (count is None and kind in _SOMETIMES_FUSED):
        return False
    return kind != "gemma4_text" or bool(model.config.get("enable_moe_block"))


def has_adapted_experts(config: TrialConfig, model: ModelSpec) -> bool:
    """Whether a configuration puts adapters on experts."""
    if not has_experts(model):
        return False
    if config.target_modules == "all-linear":
        return model.model_type in _EXPERTS_IN_ALL_LINEAR
    return not EXPERT_WEIGHTS.isdisjoint(resolve_targets(config, model))


def unquantized(model: ModelSpec, bits: int = 4) -> str | None:
    """Return what most of the model's weights are in, where quantization to so many bits leaves
    them as they are: ``experts of one tensor a layer, 54 GiB``.

    None where nothing is known to be left; the real modules are counted before they train.
    """
    if model.model_type in _LEFT:
        return _LEFT[model.model_type]
    is_packed = bits < 16 and model.model_type not in _OWN_EXPERTS and model.stored is None
    if not has_experts(model) or is_packed:
        return None
    weights = expert_weights(model)
    if weights is None:
        return "experts of one tensor a layer"
    return f"experts of one tensor a layer, {2 * weights / 2**30:.3g} GiB"


def expert_weights(model: ModelSpec) -> int | None:
    """Return the weights of all fused experts; None where type or config does not tell."""
    kind = model.model_type
    config = model.config
    width = _size(config, _WIDTHS.get(kind))
    count = _size(config, _FUSED.get(kind))
    layers = expert_layers(model)
    if not width or not count or layers is None:
        return None
    return layers * count * _GATED_MATRICES * model.hidden_size * width


def _routing(model: ModelSpec) -> int:
    """Return the parameters of a layer that choose among its experts, and the experts' biases."""
    config = model.config
    hidden = model.hidden_size
    count = _size(config, _FUSED[model.model_type])
    if model.model_type != "gpt_oss":
        return hidden * count
    # Experts and router have biases, and each head a weight that stands for an attention sink.
    biases = count * (2 * int(config["intermediate_size"]) + hidden + 1)
    return hidden * count + biases + int(config["num_attention_heads"])


def expert_layers(model: ModelSpec) -> int | None:
    """Return how many layers have experts, the others have one feed-forward block; None where the
    config does not tell."""
    config = model.config
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return kinds.count("sparse")
    first = 0
    if model.model_type in _DENSE_FIRST:
        key = _DENSE_FIRST[model.model_type]
        if key not in config:
            return None
        first = _size(config, key)
    step = _size(config, "decoder_sparse_step") or 1
    dense = config.get("mlp_only_layers") or ()
    return sum((i + 1) % step == 0 and i not in dense for i in range(first, model.hidden_layers))
