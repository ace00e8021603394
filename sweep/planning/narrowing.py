"""Owns holding knobs of a space fixed, so that the rest of it is searched.

Pure: a space and values in, a smaller space or the one configuration that is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from search_spaces.config import TrialConfig, parse_config
from search_spaces.dimensions import read_value
from search_spaces.documents import Document
from search_spaces.space import SearchSpace
from search_spaces.validation import validate


def narrowed(space: SearchSpace, held: Mapping[str, Any]) -> SearchSpace | TrialConfig:
    """Return ``space`` with the values in ``held`` fixed; one configuration where nothing is free.

    Raises:
        InputError: no configuration takes such a value, or no batch of the space goes with it.
    """
    options = Document("options")
    values = {key: read_value(key, value, document=options) for key, value in held.items()}
    fixed = {**space.fixed, **values}
    free = {key: dimension for key, dimension in space.dimensions.items() if key not in values}
    if not free:
        return parse_config(fixed, where="options")
    declared = space.model_dump() | {"dimensions": free, "fixed": fixed}
    return validate(SearchSpace, declared, Document(f"space '{space.name}'"))
