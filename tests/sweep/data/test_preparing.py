"""What the child leaves on the disk, in this process."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.dataset_choice import DatasetChoice, DatasetSummary
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.data import prepared_dataset as module
from qlora_sweep.sweep.data.choice import refuse_other_kind
from qlora_sweep.sweep.data.kinds import ReadingOptions
from qlora_sweep.sweep.data.prepared_dataset import (
    BROKEN,
    LENGTHS,
    LOSS_LENGTHS,
    SUMMARY,
    PreparationRequest,
    PreparedDataset,
    open_prepared,
)
from qlora_sweep.sweep.data.study_epochs import StudyEpochs
from qlora_sweep.sweep.data.tokenizers import find_tokenizer
from tests.sweep.data.layouts import written, written_rows
from tests.tables import cases

TURNS = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "In the hall."}]
Prepare = Callable[..., PreparedDataset]


@pytest.fixture
def prepared(tmp_path: Path) -> Prepare:
    """Prepares rows, or a file as it is written."""
    from qlora_sweep.sweep.data.preparing import prepare

    files = find_tokenizer(None, load_model_spec("demo"))

    def made(rows: list[Any] | str, **options: Any) -> PreparedDataset:
        path = tmp_path / "mine.jsonl"
        if isinstance(rows, str):
            written(path, rows)
        else:
            written_rows(path, rows)
        question = PreparationRequest(
            source=str(path),
            asked=ReadingOptions(),
            completions_only=None,
            tokenizer="demo",
            tokenizer_directory=str(files.directory),
            tokenizer_digest=files.digest,
            home=str(tmp_path / "home"),
            content=path.read_text(),
        )
        return open_prepared(prepare(replace(question, **options), on_progress=lambda *_: None))

    return made


def test_tokens_lengths_and_summary_are_of_the_same_rows(prepared: Prepare) -> None:
    from qlora_sweep.sweep.data.batches import open_tokens

    rows = [{"messages": TURNS * count} for count in (1, 3, 2)]
    dataset = prepared(rows, completions_only=True)
    tokens, summary = open_tokens(dataset.directory), dataset.summary
    assert [len(ids) for ids in tokens["input_ids"]] == dataset.lengths().tolist()
    assert [sum(mask) for mask in tokens["completion_mask"]] == dataset.loss_lengths().tolist()
    assert tokens.features["input_ids"].feature.dtype == "int32"
    assert tokens.features["completion_mask"].feature.dtype == "int8"
    assert dataset.lengths().dtype == dataset.loss_lengths().dtype == np.int32
    assert (summary.kind, summary.rows, summary.broken) == ("messages", 3, 0)
    assert summary.tokens == int(dataset.lengths().sum())
    assert summary.loss_tokens == int(dataset.loss_lengths().sum())
    assert summary.longest == summary.quantiles.max == int(dataset.lengths().max())
    assert summary.largest_token == max(max(ids) for ids in tokens["input_ids"])
    assert summary.fingerprint == dataset.directory.name
    assert summary.marked_template is None, "the tokenizer's own marks the assistant's turns"


def test_a_summary_of_a_later_version_is_read(prepared: Prepare) -> None:
    summary = prepared([{"text": "a"}]).summary
    later = summary.model_dump() | {"something": "of a later version"}
    assert DatasetSummary.model_validate(later) == summary


def test_a_template_that_nobody_marks_is_kept_with_marks(prepared: Prepare, tmp_path: Path) -> None:
    directory = tmp_path / "tokenizer"
    shutil.copytree(find_tokenizer(None, load_model_spec("demo")).directory, directory)
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    rows = [{"messages": TURNS}]
    own = {"tokenizer_directory": str(directory), "tokenizer_digest": "own"}
    found = prepared(rows, completions_only=True, **own).summary.marked_template
    assert found is not None
    assert template in found
    assert prepared(rows, **own).summary.marked_template is None


def test_what_carries_loss_by_default_is_said(prepared: Prepare) -> None:
    dataset = prepared([{"text": "In the hall."}])
    assert dataset.loss_lengths().tolist() == (dataset.lengths() - 1).tolist()
    assert not dataset.summary.completions_only
    pair = [{"prompt": "Where is it?", "completion": " In the hall."}]
    assert prepared(pair).summary.completions_only
    whole = prepared(pair, completions_only=False).summary
    assert not whole.completions_only
    assert whole.loss_tokens > prepared(pair).summary.loss_tokens


def test_broken_rows_are_left_out_and_named_in_order(prepared: Prepare) -> None:
    text = '{"text": "a"}\n{"text": ""}\nno JSON\n{"text": "b"}\n{"txt": 1}\n{"text": "\\ud800"}\n'
    dataset = prepared(text + '{"half \\ud800": 1, "text": "the hall"}\n')
    assert dataset.summary.rows == 3
    broken = dataset.broken()
    assert [row.line for row in broken] == [2, 3, 5, 6]
    assert "\\ud800" in broken[-1].reason
    assert dataset.summary.broken == 4
    assert dataset.summary.columns == ("text", "txt", "half ?")
    assert {Path(row.file).name for row in broken} == {"mine.jsonl"}


def test_of_very_many_broken_rows_the_first_are_named_and_all_counted(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qlora_sweep.sweep.data.preparing.BROKEN_KEPT", 3)
    dataset = prepared('{"text": "a"}\n' + "x\n" * 5)
    assert dataset.summary.broken == 5
    assert [row.line for row in dataset.broken()] == [2, 3, 4]


def test_pairs_are_two_rows_each_that_are_cut_and_counted_together(prepared: Prepare) -> None:
    rows = [
        {"prompt": "Where? ", "chosen": f"In {n}.", "rejected": "No. " * n} for n in range(1, 5)
    ]
    dataset = prepared([*rows, {"chosen": "so", "rejected": "so"}])
    summary = dataset.summary
    assert (summary.kind, summary.rows, summary.broken) == ("preference", 4, 1)
    assert summary.completions_only
    assert len(dataset.lengths()) == len(dataset.loss_lengths()) == 8
    choice = DatasetChoice(texts=summary.source, eval_fraction=0.25)
    epochs = StudyEpochs.of(dataset, choice, seed=0)
    config = TrialConfig(method="dpo", micro_batch_size=1, seq_len=1024)
    whole = epochs.epoch(config)
    assert (len(whole.rows), whole.largest.rows) == (3, 2)
    assert whole.tokens == epochs.lengths.sum()
    assert epochs.record(config) is not None
    assert epochs.refusal(config.model_copy(update={"micro_batch_size": 4})) is not None
    refuse_other_kind("dpo", dataset)
    with pytest.raises(InputError, match="--method dpo"):
        refuse_other_kind("sft", dataset)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "a"}, "chosen and rejected"),
        ({"messages": TURNS, "chosen": "a", "rejected": "b"}, "--set data.format=preference"),
    ],
    ids=str,
)
def test_what_is_no_pairs_is_refused_where_they_are_trained_on(
    prepared: Prepare, row: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        refuse_other_kind("dpo", prepared([row]))


@pytest.mark.parametrize(
    ("text", "options", "words"),
    cases(
        r"""
        "\n \n" | {} | no rows in it
        "x\n" | {} | "its one row is broken: "
        "x\ny\n" | {} | "all 2 rows are broken, the first: "
        "{}\n{}\n" | {} | "line 1: an empty object"
        "{\"txt\": \"a\"}\n" | {} | --set data.text_column=NAME
        "{\"text\": \"a\"}\n" | {completions_only: true} | data.completions_only
        "{\"text\": \"a\"}\n" | {seen: [[1, 1]]} | changed while it was read
        """
    ),
)
def test_texts_of_which_nothing_is_left_are_refused(
    prepared: Prepare, tmp_path: Path, text: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError) as refused:
        prepared(text, **options)
    assert words in str(refused.value)
    assert not list((tmp_path / "home").iterdir()), "nothing is left behind"


def test_columns_are_looked_for_behind_rows_that_cannot_be_read(prepared: Prepare) -> None:
    dataset = prepared("x\n" * 300 + '{"id": 1}\n{"id": 1, "text": "a"}\n')
    assert (dataset.summary.kind, dataset.summary.rows, dataset.summary.broken) == ("text", 1, 301)


def test_a_row_of_one_token_has_nothing_to_learn(prepared: Prepare, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(load_model_spec("demo").tokenizer_path)
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "bare")
    bare = {"tokenizer_directory": str(tmp_path / "bare"), "tokenizer_digest": "bare"}
    dataset = prepared([{"text": "a"}, {"text": "In the hall."}], **bare)
    assert dataset.broken()[0].reason == "no token of it carries loss"
    assert dataset.summary.rows == 1


@pytest.fixture
def pretend_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has a package of another version be installed."""
    own = module.version

    def pretend(package: str) -> None:
        def version(name: str) -> str:
            if name == package:
                return "0"
            return own(name)

        monkeypatch.setattr(module, "version", version)

    return pretend


def test_texts_are_found_again_after_an_upgrade_that_changes_no_token(
    prepared: Prepare, pretend_version: Callable[[str], None]
) -> None:
    first = prepared([{"text": "a"}])
    for package in ("transformers", "trl"):
        pretend_version(package)
        assert prepared([{"text": "a"}]) == first
    notes = list(first.directory.parent.glob("*.name"))
    assert [note.read_text() for note in notes] == [first.summary.fingerprint] * 3


def test_texts_that_are_known_are_not_tokenized_again(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared([{"text": "a"}])
    monkeypatch.setattr("qlora_sweep.sweep.data.preparing.load_tokenizer", None)
    assert prepared([{"text": "a"}]) == first


def test_texts_whose_tokens_are_others_are_others(
    prepared: Prepare, pretend_version: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qlora_sweep.sweep.data import preparing

    rows = [{"text": "a"}, {"text": "b"}]
    first = prepared(rows).summary.fingerprint
    assert prepared(rows, tokenizer_digest="other").summary.fingerprint != first
    pretend_version("transformers")
    encoded = preparing.encoded
    monkeypatch.setattr(preparing, "encoded", lambda *of: reversed([*encoded(*of)]))
    assert prepared(rows).summary.fingerprint != first


def test_what_a_killed_preparation_left_is_removed_and_no_others(
    prepared: Prepare, tmp_path: Path
) -> None:
    left = tmp_path / "home" / ".a.unfinished"
    being_written = tmp_path / "home" / ".b.unfinished"
    left.mkdir(parents=True)
    being_written.mkdir()
    two_days_ago = time.time() - 48 * 3600
    os.utime(left, (two_days_ago, two_days_ago))
    prepared([{"text": "a"}])
    assert not left.exists()
    assert being_written.exists()


@pytest.mark.parametrize("missing", [SUMMARY, LENGTHS])
def test_a_directory_of_which_something_is_missing_is_made_anew(
    prepared: Prepare, missing: str
) -> None:
    directory = prepared([{"text": "a"}]).directory
    (directory / missing).unlink()
    assert prepared([{"text": "a"}]).directory == directory
    names = {path.name for path in directory.iterdir()}
    assert names == {"tokens", LENGTHS, LOSS_LENGTHS, BROKEN, SUMMARY}


def test_a_disk_that_is_full_leaves_nothing_behind(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space left"):
        prepared([{"text": "a"}])
    assert not list((tmp_path / "home").iterdir())


def test_of_several_files_broken_rows_are_told_with_theirs(
    prepared: Prepare, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        written_rows(tmp_path / "all" / f"{name}.jsonl", [{"text": "a b"}, {"text": 3}])
    (note,) = prepared([], source=str(tmp_path / "all"), content="all").notes()
    assert f"{tmp_path}/all/b.jsonl: line 2: text must be text" in note
