"""What goes along with a study that runs on another machine, and where it is found there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from search_spaces.errors import InputError
from search_spaces.models import load_model_spec
from sweep.cli import main
from sweep.launching.inputs import files_below, packed
from sweep.request import REQUEST, RunRequest

SPACE = """
gpu: cpu
budget_gib: 0.0625
model: mine
data: texts.jsonl
dimensions:
  lora_rank: [4, 8]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, a dataset and a space that names both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(load_model_spec("demo").config))
    (tmp_path / "mine" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


def of_space(**data: str) -> RunRequest:
    return RunRequest(space="space.yaml", overrides={"data": data} if data else {})


def test_a_preset_needs_nothing_and_all_that_was_typed_goes_along() -> None:
    request = RunRequest(
        space="cpu-demo",
        overrides={"trials": 3, "confirm": False},
        held={"lora_rank": 8},
        storage="sqlite:///x.db",
        devices="2",
        as_json=True,
    )
    sent, files = packed(request)
    assert files == {}
    # The database is this machine's.
    changed = {"storage": None, "study": "cpu-demo-90cac3"}
    assert sent == request.model_copy(update=changed)


def test_a_space_goes_along_with_what_it_names_and_without_weights(here: Path) -> None:
    sent, files = packed(of_space())
    assert (sent.space, sent.study) == ("./beside/space/space.yaml", "space")
    assert sent.overrides["model"] == "./beside/model/mine"
    assert sent.overrides["data"]["texts"] == "./beside/data/texts.jsonl"
    assert files == {
        "space/space.yaml": here / "space.yaml",
        "model/mine/config.json": here / "mine" / "config.json",
        "data/texts.jsonl": here / "texts.jsonl",
    }


def test_what_is_typed_goes_along_in_the_place_of_what_the_space_names(here: Path) -> None:
    (here / "others.jsonl").write_text('{"text": "b"}\n')
    (here / "tokens").mkdir()
    (here / "tokens" / "tokenizer.json").write_text("{}")
    data = {"texts": "others.jsonl", "tokenizer": "tokens"}
    request = RunRequest(space="space.yaml", overrides={"data": data, "model": "demo"})
    sent, files = packed(request)
    assert sent.overrides["data"]["texts"] == "./beside/data/others.jsonl"
    assert sent.overrides["data"]["tokenizer"] == "./beside/tokenizer/tokens"
    assert sent.overrides["model"] == "demo"
    assert "data/texts.jsonl" not in files


def test_what_another_machine_reads_is_the_same_study(here: Path, tmp_path: Path) -> None:
    (here / "space.yaml").write_text(
        SPACE.replace("texts.jsonl", "{texts: texts.jsonl, format: text}")
    )
    request = of_space()
    sent, files = packed(request.model_copy(update={"held": {"compute_dtype": "fp32"}}))
    there = tmp_path / "there"
    for name, file in files.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(file.read_bytes())
    (there / REQUEST).write_text(sent.model_dump_json())
    name, space = RunRequest.read(str(there / REQUEST)).named()
    mine, here_space = request.model_copy(update={"held": {"compute_dtype": "fp32"}}).named()
    assert name == mine
    assert space.data is not None
    assert here_space.data is not None
    assert space.model == str(there / "model" / "mine")
    assert space.data.texts == str(there / "data" / "texts.jsonl")
    same = {"model": here_space.model, "data": here_space.data}
    assert space.model_copy(update=same) == here_space
    assert space.data.format == here_space.data.format == "text"


def test_what_a_request_names_here_is_never_looked_for_beside_it(tmp_path: Path) -> None:
    directory = tmp_path / "request"
    (directory / "mine").mkdir(parents=True)
    (tmp_path / "texts.jsonl").write_text("planted")
    request = RunRequest(
        space="space.yaml",
        overrides={"model": "mine", "data": {"texts": "../texts.jsonl", "tokenizer": "."}},
        carried="mine",
    )
    (directory / REQUEST).write_text(request.model_dump_json())
    assert RunRequest.read(str(directory / REQUEST)) == request


@pytest.mark.parametrize(
    "doctored",
    [
        '{"space": "cpu-demo", "overrides": {"data": 5}}',
        '{"space": "cpu-demo", "overrides": {"changed": 1}}',
        '{"space": "a10", "more": 1}',
        '{"overrides": {}}',
        "[]",
        "{",
    ],
)
def test_a_request_that_is_none_is_bad_input(
    tmp_path: Path, doctored: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / REQUEST).write_text(doctored)
    assert main(["run", str(tmp_path / REQUEST)]) == 2
    assert "holds no request" in capsys.readouterr().err


def test_a_request_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / REQUEST).write_text(RunRequest(space="cpu-demo").model_dump_json())
    assert main(["run", str(tmp_path / REQUEST), "--trials", "3"]) == 2
    assert "no option goes with it" in capsys.readouterr().err


def test_texts_that_are_a_link_go_along_under_its_own_name(here: Path) -> None:
    (here / "blob-of-a-cache").write_text('{"text": "a"}\n')
    (here / "linked.jsonl").symlink_to("blob-of-a-cache")
    sent, files = packed(of_space(texts="linked.jsonl"))
    assert sent.overrides["data"]["texts"] == "./beside/data/linked.jsonl"
    assert "data/linked.jsonl" in files


def test_what_is_hidden_and_a_tokenizers_weights_stay_here(here: Path) -> None:
    for name in ("texts/a.jsonl", "texts/.env", "mine/tokenizer.json", "mine/.env"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text('{"text": "a"}\n')
    _, files = packed(of_space(texts="texts", tokenizer="mine"))
    assert sorted(files) == [
        "data/texts/a.jsonl",
        "model/mine/config.json",
        "model/mine/tokenizer.json",
        "space/space.yaml",
        "tokenizer/mine/config.json",
        "tokenizer/mine/tokenizer.json",
    ]


def test_the_spool_of_a_study_that_is_carried_over_goes_along(here: Path) -> None:
    study = here / "runs" / "before"
    study.mkdir(parents=True)
    (study / "spool.jsonl").write_text("{}\n")
    (study / "study.json").write_text("{}")
    for typed in ("before", "runs/before/spool.jsonl"):
        sent, files = packed(RunRequest(space="cpu-demo", carried=typed))
        assert sent.carried == "./beside/from/before/spool.jsonl"
        assert sorted(files) == ["from/before/spool.jsonl", "from/before/study.json"]


def test_weights_go_along_where_they_are_loaded_and_asked_for_alone(here: Path) -> None:
    (here / "space.yaml").write_text(SPACE + "weights: pretrained\n")
    with pytest.raises(InputError, match="do not go along: name a hub id"):
        packed(of_space())
    _, files = packed(of_space(), with_weights=True)
    assert "model/mine/model.safetensors" in files


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
    directory = tmp_path / "directory"
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    assert [below for below, _ in files_below(kind, directory)] == along
