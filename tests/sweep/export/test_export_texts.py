"""A study on texts as a script: rows, loss and packing as `sweep.data` has them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from search_spaces.config import TrialConfig
from search_spaces.models import ModelSpec
from sweep.data.split import split
from sweep.export.formats import export
from tests.sweep.export.studies import a_study, some_texts
from tests.sweep.export.weights import a_row, saved_model, written_texts
from tests.sweep.training.tiny import tiny_config

KINDS = ("text", "instruction", "prompt-completion", "messages", "conversations")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: ModelSpec) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model.path))


def script_of(
    directory: Path, kind: Any, config: TrialConfig, model: ModelSpec, *, only: bool = False
) -> ModuleType:
    """Return the script of a study on texts of a kind, as a module."""
    source = written_texts(directory / "texts.jsonl", kind)
    texts = some_texts(kind, completions_only=only, source=str(source))
    path = directory / "exported_texts.py"
    path.write_text(export(a_study(config, model=model, texts=texts), format="script"), "utf-8")
    spec = importlib.util.spec_from_file_location("exported_texts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_script_reads_rows_as_they_were_measured(
    kind: Any, only: bool, model: ModelSpec, tokenizer: Any, tmp_path: Path
) -> None:
    from sweep.data.kinds import Broken, parsed
    from sweep.data.rendering import Rendered, renderer
    from sweep.data.tokenizing import Tokenizing

    script = script_of(tmp_path, kind, tiny_config(packing="none"), model, only=only)
    is_chat = kind in ("messages", "conversations")
    is_told = only and kind != "text"
    render = renderer(tokenizer, name="mine", is_chat=is_chat, completions_only=is_told)
    for index in range(6):
        row = a_row(kind, index)
        read = parsed(row, kind, text_column=None)
        assert not isinstance(read, Broken)
        rendered = render(read)
        assert isinstance(rendered, Rendered)
        (expected,) = Tokenizing(tokenizer)([rendered])
        found = script.tokens_of(row, tokenizer)
        assert found["input_ids"] == expected.ids.tolist()
        assert found["completion_mask"] == expected.mask.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_script_leaves_out_what_is_broken(
    kind: Any, model: ModelSpec, tokenizer: Any, tmp_path: Path
) -> None:
    script = script_of(tmp_path, kind, tiny_config(), model)
    assert script.tokens_of({}, tokenizer) is None
    assert script.tokens_of(dict.fromkeys(a_row(kind, 0)), tokenizer) is None


def test_the_script_holds_out_the_rows_that_the_study_held_out(
    model: ModelSpec, tmp_path: Path
) -> None:
    script = script_of(tmp_path, "text", tiny_config(), model)
    for rows in (1, 2, 19, 60):
        trained, held = script.split(list(range(rows)))
        expected = split(rows, script.EVAL_FRACTION, script.SEED)
        assert (trained, held) == tuple(indices.tolist() for indices in expected)


@pytest.mark.parametrize("packing", ["none", "packed", "grouped"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_script_makes_the_micro_batches_that_were_measured(
    packing: str, compiled: bool, model: ModelSpec, tokenizer: Any, tmp_path: Path
) -> None:
    from sweep.data.collating import collator

    config = tiny_config(packing=packing, compile=compiled, seq_len=128)
    script = script_of(tmp_path, "prompt-completion", config, model, only=True)
    rows = [script.tokens_of(a_row("prompt-completion", i), tokenizer) for i in range(12)]
    made = script.as_measured(rows)
    collate = script.Collator(tokenizer)
    few = [made[index] for index in range(2)]
    batch, expected = collate(few), collator(config, collate.pad_token_id)(few)
    assert set(batch) == set(expected)
    assert all(np.array_equal(batch[key], expected[key]) for key in expected)
    assert collate.loss_tokens == [int((expected["labels"] != -100).sum())]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "packing"), [("messages", "packed"), ("text", "grouped")])
def test_the_script_trains_on_texts_and_says_what_it_reached(
    kind: str,
    packing: str,
    model: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tiny_config(packing=packing, seq_len=128)
    script = script_of(tmp_path, kind, config, model, only=kind == "messages")
    typed = ["--max-steps", "5", "--output", "out", "--metrics", "metrics.json"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *typed])
    script.main()
    reached = json.loads((tmp_path / "metrics.json").read_text())
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert reached["steps"] == 5
    assert 5.0 < reached["eval_loss"] < 7.0
    most = config.tokens_per_step / reached["step_seconds"]
    assert 0 < reached["tokens_per_second"] < most, "only what carries loss counts"
    assert "held-out rows" in capsys.readouterr().out
