"""Which files go along to a rented machine, and by what names the command has them there."""

from __future__ import annotations

from pathlib import Path

import pytest

from search_spaces.models import load_model_spec
from search_spaces.texts import TextsChoice
from sweep.launching.inputs import carried, files_below, located, place
from sweep.launching.parcel import Input

DEMO = load_model_spec("demo")


def test_what_is_no_file_here_keeps_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    choice = TextsChoice(texts="org/texts", tokenizer="demo")
    assert located("A10", model=DEMO, choice=choice) == ("a10", {})
    assert located("a10", model=DEMO, choice=None) == ("a10", {})


def test_texts_and_tokenizer_go_along_from_where_the_command_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokenizer.json").touch()
    choice = TextsChoice(texts="texts.jsonl", tokenizer="mine")
    space, named = located("spaces/my.yaml", model=DEMO, choice=choice)
    assert space == Input(tmp_path / "spaces" / "my.yaml", "space/my.yaml")
    assert named == {
        "data": Input(tmp_path / "texts.jsonl", "data/texts.jsonl"),
        "tokenizer": Input(tmp_path / "mine", "tokenizer/mine"),
    }
    assert carried(space, named, are_weights_random=True) == (
        space,
        named["data"],
        Input(tmp_path / "mine" / "tokenizer.json", "tokenizer/mine/tokenizer.json"),
    )


@pytest.mark.parametrize("are_random", [True, False])
def test_weights_go_along_only_where_they_are_loaded(are_random: bool, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors", ".cache"):
        (tmp_path / name).touch()
    model = Input(tmp_path, "model/mine")
    found = carried("a10", {"model": model}, are_weights_random=are_random)
    weights = [] if are_random else ["model/mine/model.safetensors"]
    assert [one.name for one in found] == [
        "model/mine/config.json",
        *weights,
        "model/mine/tokenizer.json",
    ]


@pytest.mark.parametrize(
    ("kind", "names", "along"),
    [
        (
            "data",
            ["a.jsonl", ".env", ".git/a.jsonl", "notes.txt", "more/b.csv"],
            ["/a.jsonl", "/more/b.csv"],
        ),
        (
            "tokenizer",
            ["tokenizer.json", "model.safetensors", "MODEL.BIN", ".env", "sub/x.json"],
            ["/tokenizer.json"],
        ),
        (
            "tokenizer",
            ["chat_template.jinja", "additional_chat_templates/tools.jinja"],
            ["/additional_chat_templates/tools.jinja", "/chat_template.jinja"],
        ),
        ("model", ["config.json", "flax_model.msgpack", "onnx/model.onnx"], ["/config.json"]),
    ],
)
def test_nothing_goes_along_but_what_a_study_reads(
    kind: str, names: list[str], along: list[str], tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [below for below, _ in files_below(kind, tmp_path)] == along


@pytest.mark.parametrize(
    ("typed", "name"), [("here.jsonl", "here.jsonl"), (".", "mine"), ("sub/..", "mine")]
)
def test_a_file_has_there_the_name_that_it_has_here(
    typed: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    Path("here.jsonl").symlink_to("blob-of-a-cache")
    assert place("data", Path(typed)) == f"data/{name}"
