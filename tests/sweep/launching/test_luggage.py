"""What goes along with a study that runs on another machine, and how it is called there."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer.main

from search_spaces.errors import InputError
from search_spaces.knobs import KNOBS
from search_spaces.models import load_model_spec
from sweep import cli
from sweep.study.asked import named
from sweep.terminal.knob_options import add_knobs
from sweep.terminal.remote import Luggage, packed
from sweep.terminal.typed import call, respelled

SPACE = """
gpu: cpu
budget_gib: 0.0625
model: mine
data: texts.jsonl
dimensions:
  lora_rank: [4, 8]
"""


@pytest.fixture(scope="module")
def command() -> Any:
    add_knobs(cli.run, KNOBS)
    return typer.main.get_command(cli.app).commands["run"]  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, texts and a space that names both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(load_model_spec("demo").config))
    (tmp_path / "mine" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


def luggage(command: Any, *words: str) -> Luggage:
    """Return what goes along with a run, as it was typed."""
    taken: list[Luggage] = []

    def drive(space_name: str, **came_to: Any) -> int:
        keys = ("overrides", "held", "study")
        name, space = named(space_name, **{key: came_to[key] for key in keys})
        pack = partial(packed, command=command, words=words)
        taken.append(pack(space_name, space, name, came_to["carried"]))
        return 0

    assert call(command, words, drive=drive) == 0
    return taken[0]


def test_a_preset_needs_nothing_and_every_option_goes_along(command: Any) -> None:
    words = ("--trials", "3", "cpu-demo", "--rank", "8", "--no-confirm", "--json")
    found = luggage(command, *words, "--storage", "sqlite:///x.db")
    assert found.files == {}
    assert found.words == (
        *("run", "cpu-demo", "--trials=3", "--lora-rank=8", "--no-confirm", "--json"),
        *("--model=demo", "--study=cpu-demo-90cac3"),
    )


def test_a_space_goes_along_with_what_it_names_and_without_weights(
    command: Any, here: Path
) -> None:
    found = luggage(command, "space.yaml", "--all-tokens")
    assert found.words == (
        *("run", "inputs/space/space.yaml", "--all-tokens", "--model=inputs/model/mine"),
        *("--data=inputs/data/texts.jsonl", "--study=space"),
    )
    assert {name: path.resolve() for name, path in found.files.items()} == {
        "inputs/space/space.yaml": here / "space.yaml",
        "inputs/model/mine/config.json": here / "mine" / "config.json",
        "inputs/data/texts.jsonl": here / "texts.jsonl",
    }


def test_what_is_typed_goes_along_in_the_place_of_what_the_space_names(
    command: Any, here: Path
) -> None:
    (here / "others.jsonl").write_text('{"text": "b"}\n')
    (here / "tokens").mkdir()
    (here / "tokens" / "tokenizer.json").write_text("{}")
    found = luggage(
        command, "space.yaml", "--data=others.jsonl", "--model=demo", "--tokenizer", "tokens"
    )
    assert "--data=inputs/data/others.jsonl" in found.words
    assert "--tokenizer=inputs/tokenizer/tokens" in found.words
    assert "--model=demo" in found.words
    assert "inputs/data/texts.jsonl" not in found.files


def test_texts_that_are_a_link_go_along_under_its_own_name(command: Any, here: Path) -> None:
    (here / "blob-of-a-cache").write_text('{"text": "a"}\n')
    (here / "linked.jsonl").symlink_to("blob-of-a-cache")
    found = luggage(command, "space.yaml", "--data", "linked.jsonl")
    assert "--data=inputs/data/linked.jsonl" in found.words
    assert "inputs/data/linked.jsonl" in found.files


def test_what_is_hidden_and_a_tokenizers_weights_stay_here(command: Any, here: Path) -> None:
    for name in ("texts/a.jsonl", "texts/.env", "mine/tokenizer.json", "mine/.env"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text('{"text": "a"}\n')
    found = luggage(command, "space.yaml", "--data", "texts", "--tokenizer", "mine")
    assert sorted(found.files) == [
        "inputs/data/texts/a.jsonl",
        "inputs/model/mine/config.json",
        "inputs/model/mine/tokenizer.json",
        "inputs/space/space.yaml",
        "inputs/tokenizer/mine/config.json",
        "inputs/tokenizer/mine/tokenizer.json",
    ]


def test_the_spool_of_a_study_that_is_carried_over_goes_along(command: Any, here: Path) -> None:
    study = here / "runs" / "before"
    study.mkdir(parents=True)
    (study / "spool.jsonl").write_text("{}\n")
    (study / "study.json").write_text("{}")
    for typed in ("before", "runs/before/spool.jsonl"):
        found = luggage(command, "cpu-demo", "--from", typed)
        assert "--from=inputs/from/before/spool.jsonl" in found.words
        assert sorted(found.files) == [
            "inputs/from/before/spool.jsonl",
            "inputs/from/before/study.json",
        ]


def test_weights_that_are_here_alone_are_refused(command: Any, here: Path) -> None:
    (here / "space.yaml").write_text(SPACE + "weights: pretrained\n")
    with pytest.raises(InputError, match="do not go along: name a hub id"):
        luggage(command, "space.yaml")


@pytest.mark.parametrize(
    ("words", "again"),
    [
        (["--rank=8", "a10", "--upcast-fp32"], ["a10", "--lora-rank=8", "--upcast-fp32"]),
        (["a10", "--no-upcast-fp32", "--study", "-x"], ["a10", "--no-upcast-fp32", "--study=-x"]),
        (["a10", "--seed", "1", "--seed", "2"], ["a10", "--seed=2"]),
    ],
)
def test_words_are_spelled_again_as_they_were_meant(
    command: Any, words: list[str], again: list[str]
) -> None:
    assert respelled(command, words) == again
