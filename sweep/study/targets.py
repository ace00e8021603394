"""Which GPU a study is for, and whether machine and model go with it."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.gpus import GIB, GpuSpec, asked_bytes, find_gpu, product_of
from qlora_sweep.search_spaces.kinds import QUANTIZATIONS
from qlora_sweep.search_spaces.linears import expert_weights, is_tied, unquantized
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.rules import Violation, violation
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.soundness import frozen_linear_weights
from qlora_sweep.sweep.running.device_info import GpuInfo

UNKNOWN_GPU_RESERVE_BYTES = GIB
"""Context, libraries and headroom on a GPU that the catalogue does not have."""
SHARED_MEMORY_RESERVE = 0.15
"""Share kept for the host where GPU and host have one memory: without it processes are ended."""
ADVICE = (
    "`sweep doctor` says what is wrong, `sweep plan` answers without a GPU, and "
    "`sweep run cpu-demo` is a study on the CPU"
)


@dataclass(frozen=True)
class ResolvedTarget:
    """A target, and what the rules need to know of the GPU behind it."""

    target: Target
    compute_capability: tuple[int, int] | None
    """What may be relied on: the least of the target's and its host's; None on a CPU, or where it
    is not known."""
    host_capability: tuple[int, int] | None
    """Of the GPU that really runs; None as above."""

    def violation(
        self, config: TrialConfig, *, model: ModelSpec, has_dataset: bool
    ) -> Violation | None:
        """Return the rule that forbids a configuration of a model here, or None."""
        return violation(
            config,
            model=model,
            compute_capability=self.compute_capability,
            device=self.target.device,
            has_dataset=has_dataset,
        )


def resolve_target(space: SearchSpace, gpu_here: GpuInfo | None) -> ResolvedTarget:
    """Return what the study of ``space`` is for on a machine with ``gpu``.

    Raises:
        InputError: no such GPU, or a budget that is missing or more than the GPU has.
        EnvironmentFault: there is no GPU here, or a smaller one than asked for.
    """
    if space.gpu == "cpu":
        if space.budget_gib is None:
            raise InputError(
                f"space '{space.name}': budget_gib is missing: gpu cpu has no memory of its own, "
                "so say how much a training may take"
            )
        target = Target(gpu="cpu", device="cpu", budget_bytes=int(space.budget_gib * GIB))
        return ResolvedTarget(target, None, None)
    wanted = None
    asked = "a GPU"
    if space.gpu != "auto":
        wanted = find_gpu(space.gpu)
        asked = f"the {wanted.name}"
    if gpu_here is None:
        raise EnvironmentFault(
            f"space '{space.name}' is for {asked}, and this machine shows no NVIDIA GPU: {ADVICE}"
        )
    host = gpu_here.known
    here = gpu_here.product
    capability = gpu_here.compute_capability
    if host is not None:
        here = product_of(host)
        capability = capability or host.compute_capability
    if wanted is None or wanted == host:
        name = gpu_here.product if host is None else host.name
        budget_bytes = _budget(space, gpu_here, host, stands_in=False)
        target = Target(gpu=name, device="cuda", budget_bytes=budget_bytes)
        return ResolvedTarget(target, capability, capability)
    target = Target(
        gpu=wanted.name,
        device="cuda",
        budget_bytes=_budget(space, gpu_here, wanted, stands_in=True),
        emulated_on=here,
    )
    capabilities = filter(None, (capability, wanted.compute_capability))
    return ResolvedTarget(target, min(capabilities, default=None), capability)


def _budget(space: SearchSpace, gpu_here: GpuInfo, spec: GpuSpec | None, *, stands_in: bool) -> int:
    """Return the tighter of what a training has on the target and what the space allows.

    Args:
        space: what is searched.
        gpu: the GPU that is here.
        spec: of the target; None for one that the catalogue does not have.
        stands_in: whether the GPU stands in for another target.
    """
    reserve = UNKNOWN_GPU_RESERVE_BYTES
    if gpu_here.shares_host_memory:
        reserve = max(reserve, int(SHARED_MEMORY_RESERVE * gpu_here.memory_bytes))
    available = gpu_here.memory_bytes - reserve
    if spec is not None and stands_in and available < spec.budget_bytes:
        raise EnvironmentFault(
            f"the {gpu_here.product} here has {units.gib(gpu_here.memory_bytes)} and cannot "
            f"stand in for the {spec.name}, whose trainings may take "
            f"{units.gib(spec.budget_bytes)}"
        )
    gpu = gpu_here.product
    if spec is not None:
        gpu = spec.name
        available = spec.budget_bytes
        if not stands_in:
            # A slice of a GPU, or one with ECC on, has less than the catalogue says.
            available -= max(0, spec.memory_bytes - gpu_here.memory_bytes)
    if space.budget_gib is None:
        return available
    try:
        return asked_bytes(space.budget_gib, available=available, gpu=gpu)
    except InputError as error:
        raise InputError(f"space '{space.name}': {error}") from error


def check_budget(space: SearchSpace, model: ModelSpec, target: Target) -> None:
    """Refuse a budget that cannot even hold the frozen weights, before minutes go into trying.

    Raises:
        InputError: names both sizes.
    """
    least = least_weight_bytes(space, model)
    if least is not None and least > target.budget_bytes:
        budget = units.gib(target.budget_bytes)
        raise InputError(
            f"space '{space.name}': model '{model.name}' needs at least {units.gib(least)} for its "
            f"frozen weights and the budget on the {target.gpu} is {budget}: "
            "name a smaller model, a larger GPU or a larger budget_gib"
        )


def least_weight_bytes(space: SearchSpace, model: ModelSpec) -> int | None:
    """Return what the weights take at the very least; None where the architecture is not known.

    Half a byte for each weight of a 4-bit linear layer or expert, one in 8 bits, two not quantized,
    as embeddings and head never are. Constants, norms and everything that trains come on top.
    """
    bits = min(QUANTIZATIONS[kind].bits for kind in space.values_of("quantization"))
    experts = expert_weights(model)
    if experts is not None:
        if unquantized(model, bits) is not None:
            bits = 16
        return experts * bits // 8 + 2 * model.vocab_size * model.hidden_size
    linears = frozen_linear_weights(model)
    if not linears:
        return None
    tables = 1 if is_tied(model) else 2
    return linears * bits // 8 + 2 * tables * model.vocab_size * model.hidden_size
