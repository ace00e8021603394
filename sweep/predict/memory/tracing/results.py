"""Owns what an operator returns on tensors without data, worked out once for arguments of a kind.

Most of torch's operators work out the shape of a result in Python, which takes a tenth of a
millisecond; a walk asks a thousand times, mostly for what the layer before, or another structure of
the same model, has asked already. Knows nothing of who counts the results.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and type: all that there is to a tensor without data."""

_known: dict[Any, list[_Layout | None] | None] = {}
"""By operator and arguments, the layouts of what it returns; None where it has to be run."""


class _Unknown(Exception):  # noqa: N818 - it never leaves this module
    """An argument on which a result may depend in ways that its kind does not tell."""


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator returns: new tensors laid out as it would, where that is known."""
    if not _makes_new(func):
        return func(*args, **kwargs)
    try:
        key = (func, _kinds(args), _kinds(kwargs.items()) if kwargs else ())
    except _Unknown:
        return func(*args, **kwargs)
    if key not in _known:
        result = func(*args, **kwargs)
        _known[key] = _layouts(result, args)
        return result
    layouts = _known[key]
    if layouts is None:
        return func(*args, **kwargs)
    made = tuple(None if layout is None else _made(layout) for layout in layouts)
    return made if len(func._schema.returns) > 1 else made[0]


@cache
def _makes_new(func: Any) -> bool:
    """Whether an operator returns tensors that share nothing with those it was given."""
    schema = func._schema
    values = [*schema.arguments, *schema.returns]
    returned = {str(value.type) for value in schema.returns}
    takes_tensors = any("Tensor" in str(value.type) for value in schema.arguments)
    return takes_tensors and returned == {"Tensor"} and not any(v.alias_info for v in values)


def _kinds(values: Any) -> tuple[Any, ...]:
    return tuple(map(_kind, values))


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            raise _Unknown
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return _kinds(value)
    # 1, 1.0 and True are equal, and make results of other types.
    return type(value), value


def _layouts(result: Any, args: tuple[Any, ...]) -> list[_Layout | None] | None:
    """Return how the results are laid out; None where new tensors would not be the same."""
    results = result if isinstance(result, tuple | list) else (result,)
    taken = {_storage(a) for a in args if isinstance(a, torch.Tensor)}
    layouts: list[_Layout | None] = []
    for tensor in results:
        if tensor is None:
            layouts.append(None)
            continue
        layout = (tensor.shape, tensor.stride(), tensor.dtype)
        is_whole = tensor.untyped_storage().nbytes() == _made(layout).untyped_storage().nbytes()
        if not tensor.is_meta or not is_whole or _storage(tensor) in taken:
            return None
        taken.add(_storage(tensor))
        layouts.append(layout)
    return layouts


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _made(layout: _Layout) -> torch.Tensor:
    shape, strides, dtype = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
