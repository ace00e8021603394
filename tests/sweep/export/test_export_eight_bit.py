"""A script in 8 bits trains in the products that `sweep train` chooses on the same examples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage.definition import StudySnapshot
from tests.sweep.export.studies import PAIR, a_study, some_dataset
from tests.sweep.export.weights import prepared_by_sweep, written_dataset
from tests.sweep.finetuning.trainings import job, run
from tests.sweep.training.tiny import UNSUITED, tiny_config

INT8: dict[str, Any] = {"quantization": "int8", "compute_dtype": "int8", "upcast_fp32": False}
Script = Callable[[StudySnapshot], ModuleType]


def trained_by_sweep(source: Path, kind: Any, config: Any, model: ModelSpec) -> Any:
    """Return what `sweep train` records of 8-bit products on a file's examples."""
    only = kind == "preference"
    directory = prepared_by_sweep(source, kind, tokenizer=str(model.path), completions_only=only)
    ours = job(
        source.with_name("out"),
        directory,
        config=config,
        model=model.to_json(),
        weights="pretrained",
        eval_fraction=0.1,
        max_steps=1,
    )
    end, _ = run(ours)
    return end.eight_bit  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("text", {"packing": "packed"}),
        ("preference", {"method": "dpo", "checkpoint_fraction": 0.5}),
    ],
)
def test_a_script_keeps_the_layers_in_16_bits_that_sweep_train_keeps(
    kind: Any,
    settings: dict[str, Any],
    outliers: ModelSpec,
    script_of: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = written_dataset(tmp_path / "data.jsonl", kind, rows=40)
    said: dict[str, Any] = {"source": str(source)}
    if kind == "preference":
        said |= {"columns": PAIR, "completions_only": True}
    config = tiny_config(**INT8, seq_len=64, lora_dropout=0.1, **settings)
    ours = trained_by_sweep(source, kind, config, outliers)
    assert ours.kept_in_16_bits == (UNSUITED,)

    study = a_study(config, model=outliers, dataset=some_dataset(kind, **said))
    typed = ["--output", str(tmp_path / "adapter"), "--max-steps", "2"]
    monkeypatch.setattr("sys.argv", ["train.py", *typed])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script_of(study).main()
    assert UNSUITED in capsys.readouterr().out
    about = json.loads((tmp_path / "adapter" / "training.json").read_text())["eight_bit"]
    assert about.pop("kept_in_16_bits") == list(ours.kept_in_16_bits)
    for name, value in about.items():
        assert value == pytest.approx(getattr(ours, name), rel=1e-3), name


def test_a_script_refuses_weights_that_8_bits_do_not_suit(
    outliers: ModelSpec, script_of: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qlora_sweep.sweep.training.fitting.MOST_SHARE", 0.05)
    written_dataset(tmp_path / "data.jsonl", "text")
    typed = ["--data", str(tmp_path / "data.jsonl"), "--output", str(tmp_path / "adapter")]
    monkeypatch.setattr("sys.argv", ["train.py", *typed])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = script_of(a_study(tiny_config(**INT8), model=outliers))
    with pytest.raises(SystemExit, match="compute_dtype=bf16"):
        script.main()
    assert not list(tmp_path.glob("adapter/adapter_model*"))
