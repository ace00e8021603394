"""What is known of a structure's memory: which tensors a training step has, and when.

A structure is what of a configuration decides which tensors exist; batch, length, rank and number
of steps only scale them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from search_spaces.config import TrialConfig, canonical, parse_config
from search_spaces.errors import InputError
from search_spaces.knobs import KNOBS
from sweep.predict.memory.polynomials import Polynomial

Account = dict[str, Polynomial]
"""Polynomial by what the bytes are for: ``activations``, ``gradients`` or ``loss``.

In the segments that happen once, ``activations 2`` is added once for each layer that the traced
layer 2 stands for.
"""


class Untraceable(InputError):  # noqa: N818 - the name says what happened
    """The model's code cannot be walked without data; the message names the module and why."""


def is_masked_by_text(config: TrialConfig) -> bool:
    """Whether a mask keeps the texts of packed rows apart; flash attention is told where they begin
    instead."""
    return config.packing == "packed" and config.attention != "flash_attention_2"


@dataclass(frozen=True)
class Structure:
    """What of a configuration decides which tensors exist."""

    config: TrialConfig
    """A configuration that has it: what only scales tensors is the recipe's, and all decoder layers
    are recomputed or none; both together give what lies between.
    """
    has_flash: bool
    """Whether the card has flash attention."""
    is_long: bool = False
    """Whether the sequence passes the attention window, so that a mask has to exist."""

    @classmethod
    def of(
        cls,
        config: TrialConfig,
        *,
        is_checkpointed: bool,
        has_flash: bool = True,
        is_long: bool = False,
    ) -> Structure:
        """Return a configuration's structure, with all layers recomputed or none."""
        resolved = canonical(config)
        shaping = {
            key: knob.traced(getattr(resolved, key)) for key, knob in KNOBS.items() if knob.traced
        }
        shaping["checkpoint_fraction"] = float(is_checkpointed)
        return cls(TrialConfig.model_construct(**shaping), has_flash, is_long)

    def in_bf16(self) -> Structure | None:
        """Return the structure that has bf16 wherever this has fp16; None where it has none.

        An adapter in bf16 is of the type of what goes through it in the one, and not in the other.
        """
        if self.config.compute_dtype != "fp16" or self.config.adapter_dtype != "fp32":
            return None
        return replace(self, config=self.config.model_copy(update={"compute_dtype": "bf16"}))

    @property
    def is_checkpointed(self) -> bool:
        """Whether all decoder layers are recomputed."""
        return self.config.checkpoint_fraction > 0

    @property
    def is_mixed(self) -> bool:
        """Whether it is put together from the profiles of `parts`, and not traced itself."""
        return self.config.quantized_fraction < 1

    def parts(self) -> tuple[Structure, ...]:
        """Return the structures to trace for it: the same with all layers in 4 bits, and with none;
        where it has layers of one kind only, itself."""
        if not self.is_mixed:
            return (self,)
        alike = self.config.model_copy(update={"quantized_fraction": 1.0})
        wide = alike.model_copy(update={"quantization": "none", "double_quant": False})
        return replace(self, config=alike), replace(self, config=wide)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**vars(self), "config": self.config.model_dump(mode="json")}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Structure:
        """Read what `to_json` wrote."""
        return cls(**{**values, "config": parse_config(values["config"])})


BIRTH, DEATH, LEAVE, FETCH, FETCH_ALL = range(5)
"""What happens in a segment: a temporary is born, or dies; something is left for a later segment;
what an earlier one left dies, in one layer or in all.
"""

Entry = tuple[int, int | str, int]
"""What happens, to what (a temporary's number or a path), and the index of the size that is born or
the layers that what dies lived through.
"""


@dataclass(frozen=True)
class Stretch:
    """A part of a tape, up to where something dies that an earlier segment has left.

    Every tensor that is born in a tape has a place, counted from zero.
    """

    births: Sequence[tuple[int, int, int]]
    """Births and deaths in order: the index of the size that is born, or -1; that of what is born
    or dies; its place.
    """
    leaves: Sequence[tuple[str, int, int]]
    """What is born to outlive the segment: its path, the index of its size, its place."""
    fetched: tuple[str, int | None] | None
    """The path of what dies at the end, and the layers it lived through; None for all layers'."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a training step."""

    kept: Account
    """How much more is alive at its end than at its beginning."""
    peaks: tuple[Account, ...]
    """How high it can rise above its beginning: its moments that are the highest at some size."""
    tape: tuple[Entry, ...]
    """Its births and deaths in order."""

    @cached_property
    def repeated(self) -> Account:
        """The part of `kept` that each layer adds."""
        return {key: part for key, part in self.kept.items() if " " in key}

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The tape, in a form that is fast to go through at any sizes."""
        places: dict[int | str, tuple[int, int]] = {}
        found: list[Stretch] = []
        births: list[tuple[int, int, int]] = []
        leaves: list[tuple[str, int, int]] = []
        count = 0
        for what, key, value in self.tape:
            if what in (BIRTH, LEAVE):
                places[key] = value, count
                births.append((value, value, count))
                if what == LEAVE:
                    leaves.append((str(key), value, count))
                count += 1
            elif what == DEATH:
                births.append((-1, *places.pop(key)))
            else:
                fetched = str(key), value if what == FETCH else None
                found.append(Stretch(births, leaves, fetched))
                births, leaves = [], []
        return (*found, Stretch(births, leaves, None))

    @cached_property
    def births(self) -> int:
        """How many tensors are born in it."""
        return sum(what in (BIRTH, LEAVE) for what, _, _ in self.tape)

    @cached_property
    def leaves(self) -> int:
        """How many of them outlive it."""
        return sum(what == LEAVE for what, _, _ in self.tape)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Segment:
        """Read what the tracing child writes."""
        return cls(
            kept=values["kept"],
            peaks=tuple(values["peaks"]),
            tape=tuple((what, key, value) for what, key, value in values["tape"]),
        )


@dataclass(frozen=True)
class Base:
    """The frozen base on the card."""

    allocated_bytes: int
    """What its tensors take, remainders that the allocator does not split off included."""
    requested_bytes: int
    """What they take without those remainders, of which expandable segments leave none."""
    reserved_bytes: int
    """The segments that hold it."""
    holes: tuple[int, ...]
    """Free blocks within those segments."""


@dataclass(frozen=True)
class Profile:
    """A structure's memory over one step, for every batch, length and rank."""

    positions: tuple[int, ...]
    """For each decoder layer, the traced layer that stands for it."""
    base: Base
    adapters: tuple[tuple[int, ...], ...]
    """Elements of every trained tensor for each unit of rank, by traced layer, as attached."""
    segments: dict[str, Segment]
    """``embed``, ``forward 0``..., ``head``, ``head_backward``, ``backward 0``..., as traced."""
    sizes: tuple[Polynomial, ...]
    """Bytes, by the tapes' index."""
    window: int | None
    """Length from which the structure is another one; None where there is none."""
    quantized_share: float | None = None
    """Of the weights that QLoRA means to hold in 4 bits, how many are; None for a 16-bit base."""
    is_same_in_fp16: bool = False
    """Whether it is known that fp16 in bf16's place comes to the same profile."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Profile:
        """Read what the tracing child writes."""
        base = values["base"]
        return cls(
            positions=tuple(values["positions"]),
            base=Base(**{**base, "holes": tuple(base["holes"])}),
            adapters=tuple(map(tuple, values["adapters"])),
            segments={n: Segment.from_json(part) for n, part in values["segments"].items()},
            sizes=tuple(values["sizes"]),
            window=values["window"],
            quantized_share=values.get("quantized_share"),
            is_same_in_fp16=values.get("is_same_in_fp16", False),
        )
