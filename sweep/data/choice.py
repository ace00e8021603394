"""Owns the way from a person's choice of texts to prepared ones, and to the space that they make.

What runs, plans and trains on texts comes by here. Knows nothing of how texts are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from search_spaces.documents import Document
from search_spaces.errors import InputError
from search_spaces.loading import located_texts
from search_spaces.models import ModelSpec
from search_spaces.offering import HOW_TO_NAME_TEXTS, Offered, with_texts, worth_offering
from search_spaces.space import SearchSpace
from search_spaces.texts import TextsChoice
from search_spaces.validation import validate
from sweep.data.lengths import worthwhile_lengths
from sweep.data.texts import PreparedTexts, TextsRequest

ReadTexts = Callable[[TextsRequest], PreparedTexts]
"""Reads and tokenizes texts, or finds what did so before."""

_OF_THE_FILE = ("text_column", "format")
"""What is said of one file's rows and of no other's."""


def typed_texts(known: TextsChoice | None, typed: Mapping[str, Any]) -> TextsChoice | None:
    """Return the choice of texts with what was typed in place of what was known.

    Args:
        known: of the space or the study; None where it has no texts.
        typed: keys of the choice; None leaves what is known.

    Raises:
        InputError: a value that cannot be, or something said of texts that nobody named.
    """
    given = {key: value for key, value in typed.items() if value not in (None, False)}
    if not given:
        return known
    if known is None and "texts" not in given:
        option = next(iter(given)).replace("_", "-")
        raise InputError(f"--{option} is about texts, and none are named: {HOW_TO_NAME_TEXTS}")
    before = {} if known is None else known.model_dump()
    if "texts" in given:
        before = {key: value for key, value in before.items() if key not in _OF_THE_FILE}
    choice = validate(TextsChoice, {**before, **given}, Document("options"))
    return located_texts(choice, beside=Path.cwd())


def request_of(choice: TextsChoice, model: ModelSpec) -> TextsRequest:
    """Return what is to be read for a model."""
    return TextsRequest(
        source=choice.texts,
        text_column=choice.text_column,
        format=choice.format,
        completions_only=choice.completions_only,
        tokenizer=choice.tokenizer,
        model=model,
    )


def space_with_texts(
    space: SearchSpace,
    texts: PreparedTexts,
    *,
    model: ModelSpec,
    is_preset: bool,
    held: Collection[str] = (),
) -> Offered:
    """Return the space as its texts make it, and what that changed.

    Args:
        space: as it was named.
        texts: what its trials would train on.
        model: what would be trained.
        is_preset: whether nobody wrote it for these texts.
        held: knobs that were typed.

    Raises:
        InputError: what is left makes no space.
    """
    is_own = not is_preset and "seq_len" in {*space.dimensions, *space.fixed}
    candidates = worthwhile_lengths(texts)
    lengths = worth_offering(candidates, positions=model.max_positions)
    return with_texts(space, lengths, names_its_lengths=is_own, held=held)
