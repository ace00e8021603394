"""Exported files in the trainers that they are for: built, and two steps trained on the CPU.

Each trainer has an environment of its own, in `build/exports/NAME`: `make test-exports` builds them
and runs this. Nothing here imports a trainer.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from search_spaces.models import ModelSpec
from sweep.export.formats import export
from tests.sweep.export.studies import a_study, some_texts
from tests.sweep.export.weights import saved_model, written_texts
from tests.sweep.training.tiny import tiny_config

pytestmark = [pytest.mark.exports, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
ENVIRONMENTS = Path(os.environ.get("EXPORTS", HERE.parent.parent / "build" / "exports"))
KINDS: tuple[Any, ...] = ("text", "instruction", "prompt-completion", "messages", "conversations")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return saved_model(tmp_path_factory.mktemp("model"))


def in_trainer(name: str, *arguments: str, cwd: Path) -> list[dict[str, Any]]:
    """Run a trainer's script in its environment; return the JSON objects that it prints."""
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.exists():
        missing = pytest.fail if "EXPORTS" in os.environ else pytest.skip
        missing(f"{python} is missing: `make test-exports` makes it")
    script = HERE / f"{name.replace('-', '_')}_on_cpu.py"
    quiet = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "AXOLOTL_DO_NOT_TRACK": "1"}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | quiet
    done = subprocess.run(
        [str(python), str(script), *arguments],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    # Trainers print their logs beside: as Python has a dictionary, or over many lines.
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert found, done.stderr[-3000:]
    return found


def files_of(format: str, directory: Path, model: ModelSpec) -> list[str]:
    """Write a file of each kind of rows and of each packing, and of random rows."""
    written_texts(directory / "data.jsonl", "text")
    plain: list[tuple[Any, dict[str, Any]]] = [(None, {}), (None, {"attention": "eager"})]
    texts = [(kind, {"packing": "packed"}) for kind in KINDS]
    padded = [("messages", {"packing": "none"}), ("prompt-completion", {"packing": "grouped"})]
    for number, (kind, knobs) in enumerate([*plain, *texts, *padded]):
        summary = None
        if kind is not None:
            source = written_texts(directory / f"{kind}.jsonl", kind)
            only = kind == "messages"
            summary = some_texts(kind, completions_only=only, source=str(source))
        config = tiny_config(seq_len=128, **knobs)
        text = export(a_study(config, model=model, texts=summary), format=format)
        (directory / f"{number}.yaml").write_text(text, encoding="utf-8")
    return sorted(path.name for path in directory.glob("*.yaml"))


@pytest.mark.parametrize("format", ["axolotl", "llama-factory"])
def test_every_file_trains_two_steps_in_its_trainer(
    format: str, model: ModelSpec, tmp_path: Path
) -> None:
    files = files_of(format, tmp_path, model)
    found = {row["file"]: row for row in in_trainer(format, *files, cwd=tmp_path)}
    assert [row["error"] for row in found.values() if "error" in row] == []
    assert sorted(found) == files
    assert {row["steps"] for row in found.values()} == {2}
    assert all(5.0 < row["loss"] < 7.0 for row in found.values()), "of random weights: ln 512"
    # axolotl tells what it made of each option.
    assert [row["changed"] for row in found.values() if row.get("changed")] == []


def test_the_recorded_keys_are_those_of_axolotls_schema(tmp_path: Path) -> None:
    known = json.loads((HERE / "axolotl_keys.json").read_text(encoding="utf-8"))
    del known["axolotl"]
    assert in_trainer("axolotl", "--keys", cwd=tmp_path) == [known]
