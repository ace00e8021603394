"""What a model's decoder layers are made of, as far as the time of a step goes by it.

Of the types whose layers `search_spaces.linears` knows it follows from the config. Any other model
is walked once, without data, in a process of its own (`sweep.predict.memory.tracing.layers`), and
what was found is kept; that of the shipped models ships.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import starmap
from pathlib import Path
from typing import Any

from qlora_sweep.search_spaces.errors import InputError, SweepError
from qlora_sweep.search_spaces.linears import Shape, linear_shapes
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.sweep.paths import cache_directory
from qlora_sweep.sweep.predict.memory.profile_store import (
    trace_layers,
    tracing_fingerprint,
    write_cache,
)

SHIPPED = Path(__file__).with_name("layers.json")
"""The layers of shipped models that had to be walked, by the model's fingerprint; written by
`make profiles`."""
HEAD_NORM_TYPES = frozenset({"qwen3", "gemma3_text", "olmo2"})
"""Model types that normalize queries and keys."""
FOUR_NORM_TYPES = frozenset({"gemma2", "gemma3_text"})
"""Model types with a norm after each half of a layer as well as before it."""
LAST_NORM_TYPES = FOUR_NORM_TYPES | {"olmo2"}
"""Model types that normalize what the last linear layer returns, which is kept for that."""

Pair = tuple[float, float]
"""Of the forward and of the backward pass."""


@dataclass(frozen=True)
class Product:
    """A product with frozen matrices that are no linear layer: a router's, or that of experts."""

    rows_per_token: float
    """Rows that are multiplied for each token: the experts that run, say."""
    rows: int
    columns: int
    """Widths of a matrix."""
    groups: int
    """Matrices that share the rows."""
    is_routed: bool
    """Whether each row is sent to one of them, as to an expert; else all have as many rows."""


@dataclass(frozen=True)
class DeltaRule:
    """Linear attention by the gated delta rule, of one layer."""

    heads: int
    """Of the values."""
    keys: int
    """Width of a key."""
    values: int
    """Width of a value."""


@dataclass(frozen=True)
class Walked:
    """What operators beside products and fused attention were seen to do, in bf16."""

    bytes_per_token: Pair
    launches: Pair
    score_bytes: Pair | None
    """Moved for each pair of tokens, where scores are written out; None where they are not."""
    score_launches: Pair | None


@dataclass(frozen=True)
class Layers:
    """Decoder layers that are alike, and what one of them is made of."""

    count: int
    linears: Mapping[str, Shape]
    """Input and output features of its linear layers, by their path within it."""
    heads: int
    queries: int
    """Width of all heads' queries; of what they score by and what they sum, the mean."""
    keys: int
    """Width of the keys, and of the values."""
    inner: int
    """Width between the two halves of the feed-forward part, of all experts that run."""
    norms: tuple[int, ...]
    """Elements of a token that each of its norms takes."""
    products: tuple[Product, ...] = ()
    recurrent: tuple[DeltaRule, ...] = ()
    """Its linear attention; none where it attends."""
    places: tuple[int, ...] = ()
    """Their numbers among the model's layers, where some layers may be without adapters; else
    none."""
    last: str | None = None
    """The linear layer whose output is only added to the stream, so that recomputation stops before
    it; None where there is none."""
    has_all_linear: bool = True
    """Whether ``all-linear`` means linear layers alone, and no experts."""
    walked: Walked | None = None
    """None where the type is known."""

    def carries(self, name: str, targets: Sequence[str]) -> bool:
        """Whether PEFT puts an adapter on a linear layer."""
        if "all-linear" in targets:
            return True
        return any(name == target or name.endswith(f".{target}") for target in targets)

    @property
    def weights(self) -> float:
        """Of one layer's matrices."""
        return self._linear_weights + sum(p.groups * p.rows * p.columns for p in self.products)

    @property
    def frozen_weights(self) -> float:
        """Of one layer, those that a token is multiplied with."""
        routed = sum(p.rows_per_token * p.rows * p.columns for p in self.products)
        return self._linear_weights + routed

    @property
    def _linear_weights(self) -> int:
        return sum(rows * columns for rows, columns in self.linears.values())


def layers_of(model: ModelSpec) -> tuple[Layers, ...] | InputError:
    """Return the kinds of a model's decoder layers, or why they are not known."""
    key = model.fingerprint
    if key not in _found:
        _found[key] = _known(model) or _read(model) or _trace(model)
    return _found[key]


_found: dict[str, tuple[Layers, ...] | InputError] = {}


def _known(model: ModelSpec) -> tuple[Layers, ...] | None:
    """Return the layers of a model whose type is known."""
    linears = linear_shapes(model)
    if linears is None:
        return None
    kind = model.model_type
    queries = linears["o_proj"][0]
    if "qkv_proj" in linears:
        keys = (linears["qkv_proj"][1] - queries) // 2
    else:
        keys = linears["k_proj"][1]
    norms = [model.hidden_size] * 2
    if kind in FOUR_NORM_TYPES:
        norms *= 2
    if kind in HEAD_NORM_TYPES:
        norms.append(queries + keys)
    last = None
    if kind not in LAST_NORM_TYPES:
        last = "down_proj"
    layers = Layers(
        count=model.hidden_layers,
        linears=linears,
        heads=int(model.config["num_attention_heads"]),
        queries=queries,
        keys=keys,
        inner=linears["down_proj"][0],
        norms=tuple(norms),
        last=last,
    )
    return (layers,)


@cache
def _shipped() -> Mapping[str, Any]:
    if not SHIPPED.is_file():
        return {}
    return dict(json.loads(SHIPPED.read_text(encoding="utf-8")))


def _path(model: ModelSpec) -> Path:
    parts = f"layers {model.fingerprint} {tracing_fingerprint()}"
    return cache_directory() / "memory" / f"{hashlib.sha256(parts.encode()).hexdigest()[:32]}.json"


def _read(model: ModelSpec) -> tuple[Layers, ...] | None:
    """Return what ships or was walked before."""
    if model.fingerprint in _shipped():
        return from_json(_shipped()[model.fingerprint])
    try:
        return from_json(json.loads(_path(model).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _trace(model: ModelSpec) -> tuple[Layers, ...] | InputError:
    try:
        walked = trace_layers(model)
    except SweepError as error:
        return InputError(str(error))
    write_cache(_path(model), walked)
    return from_json(walked)


def from_json(kinds: Sequence[Mapping[str, Any]]) -> tuple[Layers, ...]:
    """Read what the tracing child writes."""
    return tuple(map(_kind, kinds))


def _kind(values: Mapping[str, Any]) -> Layers:
    products = tuple(Product(*product) for product in values["products"])
    hidden = values["hidden"]
    linears: dict[str, tuple[int, int]] = {}
    # What brings a token back to the stream, but attention, is the second half of a gated block.
    inner = 0
    for name, (rows, columns) in values["linears"].items():
        linears[name] = (rows, columns)
        if columns == hidden and name.partition(".")[0] not in values["attention"]:
            inner += rows
    for product in products:
        if product.columns == hidden:
            inner += int(product.rows_per_token * product.rows)
    queries = round(values["queries"])
    keys = values["keys"]
    score_bytes: tuple[float, float] | None = None
    score_launches: tuple[float, float] | None = None
    if values["score_bytes"]:
        score_bytes = tuple(values["score_bytes"])
        score_launches = tuple(values["score_launches"])
        # Scores are written out, and the keys repeated for each head before.
        keys = queries
    return Layers(
        count=values["layers"],
        linears=linears,
        heads=values["heads"],
        queries=queries,
        keys=keys,
        inner=inner,
        norms=tuple(values["norms"]),
        products=products,
        recurrent=tuple(starmap(DeltaRule, values.get("recurrent", ()))),
        places=tuple(values.get("places", ())),
        last=values["last"],
        has_all_linear=values["has_all_linear"],
        walked=Walked(
            bytes_per_token=tuple(values["bytes"]),
            launches=tuple(values["launches"]),
            score_bytes=score_bytes,
            score_launches=score_launches,
        ),
    )
