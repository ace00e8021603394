"""Layers that are no attention over all tokens: which model types have them, and whose kernels run
them.

Read in transformers 5.17. Where the package is missing, transformers runs a loop in plain PyTorch
in its place, which computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.version import Version

from qlora_sweep.search_spaces.errors import install_extra
from qlora_sweep.search_spaces.models import ModelSpec


@dataclass(frozen=True)
class RecurrentKind:
    """A kind of recurrent layer."""

    label: str
    """What it is called, in the plural."""
    package: str | None
    """Distribution whose kernels transformers calls for it; None for torch's own operators."""
    function: str
    """What transformers' modelling code calls the loop in those kernels' place; empty where the
    kernels are not modelled."""
    is_built: bool = False
    """Whether the package is built from source where it is installed."""

    @property
    def is_predicted(self) -> bool:
        """Whether what the kernels keep and take is known."""
        return self.package is None or bool(self.function)

    @property
    def unpredicted(self) -> str:
        """Why its memory and speed are not predicted, and what to do."""
        where = "are not modelled"
        if self.is_built:
            where = "have to be built from source and are not modelled"
        return f"the kernels of its {self.label} ({self.package}) {where}: a trial measures it"


FLASH_LINEAR_ATTENTION = "flash-linear-attention"
EXTRA = "hybrid"
"""What installs it."""
LEAST_TRITON_ON_HOPPER = "3.7.1"
_WRONG_TRITON = (Version("3.4.0"), Version(LEAST_TRITON_ON_HOPPER))
"""From which version on, and up to which, Triton compiles a kernel of the gated delta rule's
backward pass wrongly for Hopper GPUs; flash-linear-attention 0.6.0 raises an error there (its issue
640, `fla/ops/common/chunk_o.py`)."""
_HOPPER = 9
SLOWER = "more than ten times slower on an H100, as transformers says"
GATED_DELTA_RULE = RecurrentKind(
    "linear attention layers", FLASH_LINEAR_ATTENTION, "torch_chunk_gated_delta_rule"
)
KIMI_DELTA_ATTENTION = RecurrentKind(
    "Kimi linear attention layers", FLASH_LINEAR_ATTENTION, "chunk_kimi_delta_attention"
)
SHORT_CONVOLUTION = RecurrentKind("short convolutions", None, "")
STATE_SPACE = RecurrentKind("state-space layers", "mamba-ssm and causal-conv1d", "", is_built=True)

_TYPES = {
    GATED_DELTA_RULE: "olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text",
    KIMI_DELTA_ATTENTION: "glm5_next_text kimi_linear",
    SHORT_CONVOLUTION: "lfm2 lfm2_moe",
    STATE_SPACE: """
        bamba falcon_h1 falcon_mamba granitemoehybrid jamba mamba mamba2 nemotron_h zamba zamba2
    """,
}
RECURRENT: Mapping[str, RecurrentKind] = {
    kind: layers for layers, kinds in _TYPES.items() for kind in kinds.split()
}
"""By model type."""
_ATTENDING = frozenset({"attention", "full_attention"})
"""Kinds of layers that attend to all tokens, as configs name them."""
_OTHER_STATEFUL = frozenset({"inkling_text", "minimax", "recurrent_gemma", "rwkv", "xlstm"})
"""Further types whose layers carry something from token to token."""


def recurrent_kind(model: ModelSpec) -> RecurrentKind | None:
    """Return the kind of a model's recurrent layers; None where it has none that is known.

    Of a type with such layers a model may be without: every layer of Granite 4.0 Micro attends.
    """
    layers = model.config.get("layer_types")
    if isinstance(layers, list) and _ATTENDING.issuperset(layers):
        return None
    return RECURRENT.get(model.model_type)


def is_stateful(model: ModelSpec) -> bool:
    """Whether a model's layers carry something from token to token that no mask stops."""
    if model.model_type in RECURRENT:
        return recurrent_kind(model) is not None
    return model.model_type in _OTHER_STATEFUL


def needed_package(model: ModelSpec) -> str | None:
    """Return the distribution without which a model's linear attention runs in plain PyTorch."""
    kind = recurrent_kind(model)
    if kind is None or kind.is_built:
        return None
    return kind.package


def is_installed(package: str) -> bool:
    """Whether a distribution is installed here; it is not imported."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def refused_triton(version: str | None, compute_capability: tuple[int, int] | None) -> str | None:
    """Return why flash-linear-attention does not train on a GPU with a version of Triton; None
    where it does, or either is not known."""
    if version is None or compute_capability is None or compute_capability[0] != _HOPPER:
        return None
    first, fixed = _WRONG_TRITON
    if not first <= Version(version) < fixed:
        return None
    return (
        f"its backward pass is refused with Triton {version} on Hopper GPUs, which compiles it "
        f"wrongly: Triton {fixed} or newer is needed"
    )


def needs_words(model: ModelSpec) -> str | None:
    """Return what a model's speed and memory need to be as predicted; None where it needs
    nothing."""
    package = needed_package(model)
    if package is None:
        return None
    return (
        f"linear attention of {model.name} is predicted by the kernels of {package} "
        f"({install_extra(EXTRA)}); without them transformers loops in plain PyTorch, which is "
        f"{SLOWER}"
    )


def plain_loop(model: ModelSpec, *, is_on_gpu: bool) -> str | None:
    """Return that a model's linear attention runs here in plain PyTorch, and why; None where it
    does not.

    Args:
        model: what is trained.
        is_on_gpu: whether it is trained on a GPU.
    """
    package = needed_package(model)
    if package is None or (is_on_gpu and is_installed(package)):
        return None
    loops = f"linear attention of {model.name} runs as a loop in plain PyTorch"
    if not is_on_gpu:
        return f"{loops}, as the kernels of {package} need a GPU"
    return f"{loops}, which is {SLOWER}, as {package} is not installed here: {install_extra(EXTRA)}"
