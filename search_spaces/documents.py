"""Owns reading a file that a person wrote: YAML with the line of every key, and JSON, both strict.

Knows nothing of what the keys mean.
"""

from __future__ import annotations

import errno
import json
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from search_spaces.errors import EnvironmentFault, InputError, quote

BYTES_MAX = 16 * 1024 * 1024
"""More than any space, model config or shard index; a bigger file was named by mistake."""

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """A mapping that was read, and where each of its keys and list items stands."""

    label: str
    """The file as the person named it, or what else the values came from."""
    values: dict[str, Any] = field(default_factory=dict)
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    """Line from 1 by path of keys, ``('dimensions', 'seq_len', 0)`` for a list's first item; empty
    where it is no YAML."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What a person typed for a key, by key, where that is not the key itself."""

    def where(self, *path: str | int) -> str:
        """Return ``file: line n`` of the key, or of the nearest one around it."""
        line = self.line_of(*path)
        return self.label if line is None else f"{self.label}: line {line}"

    def line_of(self, *path: str | int) -> int | None:
        """Return the line of the key, or of the nearest one around it; None where none is known."""
        ends = range(len(path), 0, -1)
        return next((self.lines[path[:end]] for end in ends if path[:end] in self.lines), None)


def home_expanded(name: str) -> Path:
    """Return a path with ``~`` replaced where there is such a home, and as it is otherwise."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def is_directory(path: Path, *, label: str) -> bool:
    """Return whether there is such a directory.

    Raises:
        EnvironmentFault: nobody can tell, as around it is a directory that may not be searched.
    """
    kind = _kind(path, label=label)
    return kind is not None and stat.S_ISDIR(kind)


def exists(path: Path, *, label: str) -> bool:
    """Return whether there is anything under that name. Raises what `is_directory` raises."""
    return _kind(path, label=label) is not None


def _kind(path: Path, *, label: str) -> int | None:
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return None
        raise EnvironmentFault(f"{label}: cannot be read: {error.strerror}") from error
    except ValueError:
        # A name with a null character in it is nobody's.
        return None


def read_text(path: Path, *, label: str) -> str:
    """Return the text of a file.

    Raises:
        InputError: there is no such file, it is none, too large, or not UTF-8.
        EnvironmentFault: it is there and cannot be read.
    """
    try:
        with open_file(path, label=label) as file:
            data = file.read(BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"{label}: no such file") from error
    except OSError as error:
        raise EnvironmentFault(f"{label}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{quote(label)}: not a file name: {error}") from error
    if len(data) > BYTES_MAX:
        raise InputError(f"{label}: larger than {BYTES_MAX:,} bytes; is it the right file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{label}: not UTF-8 text, byte {error.start} is wrong") from error


_HANDED_OVER = re.compile(r"/dev/(stdin|fd/\d+)|/proc/self/fd/\d+")
"""A descriptor that the shell opened, as for ``<(command)``: whoever writes to it ends."""

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (lambda _: True, "a device"),
)


def open_file(path: Path, *, label: str) -> IO[bytes]:
    """Open a file and nothing else: reading a pipe or a device may never end.

    Raises:
        InputError: it is something else.
        OSError: it cannot be opened.
    """
    if _HANDED_OVER.fullmatch(str(path)):
        return path.open("rb")
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = next(words for is_kind, words in _KINDS if is_kind(mode))
        raise InputError(f"{label}: is {kind}, not a file")
    return path.open("rb")


class _StrictLoader(yaml.SafeLoader):
    """The safe loader without aliases, whose every error names a line.

    A few nested aliases can stand for gigabytes.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases are not supported, write the value out",
                problem_mark=self.get_mark(),
            )
        return super().compose_node(parent, index)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except ValueError as error:
            # A date with a month of 13, for one; PyYAML lets it through without its place.
            raise yaml.MarkedYAMLError(
                problem=f"{error}, got {quote(node.value)}", problem_mark=node.start_mark
            ) from error


def parse_yaml(text: str, *, label: str) -> Document:
    """Read a YAML mapping; tags that would build objects are errors, never executed.

    Raises:
        InputError: a syntax error, a key given twice, or something other than a mapping.
    """
    lines: dict[KeyPath, int] = {}
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise InputError(f"{label}: the file is empty")
        if not isinstance(node, yaml.MappingNode):
            raise InputError(f"{label}: line {_line(node)}: expected 'key: value' lines")
        _note_lines(node, (), label=label, lines=lines)
        values = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise InputError(f"{label}: {_syntax_error(error)}") from error
    except (yaml.YAMLError, ValueError) as error:
        # The reader's own errors take two lines, the second about its buffer.
        raise InputError(f"{label}: not valid YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise InputError(f"{label}: nested too deeply") from error
    return Document(label, values, lines)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _note_lines(node: yaml.Node, path: KeyPath, *, label: str, lines: dict[KeyPath, int]) -> None:
    """Note the line of every key and list item below ``node``; refuse what is not a plain key."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*path, index] = _line(item)
            _note_lines(item, (*path, index), label=label, lines=lines)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, _key(key, label=label))
            if here in lines:
                raise InputError(
                    f"{label}: line {_line(key)}: key {quote(key.value)} is given twice, "
                    f"first on line {lines[here]}"
                )
            lines[here] = _line(key)
            _note_lines(value, here, label=label, lines=lines)


def _key(node: yaml.Node, *, label: str) -> str:
    if node.tag != "tag:yaml.org,2002:str":
        text = f", got {quote(node.value)}" if isinstance(node, yaml.ScalarNode) else ""
        raise InputError(f"{label}: line {_line(node)}: a key must be text{text}")
    return str(node.value)


def _syntax_error(error: yaml.MarkedYAMLError) -> str:
    """Return line and problem of a YAML error in one line."""
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}: " if mark else ""
    context = f" {error.context}" if error.context else ""
    return f"{where}not valid YAML: {error.problem}{context}"


def read_json(path: Path, *, label: str) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        InputError: not to be read, a syntax error, or something other than an object.
    """
    text = read_text(path, label=label)
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{label}: line {error.lineno}: not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{label}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{label}: expected a JSON object, got {quote(values)}")
    return values


def parse_object(line: str, *, where: str) -> dict[str, Any]:
    """Read a line of a file of JSON objects, each of whose keys is given once.

    Raises:
        InputError: a syntax error, a key that is given twice, or something other than an object.
    """
    try:
        values = json.loads(line, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{where}: must be a JSON object, got {quote(values)}")
    return values


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object whose keys are each given once."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {quote(key)} is given twice")
        values[key] = value
    return values
