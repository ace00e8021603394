"""Files that people write: YAML and JSON, read strictly, and what is said of what is wrong in them.

A message names file, line, key and value, where a pydantic model refuses too.
"""

from __future__ import annotations

import errno
import json
import math
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, quote
from qlora_sweep.search_spaces.other_names import meant

BYTES_MAX = 16 * 1024 * 1024
"""More than any model config or shard index; a bigger file was named by mistake."""
YAML_MAX = 256 * 1024
"""Characters: far more than any space or price list, and read in a second or two."""
NESTED_MAX = 100
"""Levels of YAML, of which the fast parser would overflow the stack."""
FAULTS_SHOWN = 5
"""Faults of one file in one message."""
FAULTS_READ = 100
"""Of which those are chosen: a file may have as many as lines."""

KeyPath = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)
Fault = Mapping[str, Any]
"""One of pydantic's errors: its type, location, input and context."""


@dataclass(frozen=True)
class Document:
    """A mapping that was read, and where each of its keys and list items stands."""

    label: str
    """The file as the person named it, or what else the values came from."""
    values: dict[str, Any] = field(default_factory=dict)
    node: yaml.Node | None = None
    """What YAML read, with its lines; None where it is no YAML."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What a person typed for a key, by key, where that is not the key itself."""

    def where(self, *path: str | int) -> str:
        """Return ``file: line n`` of the key, or of the nearest one around it."""
        line = self.line_of(*path)
        if line is None:
            return self.label
        return f"{self.label}: line {line}"

    def line_of(self, *path: str | int) -> int | None:
        """Return the line of the key, or of the nearest one around it; None where none is known."""
        node = self.node
        line = None
        for step in path:
            here: list[tuple[yaml.Node, yaml.Node]] = []
            if isinstance(node, yaml.MappingNode):
                here = [pair for pair in node.value if pair[0].value == str(step)]
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                here = [(item, item) for item in node.value[step : step + 1]]
            if not here:
                break
            key, node = here[0]
            line = _line(key)
        return line


# Files.


def home_expanded(name: str) -> Path:
    """Return a path with ``~`` replaced where there is such a home, and as it is otherwise."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def is_directory(path: Path, *, label: str) -> bool:
    """Return whether there is such a directory.

    Raises:
        EnvironmentFault: a directory above it may not be searched.
    """
    return stat.S_ISDIR(_mode(path, label=label))


def exists(path: Path, *, label: str) -> bool:
    """Return whether there is anything under that name. Raises what `is_directory` raises."""
    return _mode(path, label=label) != 0


def _mode(path: Path, *, label: str) -> int:
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            return 0
        raise EnvironmentFault(f"{label}: cannot be read: {error.strerror}") from error
    except ValueError:
        # No file has a null character in its name.
        return 0


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
        if error.errno == errno.ELOOP:
            raise InputError(f"{label}: a link that leads to itself") from error
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
"""A descriptor that the shell opened, as for ``<(command)``: its writer ends."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def open_file(path: Path, *, label: str) -> IO[bytes]:
    """Open a file and nothing else: reading a pipe or a device may never end.

    Raises:
        InputError: it is something else.
        OSError: it cannot be opened.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not _HANDED_OVER.fullmatch(str(path)):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise InputError(f"{label}: is {kind}, not a file")
    return path.open("rb")


# YAML.

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_Loader):  # type: ignore[misc]  # one of two classes
    """The safe loader, whose every error names a line, and whose keys are text given once."""

    label = ""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        first: dict[str, int] = {}
        for key, _ in node.value:
            where = f"{self.label}: line {_line(key)}"
            if key.tag != "tag:yaml.org,2002:str":
                problem = f"{where}: a key must be text"
                if isinstance(key, yaml.ScalarNode):
                    problem += f", got {quote(key.value)}"
                raise InputError(problem)
            if key.value in first:
                raise InputError(
                    f"{where}: key {quote(key.value)} is given twice, "
                    f"first on line {first[key.value]}"
                )
            first[key.value] = _line(key)
        return super().construct_mapping(node, deep=deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except ValueError as error:
            # A date with a month of 13, for one; PyYAML lets it through without its place.
            raise yaml.MarkedYAMLError(
                problem=f"{error}, got {quote(node.value)}", problem_mark=node.start_mark
            ) from error


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def parse_yaml(text: str, *, label: str) -> Document:
    """Read a YAML mapping; tags that would build objects are errors, never executed.

    Raises:
        InputError: a syntax error, a key given twice, or something other than a mapping.
    """
    if len(text) > YAML_MAX:
        raise InputError(f"{label}: larger than {YAML_MAX:,} characters; is it the right file?")
    try:
        _refuse_traps(text, label=label)
        loader = _StrictLoader(text)
        loader.label = label
        node = loader.get_single_node()
        if node is None:
            raise InputError(f"{label}: the file is empty")
        if not isinstance(node, yaml.MappingNode):
            raise InputError(f"{label}: line {_line(node)}: expected 'key: value' lines")
        return Document(label, loader.construct_document(node), node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = label
        if mark:
            where = f"{label}: line {mark.line + 1}"
        problem = f"{where}: not valid YAML: {error.problem}"
        if error.context:
            problem += f" {error.context}"
        raise InputError(problem) from error
    except (yaml.YAMLError, ValueError) as error:
        # The reader's own errors take two lines, the second about its buffer.
        raise InputError(f"{label}: not valid YAML: {str(error).splitlines()[0]}") from error


def _refuse_traps(text: str, *, label: str) -> None:
    """Refuse aliases, a few of which can stand for gigabytes, and levels without end."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            mark: Any = event.start_mark
            problem = "aliases are not supported, write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > NESTED_MAX:
            raise InputError(f"{label}: nested too deeply")


# JSON.


def read_json(path: Path, *, label: str) -> dict[str, Any]:
    """Read a file that holds one JSON object, as programs write it.

    Raises:
        InputError: not to be read, a syntax error, or something other than an object.
    """
    return parse_object(read_text(path, label=label), where=label, is_strict=False)


def parse_object(text: str, *, where: str, is_strict: bool = True) -> dict[str, Any]:
    """Read one JSON object; of a strict one each key is given once.

    Raises:
        InputError: a syntax error, a key that is given twice, or something other than an object.
    """
    try:
        pairs_hook = None
        if is_strict:
            pairs_hook = _once
        values = json.loads(text, object_pairs_hook=pairs_hook)
    except json.JSONDecodeError as error:
        if "\n" in text.strip() or not is_strict:
            where = f"{where}: line {error.lineno}"
        column = f" at column {error.colno}"
        raise InputError(f"{where}: not valid JSON: {error.msg}{column}") from error
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


# Values that a model refuses.


class Strict(BaseModel):
    """A part of a file that a person writes: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


EXPLAINED = ConfigDict(use_attribute_docstrings=True)
"""Of models whose JSON Schema is shown: the strings below their fields are descriptions. Reading
them takes milliseconds of every start."""


class UnknownKeyError(ValueError):
    """What a validator raises for a key that is not among the known ones, which it is given."""


class ContradictionError(ValueError):
    """What a validator of a whole model raises for values that contradict each other.

    ``path`` is the key, inside the model, on whose line the message stands.
    """

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


def known_key(key: str, *, known: tuple[str, ...]) -> str:
    """Return a mapping's key if it is among ``known``: a validator for pydantic."""
    if key not in known:
        raise UnknownKeyError(known)
    return key


_RULES = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be one of {expected}",
    "int": "must be a whole number",
    "bool": "must be true or false",
    "float": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "date": "must be a date like 2026-11-21",
    "list": "must be a list",
    "tuple": "must be a list",
    "dict": "must map keys to values",
    "model": "must map keys to values",
    "missing": "is missing",
}
"""What pydantic's errors mean for their author, by what their types begin with."""


def validate(
    model: type[Model], values: object, document: Document, *, at: KeyPath = (), about: str = ""
) -> Model:
    """Return ``values`` as an instance of ``model``.

    Args:
        model: strict, with extra keys forbidden.
        values: of the document, or made from what it holds.
        document: what they came from.
        at: where in it they stand.
        about: stands before the key in the message, but for an unknown one.

    Raises:
        InputError: of a whole file all that is wrong, each fault after its line, else the first;
            each as `explain` says.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = _faults(error)
        if document.node is None or at:
            faults = faults[:1]
        first_faults: dict[KeyPath, tuple[float, str]] = {}
        for fault in faults[:FAULTS_READ]:
            path = at + _path(fault)
            words = _words(fault, model, document, at=at, about=about)
            first_faults.setdefault(path, (document.line_of(*path) or math.inf, words))
        ordered = sorted(first_faults.values(), key=lambda one: one[0])[:FAULTS_SHOWN]
        parts = []
        for line, words in ordered:
            if line < math.inf:
                words = f"Line {line}: {words}"
            parts.append(words)
        left = len(first_faults) + len(faults[FAULTS_READ:]) - len(parts)
        if left:
            parts.append(f"And {left} more")
        text = ". ".join(parts).replace("?. ", "? ")
        if text.startswith("Line "):
            text = text.replace("Line ", "line ", 1)
        if document.label:
            text = f"{document.label}: {text}"
        raise InputError(text) from error


def shipped(name: str, model: type[Model]) -> Model:
    """Return a YAML file that ships in this package, read strictly."""
    text = (files("qlora_sweep.search_spaces") / name).read_text(encoding="utf-8")
    document = parse_yaml(text, label=name)
    return validate(model, document.values, document)


def explain(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Return one line for the first fault of a pydantic error: key, rule, and what broke it.

    Args:
        error: what pydantic raised.
        model: what refused the values; an unknown key is then compared with its fields.
    """
    return _words(_faults(error)[0], model, Document(""), at=(), about="")


def refusal(
    error: ValidationError, model: type[BaseModel], *, at: KeyPath, about: str = ""
) -> ContradictionError:
    """Return what a validator raises for a part of a YAML file that ``model`` refused."""
    fault = _faults(error)[0]
    words = _words(fault, model, _IN_YAML, at=at, about=about)
    return ContradictionError(words, *at, *_path(fault))


_IN_YAML = Document("", node=yaml.MappingNode("", []))


def _faults(error: ValidationError) -> list[Fault]:
    """Return unknown keys before anything else: what is missing is often a key misspelt."""
    return sorted(error.errors(), key=lambda fault: not _is_unknown_key(fault))


def _is_unknown_key(fault: Fault) -> bool:
    is_extra = fault["type"] in ("extra_forbidden", "invalid_key")
    return is_extra or isinstance(_raised(fault), UnknownKeyError)


def _raised(fault: Fault) -> object:
    """Return what one of our own validators raised; None where pydantic itself refuses."""
    return fault.get("ctx", {}).get("error")


def _path(fault: Fault) -> KeyPath:
    """Return where a fault is, without what pydantic adds to a location for its own types."""
    path = []
    for step in fault["loc"]:
        if step != "[key]" and not str(step).startswith("function-"):
            path.append(step)
    raised = _raised(fault)
    if isinstance(raised, ContradictionError):
        path += raised.path
    return tuple(path)


def _words(
    fault: Fault, model: type[BaseModel] | None, document: Document, *, at: KeyPath, about: str
) -> str:
    path = _path(fault)
    kind = fault["type"]
    raised = _raised(fault)
    if _is_unknown_key(fault):
        key = str(path[-1])
        around = (at + path)[-2:-1]
        under = ""
        if around and isinstance(around[0], str):
            under = f" under {around[0]}"
        near = meant(key, _known_keys(fault, model), lists="sweep schema")
        return f"unknown key {quote(key)}{under}{near}"
    if isinstance(raised, ContradictionError):
        return f"{about}{raised}"
    name = ".".join(map(str, path))
    subject = about
    if path:
        subject = f"{about}{document.names.get(name, name)} "
    if kind == "value_error":
        return f"{subject}{raised}"
    context = fault.get("ctx", {})
    if kind == "union_tag_invalid":
        return f"{subject}has an unknown {context['discriminator']}: {quote(context['tag'])}"
    rule = fault["msg"]
    for start, text in _RULES.items():
        if kind.startswith(start):
            rule = text.format(**context)
            break
    sentence = f"{subject}{rule}"
    if kind != "missing":
        sentence += f", got {quote(fault['input'])}"
    if document.node is not None:
        sentence += _yaml_hint(fault)
    return sentence


def _known_keys(fault: Fault, model: type[BaseModel] | None) -> tuple[str, ...]:
    """Return the keys that the mapping around an unknown one may have."""
    if isinstance(raised := _raised(fault), UnknownKeyError):
        return tuple(raised.args[0])
    models: list[type[BaseModel]] = []
    if model is not None:
        models = [model]
    for step in _path(fault)[:-1]:
        inner: list[type[BaseModel]] = []
        for around in models:
            if step in around.model_fields:
                inner += _models_in(around.model_fields[step].annotation)
        # A list's index and a mapping's key lead to no field: the models stay those of its items.
        models = inner or models
    keys: list[str] = []
    for around in models:
        keys += around.model_fields
    return tuple(keys)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _yaml_hint(fault: Fault) -> str:
    """Say what YAML made of something that was perhaps meant otherwise."""
    match fault["type"], fault["input"]:
        case "literal_error", False:
            return '; YAML reads an unquoted no or off as false: write a word in quotes, "none"'
        case "literal_error", None:
            return '; YAML reads null, ~ and nothing as no value: write a word in quotes, "none"'
        case "int_type", str() as text:
            with suppress(ValueError):
                float(text)
                return "; YAML reads it as text: write 1000, not '1000' or 1e3"
    return ""
