"""A study on pairs as a script with `preference.py` beside it, and as other trainers' files."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.sweep.data.kinds import Asked
from qlora_sweep.sweep.training import preference
from tests.sweep.export.studies import a_study, some_dataset
from tests.sweep.training.tiny import tiny_config

Script = Callable[[StudySnapshot], ModuleType]

PAIRS = [
    {"prompt": f"Where is {n}? ", "chosen": f"In the hall {n}." * (1 + n % 4), "rejected": "No."}
    for n in range(40)
]


def on_pairs(model: ModelSpec, source: Path | None = None, **settings: Any) -> StudySnapshot:
    """Return a study of one configuration on pairs: of a file, or random ones."""
    columns = ("prompt", "chosen", "rejected")
    said: dict[str, Any] = {"source": str(source), "columns": columns, "completions_only": True}
    texts = None if source is None else some_dataset("preference", **said)
    return a_study(tiny_config(method="dpo", seq_len=64, **settings), model=model, texts=texts)


def written_pairs(path: Path) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in PAIRS), encoding="utf-8")
    return path


@pytest.fixture
def run(
    script_of: Script, tmp_path: Path, model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Run the script of a study in this process; return what it says that it reached."""
    monkeypatch.setitem(sys.modules, "preference", preference)

    def ran(study: StudySnapshot, *options: str) -> Any:
        metrics, output = tmp_path / "metrics.json", tmp_path / "out"
        given = {"model": model.path, "output": output, "metrics": metrics}
        typed = [part for name, value in given.items() for part in (f"--{name}", str(value))]
        monkeypatch.setattr("sys.argv", ["train.py", *typed, *options])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        script_of(study).main()
        return json.loads(metrics.read_text())

    return ran


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reference": "precomputed", "effective_batch_size": 4, "lora_dropout": 0.1},
        {"packing": "grouped", "loss_type": "ipo", "dpo_beta": 0.5, "compile": True},
    ],
    ids=str,
)
def test_a_script_trains_on_pairs_and_says_what_it_reached(
    settings: dict[str, Any],
    run: Callable[..., Any],
    model: ModelSpec,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study = on_pairs(model, written_pairs(tmp_path / "data.jsonl"), **settings)
    reached = run(study, "--max-steps", "2", "--learning-rate", "1e-3")
    assert reached["steps"] == 2
    first = 1.0 if settings.get("loss_type") == "ipo" else math.log(2)
    assert reached["train_loss"] == pytest.approx(first, rel=0.2), "the policy is the reference"
    assert (reached["eval_pairs"], reached["eval_wins"] in (0, 1, 2)) == (2, True)
    said = capsys.readouterr().out
    assert "chosen completion gained more" in said
    assert "pairs" in said.partition("trained on: Length ")[2].partition("\n")[0]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_a_script_trains_on_the_pairs_of_our_own_training(
    script_of: Script, model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np
    from transformers import AutoTokenizer

    from qlora_sweep.sweep.data.batches import training_rows
    from qlora_sweep.sweep.data.prepared_dataset import Question
    from qlora_sweep.sweep.data.preparing import prepare

    monkeypatch.setitem(sys.modules, "preference", preference)
    source, place = tmp_path / "data.jsonl", str(model.path)
    late = {"prompt": "p" * 40, "chosen": "x" * 40 + "a", "rejected": "x" * 40 + "b"}
    rows = [*PAIRS[:9], late, {**late, "rejected": late["chosen"]}, *PAIRS[9:]]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    study = on_pairs(model, source, micro_batch_size=4)
    script, config = script_of(study), study.records[0].config
    asked = Asked(format="preference")
    question = Question(str(source), asked, True, place, place, "", str(tmp_path), "x")
    read = script.read(str(source), AutoTokenizer.from_pretrained(place))
    trained, held_out = script.split(len(read), 0.1, 0, 2)
    assert len(trained) + len(held_out) == 2 * (len(PAIRS) + 1), "one is no pair"
    directory = prepare(question, on_progress=lambda *_: None)
    expected = preference.Paired(training_rows(directory, config, indices=trained, seed=0))
    found = script.cut(read, trained)
    assert len(found) == len(expected) == len(trained) // 2 - 1, "one does not differ in 64 tokens"
    for pair, other in zip(found, expected, strict=True):
        for row, same in zip(pair, other, strict=True):
            assert all(
                np.array_equal(row[key], same[key]) for key in ("input_ids", "completion_mask")
            )
    batch = script.collate([found[index] for index in range(4)])
    assert batch["labels"].shape == batch["input_ids"].shape
    assert len(batch["labels"]) == 8


def test_both_references_train_the_same_adapter(
    run: Callable[..., Any], model: ModelSpec, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    source = written_pairs(tmp_path / "data.jsonl")
    kept = tmp_path / "out" / "adapter_model.safetensors"
    losses, adapters = [], []
    for each in ("adapter_off", "precomputed"):
        study = on_pairs(model, source, reference=each)
        losses.append(run(study, "--max-steps", "3", "--learning-rate", "1e-3")["train_loss"])
        adapters.append(load_file(kept))
        kept.unlink()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for name, tensor in adapters[0].items():
        # Adam moves an element whose gradient is all rounding as far as every other.
        apart = torch.linalg.vector_norm(tensor - adapters[1][name])
        assert apart < 0.005 * torch.linalg.vector_norm(tensor)
