"""Owns which linear layers the known architectures have, and the parameter counts that follow.

From the config alone: nothing is loaded. An architecture that is not known here gives None, and the
worker, which has the real model, answers instead.
"""

from __future__ import annotations

from search_spaces.config import TrialConfig
from search_spaces.models import ModelSpec

Shape = tuple[int, int]
"""Input and output features of a linear layer."""

_SEPARATE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_NAMES = {
    "gemma": _SEPARATE,
    "gemma2": _SEPARATE,
    "gemma3_text": _SEPARATE,
    "granite": _SEPARATE,
    "llama": _SEPARATE,
    "ministral": _SEPARATE,
    "mistral": _SEPARATE,
    "olmo2": _SEPARATE,
    "phi3": _FUSED,
    "qwen2": _SEPARATE,
    "qwen3": _SEPARATE,
    "smollm3": _SEPARATE,
}
"""Linear layers inside a decoder layer, by transformers' model type (read in transformers 5.17)."""

_HEADS_DEFAULT_TO_QUERIES = frozenset({"granite", "llama", "olmo2", "phi3"})
"""Types whose keys and values have as many heads as the queries where the config does not say.
Others have a default of their own, which only transformers knows."""
_OWN_HEAD_DIM = frozenset({"gemma", "gemma2", "gemma3_text", "qwen3"})
"""Types whose heads have a width of their own where the config does not say."""

_TARGETS = {
    _SEPARATE: {"qv": ("q_proj", "v_proj"), "attention": _SEPARATE[:4], "all-linear": _SEPARATE},
    # One matrix holds q, k and v: an adapter on q and v alone cannot be had.
    _FUSED: {"attention": _FUSED[:2], "all-linear": _FUSED},
}
_COUNTED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose biases and norms `parameters` knows."""


def known_linear_modules(model: ModelSpec) -> tuple[str, ...] | None:
    """Return the names of a decoder layer's linear layers; None where the type is not known."""
    return _NAMES.get(model.model_type)


def resolve_targets(config: TrialConfig, model: ModelSpec) -> tuple[str, ...]:
    """Return the module names that ``config`` puts adapters on, in the order of the decoder layer.

    For a model type that is not known, ``all-linear`` stays as it is (PEFT resolves it on the real
    model) and the other sets get the names that most architectures use. A set that the architecture
    cannot have (q and v where one matrix holds q, k and v) gives those names as well: they are
    then not among its modules.
    """
    wanted = config.target_modules
    names = known_linear_modules(model)
    if not isinstance(wanted, str):
        return tuple(wanted)
    if names is None and wanted == "all-linear":
        return ("all-linear",)
    sets = _TARGETS[names or _SEPARATE]
    return sets.get(wanted, _TARGETS[_SEPARATE][wanted])


def linear_shapes(model: ModelSpec) -> dict[str, Shape] | None:
    """Return in and out features of a decoder layer's linear layers; None where not known."""
    names, config = known_linear_modules(model), model.config
    if names is None or not _says_its_sizes(model):
        return None
    hidden, heads = model.hidden_size, int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    # Grouped-query attention: fewer heads for keys and values than for queries.
    keys = int(config.get("num_key_value_heads") or heads) * head_dim
    queries, inner = heads * head_dim, int(config["intermediate_size"])
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


def parameters(model: ModelSpec) -> int | None:
    """Return the parameters of the whole model; None where the architecture is not known."""
    shapes = linear_shapes(model)
    if shapes is None or model.model_type not in _COUNTED:
        return None
    config, hidden = model.config, model.hidden_size
    embeddings = model.vocab_size * hidden * (1 if config.get("tie_word_embeddings") else 2)
    linears = sum(rows * columns for rows, columns in shapes.values())
    per_layer = linears + _biases(model, shapes) + 2 * hidden + _head_norms(model)
    return embeddings + model.hidden_layers * per_layer + hidden


def _biases(model: ModelSpec, shapes: dict[str, Shape]) -> int:
    """Biases of a decoder layer: Qwen2 always has them on q, k and v, others where they say so."""
    biased: tuple[str, ...] = ()
    if model.model_type == "qwen2":
        biased = ("q_proj", "k_proj", "v_proj")
    elif model.config.get("attention_bias"):
        biased = ("q_proj", "k_proj", "v_proj", "o_proj")
    if model.config.get("mlp_bias"):
        biased += ("gate_proj", "up_proj", "down_proj")
    return sum(shapes[name][1] for name in biased)


def _head_norms(model: ModelSpec) -> int:
    """Qwen3 normalises the queries and keys of every head with one weight vector each."""
    if model.model_type != "qwen3":
        return 0
    return 2 * int(model.config["head_dim"])
