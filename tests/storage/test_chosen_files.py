from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from storage.files import write_chosen


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_chosen(pipe, b"text")
    reader.join(timeout=10)
    assert read == [b"text"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_a_link_to_what_was_written(tmp_path: Path, *, is_there: bool) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    if is_there:
        file.write_text("before")
    write_chosen(link, b"after")
    assert link.is_symlink()
    assert file.read_text() == "after"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]
