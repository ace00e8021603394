"""Owns what texts add to a space: `packing`, and the lengths that are worth searching for them.

Also what may be asked of a space only with texts. Pure; knows nothing of files or tokenizers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from search_spaces.dimensions import Choices
from search_spaces.errors import InputError, in_percent, quote
from search_spaces.knobs import Packing
from search_spaces.space import SearchSpace

PACKINGS: tuple[str, ...] = get_args(Packing)
"""How rows of texts are put into micro-batches; the first is the standard recipe's."""
HOW_TO_NAME_TEXTS = "name them with --data TEXTS, or under data in a space file"


@dataclass(frozen=True)
class Length:
    """A sequence length, and what it cuts off the texts."""

    seq_len: int
    tokens_cut: float
    """Share of the texts' tokens beyond it, 0 to 1."""


@dataclass(frozen=True)
class Offered:
    """A space as texts make it, and what was done to it."""

    space: SearchSpace
    notes: tuple[str, ...] = ()
    """For a person, a sentence each."""


def with_texts(
    space: SearchSpace,
    lengths: Sequence[Length],
    *,
    names_its_lengths: bool,
    held: Collection[str] = (),
) -> Offered:
    """Return a space that searches what texts make worth searching.

    Packing is searched where nobody fixed it. Lengths are, where the person named none: those of a
    preset are for random rows. The baseline stays the published recipe, which does not pack.

    Args:
        space: as it was named.
        lengths: to offer, at least one.
        names_its_lengths: whether the space's lengths are the person's own.
        held: settings that were typed.

    Raises:
        InputError: what is left makes no space.
    """
    dimensions: dict[str, Any] = dict(space.dimensions)
    fixed, notes = dict(space.fixed), []
    if "packing" not in {*dimensions, *fixed, *held}:
        dimensions["packing"] = Choices(choices=PACKINGS)
        notes.append(f"Packing is searched as well: {', '.join(PACKINGS)}.")
    if not names_its_lengths and "seq_len" not in held:
        fixed.pop("seq_len", None)
        dimensions["seq_len"] = Choices(choices=tuple(x.seq_len for x in lengths))
        notes.append(_lengths_words(space, lengths))
    baseline = {"packing": PACKINGS[0], **space.baseline}
    changes = {"dimensions": dimensions, "fixed": fixed, "baseline": baseline}
    return Offered(space.changed(changes), tuple(notes))


def _lengths_words(space: SearchSpace, lengths: Sequence[Length]) -> str:
    shown = ", ".join(f"{x.seq_len} (cuts {in_percent(x.tokens_cut)})" for x in lengths)
    had = space.values_of("seq_len")
    own = f" in place of {', '.join(map(str, had))}" if "seq_len" in space.dimensions else ""
    return (
        f"Lengths are those of the texts{own}: {shown} of the tokens of all rows; --seq-len, "
        "or seq_len in a space file of your own, keeps another."
    )


def refuse_without_texts(space: SearchSpace) -> None:
    """Refuse what only texts, or only their held-out loss, can show.

    Raises:
        InputError: names the key, what is missing, and what to do.
    """
    for words in _refusals(space):
        raise InputError(f"space '{space.name}': {words}")


def _refusals(space: SearchSpace) -> Iterator[str]:
    if "eval_loss" in space.objectives:
        missing = list(_missing_for_quality(space))
        if missing:
            yield f"objectives: eval_loss needs {', and '.join(missing)}"
    elif space.data is not None and space.data.quality_tokens is not None:
        yield (
            f"data: quality_tokens {space.data.quality_tokens} is what trials train on for their "
            "held-out loss, which is not searched for: add eval_loss to the objectives, or leave "
            "quality_tokens out"
        )
    if space.data is None:
        values = [*space.values_of("packing"), space.baseline.get("packing", PACKINGS[0])]
        packed = next((value for value in values if value != PACKINGS[0]), None)
        if packed is not None:
            yield (
                f"packing {packed} needs texts, as random rows are full as they are: "
                f"{HOW_TO_NAME_TEXTS}, or leave packing out"
            )


def _missing_for_quality(space: SearchSpace) -> Iterator[str]:
    if space.data is None:
        yield f"texts ({HOW_TO_NAME_TEXTS})"
    elif space.data.eval_fraction == 0:
        yield "texts that are held out (data.eval_fraction above 0)"
    if space.weights != "pretrained":
        yield (
            "weights: pretrained in the space (random where nothing is said, whatever model "
            f"{quote(space.model)} has), as random ones learn nothing that compares"
        )
