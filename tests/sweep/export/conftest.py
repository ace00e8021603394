"""What tests of exported scripts share: a tiny model on the disk, and what lies beside a script."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage.definition import StudySnapshot
from tests.sweep.export.studies import export, imported, rows_module
from tests.sweep.export.weights import saved_model, with_tokenizer
from tests.sweep.training.tiny import saved_with_outliers

BESIDE = (
    "eight_bit",
    "experts",
    "fitting",
    "grouped",
    "host_memory",
    "int8_products",
    "offload",
    "preference",
    "recomputing",
)
"""Modules of `sweep.training` that lie beside scripts."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """The tiny model with random weights and a tokenizer that knows chats."""
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A model of which INT8 suits all layers but one, with the same tokenizer."""
    directory = tmp_path_factory.mktemp("outliers")
    spec = saved_with_outliers(directory, has_unsuited=True)
    with_tokenizer(directory)
    return spec


@pytest.fixture
def script_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[StudySnapshot], ModuleType]]:
    """Return a study's script as a module, on one thread; a process has its neighbours once."""
    import torch

    for name in BESIDE:
        beside = importlib.import_module(f"qlora_sweep.sweep.training.{name}")
        monkeypatch.setitem(sys.modules, name, beside)
    monkeypatch.setitem(sys.modules, "rows", rows_module())
    # The script says how memory is allocated; other tests shall not find it.
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda study: imported(export(study, format="script"), tmp_path / "exported_script.py")
    torch.set_num_threads(before)


@pytest.fixture
def run(
    tmp_path: Path, model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Run a script in this process on the tiny model, and return what it says that it reached."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def ran(script: ModuleType, *options: str) -> dict[str, Any]:
        typed = ["train.py", "--model", str(model.path), "--data", str(tmp_path / "data.jsonl")]
        typed += ["--output", str(tmp_path / "out"), "--metrics", str(tmp_path / "metrics.json")]
        monkeypatch.setattr("sys.argv", [*typed, *options])
        script.main()
        reached: dict[str, Any] = json.loads((tmp_path / "metrics.json").read_text())
        return reached

    return ran
