"""What commands and the report say of stored studies, and the files that are exported of them."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from qlora_sweep.sweep.cli import main
from qlora_sweep.sweep.export.formats import endings_of, format_names
from qlora_sweep.sweep.paths import cache_directory, runs_directory, storage_url
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from tests.golden.frozen import Frozen
from tests.golden.stored_studies import MODEL, store, the_studies
from tests.reports.test_page import Page
from tests.sweep.shared_tracing import asked_of

pytestmark = pytest.mark.timeout(600)
NAMES = ("speed", "front", "texts", "gpus", "memory")


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tracing_child: TracingChildren
) -> Iterator[Path]:
    """A directory of the studies, with a cache of their own: reports show what is traced there."""
    home = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as patch, asked_of(tracing_child):
        patch.setenv("SWEEP_HOME", str(home))
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        predictor = TracingPredictor(
            MODEL, cache_dir=cache_directory() / "memory", tracer=tracing_child
        )
        for study in the_studies():
            predictor.predict_all([record.config for record in study.records])
            store(study, url=storage_url(None), home=runs_directory())
        yield home


@pytest.fixture
def said(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run a command and return how it ends and what it prints, JSON as what it says."""

    def run(*arguments: str) -> dict[str, Any]:
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return {"code": code, "out": json.loads(out) if "--json" in arguments else out, "err": err}

    return run


def test_what_commands_say(said: Callable[..., Any], frozen: Frozen) -> None:
    asked = [("status",), *((verb, name) for name in NAMES for verb in ("best", "status"))]
    commands = [(*command, *form) for command in asked for form in ((), ("--json",))]
    frozen("said_of_studies", {" ".join(command): said(*command) for command in commands})


@pytest.mark.parametrize("name", NAMES)
def test_reports(name: str, said: Callable[..., Any], frozen: Frozen) -> None:
    page = Page(said("report", name, "-o", "-")["out"])
    frozen(f"report_{name}", {"data": json.loads(page.scripts[0]), "text": " ".join(page.text)})


@pytest.mark.parametrize("name", ["texts", "gpus"])
def test_exports(name: str, said: Callable[..., Any], tmp_path: Path, frozen: Frozen) -> None:
    def exported(format: str) -> Any:
        to = tmp_path / format / f"exported{endings_of(format)[0]}"
        to.parent.mkdir()
        # What is printed is where it is.
        ended = said("export", name, "--format", format, "-o", str(to)) | {"out": None}
        # What is copied beside a script is source, and has its own tests.
        return ended | {file.name: told(file) for file in to.parent.glob("exported*")}

    def told(file: Path) -> Any:
        """Return the values that a file has: how it is written has tests of its own."""
        text = file.read_text("utf-8")
        if file.suffix == ".json":
            return json.loads(text)
        if file.suffix == ".yaml":
            return yaml.safe_load(text)
        if file.suffix == ".py":
            nodes = ast.walk(ast.parse(text))
            return [node.value for node in nodes if isinstance(node, ast.Constant)]
        return text

    frozen(f"exports_{name}", {format: exported(format) for format in (*format_names(), "surface")})
