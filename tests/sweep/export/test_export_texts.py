"""A study on texts as a script: rows, loss and packing as `sweep.data` has them."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from search_spaces.config import TrialConfig
from search_spaces.models import ModelSpec
from search_spaces.space import SearchSpace
from storage.definition import StudySnapshot
from sweep.data.split import split
from sweep.export.formats import export, exported
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


_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "does f"}}
_ASKED = {"role": "user", "content": "hi"}
_TURNS = [_ASKED, {"role": "assistant", "content": "ho"}]
ODD_ROWS: dict[str, list[dict[str, Any]]] = {
    "instruction": [
        {"instruction": "a", "input": 7, "output": "b"},
        {"instruction": "a", "input": " x ", "output": "b"},
        {"instruction": " ", "output": "b"},
        {"instruction": "a", "output": ["b"]},
    ],
    "prompt-completion": [
        {"prompt": "", "completion": "b"},
        {"prompt": " ", "completion": "b"},
        {"prompt": "a", "completion": " "},
        {"prompt": 1, "completion": "b"},
    ],
    "messages": [
        {"messages": json.dumps(_TURNS)},
        {"messages": "no turns"},
        {"messages": []},
        {"messages": ["hi"]},
        {"messages": [_ASKED]},
        {"messages": [*_TURNS, {"role": "narrator", "content": "so"}]},
        {"messages": [_ASKED, {"role": "assistant", "content": " "}]},
        {"messages": [{"role": "system", "content": ""}, *_TURNS]},
        {"messages": [_ASKED, {"role": "assistant"}]},
        {
            "messages": [
                {**_ASKED, "content": [{"type": "text", "text": "h"}, {"text": "i"}]},
                *_TURNS,
            ]
        },
        {"messages": [{**_ASKED, "content": [{"type": "image"}]}, *_TURNS]},
        {"messages": [{**_ASKED, "from": "gpt"}, *_TURNS]},
        {"messages": [{**_ASKED, "name": None}, *_TURNS]},
        {"messages": [*_TURNS, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]},
        {"messages": _TURNS, "tools": [_TOOL]},
        {"messages": _TURNS, "tools": json.dumps([_TOOL])},
        {"messages": _TURNS, "tools": "7"},
        {"messages": _TURNS, "chat_template_kwargs": {"aside": "psst"}},
        {"messages": [_ASKED, {"role": "assistant", "content": "refuse"}]},
    ],
}


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("kind", ODD_ROWS)
def test_the_script_takes_and_leaves_odd_rows_as_the_study_did(
    kind: Any, only: bool, model: ModelSpec, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    from sweep.data.kinds import Broken, parsed
    from sweep.data.rendering import Rendered, renderer
    from sweep.data.tokenizing import Tokenizing

    tokenizer = AutoTokenizer.from_pretrained(str(model.path))
    tokenizer.chat_template = (
        "{% if messages[-1].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
        "{{ tools | tojson if tools else '' }}{{ aside }}"
    ) + tokenizer.chat_template.replace("{% generation %}", "{% generation -%}")
    script = script_of(tmp_path, kind, tiny_config(packing="none"), model, only=only)
    is_chat = kind == "messages"
    render = renderer(tokenizer, name="mine", is_chat=is_chat, completions_only=only)
    for row in ODD_ROWS[kind]:
        read = parsed(row, kind, text_column=None)
        rendered = read if isinstance(read, Broken) else render(read)
        found = script.tokens_of(row, tokenizer)
        if not isinstance(rendered, Rendered):
            assert found is None, row
            continue
        (expected,) = Tokenizing(tokenizer)([rendered])
        assert found is not None, row
        assert found["input_ids"] == expected.ids.tolist(), row
        assert found["completion_mask"] == expected.mask.tolist(), row


def test_a_mark_that_the_tokenizer_itself_puts_at_the_end_carries_loss(
    model: ModelSpec, tmp_path: Path
) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    from sweep.data.rendering import Rendered
    from sweep.data.tokenizing import Tokenizing

    tokenizer = AutoTokenizer.from_pretrained(str(model.path))
    marks = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=marks
    )
    script = script_of(tmp_path, "prompt-completion", tiny_config(), model, only=True)
    (expected,) = Tokenizing(tokenizer)([Rendered("ab", ((1, 2),), False)])
    found = script.tokens_of({"prompt": "a", "completion": "b"}, tokenizer)
    assert found["input_ids"] == expected.ids.tolist()
    assert found["completion_mask"] == expected.mask.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("texts.tsv", "text\tother\na, b\tc\n"),
        ("texts.CSV", 'other,text\nc,"a, b"\n'),
        ("texts.jsonl", '{"text": "a, b", "other": "c"}\n'),
    ],
)
def test_the_script_reads_files_as_the_study_did(
    name: str, content: str, model: ModelSpec, tmp_path: Path
) -> None:
    script = script_of(tmp_path, "text", tiny_config(), model)
    (tmp_path / name).write_text(content, encoding="utf-8")
    (row,) = script.read_texts(str(tmp_path / name))
    assert row == {"text": "a, b", "other": "c"}


def on_texts(tokenizer: str | None = None, broken: int = 0) -> StudySnapshot:
    """Return a study whose texts had a tokenizer of their own, or broken rows."""
    texts = some_texts("text").model_copy(update={"broken": broken})
    study = a_study(texts=texts)
    data = {"texts": texts.source, "tokenizer": tokenizer}
    space = SearchSpace.model_validate(study.definition.space.model_dump() | {"data": data})
    return replace(study, definition=study.definition.model_copy(update={"space": space}))


def test_a_tokenizer_that_was_named_is_that_of_every_export() -> None:
    study = on_texts(tokenizer="/my/tokenizer")
    assert 'default="/my/tokenizer"' in export(study, format="script")
    axolotl = yaml.safe_load(export(study, format="axolotl"))
    assert axolotl["tokenizer_config"] == "/my/tokenizer"
    for format in ("trl", "llama-factory"):
        assert any("/my/tokenizer" in lost for lost in exported(study, format=format).lost)
    for format in ("script", "axolotl", "trl", "llama-factory"):
        assert "/my/tokenizer" not in export(on_texts(), format=format)


@pytest.mark.parametrize("format", ["script", "axolotl", "trl", "llama-factory"])
def test_rows_that_the_study_left_out_are_said(format: str) -> None:
    assert any("left 3 out" in lost for lost in exported(on_texts(broken=3), format=format).lost)
    assert not any("Broken rows" in lost for lost in exported(on_texts(), format=format).lost)


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
    # So many that the rows held out do not fill a micro-batch.
    config = tiny_config(packing=packing, seq_len=128, micro_batch_size=4)
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
