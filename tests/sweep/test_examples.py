"""Every example in a command's help, as it stands there, with a simulated device.

Those that take long are held against the options alone, where other tests run their commands.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

from qlora_sweep.search_spaces.presets import preset_texts
from qlora_sweep.sweep.cli import app, main
from tests.docs.test_pages import BLOCKS
from tests.sweep.predict.contributed import path_of
from tests.sweep.simulated_drive import simulate

REFUSED_WITHOUT_A_GPU = 3
CONTRIBUTION = path_of("h100_studies_mistral-7b-v0.3.jsonl")
SURFACE = Path(__file__).parents[1] / "data" / "surfaces" / "tinyllama-1.1b_h200.jsonl"
TEXTS = Path(__file__).parents[2] / "docs" / "examples" / "dataset.jsonl"
TOKENIZER = Path(__file__).parents[2] / "search_spaces" / "tokenizers" / "demo"
NOT_RUN = ("train", "verify", "merge", "doctor", "mcp")
"""Commands whose examples are not run."""
RUN_ELSEWHERE = (
    "sweep run cpu-demo --for trl --trials 3 --no-confirm",
    "sweep plan --gpu rtx-3090 --devices 2",
)
"""By `test_for_trainer` and `test_plan_command`, of which they are the like."""


def commands() -> dict[str, Any]:
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def examples() -> Iterator[tuple[str, str]]:
    for name, command in commands().items():
        for line in re.findall(r"^  \$ (.+)$", command.epilog or "", flags=re.MULTILINE):
            yield name, line


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a study on the CPU called ``a10``, and the files that examples name."""
    home = tmp_path_factory.mktemp("prepared")
    demo = preset_texts()["cpu-demo"].replace("name: cpu-demo\n", "")
    wider = demo.replace("lora_rank: [4, 8, 16]", "lora_rank: [2, 4, 8, 16]")
    (home / "wider.yaml").write_text(wider, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        at_home(home, patch)
        assert main(["run", "cpu-demo", "--trials", "3", "--study", "a10", "--no-confirm"]) == 0
    shutil.copy(TEXTS, home / "dataset.jsonl")
    shutil.copytree(TOKENIZER, home / "models" / "mine")
    surface = SURFACE.read_text(encoding="utf-8").splitlines(keepends=True)
    # Two trials of one structure: each structure takes its time to trace.
    contribution = CONTRIBUTION.read_text(encoding="utf-8").splitlines(keepends=True)
    (home / "a10.jsonl").write_text("".join(contribution[:3]), encoding="utf-8")
    (home / "surface.jsonl").write_text("".join(surface[:40]), encoding="utf-8")
    return home


def is_run_elsewhere(line: str) -> bool:
    """Whether another test runs it, as those of pages do what they show."""
    typed = shlex.split(line)
    on_pages = any(block.is_run and typed in block.commands for block in BLOCKS)
    return on_pages or line in RUN_ELSEWHERE


def at_home(home: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("SWEEP_HOME", str(home))
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    simulate(patch)
    patch.chdir(home)


def test_every_command_shows_how_it_is_used() -> None:
    shown = {name for name, _ in examples()}
    assert commands().keys() - shown == set()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "line"), list(examples()))
def test_an_example_does_what_its_command_says(
    name: str,
    line: str,
    prepared: Path,
    shared_tracing: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name == "dashboard" and find_spec("optuna_dashboard"):
        pytest.skip("it serves until it is stopped")
    if name in NOT_RUN or is_run_elsewhere(line):
        commands()[name].make_context(name, shlex.split(line)[2:])
        return
    home = tmp_path / "home"
    shutil.copytree(prepared, home)
    at_home(home, monkeypatch)
    program, *arguments = shlex.split(line)
    assert program == "sweep"
    assert arguments[0] == name
    before = set(os.listdir(home))
    code = main(arguments)
    out, err = capsys.readouterr()
    if _needs_a_gpu(arguments):
        assert code == REFUSED_WITHOUT_A_GPU
        assert "sweep doctor" in err
    elif line == "sweep rm a10":
        assert code == 2
        assert "pass --yes" in err
    elif name == "contribute":
        assert code == 2
        assert "only what a GPU measured" in err
    elif name == "dashboard":
        assert code == REFUSED_WITHOUT_A_GPU
        assert "pip install 'qlora-sweep[dashboard]'" in err
    else:
        assert code in (0, 1), err
        assert out or set(os.listdir(home)) - before


def _needs_a_gpu(arguments: list[str]) -> bool:
    return arguments[:2] == ["run", "a10"] and "--dry-run" not in arguments
