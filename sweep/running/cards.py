"""Which of a machine's GPUs a study runs on: what `--cards` means, and what is refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from reports import units
from search_spaces.errors import EnvironmentFault, InputError
from sweep.running.device_info import Card

ALL = "all"
FREE_BYTES_MISSING = 2**30
"""What a card that nobody uses may be short of: the driver's own part of it."""
FREE_SHARE_MISSING = 0.01
"""And that grows with the card."""


@dataclass(frozen=True)
class ChosenCard:
    """One card that a study runs on."""

    index: int
    """Among those that CUDA would see."""
    card: Card

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"card {self.index}"

    @property
    def cuda_name(self) -> str:
        """What ``CUDA_VISIBLE_DEVICES`` calls it, whatever that is now."""
        return self.card.uuid or str(self.index)


def cards_for(size: int, cards: Sequence[Card]) -> tuple[ChosenCard, ...]:
    """Return the first cards of a machine, as many as one trial trains on together.

    Raises as `choose_cards` does.
    """
    try:
        return choose_cards(str(size), cards)
    except (InputError, EnvironmentFault) as error:
        raise type(error)(f"data_parallel {size} needs {size} cards for a trial: {error}") from None


def teams_of(cards: Sequence[ChosenCard], *, size: int) -> list[tuple[ChosenCard, ...]]:
    """Return cards in groups of so many, which train one configuration at a time; what is left over
    trains none.
    """
    whole = len(cards) - len(cards) % size
    return [tuple(cards[first : first + size]) for first in range(0, whole, size)]


def choose_cards(typed: str, cards: Sequence[Card]) -> tuple[ChosenCard, ...]:
    """Return the cards that ``--cards`` names: ``all``, how many, or which (``0,2``, or ``2,``).

    Args:
        typed: the option's value.
        cards: every card of the machine, as CUDA counts them.

    Raises:
        InputError: it names none, or more than there are, or cards of two products, whose speeds
            are not one study's.
        EnvironmentFault: there is no card, or another process has memory on one of them.
    """
    wanted = _indices(typed, len(cards))
    if not cards:
        raise EnvironmentFault(
            f"--cards {typed}: this machine shows no NVIDIA GPU; `sweep doctor` says what is wrong"
        )
    chosen = tuple(ChosenCard(index, cards[index]) for index in wanted)
    _refuse_doubled(typed, chosen)
    _refuse_different(typed, chosen, cards)
    _refuse_busy(typed, chosen)
    return chosen


def check_spelling(typed: str) -> None:
    """Raise `InputError` where ``--cards`` names none, whatever cards a machine has."""
    _indices(typed, 0)


def _indices(typed: str, count: int) -> list[int]:
    if typed == ALL:
        return list(range(count))
    if re.fullmatch(r"[0-9]{1,6}", typed):
        return _first(typed, count)
    if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*,?", typed):
        raise InputError(f"--cards {typed}: name all, how many (2), or which of them (0,2)")
    named = [int(index) for index in typed.split(",") if index]
    twice = [index for index, times in Counter(named).items() if times > 1]
    if twice:
        raise InputError(f"--cards {typed}: card {twice[0]} is named twice")
    missing = [index for index in named if index >= count]
    if missing and count:
        raise InputError(f"--cards {typed}: there is no card {missing[0]}; {_there_are(count)}")
    return named if count else []


def _first(typed: str, count: int) -> list[int]:
    asked = int(typed)
    if asked == 0:
        raise InputError("--cards 0: a study needs a card; card 0 alone is --cards 0,")
    if asked > count and count:
        which = f"; card {asked} alone is --cards {asked}," if asked < count else ""
        raise InputError(f"--cards {typed}: {_there_are(count)}{which}")
    return list(range(min(asked, count)))


def _there_are(count: int) -> str:
    if count == 1:
        return "this machine has one card, 0"
    return f"this machine has {count} cards, 0 to {count - 1}"


def _refuse_doubled(typed: str, chosen: Sequence[ChosenCard]) -> None:
    known: dict[str, ChosenCard] = {}
    for card in chosen:
        other = known.setdefault(card.cuda_name, card)
        if other is not card:
            raise InputError(
                f"--cards {typed}: {other.name} and {card.name} are one and the same: "
                "CUDA_VISIBLE_DEVICES names it twice"
            )


def _refuse_different(typed: str, chosen: Sequence[ChosenCard], cards: Sequence[Card]) -> None:
    first = chosen[0]
    other = next((c for c in chosen if c.card.product != first.card.product), None)
    if other is None:
        return
    alike = [str(at) for at, card in enumerate(cards) if card.product == first.card.product]
    raise InputError(
        f"--cards {typed}: {first.name} is a {first.card.product} and {other.name} a "
        f"{other.card.product}, whose speeds do not compare in one study: "
        f"choose cards of one product, as --cards {_listed(alike)} does"
    )


def _listed(indices: Sequence[str]) -> str:
    return ",".join(indices) + ("," if len(indices) == 1 else "")


def _refuse_busy(typed: str, chosen: Sequence[ChosenCard]) -> None:
    busy = {c.index: words for c in chosen if (words := _in_use(c.card)) is not None}
    if not busy:
        return
    index, words = next(iter(busy.items()))
    free = [str(c.index) for c in chosen if c.index not in busy]
    rest = f", or leave it out with --cards {_listed(free)}" if free else ""
    raise EnvironmentFault(
        f"--cards {typed}: card {index} is in use: {words}: wait until it is free{rest}"
    )


def _in_use(card: Card) -> str | None:
    """Return who has memory on a card; None where nobody has."""
    if card.processes:
        first = card.processes[0]
        size = "" if first.used_bytes is None else f" has {units.gib(first.used_bytes)} of it"
        return f"process {first.pid}{size}"
    if card.free_bytes is None or card.shares_host_memory:
        return None
    used = card.memory_bytes - card.free_bytes
    if used <= FREE_BYTES_MISSING + FREE_SHARE_MISSING * card.memory_bytes:
        return None
    return f"another process has {units.gib(used)} of it"
