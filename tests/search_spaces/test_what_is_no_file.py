"""What is named where a file should be: a message at once, and never a read without end."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from search_spaces.checkpoints import check_weights
from search_spaces.documents import read_text
from search_spaces.errors import InputError
from search_spaces.loading import load_space
from search_spaces.models import ModelSpec, load_model_spec
from search_spaces.prices import load_prices
from sweep.planning.question import read_configurations

pytestmark = pytest.mark.timeout(20)


def a_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # A socket's whole path must be short.
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


KINDS: dict[str, Callable[[Path], None]] = {
    "a named pipe": lambda path: os.mkfifo(path),
    "a directory": lambda path: path.mkdir(),
    "a socket": a_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def the_weights(path: Path) -> None:
    check_weights(ModelSpec("mine", "directory", {}, path.parent))


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a space": ("mine.yaml", lambda path: load_space(str(path))),
    "a model's config": ("config.json", lambda path: load_model_spec(str(path.parent))),
    "prices": ("prices.yaml", load_prices),
    "configurations": ("configs.jsonl", lambda path: read_configurations(str(path))),
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
