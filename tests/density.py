"""Density of the code: what reads slowly, counted in each file and each room, held to limits.

`python -m tests.density` (part of `make lint`) names each file and room that is over a limit.
`--rooms` prints the figures by room instead.
"""

import argparse
import ast
import io
import math
import os
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("qlora_sweep", "search_spaces", "storage", "reports", "sweep")

# At most so many per 10,000 tokens, rounded up to a whole count: one is allowed in any file.
LIMITS = {
    "conditional expressions": 24,
    "comprehensions": 40,
    "tuple assignments": 4,
    "displays with starred items": 1.5,
}
PER_TOKENS = 10_000

LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


@dataclass
class Density:
    """What was counted in a file, or in the files of a room."""

    tokens: int = 0
    statements: int = 0
    places: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in LIMITS})

    def add(self, other: "Density") -> None:
        """Count what another file has as well."""
        self.tokens += other.tokens
        self.statements += other.statements
        for kind, places in other.places.items():
            self.places[kind] += places

    def rate(self, kind: str) -> float:
        """Occurrences of a kind per 10,000 tokens."""
        return len(self.places[kind]) * PER_TOKENS / max(self.tokens, 1)

    def allowed(self, kind: str) -> int:
        """How many of a kind so much code may have."""
        return max(1, math.ceil(LIMITS[kind] * self.tokens / PER_TOKENS))

    def excesses(self) -> list[str]:
        """The kinds of which there are more than allowed."""
        return [kind for kind in LIMITS if len(self.places[kind]) > self.allowed(kind)]


def measure(text: str, name: str) -> Density:
    """Return the density of a file's text; name: the file, for the places."""
    measured = Density()
    tree = ast.parse(text, name)
    uncounted_lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            uncounted_lines.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.stmt):
            measured.statements += 1
        kind = _kind(node)
        if kind is not None:
            measured.places[kind].append(f"{name}:{node.lineno}")
    for token in _tokens(text):
        if token.start[0] not in uncounted_lines:
            measured.tokens += 1
    return measured


def _is_docstring(node: ast.AST) -> bool:
    is_expression = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_expression and isinstance(node.value.value, str)


def _kind(node: ast.AST) -> str | None:
    """Return which limit a node counts towards."""
    match node:
        case ast.IfExp():
            return "conditional expressions"
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return "comprehensions"
        case ast.Assign(value=ast.Tuple() | ast.List()):
            if any(isinstance(target, ast.Tuple | ast.List) for target in node.targets):
                return "tuple assignments"
        case ast.List() | ast.Tuple() | ast.Set():
            # `first, *rest = values` takes apart, and displays nothing.
            is_target = isinstance(getattr(node, "ctx", None), ast.Store)
            if not is_target and any(isinstance(item, ast.Starred) for item in node.elts):
                return "displays with starred items"
    return None


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """Yield what is written, without comments and layout; an f-string is one token.

    From Python 3.12 on the tokenizer gives an f-string's parts: with those the figures would
    depend on the version.
    """
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        token_name = tokenize.tok_name[token.type]
        if token_name in ("FSTRING_END", "TSTRING_END"):
            depth -= 1
        elif depth == 0 and token.type not in LAYOUT:
            yield token
        if token_name in ("FSTRING_START", "TSTRING_START"):
            depth += 1


def room_of(name: str) -> str:
    """Return the room of a file: a folder at the top, or one of sweep's: "sweep/export/"."""
    parts = name.split("/")
    if parts[0] == "sweep" and len(parts) > 2:
        return f"sweep/{parts[1]}/"
    return f"{parts[0]}/"


def survey(root: Path) -> dict[str, Density]:
    """Return the density of each file, by its path from the root, and of each room ("reports/")."""
    surveyed: dict[str, Density] = {}
    for folder in FOLDERS:
        for directory, subdirectories, files in os.walk(root / folder):
            subdirectories.sort()
            if "vendor" in subdirectories:
                subdirectories.remove("vendor")
            for file in sorted(files):
                if not file.endswith(".py"):
                    continue
                path = Path(directory, file)
                name = path.relative_to(root).as_posix()
                surveyed[name] = measure(path.read_text(encoding="utf-8"), name)
                surveyed.setdefault(room_of(name), Density()).add(surveyed[name])
    return surveyed


def faults(surveyed: dict[str, Density]) -> list[str]:
    """Return what is too dense, a text each.

    Args:
        surveyed: the density of each file and room, by name.
    """
    messages: list[str] = []
    for name in sorted(surveyed):
        messages += _excess_messages(name, surveyed[name])
    return messages


def _excess_messages(name: str, measured: Density) -> list[str]:
    messages = []
    for kind in measured.excesses():
        places = measured.places[kind]
        limit = f"{LIMITS[kind]} per {PER_TOKENS:,}, here {measured.allowed(kind)}"
        count = f"{len(places)} {kind} in {measured.tokens:,} tokens"
        messages.append("\n  ".join([f"{name}: {count}; the limit is {limit}"] + places))
    return messages


def table(surveyed: dict[str, Density]) -> str:
    """Return the figures of each room and of all, as a table."""
    rooms = {name: measured for name, measured in surveyed.items() if name.endswith("/")}
    total = Density()
    for measured in rooms.values():
        total.add(measured)
    rooms["all"] = total
    names = f"{'if-else':>9}{'compr.':>8}{'tuples':>8}{'starred':>9}"
    lines = [f"{'':18}{'tokens':>9}{'a statement':>13}{names}"]
    for name, measured in rooms.items():
        tokens_a_statement = measured.tokens / max(measured.statements, 1)
        conditional, comprehensions, tuples, starred = (measured.rate(kind) for kind in LIMITS)
        lines.append(
            f"{name:18}{measured.tokens:9,}{tokens_a_statement:13.1f}{conditional:9.1f}"
            f"{comprehensions:8.1f}{tuples:8.1f}{starred:9.1f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Print what is too dense, or the table; return the exit code."""
    parser = argparse.ArgumentParser(description="Hold the code to limits of density.")
    parser.add_argument(
        "--rooms", action="store_true", help="print the figures by room, per 10,000 tokens"
    )
    arguments = parser.parse_args()
    surveyed = survey(ROOT)
    if arguments.rooms:
        print(table(surveyed))
        return 0
    messages = faults(surveyed)
    for message in messages:
        print(message)
    if messages:
        print(f"density: {len(messages)} to mend")
        return 1
    print("density: all holds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
