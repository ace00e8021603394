"""A study on pairs as a script with `preference.py` beside it, and as other trainers' files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.sweep.training import preference
from tests.sweep.export.studies import PAIR, a_study, some_dataset
from tests.sweep.export.weights import a_row, prepared_by_sweep, written_dataset
from tests.sweep.training.tiny import tiny_config

Script = Callable[[StudySnapshot], ModuleType]


def on_pairs(model: ModelSpec, source: Path, **settings: Any) -> StudySnapshot:
    """Return a study of one configuration on the pairs of a file."""
    dataset = some_dataset("preference", source=str(source), columns=PAIR, completions_only=True)
    return a_study(tiny_config(method="dpo", seq_len=64, **settings), model=model, dataset=dataset)


@pytest.mark.parametrize(
    ("settings", "first_loss"),
    [
        ({"reference": "precomputed", "effective_batch_size": 4, "lora_dropout": 0.1}, math.log(2)),
        ({"packing": "grouped", "loss_type": "ipo", "dpo_beta": 0.5, "compile": True}, 1.0),
    ],
    ids=str,
)
def test_a_script_trains_on_pairs_and_says_what_it_reached(
    settings: dict[str, Any],
    first_loss: float,
    run: Callable[..., Any],
    script_of: Script,
    model: ModelSpec,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = written_dataset(tmp_path / "data.jsonl", "preference", rows=40)
    script = script_of(on_pairs(model, source, **settings))
    reached = run(script, "--max-steps", "2", "--learning-rate", "1e-3")
    assert reached["steps"] == 2
    assert reached["train_loss"] == pytest.approx(first_loss, rel=0.2), (
        "the policy is the reference"
    )
    assert reached["eval_pairs"] == 2
    assert reached["eval_wins"] in (0, 1, 2)
    said = capsys.readouterr().out
    assert "pairs" in said.partition("trained on: Length ")[2].partition("\n")[0]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_a_script_trains_on_the_pairs_of_our_own_training(
    script_of: Script, model: ModelSpec, tmp_path: Path
) -> None:
    import numpy as np
    from transformers import AutoTokenizer

    from qlora_sweep.sweep.data.batches import training_rows

    source = tmp_path / "data.jsonl"
    place = str(model.path)
    plain = [a_row("preference", index) for index in range(40)]
    late = {"prompt": "p" * 40, "chosen": "x" * 40 + "a", "rejected": "x" * 40 + "b"}
    rows = [*plain[:9], late, {**late, "rejected": late["chosen"]}, *plain[9:]]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    study = on_pairs(model, source, micro_batch_size=4)
    script, config = script_of(study), study.records[0].config
    read = script.read(str(source), AutoTokenizer.from_pretrained(place))
    trained, held_out = script.split(len(read), 0.1, 0, 2)
    assert len(trained) + len(held_out) == 2 * (len(plain) + 1), "one is no pair"
    directory = prepared_by_sweep(source, "preference", tokenizer=place, completions_only=True)
    expected = preference.Paired(training_rows(directory, config, indices=trained, seed=0))
    found = script.cut(read, trained)
    assert len(found) == len(expected) == len(trained) // 2 - 1, "one does not differ in 64 tokens"
    for pair, other in zip(found, expected, strict=True):
        for row, same in zip(pair, other, strict=True):
            for key in ("input_ids", "completion_mask"):
                assert np.array_equal(row[key], same[key])
    batch = script.collate([found[index] for index in range(4)])
    assert batch["labels"].shape == batch["input_ids"].shape
    assert len(batch["labels"]) == 8
