"""What a study may be called: its name is a directory's too."""

from __future__ import annotations

import re

from search_spaces.errors import InputError, quote

NAME_MAX = 100
_NAME_BYTES_MAX = 200
"""A file system's names end at 255 bytes, and the lock's begins with the database's."""


def check_name(name: str) -> None:
    """Raise `InputError` where no study can have this name, which is a directory's too."""
    if len(name) > NAME_MAX or not is_file_name(name):
        raise InputError(
            f"study name must be at most {NAME_MAX} letters, digits, '.', '_' and '-', "
            f"got {quote(name)}"
        )


def is_file_name(name: str) -> bool:
    """Whether a study's name can be that of a directory: others are some other tool's."""
    is_plain = re.fullmatch(r"[^\W_][\w.-]*", name) is not None
    return is_plain and len(name.encode()) <= _NAME_BYTES_MAX
