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

from qlora_sweep.search_spaces.linears import lora_parameters
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage.definition import StudySnapshot
from tests.sweep.export.studies import a_study, export, some_dataset
from tests.sweep.export.weights import a_row, saved_model, written_dataset
from tests.sweep.training.tiny import TINY, tiny_config

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


PLAIN: tuple[dict[str, Any], ...] = (
    {},
    {
        "target_modules": ("up_proj",),
        "lora_alpha": 24.5,
        "lora_dropout": 0.05,
        "attention": "eager",
        "quantization": "fp4",
        "double_quant": False,
    },
    {
        "target_modules": "all-linear",
        "quantization": "none",
        "adapter_dtype": "bf16",
        "upcast_fp32": False,
        "checkpoint_fraction": 0.0,
        "optimizer": "adamw_torch_fused",
        "learning_rate": 1e-3,
        "effective_batch_size": 4,
    },
)
"""On full random rows."""
ON_PAIRS: dict[str, dict[str, Any]] = {
    "given": {"lora_dropout": 0.1, "upcast_fp32": False, "effective_batch_size": 4},
    "known": {"reference": "precomputed", "packing": "grouped"},
    "turns": {"dpo_beta": 0.3},
    "random": {},
}
"""On pairs of texts, the same with the reference known before, of turns, and on random ones."""
TURNS = "turns.yaml"
"""LLaMA-Factory reads none as they are; its file says so."""
READ = ("array.json", "cells.csv", "texts.parquet", "tabs")
REFUSED = "cells.tsv"
"""Of axolotl, which sees one column in it, and of LLaMA-Factory; their files say so."""


def studies_of(directory: Path, model: ModelSpec) -> dict[str, StudySnapshot]:
    """Return a study of each kind of rows, of each packing and of each kind of file."""
    written_dataset(directory / "data.jsonl", "text")
    settings = enumerate(PLAIN)
    found = {
        f"plain{i}": a_study(tiny_config(seq_len=128, **some), model=model) for i, some in settings
    }
    dataset = [(kind, "packed", f"{kind}.jsonl") for kind in KINDS]
    padded = [("messages", "none", "chats.jsonl"), ("prompt-completion", "grouped", "pairs.jsonl")]
    files = [("prompt-completion", "none", name) for name in (*READ, REFUSED)]
    for kind, packing, name in (*dataset, *padded, *files):
        source = str(written_as(directory / name, kind))
        summary = some_dataset(kind, completions_only=kind == "messages", source=source)
        config = tiny_config(seq_len=128, packing=packing)
        found[name] = a_study(config, model=model, dataset=summary)
    return found


def studies_on_pairs(directory: Path, model: ModelSpec) -> dict[str, StudySnapshot]:
    """Return a study of each kind of pairs."""
    found = {}
    for name, settings in ON_PAIRS.items():
        config = tiny_config(seq_len=128, method="dpo", **settings)
        source = directory / f"{name}.jsonl"
        if name == "random":
            source = directory / "data.jsonl"
        rows = [a_pair(index, has_turns=name == "turns") for index in range(60)]
        source.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        said: dict[str, Any] = {"source": str(source), "completions_only": True}
        said["columns"] = ("prompt", "chosen", "rejected")
        dataset = None if name == "random" else some_dataset("preference", **said)
        found[f"{name}.yaml"] = a_study(config, model=model, dataset=dataset)
    return found


def a_pair(index: int, *, has_turns: bool) -> dict[str, Any]:
    """Return a row of a pair: texts, or turns of which the prompt is what both begin with."""
    pair = {"prompt": f"Where is {index}? ", "chosen": "In the hall. " * (1 + index % 3)}
    pair["rejected"] = f"No {index}."
    if not has_turns:
        return pair
    asked = {"role": "user", "content": pair["prompt"]}
    turns = {key: {"role": "assistant", "content": pair[key]} for key in ("chosen", "rejected")}
    return {key: [asked, turn] for key, turn in turns.items()}


def written_as(path: Path, kind: str) -> Path:
    """Write rows as the kind of file that the name says; without an ending a directory of it."""
    from datasets import Dataset

    rows = [a_row(kind, index) for index in range(60)]
    match path.suffix:
        case ".jsonl":
            return written_dataset(path, kind)
        case ".json":
            path.write_text(json.dumps(rows), encoding="utf-8")
        case ".parquet":
            Dataset.from_list(rows).to_parquet(path)
        case ".csv" | ".tsv":
            Dataset.from_list(rows).to_csv(path, sep="," if path.suffix == ".csv" else "\t")
        case _:
            path.mkdir()
            written_as(path / "rows.tsv", kind)
    return path


def trained(
    format: str, studies: dict[str, StudySnapshot], directory: Path, *, refused: str | None
) -> list[float]:
    """Train two steps of each study's file in a trainer, but for one that it cannot read; return
    the losses."""
    for name, study in studies.items():
        (directory / name).write_text(export(study, format=format), encoding="utf-8")
    found = {row["file"]: row for row in in_trainer(format, *studies, cwd=directory)}
    assert sorted(found) == sorted(studies)
    if refused is not None:
        assert "error" in found.pop(refused)
    for name, row in found.items():
        assert "error" not in row, row["error"]
        assert row["steps"] == 2
        # axolotl tells what it made of each option.
        assert not row.get("changed")
        assert_adapters(row, studies[name])
    return [row["loss"] for row in found.values()]


@pytest.mark.parametrize("format", ["axolotl", "llama-factory"])
def test_every_file_trains_two_steps_in_its_trainer(
    format: str, model: ModelSpec, tmp_path: Path
) -> None:
    studies = {f"{name}.yaml": study for name, study in studies_of(tmp_path, model).items()}
    losses = trained(format, studies, tmp_path, refused=f"{REFUSED}.yaml")
    assert all(5.0 < loss < 7.0 for loss in losses), "of random weights: ln 512"


@pytest.mark.parametrize(("format", "refused"), [("axolotl", None), ("llama-factory", TURNS)])
def test_every_file_on_pairs_trains_two_steps_in_its_trainer(
    format: str, refused: str | None, model: ModelSpec, tmp_path: Path
) -> None:
    losses = trained(format, studies_on_pairs(tmp_path, model), tmp_path, refused=refused)
    assert all(0.6 < loss < 0.8 for loss in losses), "the policy is the reference: ln 2"


def assert_adapters(row: dict[str, Any], study: StudySnapshot) -> None:
    """Check that a trainer put the adapters of the trial on, and trained nothing else."""
    (trial,) = study.records
    asked, made = json.loads(export(study, format="peft")), row["adapter"]
    assert {key: made[key] for key in ("r", "lora_dropout")} == {
        key: asked[key] for key in ("r", "lora_dropout")
    }
    assert made["lora_alpha"] == round(asked["lora_alpha"]), "trainers take whole numbers"
    assert set(made["target_modules"]) == set(asked["target_modules"])
    assert row["trainable"] == lora_parameters(trial.config, TINY)


@pytest.mark.parametrize("format", ["axolotl", "llama-factory"])
def test_the_recorded_keys_are_those_of_the_trainers_schema(format: str, tmp_path: Path) -> None:
    path = HERE / f"{format.replace('-', '_')}_keys.json"
    known = json.loads(path.read_text(encoding="utf-8"))
    del known["version"]
    assert in_trainer(format, "--keys", cwd=tmp_path) == [known]
