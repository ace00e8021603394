"""Which tests a change concerns: those of the rooms it is in, of the rooms that import what it
changes, those that import it themselves, and the contracts.

    python -m tests.concerned [BASE]    print what pytest is to be given: changed since BASE (HEAD^)

What is not committed is part of the change. Where nobody can tell, as without git, or where a file
concerns all, as pyproject.toml does, that is ``tests``, the whole suite.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGE = "qlora_sweep"
EVERYTHING = "tests"
CONTRACTS = ("tests/contract", "tests/golden")
"""Run whatever changes: they hold every runner, every storage and every answer."""
SOURCES = ("search_spaces", "storage", "reports", "sweep")
COMMANDS = ("sweep", "sweep/terminal")
"""Rooms of what a person types."""
AS_TYPED = ("tests/docs", "tests/test_demo.py", "tests/test_wheel.py", "tests/sweep/*.py")
"""Tests that type commands, whatever room does what they say."""
OF_NO_TEST = ("CHANGELOG.md", "LICENSE", ".gitignore", "tests/bench/results/")
BY_ROOM = {
    "sweep/study": ("tests/faults",),
    "storage": ("tests/faults",),
    "sweep/training": ("tests/gpu",),
    "sweep/running": ("tests/gpu", "tests/faults"),
    "search_spaces": ("tests/gpu",),
    "sweep/launching": ("tests/rented",),
    "sweep/export": ("tests/exports",),
    # Exported scripts have its source in them.
    "sweep/data": ("tests/sweep/export",),
}
"""Further tests of a room than those in the folder of its name."""


def changed_files(base: str) -> list[str] | None:
    """Return what differs from a commit, paths in the repository; None where git cannot say."""
    differing = ["git", "diff", "--name-only", "--no-renames", base]
    untracked = ["git", "ls-files", "--others", "--exclude-standard"]
    names: list[str] = []
    for command in (differing, untracked):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return None
        names.extend(done.stdout.splitlines())
    return names


def concerned(changed: Iterable[str]) -> list[str]:
    """Return the tests that changed files concern, as pytest is given them."""
    found = set(CONTRACTS)
    modules: set[str] = set()
    for name in changed:
        if name.startswith(OF_NO_TEST):
            continue
        if name.startswith(("docs/", "README.md")):
            found.add("tests/docs")
        elif name.startswith(tuple(f"{room}/" for room in SOURCES)):
            modules.update(_modules_of(name))
            found.update(_tests_of(_room_of_file(name)))
        elif not name.startswith("tests/") or name.startswith("tests/data/"):
            return [EVERYTHING]
        elif name.endswith(".py"):
            found.update(_tests_with(name))
        else:
            found.add("/".join(Path(name).parts[:2]))
    for module in modules:
        for importer in _graph().find_modules_that_directly_import(module):
            found.update(_tests_of(_room_of_module(importer)))
        importers = _importers().get(f"{module.replace('.', '/')}.py", set())
        found.update(name for name in importers if _is_test(name))
    return _shortest(found)


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(PACKAGE, cache_dir=None)


def _modules_of(name: str) -> set[str]:
    """Return the modules that a file of the package is, or that name it or its folder; where none
    does, all beside it."""
    path = Path(name)
    if path.suffix == ".py":
        parts = path.with_suffix("").parts
        named = ".".join((PACKAGE, *parts)).removesuffix(".__init__")
        return {named} & _graph().modules
    folder = path.parent
    while folder.parts:
        package = ".".join((PACKAGE, *folder.parts))
        if package in _graph().modules:
            beside = {package, *_graph().find_children(package)}
            return {module for module in beside if _names(module, path)} or beside
        folder = folder.parent
    return set()


def _names(module: str, path: Path) -> bool:
    source = Path(*module.split(".")[1:])
    files = (ROOT / source.with_suffix(".py"), ROOT / source / "__init__.py")
    (text,) = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    folder = path.parent.name
    return f'{path.name}"' in text or f'"{folder}"' in text or f'"{folder}/' in text


def _room_of_file(name: str) -> str:
    parts = Path(name).parts
    if parts[0] == "sweep" and len(parts) > 2:
        return f"sweep/{parts[1]}"
    return parts[0]


def _room_of_module(module: str) -> str:
    parts = module.split(".")[1:]
    if parts[:1] == ["sweep"] and len(parts) > 1 and _graph().find_children(_package(parts[:2])):
        return f"sweep/{parts[1]}"
    return parts[0] if parts else "sweep"


def _package(parts: list[str]) -> str:
    return ".".join((PACKAGE, *parts))


def _tests_of(room: str) -> Iterator[str]:
    if room == "sweep":
        yield "tests/sweep/*.py"
    elif (ROOT / "tests" / room).is_dir():
        yield f"tests/{room}"
    if room in COMMANDS:
        yield from AS_TYPED
    yield from BY_ROOM.get(room, ())


def _tests_with(name: str) -> set[str]:
    """Return a changed test, or all that import or are set up by what is shared."""
    if _is_test(name):
        return {name} if (ROOT / name).exists() else set()
    reached = {name}
    waiting = [name]
    while waiting:
        for importer in _importers().get(waiting.pop(), set()) - reached:
            reached.add(importer)
            waiting.append(importer)
    found = {each for each in reached if _is_test(each)}
    found.update(str(Path(each).parent) for each in reached if each.endswith("/conftest.py"))
    return found


def _is_test(name: str) -> bool:
    return Path(name).name.startswith("test_")


@cache
def _importers() -> dict[str, set[str]]:
    """Return of each file in tests/ and of the package those in tests/ that import it."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        importer = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for module in _imported(node):
                found.setdefault(f"{module.replace('.', '/')}.py", set()).add(importer)
    return found


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the modules of tests/ and of the package that a statement may import."""
    if isinstance(node, ast.Import):
        names = [each.name for each in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        # What runs in a process of its own is named in its command.
        names = [node.value]
    else:
        return
    for name in names:
        if name.startswith(("tests.", f"{PACKAGE}.")) and " " not in name:
            yield name


def _shortest(found: set[str]) -> list[str]:
    """Return paths that exist, without those in a folder that is there as a whole."""
    paths: set[str] = set()
    for name in found:
        if "*" in name:
            matches = (str(path.relative_to(ROOT)) for path in ROOT.glob(name))
            paths.update(match for match in matches if _is_test(match))
        else:
            paths.add(name)
    return sorted(path for path in paths if not paths & {str(p) for p in Path(path).parents})


def main(base: str = "HEAD^") -> None:
    """Print them, on a line."""
    changed = changed_files(base)
    if changed is None:
        print(EVERYTHING)
    else:
        print(*concerned(changed))


if __name__ == "__main__":
    main(*sys.argv[1:])
