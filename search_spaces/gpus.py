"""Owns the GPU catalogue: what each card has that a training can use, and what it costs.

Values only; what card is really in the machine is read elsewhere.
"""

from __future__ import annotations

from datetime import date
from functools import cache
from importlib.resources import files

import yaml
from pydantic import BaseModel, ConfigDict, Field

from search_spaces.config import ComputeDtype
from search_spaces.errors import InputError, did_you_mean

GIB = 1024**3


class Source(BaseModel):
    """Where a figure was read, and when."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: str
    url: str
    date: date


class GpuSpec(BaseModel):
    """One card. Bytes are what the driver reports as usable, not the name on the box."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    """Dense FLOP/s of matrix products by compute dtype, without sparsity."""
    compute_capability: tuple[int, int]
    sources: tuple[Source, ...] = ()

    @property
    def budget_bytes(self) -> int:
        """Bytes that the allocator may reserve: usable memory less the context and the headroom."""
        return self.memory_bytes - self.context_bytes - self.headroom_bytes


@cache
def gpu_catalogue() -> dict[str, GpuSpec]:
    """Return the shipped cards by name."""
    text = (files("search_spaces") / "gpus.yaml").read_text(encoding="utf-8")
    specs = [GpuSpec.model_validate(entry) for entry in yaml.safe_load(text)["gpus"]]
    return {spec.name: spec for spec in specs}


def find_gpu(name: str) -> GpuSpec:
    """Return the card that ``name`` or an alias of it names.

    Raises:
        InputError: no such card; the message names the nearest one.
    """
    wanted = name.strip().lower()
    names = {
        alias: spec for spec in gpu_catalogue().values() for alias in (spec.name, *spec.aliases)
    }
    if wanted not in names:
        raise InputError(f"unknown GPU '{name}'{did_you_mean(wanted, names)}")
    return names[wanted]


def match_product(product: str) -> GpuSpec | None:
    """Return the catalogue's card for what NVML calls it, or None where it has none."""
    wanted = _bare(product)
    for spec in gpu_catalogue().values():
        if wanted in map(_bare, (spec.product, *spec.aliases)):
            return spec
    return None


def _bare(product: str) -> str:
    """Return a product's name without the maker, case and spaces: ``a100-80gb-pcie``."""
    return product.lower().replace("nvidia", "").strip().replace(" ", "-")
