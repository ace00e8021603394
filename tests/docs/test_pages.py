"""Code on the pages is right: commands run, or at least parse, and every file loads.

A block of commands (``console``) runs in a directory of its page's own, with the studies of all
pages together. One that cannot run here has a comment in front of it, ``<!-- not run: why -->``:
what it types is then held against the commands' options alone. After ``<!-- printed -->`` the block
that follows is what the command prints, to the letter.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from qlora_sweep.search_spaces.config import parse_config
from qlora_sweep.search_spaces.gpus import GpuSpec
from qlora_sweep.search_spaces.loading import parse_space
from qlora_sweep.search_spaces.prices import load_prices
from qlora_sweep.sweep import cli
from qlora_sweep.sweep.export.trainers import trainers
from qlora_sweep.sweep.planning.question import Grpo
from qlora_sweep.sweep.request import Where
from qlora_sweep.sweep.terminal import options
from tests.docs import settings_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FIRST = [DOCS / "tutorial.md"]
"""Makes the study that other pages go on with; each would make it itself."""
PAGES = [*FIRST, *sorted({ROOT / "README.md", *DOCS.rglob("*.md")} - set(FIRST))]
LANGUAGES = {"console", "json", "python", "text", "yaml", "{toctree}", "{eval-rst}"}
NOT_RUN = "<!-- not run: "
PRINTED = "<!-- printed -->"
_FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"`((?:search_spaces|storage|sweep|reports|tests|docs)/[\w/.-]+)`")
_COMMAND = re.compile(r"`sweep ([a-z]+)[^`]*`")


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    page: Path
    line: int
    language: str
    text: str
    is_run: bool
    is_printed: bool
    """Whether the block after it is what it prints."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        lines = [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
        return [shlex.split(line, comments=True) for line in lines]


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        before = text[: found.start()].rstrip("\n").rpartition("\n")[2]
        yield Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found[2],
            re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE),
            not before.strip().startswith(NOT_RUN),
            before.strip() == PRINTED,
        )


BLOCKS = [block for page in PAGES for block in blocks(page)]


def of(*languages: str) -> list[Any]:
    return [pytest.param(one, id=str(one)) for one in BLOCKS if one.language in languages]


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    """The commands by name."""
    return dict(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page: Path) -> None:
    fences = re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(list(blocks(page)))
    assert {block.language for block in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize("block", of("console"))
def test_every_command_is_one(block: Block, commands: dict[str, Any]) -> None:
    assert block.commands
    for program, *arguments in block.commands:
        if program == "sweep" and arguments[0] in commands:
            context = commands[arguments[0]].make_context(arguments[0], arguments[1:])
            known = (*options.SPACE_SETTINGS, *Grpo.model_fields, "data.eval_fraction")
            options.settings({}, context.params.get("settings"), also=known)
            on, given = context.params.get("on"), context.params.get("place_settings")
            Where.parse(on, options.pairs("--with", given, bare=True))
        else:
            assert _is_known(program, arguments), f"{block}: {program} {' '.join(arguments)}"


def _is_known(program: str, arguments: list[str]) -> bool:
    """Whether something else than our commands is there to be typed."""
    match [program, *arguments]:
        case ["sweep", "--version" | "--help"] | ["python3", "-m", "venv", _] | [".", _]:
            return True
        case ["make", target]:
            return f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        case ["pip", "install", *_, what]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
            extras = re.findall(r"\[(.*)\]", what)
            return set(extras) <= project["optional-dependencies"].keys()
        case ["python", "-m", module, *_]:
            return importlib.util.find_spec(module) is not None
        case ["python", script, *_]:
            return (ROOT / script).is_file()
        case _:
            return False


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def ran() -> set[str]:
    """What has run on an earlier page is not run again, unless the page shows what it prints."""
    return set()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(b.language == "console" and b.is_run for b in blocks(page))],
    ids=lambda page: page.name,
)
def test_the_commands_of_a_page_run_one_after_another(
    page: Path,
    home: Path,
    ran: set[str],
    shared_tracing: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(home))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    # What commands on the pages read.
    shutil.copy(DOCS / "examples" / "dataset.jsonl", tmp_path)
    for block, after in pairwise([*blocks(page), None]):
        for program, *arguments in block.commands if block and block.is_run else ():
            line = shlex.join(arguments)
            if program != "sweep" or (line in ran and not block.is_printed):
                continue
            ran.add(line)
            code = cli.main(arguments)
            out, err = capsys.readouterr()
            assert code == 0, f"sweep {line}: {err}"
            assert out.strip() or "-o" in arguments
            if block and block.is_printed:
                assert after is not None
                assert out.rstrip() == after.text.rstrip()


@pytest.mark.parametrize("block", of("json", "python", "yaml"))
def test_every_example_is_what_it_is(block: Block, tmp_path: Path) -> None:
    if block.language == "python":
        assert ast.parse(block.text).body
    elif block.language == "json":
        try:
            documents = [json.loads(block.text)]
        except json.JSONDecodeError:
            documents = [json.loads(line) for line in block.text.splitlines()]
        for document in documents:
            assert parse_config(document.get("config", document), where=str(block))
    elif "offers" in (values := yaml.safe_load(block.text)):
        path = tmp_path / "prices.yaml"
        path.write_text(block.text, encoding="utf-8")
        assert load_prices(path)
    elif "gpus" in values:
        assert [GpuSpec.model_validate(gpu).budget_bytes > 0 for gpu in values["gpus"]]
    else:
        assert parse_space(block.text, label=str(block)).dimensions


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:'demo' has no weights")
def test_the_python_of_its_page_runs_from_top_to_bottom(
    home: Path, shared_tracing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    wanted = [b for b in blocks(DOCS / "python.md") if b.language == "python" and b.is_run]
    names: dict[str, Any] = {}
    for block in wanted:
        exec(compile(block.text, str(block), "exec"), names)
    assert names["planned"].fits is True
    assert names["study"].trials["total"] == 3
    assert names["trainer"].state.global_step == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_command_that_a_page_names_is_there(
    page: Path, commands: dict[str, Any]
) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    missing = {path for path in _PATH.findall(text) if not (ROOT / path).exists()}
    assert missing - {"search_spaces/architectures/NAME.json"} == set()
    assert set(_COMMAND.findall(text)) <= commands.keys()


def test_the_page_of_exports_names_the_versions_that_the_files_name() -> None:
    page = (DOCS / "guide" / "export.md").read_text(encoding="utf-8")
    tried = {f"{t['name']} {t['versions']}" for t in trainers().values() if "versions" in t}
    assert {words for words in tried if words not in page} == set()


def test_every_setting_is_on_its_page_as_declared_and_measured() -> None:
    written = settings_page.PAGE.read_text(encoding="utf-8")
    assert written == settings_page.page(), "run: python -m tests.docs.settings_page"
