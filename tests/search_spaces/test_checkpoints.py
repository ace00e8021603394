"""Weights in a directory, and whatever else is named where a file should be."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlora_sweep.search_spaces.checkpoints import INDEX, SINGLE, check_weights
from qlora_sweep.search_spaces.documents import read_text
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.loading import load_space
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec


def safetensors(*names: str, bytes_each: int = 8) -> bytes:
    entries = {
        name: {
            "dtype": "U8",
            "shape": [bytes_each],
            "data_offsets": [i * bytes_each, (i + 1) * bytes_each],
        }
        for i, name in enumerate(names)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(bytes_each * len(names))


def spec_of(directory: Path) -> ModelSpec:
    return ModelSpec("model", "directory", {"model_type": "llama"}, directory)


def weights_error(directory: Path) -> str:
    with pytest.raises(InputError) as caught:
        check_weights(spec_of(directory))
    return str(caught.value)


def shard(directory: Path) -> None:
    places = {"a": "one.safetensors", "b": "two.safetensors"}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (directory / "one.safetensors").write_bytes(safetensors("a"))
    (directory / "two.safetensors").write_bytes(safetensors("b"))


def test_complete_weights_pass(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(safetensors("a", "b"))
    check_weights(spec_of(tmp_path))
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"w": pytest.importorskip("numpy").ones((3, 5))}, str(tmp_path / SINGLE))
    check_weights(spec_of(tmp_path))
    shard(tmp_path)
    check_weights(spec_of(tmp_path))
    # A hub model's weights are left to the download, and an architecture that is shipped has none.
    check_weights(ModelSpec("org/m", "hub", {"model_type": "llama"}, tmp_path / "nowhere"))
    with pytest.raises(InputError, match="an architecture without weights"):
        check_weights(load_model_spec("demo"))


def test_a_shard_that_is_missing_cut_short_or_without_its_tensor_is_named(tmp_path: Path) -> None:
    shard(tmp_path)
    two = tmp_path / "two.safetensors"
    two.write_bytes(safetensors("other"))
    assert "model/two.safetensors: tensor 'b' of" in weights_error(tmp_path)
    whole = safetensors("b", bytes_each=5000)
    two.write_bytes(whole[:-1000])
    assert weights_error(tmp_path) == (
        f"model/{two.name}: cut short: expected {len(whole):,} bytes, found {len(whole) - 1000:,}"
    )
    two.unlink()
    assert weights_error(tmp_path) == "model/two.safetensors: this shard is missing"


@given(st.integers(0, 10_000))
def test_no_cut_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    whole = safetensors("a", "b", bytes_each=100)
    path = tmp_path_factory.mktemp("cut")
    (path / SINGLE).write_bytes(whole[: length % len(whole)])
    assert weights_error(path).startswith(f"model/{SINGLE}: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (safetensors("a") + b"x", "longer than its header says"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer, not the weights"),
        ((2).to_bytes(8, "little") + b"[]", "its header cannot be read"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "its header cannot be read"),
        (b"\xff" * 64, "its header cannot be read"),
        (b"", "cut short"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    assert message in weights_error(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {}}', "weight_map must name the shard"),
        ('{"weight_map": {"a": 3}}', "'a' must be in a file, got 3"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "got '../../etc/passwd'"),
        ("{", "not valid JSON"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / INDEX).write_text(index)
    error = weights_error(tmp_path)
    assert error.startswith(f"model/{INDEX}: ")
    assert message in error


def test_a_directory_without_weights_is_refused_and_pickles_are_not_loaded(tmp_path: Path) -> None:
    assert weights_error(tmp_path).startswith("model: no weights, neither")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pickles" in weights_error(tmp_path)


pytestmark = pytest.mark.timeout(20)


KINDS: dict[str, Callable[[Path], None]] = {
    "a named pipe": lambda path: os.mkfifo(path),
    "a directory": lambda path: path.mkdir(),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def the_weights(path: Path) -> None:
    check_weights(ModelSpec("mine", "directory", {}, path.parent))


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a space": ("mine.yaml", lambda path: load_space(str(path))),
    "a model's config": ("config.json", lambda path: load_model_spec(str(path.parent))),
    "a weights' index": ("model.safetensors.index.json", the_weights),
    "weights": ("model.safetensors", the_weights),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, reader: str) -> None:
    name, read = READERS[reader]
    for kind, make in KINDS.items():
        place = tmp_path / kind
        place.mkdir()
        make(place / name)
        with pytest.raises(InputError, match=rf"{name}: is {kind}, not a file"):
            read(place / name)


def test_what_the_shell_hands_over_is_read_though_it_is_a_pipe() -> None:
    end, start = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(start, b"name: mine\n"), os.close(start)))
    writer.start()
    try:
        assert read_text(Path(f"/dev/fd/{end}"), label="piped") == "name: mine\n"
    finally:
        writer.join()
        os.close(end)
