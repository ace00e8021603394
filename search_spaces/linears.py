"""Owns which linear layers the known architectures have, and counts that follow from their shapes.

From the config alone: nothing is loaded. An architecture that is not known here gives None, and the
worker, which has the real model, answers instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from search_spaces.config import TrialConfig
from search_spaces.experts import expert_weights
from search_spaces.models import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Shape = tuple[int, int]
"""Input and output features of a linear layer."""
Quantity = TypeVar("Quantity", float, "NDArray[np.float64]")
"""One configuration's number, or the numbers of several."""

_SEPARATE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_SHAPED = {
    **dict.fromkeys(
        ["gemma", "gemma2", "gemma3_text", "granite", "llama", "ministral", "mistral"], _SEPARATE
    ),
    **dict.fromkeys(["olmo2", "qwen2", "qwen3", "smollm3"], _SEPARATE),
    "phi3": _FUSED,
}
"""Types whose linear layers have sizes that `linear_shapes` knows (read in transformers 5.17)."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_OUT = ("q_proj", "k_proj", "v_proj", "out_proj")
_QUERY_KEY_VALUE = ("query_key_value", "dense")
# The name alone would be the feed-forward block's as well.
_C_ATTN = ("c_attn", "attn.c_proj")
_UP_DOWN = ("dense_h_to_4h", "dense_4h_to_h")


@dataclass(frozen=True)
class _Names:
    """A decoder layer's linear layers, as PEFT matches them: by the end of their path."""

    attention: tuple[str, ...]
    """Queries, keys, values and output, in as many matrices as the architecture has."""
    feed_forward: tuple[str, ...]

    @property
    def every(self) -> tuple[str, ...]:
        """All of them."""
        return self.attention + self.feed_forward

    @property
    def qv(self) -> tuple[str, ...] | None:
        """Queries and values; None where one matrix holds them with the keys."""
        return ("q_proj", "v_proj") if "q_proj" in self.attention else None


_GATED = (
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "helium",
    "ministral3",
    "olmo",
    "olmo3",
    "seed_oss",
    "stablelm",
)
_NAMES = dict.fromkeys((*_GATED, *_SHAPED), _Names(_ATTENTION, _SEPARATE[4:])) | {
    "apertus": _Names(_ATTENTION, ("up_proj", "down_proj")),
    "arcee": _Names(_ATTENTION, ("up_proj", "down_proj")),
    "bloom": _Names(_QUERY_KEY_VALUE, _UP_DOWN),
    "codegen": _Names(("qkv_proj", "out_proj"), ("fc_in", "fc_out")),
    "falcon": _Names(_QUERY_KEY_VALUE, _UP_DOWN),
    "glm": _Names(_ATTENTION, _FUSED[2:]),
    "glm4": _Names(_ATTENTION, _FUSED[2:]),
    "gpt2": _Names(_C_ATTN, ("c_fc", "c_proj")),
    "gpt_bigcode": _Names(_C_ATTN, ("c_fc", "c_proj")),
    "gpt_neo": _Names(_OUT, ("c_fc", "c_proj")),
    "gpt_neox": _Names(_QUERY_KEY_VALUE, _UP_DOWN),
    "gptj": _Names(_OUT, ("fc_in", "fc_out")),
    "mpt": _Names(("Wqkv", "out_proj"), ("up_proj", "down_proj")),
    "nemotron": _Names(_ATTENTION, ("up_proj", "down_proj")),
    "opt": _Names(_OUT, ("fc1", "fc2")),
    "phi": _Names(("q_proj", "k_proj", "v_proj", "dense"), ("fc1", "fc2")),
    "phi3": _Names(_FUSED[:2], _FUSED[2:]),
    "starcoder2": _Names(_ATTENTION, ("c_fc", "c_proj")),
}
"""Linear layers inside a decoder layer, by transformers' model type (read in transformers 5.17)."""

_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_LATENT_TYPES = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite"})
"""Types with multi-head latent attention: queries, and keys with values, through a low rank."""

_NOT_EVERY_LINEAR = frozenset({"falcon_h1", "llama4_text", "phimoe"})
"""Types with a linear layer that no adapter can go on: a router that returns more than a tensor, or
a state space's output, which PEFT refuses.
"""

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
"""Types whose head is the embedding where the config does not say (read in transformers 5.17)."""
_FOUR_NORMS = frozenset({"gemma3_text"})
"""Types that normalize after attention and feed-forward as well as before."""


def known_linear_modules(model: ModelSpec) -> tuple[str, ...] | None:
    """Return the names of a decoder layer's linear layers; None where the type is not known."""
    names = _NAMES.get(model.model_type)
    return None if names is None else names.every


def target_sets(model: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Return the module names of every target set that the architecture can have.

    ``all-linear`` of a type that is not known stays as it is: PEFT resolves it on the real model.
    """
    names = _NAMES.get(model.model_type)
    if names is not None:
        qv = {} if names.qv is None else {"qv": names.qv}
        return {**qv, "attention": names.attention, "all-linear": names.every}
    if model.model_type in _LATENT_TYPES:
        # Without a rank for the queries they have one matrix.
        has_low_rank = model.config.get("q_lora_rank", True) is not None
        latent = _LATENT if has_low_rank else ("q_proj", *_LATENT[2:])
        return {"attention": latent, "all-linear": ("all-linear",)}
    sets = {"qv": ("q_proj", "v_proj"), "attention": _ATTENTION}
    if model.model_type in _NOT_EVERY_LINEAR:
        return sets
    return {**sets, "all-linear": ("all-linear",)}


def resolve_targets(config: TrialConfig, model: ModelSpec) -> tuple[str, ...]:
    """Return the module names that ``config`` puts adapters on, in the order of the decoder layer.

    For a model type that is not known, ``all-linear`` stays as it is (PEFT resolves it on the real
    model) and the other sets get the names that most architectures use. A set that the architecture
    cannot have (q and v where one matrix holds q, k and v) gives names that it has no modules for.
    """
    wanted = config.target_modules
    if not isinstance(wanted, str):
        return tuple(wanted)
    return target_sets(model).get(wanted, ("q_proj", "v_proj") if wanted == "qv" else (wanted,))


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


def linear_shapes(model: ModelSpec) -> dict[str, Shape] | None:
    """Return in and out features of a decoder layer's linear layers; None where not known."""
    names, config = _SHAPED.get(model.model_type), model.config
    if names is None or not _says_its_sizes(model):
        return None
    hidden, heads = model.hidden_size, int(config["num_attention_heads"])
    head_dim = config.get("head_dim")
    queries = attention_width(
        hidden=hidden, heads=heads, head_dim=None if head_dim is None else int(head_dim)
    )
    inner = int(config["intermediate_size"])
    # Grouped-query attention: fewer heads for keys and values than for queries.
    keys = int(config.get("num_key_value_heads") or heads) * (queries // heads)
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


def _says_its_sizes(model: ModelSpec) -> bool:
    """Whether the config says every size itself, leaving none to a default of transformers."""
    kind, needed = model.model_type, {"intermediate_size"}
    if kind not in _HEADS_DEFAULT_TO_QUERIES:
        needed.add("num_key_value_heads")
    if kind in _OWN_HEAD_DIM:
        needed.add("head_dim")
    return needed <= model.config.keys() and model.config["intermediate_size"] is not None


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
    *, frozen: float, adapters: Quantity, layers: int, attention_width: int, seq_len: Quantity
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
        seq_len: tokens of a row.
    """
    return 4.0 * frozen + 6.0 * adapters + 6.0 * layers * seq_len * attention_width


def parameters(model: ModelSpec) -> int | None:
    """Return the parameters of the whole model; None where the architecture is not known."""
    kind = model.model_type
    shapes = _attention_shapes(model) if kind in _COUNTED_EXPERTS else linear_shapes(model)
    experts = _experts(model) if kind in _COUNTED_EXPERTS else 0
    if shapes is None or experts is None or kind not in _COUNTED | _COUNTED_EXPERTS:
        return None
    hidden = model.hidden_size
    embeddings = model.vocab_size * hidden * (1 if is_tied(model) else 2)
    linears = sum(rows * columns for rows, columns in shapes.values())
    of_heads = 2 * int(model.config["head_dim"]) if kind in _NORMED_HEADS else 0
    norms = hidden * (4 if kind in _FOUR_NORMS else 2) + of_heads
    per_layer = linears + _biases(model, shapes) + norms
    return embeddings + model.hidden_layers * per_layer + experts + hidden


def is_tied(model: ModelSpec) -> bool:
    """Whether the head and the embedding are one matrix; some types are where nothing is said."""
    return bool(model.config.get("tie_word_embeddings", model.model_type in _TIED))


def _attention_shapes(model: ModelSpec) -> dict[str, Shape] | None:
    """Return the shapes of q, k, v and o of a type that states its heads and their width."""
    config, hidden = model.config, model.hidden_size
    if not {"head_dim", "num_key_value_heads"} <= config.keys():
        return None
    queries = int(config["num_attention_heads"]) * int(config["head_dim"])
    keys = int(config["num_key_value_heads"]) * int(config["head_dim"])
    sizes = ((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden))
    return dict(zip(_ATTENTION, sizes, strict=True))


def _experts(model: ModelSpec) -> int | None:
    """Return the parameters of all experts and of what chooses them; None where not known."""
    weights = expert_weights(model)
    if weights is None:
        return None
    config, hidden, layers = model.config, model.hidden_size, model.hidden_layers
    if model.model_type == "gpt_oss":
        # Experts and router have biases, and each head a weight that stands for an attention sink.
        count, width = int(config["num_local_experts"]), int(config["intermediate_size"])
        biases = count * (2 * width + hidden + 1)
        return weights + layers * (hidden * count + biases + int(config["num_attention_heads"]))
    return weights + layers * hidden * int(config["num_experts"])


def _biases(model: ModelSpec, shapes: dict[str, Shape]) -> int:
    """Biases of a decoder layer: Qwen2 always has them on q, k and v, others where they say so."""
    biased: tuple[str, ...] = ()
    if model.model_type == "qwen2":
        biased = ("q_proj", "k_proj", "v_proj")
    elif model.config.get("attention_bias"):
        biased = ("q_proj", "k_proj", "v_proj", "o_proj")
    if model.config.get("mlp_bias"):
        biased += ("gate_proj", "up_proj", "down_proj")
    return sum(shapes[name][1] for name in biased if name in shapes)
