"""The GPU catalogue: what each GPU has that a training can use."""

from __future__ import annotations

import math
import re
from datetime import date
from functools import cache
from typing import Literal

from pydantic import Field

from qlora_sweep.search_spaces.documents import Strict, shipped
from qlora_sweep.search_spaces.errors import InputError, did_you_mean
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.kinds import ComputeDtype, Numerics

GIB = 1024**3

UNMEASURED_MATRIX_SHARE = 0.8
"""Share of the dense peak that stands in for an unmeasured matrix rate, where 16-bit products
were not measured either: the median of those that were, power-limited GPUs apart, which are much
lower, and those of the next line."""
UNMEASURED_HALVED_SHARE = 1.05
"""The same of GPUs that multiply with fp32 accumulation at half of their rate, as GeForce GPUs do:
neither power nor memory keeps them from it, and they boost beyond the clock of their data sheet."""
HALVED_RATIO = 3.0
"""Of a 16-bit rate to the plain fp32 one: two where it is halved, four and more elsewhere."""
UNMEASURED_COPY_SHARE = 0.9
"""Share of the data sheet's bandwidth that stands in for an unmeasured copy; the measured ones
are at 0.75 (GDDR6 with error correction) to 0.9."""
MEMORY_TOLERANCE = 0.2
"""How far the memory that a driver tells may be from the catalogue's for the GPU to be that one:
NVML counts 3 % more than CUDA, error correction takes 6 %, and a hypervisor may keep some."""


class Citation(Strict):
    """Where a figure was read, and when."""

    what: str
    url: str
    date: date


_OLDER_PCIE = 15.75e9
_PCIE_OF_MAJOR = {8: 31.51e9, 9: 63.02e9, 10: 63.02e9, 12: 63.02e9}
"""Bytes/s of PCIe x16, of the third generation and by major compute capability: Ampere's and Ada's
GPUs have the fourth, Hopper's and Blackwell's the fifth
(https://en.wikipedia.org/wiki/PCI_Express)."""


class Cache(Strict):
    """A second-level cache that holds a micro-batch's activations, and is much faster than memory.

    So it is on Ada's and Blackwell's GeForce chips, which have little bandwidth behind it. A100 and
    H100 split theirs in two, and gain little over their memory.
    """

    bytes: int = Field(gt=0)
    bandwidth_bytes_per_second: float = Field(gt=0)
    """Of elementwise kernels whose tensors stay in it, as measured in torch."""


class Interconnect(Strict):
    """What the GPUs of one host send to each other through."""

    kind: Literal["nvlink", "pcie"]
    bytes_per_second: float = Field(gt=0)
    """Each way, by the standard; `sweep.predict.speed.steps` says what is reached of it."""


class SpeedSpread(Strict):
    """How far steps that are predicted from a GPU's rates may be off: standard deviations of
    logarithms, which `tests.sweep.predict.speed.spreads` estimates from measured steps."""

    shift: float = 0.0
    """What the GPU takes of a step, over what its rates say: the logarithm's expectation."""
    gpu: float = Field(default=0.0, ge=0)
    """Of that."""
    source: float = Field(default=0.0, ge=0)
    """Of a framework, its versions or a session, in what the GPU takes."""
    step: float = Field(default=0.0, ge=0)
    """Of a single step beside those, in what the GPU takes."""
    host: float = Field(default=0.0, ge=0)
    """Of what the host takes to launch operations."""
    shared: float = Field(default=0.0, ge=0)
    """Of a step that several GPUs take, beside all that."""
    pairs: float = Field(default=0.0, ge=0)
    """Of a step on pairs of completions, beside all that."""

    @property
    def device(self) -> float:
        """Of a whole step that waits for one GPU alone."""
        return math.hypot(self.gpu, self.source, self.step)


class SpeedSpreads(Strict):
    """What measured steps say of predicted ones."""

    others: SpeedSpread
    """Of a GPU that nothing was measured of."""
    gpus: dict[str, SpeedSpread]


class GpuSpec(Strict):
    """One GPU. Bytes are what the driver reports as usable, not the name on the box."""

    name: str
    """Catalogue name, as typed: ``a10``."""
    product: str
    """What NVML calls it, or a part of that: ``NVIDIA A10``."""
    aliases: tuple[str, ...] = ()
    memory_bytes: int = Field(gt=0)
    """Usable memory as the driver reports it."""
    context_bytes: int = Field(default=GIB // 2, ge=0)
    """Taken by the CUDA context and libraries before the first tensor."""
    headroom_bytes: int = Field(default=GIB // 2, ge=0)
    """Kept free, so that a fit on one day is a fit on the next."""
    bandwidth_bytes_per_second: float = Field(gt=0)
    peak_flops: dict[ComputeDtype, float]
    """Dense FLOP/s of matrix products by compute dtype, without sparsity: the data sheet's."""
    matrix_flops: dict[ComputeDtype, float] = Field(default={})
    """FLOP/s that large matrix products were measured to reach; absent where none was measured."""
    copy_bytes_per_second: float | None = Field(default=None, gt=0)
    """Bytes read and written by a large copy, as measured; None where it was not."""
    cache: Cache | None = None
    power_limit_watts: int | None = Field(default=None, gt=0)
    """Where it holds the clock well below boost in a training."""
    launch_seconds: float = Field(default=20e-6, gt=0)
    """Host seconds for one eager operation: Python, PEFT's and bitsandbytes' wrappers, launch.

    It is the host's figure rather than the GPU's: of the hosts that the GPU is rented with."""
    speed: SpeedSpread = SpeedSpread()
    """What measured steps say of predicted ones; the catalogue has it from a file of its own."""
    measured_8bit: tuple[Numerics, ...] = ()
    """The 8-bit types that trainings on it were measured in."""
    compute_capability: tuple[int, int]
    shares_host_memory: bool = False
    """Whether its memory is the host's, so that nothing is saved by having weights there."""
    interconnect: Interconnect | None = None
    """With its neighbours in one host; None where that is not known."""
    sources: tuple[Citation, ...] = ()

    @property
    def budget_bytes(self) -> int:
        """Bytes that the allocator may reserve: usable memory less the context and the headroom."""
        return self.memory_bytes - self.context_bytes - self.headroom_bytes

    @property
    def host_bytes_per_second(self) -> float:
        """What its host's memory sends it at most, by the standard of its PCIe x16: where its
        neighbours are joined by something else, that of its generation."""
        link = self.interconnect
        if link is not None and link.kind == "pcie":
            return link.bytes_per_second
        return _PCIE_OF_MAJOR.get(self.compute_capability[0], _OLDER_PCIE)

    @property
    def is_geforce(self) -> bool:
        """Whether it is a consumer's GPU, whose matrix units add up in fp32 at half their rate."""
        return "GeForce" in self.product

    @property
    def half(self) -> ComputeDtype:
        """The 16-bit type that its matrix units multiply."""
        return "bf16" if "bf16" in self.peak_flops else "fp16"

    def matrix_rate(self, dtype: ComputeDtype) -> float | None:
        """Return FLOP/s that large products sustain; None where the GPU has none for ``dtype``.

        Measured, or else the share of the data sheet's peak that 16-bit products reach: a power
        limit holds for other types too.
        """
        peak, half = self.peak_flops.get(dtype), self.half
        if dtype in self.matrix_flops or peak is None:
            return self.matrix_flops.get(dtype)
        if half in self.matrix_flops:
            return peak * self.matrix_flops[half] / self.peak_flops[half]
        return peak * self.unmeasured_share

    @property
    def unmeasured_share(self) -> float:
        """Share of its peaks that products are taken to reach where none was measured."""
        is_halved = self.peak_flops[self.half] < HALVED_RATIO * self.peak_flops["fp32"]
        return UNMEASURED_HALVED_SHARE if is_halved else UNMEASURED_MATRIX_SHARE

    @property
    def copy_rate(self) -> float:
        """Bytes/s of a large copy: measured, or else the usual share of the data sheet's."""
        return self.copy_bytes_per_second or (
            self.bandwidth_bytes_per_second * UNMEASURED_COPY_SHARE
        )


class _Catalogue(Strict):
    gpus: tuple[GpuSpec, ...]


@cache
def gpu_catalogue() -> dict[str, GpuSpec]:
    """Return the shipped GPUs by name."""
    known = shipped("speed_spreads.yaml", SpeedSpreads)
    return {
        spec.name: replaced(spec, speed=known.gpus.get(spec.name, known.others))
        for spec in shipped("gpus.yaml", _Catalogue).gpus
    }


def find_gpu(name: str) -> GpuSpec:
    """Return the GPU that ``name`` names: its own name, an alias, or what drivers call it.

    Case, the maker's and the family's name, spaces and hyphens do not count: ``NVIDIA L40S``,
    ``RTX 4090`` and ``3060 12 GB`` are found.

    Raises:
        InputError: no such GPU; the message names the nearest one.
    """
    spec = match_product(name)
    if spec is None:
        nearest = did_you_mean(name, gpu_names(), lists="sweep gpus")
        raise InputError(f"unknown GPU '{name}'{nearest}")
    return spec


def asked_bytes(budget_gib: float, *, available: int, gpu: str) -> int:
    """Return the bytes of a budget that was asked for.

    Args:
        budget_gib: in GiB.
        available: bytes that a training has on the GPU.
        gpu: its name, for the message.

    Raises:
        InputError: it is more than that.
    """
    asked = int(budget_gib * GIB)
    if asked > available:
        raise InputError(
            f"budget_gib {budget_gib:g} is more than the {available / GIB:.2f} GiB that a training "
            f"has on the {gpu}"
        )
    return asked


def gpu_names() -> dict[str, GpuSpec]:
    """Return the GPUs by all their names, the catalogue's own before any alias."""
    catalogue = gpu_catalogue()
    return catalogue | {alias: spec for spec in catalogue.values() for alias in spec.aliases}


def match_product(product: str, memory_bytes: int | None = None) -> GpuSpec | None:
    """Return the catalogue's GPU for what NVML or a person calls it, or None where it has none.

    Args:
        product: the name. Drivers call GPUs of several sizes alike: the RTX 3080 with 10 and with
            12 GB, the RTX 4060 Ti with 8 and with 16 GB.
        memory_bytes: what the driver tells of it, which decides between those; None where nothing
            is there to be asked. A GPU with memory of another size altogether is none of them.
    """
    alike = _by_bare_name().get(_bare(product), [])
    if memory_bytes is None:
        return next(iter(alike), None)
    off = {spec.name: abs(memory_bytes / spec.memory_bytes - 1.0) for spec in alike}
    nearest = min(alike, key=lambda spec: off[spec.name], default=None)
    if nearest is None or off[nearest.name] > MEMORY_TOLERANCE:
        return None
    return nearest


def product_of(spec: GpuSpec) -> str:
    """Return what a GPU's driver calls it, or, where that means another GPU, its own name."""
    return spec.product if match_product(spec.product) == spec else spec.name


@cache
def _by_bare_name() -> dict[str, list[GpuSpec]]:
    """Return the GPUs by each name; those that have it for themselves before those whose driver
    calls them so."""
    found: dict[str, list[GpuSpec]] = {}
    catalogue = gpu_catalogue().values()
    named = []
    for spec in catalogue:
        named.append((spec.name, spec))
        named += ((alias, spec) for alias in spec.aliases)
    named += ((spec.product, spec) for spec in catalogue)
    for name, spec in named:
        alike = found.setdefault(_bare(name), [])
        if spec not in alike:
            alike.append(spec)
    return found


def _bare(name: str) -> str:
    """Return a GPU's name without maker, family, case, spaces and hyphens: ``a10080gbpcie``."""
    bare = re.sub(r"[\s_-]", "", name.lower())
    return re.sub(r"^(nvidia)?(geforce|tesla)?(rtx)?", "", bare)
