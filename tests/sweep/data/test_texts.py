"""Texts as a person asks for them: prepared by a child, found again, refused in plain words."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.dataset_choice import DatasetChoice
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.sweep.data import prepared_dataset as module
from qlora_sweep.sweep.data.batches import open_tokens
from qlora_sweep.sweep.data.files import DatasetSource
from qlora_sweep.sweep.data.prepared_dataset import (
    DatasetRequest,
    PreparedDataset,
    open_prepared,
    prepare_dataset,
    require_vocabulary,
)
from qlora_sweep.sweep.data.tokenizers import TokenizerFiles, find_tokenizer
from tests.tables import cases

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "dataset.jsonl"
DEMO = load_model_spec("demo")
SECRET = "hf_" + "x" * 34


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(home))


@pytest.fixture(scope="module")
def example(home: Path) -> PreparedDataset:
    """The example's chats with loss on the assistant's turns alone, prepared by a child."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWEEP_HOME", str(home))
        return prepare_dataset(DatasetRequest(str(EXAMPLE), DEMO, completions_only=True))


def with_sizes(**sizes: int) -> ModelSpec:
    return ModelSpec("small", "shipped", DEMO.config | sizes)


def test_texts_are_prepared_under_their_fingerprint(example: PreparedDataset, home: Path) -> None:
    summary = example.summary
    assert example.directory == home / "runs" / ".texts" / summary.fingerprint
    assert (summary.rows, summary.kind, summary.broken) == (200, "messages", 0)
    assert summary.source == str(EXAMPLE)
    assert isinstance(example.lengths(), np.memmap)
    tokens = open_tokens(example.directory)
    assert len(tokens) == len(example.lengths()) == len(example.loss_lengths()) == 200
    assert example.lengths().sum() == summary.tokens
    assert open_prepared(example.directory).summary == summary
    assert (home / "runs" / ".texts").stat().st_mode & 0o077 == 0


def test_texts_are_found_again_without_a_child(
    example: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COMMAND", ("/nonexistent",))
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(EXAMPLE.read_bytes())
    again = prepare_dataset(DatasetRequest(str(copy), DEMO, completions_only=True))
    assert again.directory == example.directory
    assert again.summary.source == str(copy)
    named = DEMO.tokenizer_path
    request = DatasetRequest(str(EXAMPLE), None, completions_only=True, tokenizer=str(named))
    assert prepare_dataset(request).directory == example.directory
    choice = DatasetChoice(texts=str(copy), completions_only=True)
    assert prepare_dataset(DatasetRequest.of(choice, DEMO)).directory == example.directory


@pytest.mark.parametrize(
    "changed",
    [{"completions_only": False}, {"completions_only": True, "format": "messages"}],
)
def test_other_options_are_other_texts(
    example: PreparedDataset, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    monkeypatch.setattr(module, "_COMMAND", ("/nonexistent",))
    with pytest.raises(EnvironmentFault, match="process cannot be started"):
        prepare_dataset(DatasetRequest(str(EXAMPLE), DEMO, **changed))


def test_broken_rows_are_named_by_the_file_as_it_is_named_now(
    tmp_path: Path, example: PreparedDataset
) -> None:
    (tmp_path / "broken.jsonl").write_text(
        json.dumps({"file": "old/a.jsonl", "line": 3, "reason": "text is empty"}) + "\n"
    )
    dataset = PreparedDataset(tmp_path, example.summary.model_copy(update={"source": "new"}), "old")
    assert [row.file for row in dataset.broken()] == ["new/a.jsonl"]


def test_tokens_that_the_model_has_no_embeddings_for_are_refused(example: PreparedDataset) -> None:
    largest = example.summary.largest_token
    require_vocabulary(example.summary, with_sizes(vocab_size=largest + 1))
    small = with_sizes(vocab_size=100)
    request = DatasetRequest(
        str(EXAMPLE), small, completions_only=True, tokenizer=str(DEMO.tokenizer_path)
    )
    with pytest.raises(InputError, match=f"token {largest} .*'small' has embeddings for 100"):
        prepare_dataset(request)


def test_what_is_to_be_known_of_texts_is_said_once_each(example: PreparedDataset) -> None:
    assert example.notes(DEMO) == ()
    note, rough = example.notes(with_sizes(max_position_embeddings=400))
    assert "one row is longer than the 400 positions of model 'small' (up to 415" in note
    assert "knows 512 tokens" in rough
    assert "it is not the model's" in rough
    longer = int((example.lengths() > 300).sum())
    assert f"{longer} rows are longer" in example.notes(with_sizes(max_position_embeddings=300))[0]
    known = example.summary.model_copy(update={"tokenizer_size": 3000, "notes": ("a split",)})
    split, size = PreparedDataset(example.directory, known, str(EXAMPLE)).notes(DEMO)
    assert split == f"{EXAMPLE}: a split"
    assert "3,000 tokens, and model 'demo' has embeddings for 2,048" in size


def test_a_hub_that_cannot_be_reached_is_the_environments_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with (
        pytest.raises(EnvironmentFault, match="nobody/texts: neither a file or directory here"),
        module.translated("nobody/texts"),
    ):
        DatasetSource("nobody/texts")


DIES = f"import sys; print('first\\nout of luck {SECRET}', file=sys.stderr); sys.exit(3)"


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("{'input': 'row 3 is odd'}", InputError, "row 3 is odd"),
        ("{'environment': 'no network'}", EnvironmentFault, "no network"),
        ("{'system': [28, 'No space left', '/x']}", OSError, "No space left"),
        ("{'news': {'what': 'rows', 'done': 1, 'of': 2}}", EnvironmentFault, "exit status 0"),
        (DIES, EnvironmentFault, "exit status 3: out of luck"),
    ],
)
def test_what_a_child_says_is_said_on_without_secrets(
    monkeypatch: pytest.MonkeyPatch, script: str, error: type[Exception], words: str
) -> None:
    if script.startswith("{"):
        said = f"print('noise'); print(json.dumps({script}))"
        script = f"import json, sys; sys.stdin.readline(); {said}"
    monkeypatch.setattr(module, "_COMMAND", (sys.executable, "-c", script))
    with pytest.raises(error, match=words) as raised:
        prepare_dataset(DatasetRequest(str(EXAMPLE), DEMO, format="messages"))
    assert SECRET not in str(raised.value)


def test_an_interrupt_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import json, os, time; print(json.dumps({'news': {'what': 'rows', 'done': os.getpid(), "
        "'of': 2}}), flush=True); time.sleep(60)"
    )
    monkeypatch.setattr(module, "_COMMAND", (sys.executable, "-c", script))
    heard: list[int] = []

    def interrupt(what: str, done: int, _of: int) -> None:
        if what == "rows":
            heard.append(done)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(
            DatasetRequest(str(EXAMPLE), DEMO, format="messages"), on_progress=interrupt
        )
    with pytest.raises(ProcessLookupError):
        os.kill(heard[0], 0)


def fetched(name: str) -> Path:
    raise EnvironmentFault(f"asked for {name}")


@pytest.mark.parametrize(
    ("named", "model", "words"),
    cases(
        """
        null | | name the directory or hub id
        null | mistral-7b-v0.3 | "'mistral-7b-v0.3' ships as an architecture"
        mistral-7b-v0.3 | | "'mistral-7b-v0.3' ships as an architecture"
        nowhere | demo | "'nowhere': no such directory"
        "" | demo | no such directory
        ./here | demo | "'./here' has no tokenizer"
        org/name | demo | asked for org/name
        """
    ),
)
def test_a_tokenizer_that_is_not_there_says_what_is_needed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: str | None,
    model: str | None,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text("{}")
    spec = None if model is None else load_model_spec(model)
    with pytest.raises((InputError, EnvironmentFault)) as refused:
        find_tokenizer(named, spec, fetch=fetched)
    assert words in str(refused.value)


def test_a_tokenizer_is_a_directory_the_models_own_or_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_tokenizer("demo", None, fetch=fetched) == find_tokenizer(None, DEMO, fetch=fetched)
    (tmp_path / "demo").mkdir()
    for directory in (tmp_path, tmp_path / "demo"):
        (directory / "tokenizer.json").write_text("{}")
    # A directory comes before what is shipped under its name.
    assert find_tokenizer("demo", None, fetch=fetched).directory == tmp_path / "demo"
    beside = ModelSpec("mine", "directory", DEMO.config, tmp_path)
    assert find_tokenizer(None, beside, fetch=fetched) == TokenizerFiles("mine", tmp_path)
    hub = ModelSpec("org/x", "hub", DEMO.config, tmp_path / "snapshot")
    assert find_tokenizer(None, hub, fetch=lambda _: tmp_path) == TokenizerFiles("org/x", tmp_path)


def test_tokenizers_are_told_apart_by_their_files_alone(tmp_path: Path) -> None:
    digests = []
    for name, template in (("a", "1"), ("b", "1"), ("c", "2")):
        files = TokenizerFiles("x", tmp_path / name)
        files.directory.mkdir()
        (files.directory / "tokenizer.json").write_text("{}")
        (files.directory / "chat_template.jinja").write_text(template)
        (files.directory / "weights").write_text(name)
        digests.append(files.digest)
    assert digests[0] == digests[1] != digests[2]


def content_of(name: str) -> str:
    return module.content_of(name, on_progress=lambda *_: None)


def test_a_directorys_names_are_part_of_its_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("d/train.jsonl", "e/test.jsonl", "f/train.jsonl"):
        Path(name).parent.mkdir()
        Path(name).write_text('{"text": "a"}\n')
    known = content_of("d")
    assert content_of("e") != known
    for same in ("f", "./d/", str(tmp_path / "d")):
        assert content_of(same) == known
    # A README may say which of its files are read.
    Path("d/README.md").write_text("---\nlicense: mit\n---\n")
    assert content_of("d") != known


def test_the_demos_tokenizer_fits_its_model() -> None:
    directory = DEMO.tokenizer_path
    assert directory is not None
    shipped = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = shipped["model"]["vocab"]
    assert len(vocabulary) <= DEMO.vocab_size
    assert vocabulary["<s>"] == DEMO.config["bos_token_id"]
    assert vocabulary["</s>"] == DEMO.config["eos_token_id"]
