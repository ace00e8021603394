"""Copies of frozen records with other values."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel

Record = TypeVar("Record", bound=BaseModel)


def replaced(record: Record, /, **values: Any) -> Record:
    """Return a copy of a frozen record with other values of some fields, as `dataclasses.replace`
    does; values are not validated, as those of `model_copy` are not.

    Raises:
        TypeError: it has no such field, which `model_copy` would not say.
    """
    unknown = values.keys() - type(record).model_fields.keys()
    if unknown:
        name = type(record).__name__
        raise TypeError(f"{name} has no field {', '.join(sorted(unknown))}")
    return record.model_copy(update=values)
