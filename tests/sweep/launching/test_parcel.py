"""What goes along with a study that runs on another machine, and where it is found there."""

from __future__ import annotations

import json
import zipfile
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.cli import main
from qlora_sweep.sweep.launching.parcel import constraints, packed, released_version, write
from qlora_sweep.sweep.request import REQUEST, RunRequest

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
    typed = {
        "overrides": {"trials": 3},
        "fixed_settings": {"lora_rank": 8},
        "devices": "2",
        "as_json": True,
    }
    request = RunRequest(space="cpu-demo", storage="sqlite:///x.db", **typed)
    # The database is this machine's.
    changed = {"storage": None, "study": "cpu-demo-90cac3"}
    assert packed(request) == (request.model_copy(update=changed), {})


def test_what_another_machine_reads_is_the_same_study_without_weights(
    here: Path, tmp_path: Path
) -> None:
    (here / "space.yaml").write_text(
        SPACE.replace("texts.jsonl", "{texts: texts.jsonl, format: text}")
    )
    request = of_space().model_copy(update={"fixed_settings": {"compute_dtype": "fp32"}})
    sent, files = packed(request)
    assert sorted(files) == [
        "data/texts.jsonl",
        "model/mine/config.json",
        "space/space.yaml",
    ]
    there = tmp_path / "there"
    for name, file in files.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(file.read_bytes())
    (there / REQUEST).write_text(sent.model_dump_json())
    name, space = RunRequest.read(str(there / REQUEST)).named()
    mine, here_space = request.named()
    assert name == mine
    assert space.data is not None
    assert space.model == str(there / "model" / "mine")
    assert space.data.texts == str(there / "data" / "texts.jsonl")
    assert space.data.format == "text"
    same = {"model": here_space.model, "data": here_space.data}
    assert space.model_copy(update=same) == here_space


def test_what_is_typed_goes_along_in_the_place_of_what_the_space_names(here: Path) -> None:
    # Under the name of a link, whose ending says what it is.
    (here / "blob-of-a-cache").write_text('{"text": "a"}\n')
    (here / "linked.jsonl").symlink_to("blob-of-a-cache")
    data = {"texts": "linked.jsonl", "tokenizer": "mine"}
    request = RunRequest(space="space.yaml", overrides={"data": data, "model": "demo"})
    sent, files = packed(request)
    assert sent.overrides["data"]["texts"] == "./beside/data/linked.jsonl"
    assert sent.overrides["data"]["tokenizer"] == "./beside/tokenizer/mine"
    assert sent.overrides["model"] == "demo"
    assert sorted(files) == ["data/linked.jsonl", "space/space.yaml", "tokenizer/mine/config.json"]


def test_nothing_goes_along_but_what_a_study_reads(here: Path) -> None:
    names = ("a.jsonl", ".env", ".git/a.jsonl", "README.md", "more/b.csv", "sub/x.json")
    names += ("additional_chat_templates/tools.jinja", "MODEL.BIN", "onnx/model.onnx")
    for name in names:
        (here / "mixed" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "mixed" / name).write_text('{"text": "a"}\n')
    _, files = packed(of_space(texts="mixed", tokenizer="mixed"))
    assert [name for name in sorted(files) if "mixed" in name] == [
        *(f"data/mixed/{name}" for name in ("README.md", "a.jsonl", "more/b.csv", "sub/x.json")),
        "tokenizer/mixed/README.md",
        "tokenizer/mixed/a.jsonl",
        "tokenizer/mixed/additional_chat_templates/tools.jinja",
    ]


def test_weights_go_along_where_they_are_loaded_and_asked_for_alone(here: Path) -> None:
    (here / "space.yaml").write_text(SPACE + "weights: pretrained\n")
    with pytest.raises(InputError, match="do not go along: name a hub id"):
        packed(of_space())
    _, files = packed(of_space(), with_weights=True)
    assert "model/mine/model.safetensors" in files


def test_the_spool_of_a_study_that_is_carried_over_goes_along(here: Path) -> None:
    study = here / "runs" / "before"
    study.mkdir(parents=True)
    for name in ("spool.jsonl", "study.json"):
        (study / name).write_text("{}\n")
    for typed in ("before", "runs/before/spool.jsonl"):
        sent, files = packed(RunRequest(space="cpu-demo", carried=typed))
        assert sent.carried == "./beside/from/before/spool.jsonl"
        assert sorted(files) == ["from/before/spool.jsonl", "from/before/study.json"]


def test_what_a_request_names_here_is_never_looked_for_beside_it(tmp_path: Path) -> None:
    directory = tmp_path / "request"
    (directory / "mine").mkdir(parents=True)
    request = RunRequest(
        space="space.yaml",
        overrides={"model": "mine", "data": {"texts": "../texts.jsonl", "tokenizer": "."}},
        carried="mine",
    )
    (directory / REQUEST).write_text(request.model_dump_json())
    assert RunRequest.read(str(directory / REQUEST)) == request


@pytest.mark.parametrize(
    ("doctored", "more", "says"),
    [
        ('{"space": "a10", "more": 1}', [], "holds no request"),
        ('{"space": "cpu-demo"}', ["--trials", "3"], "no option goes with it"),
    ],
)
def test_a_request_that_is_none_or_not_whole_is_bad_input(
    doctored: str, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(REQUEST).write_text(doctored)
    assert main(["run", REQUEST, *more]) == 2
    assert says in capsys.readouterr().err


def test_a_parcel_has_this_very_package_and_the_versions_beside_it(here: Path) -> None:
    wheel = write(here / "parcel")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("there.py", "volume.py", "providers.yaml", "templates/modal_app.py.j2"):
        assert f"qlora_sweep/sweep/launching/{name}" in names
    assert sorted(path.name for path in wheel.parent.iterdir()) == [
        "constraints.txt",
        wheel.name,
        "there.py",
    ]
    held = dict(line.split("==") for line in constraints().splitlines())
    assert {"torch", "transformers", "optuna", "tokenizers"} <= held.keys()
    assert "qlora-sweep" not in held
    # A build for the CPU is none that a GPU can use.
    assert "+" not in held["torch"]


@pytest.mark.parametrize(
    ("version", "source", "pinned"),
    [
        ("2.13.0+cpu", None, "2.13.0"),
        ("5.0.0rc1", None, "5.0.0rc1"),
        ("1.2.post1", {"url": "file:///x.whl", "archive_info": {}}, "1.2.post1"),
        # In no index.
        ("2.14.0.dev20261101+cu130", None, None),
        ("2.8.0a0+5228986c39.nv25.05", None, None),
        ("5.1.0", {"url": "https://x/y", "vcs_info": {"vcs": "git", "commit_id": "1"}}, None),
        ("0.1.0", {"url": "file:///mine", "dir_info": {"editable": True}}, None),
        ("unknown", None, None),
    ],
)
def test_what_no_index_has_is_not_pinned(
    version: str, source: dict[str, Any] | None, pinned: str | None, tmp_path: Path
) -> None:
    info = tmp_path / "torch-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    if source is not None:
        (info / "direct_url.json").write_text(json.dumps(source))
    assert released_version(Distribution.at(info)) == pinned
