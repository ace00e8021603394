"""Files of a study are private from their first moment, and no planted name leads elsewhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from qlora_sweep.storage import files


@pytest.fixture(params=[0o000, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def append(path: Path) -> None:
    with files.open_append(path) as file:
        file.write(b"new")


def replace(path: Path) -> None:
    files.replace(path, b"new")


@pytest.mark.usefixtures("umask")
def test_a_new_file_is_its_owners_alone_and_an_old_one_keeps_its_readers(tmp_path: Path) -> None:
    for name, write in (("appended", append), ("replaced", replace)):
        path = tmp_path / name / "study" / "file"
        write(path)
        assert mode(path) == 0o600
        assert mode(path.parent) == mode(path.parent.parent) == 0o700
        assert os.listdir(path.parent) == ["file"]
        path.parent.chmod(0o755)
        path.chmod(0o644)
        write(path)
        assert (mode(path), mode(path.parent)) == (0o644, 0o755)
    with pytest.raises(TypeError):
        files.replace(path, 5)  # type: ignore[arg-type]
    assert (path.read_bytes(), os.listdir(path.parent)) == (b"new", ["file"])


def test_a_planted_link_or_a_second_name_is_not_written_through(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_bytes(b"theirs")
    path.symlink_to(victim)
    for use in (append, files.read_bytes):
        with pytest.raises(OSError, match="is a symbolic link"):
            use(path)
    with pytest.raises(FileExistsError):
        files.create(path)
    replace(path)
    assert not path.is_symlink()
    assert (victim.read_bytes(), path.read_bytes()) == (b"theirs", b"new")
    path.unlink()
    path.hardlink_to(victim)
    append(path)
    assert (victim.read_bytes(), path.read_bytes()) == (b"theirs", b"theirsnew")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("is_link", [False, True])
def test_a_strangers_directory_in_a_directory_of_everybody_is_refused(
    is_link: bool, tmp_path: Path
) -> None:
    shared, theirs = tmp_path / "shared", tmp_path / "theirs"
    for directory in (shared, theirs):
        directory.mkdir(mode=0o755)
    study = shared / "study"
    study.symlink_to(theirs) if is_link else study.mkdir()
    os.chown(study, 12345, -1, follow_symlinks=False)
    append(study / "before")
    shared.chmod(0o1777)
    for write in (append, replace):
        with pytest.raises(OSError, match="belongs to another user"):
            write(study / "file")


def test_the_users_own_output_follows_links_and_the_umask(
    tmp_path: Path, umask: None, request: pytest.FixtureRequest
) -> None:
    target, path = tmp_path / "target", tmp_path / "link"
    path.symlink_to(target)
    files.write_output(path, b"first")
    assert path.is_symlink()
    assert mode(target) == 0o666 & ~request.node.callspec.params["umask"]
    target.chmod(0o640)
    files.write_output(path, b"second")
    assert (mode(target), target.read_bytes()) == (0o640, b"second")
    assert sorted(os.listdir(tmp_path)) == ["link", "target"]


def test_files_that_killed_writers_left_are_deleted_and_no_others(tmp_path: Path) -> None:
    left, linked, other = (f".{digit * 16}.sweep.tmp" for digit in "abc")
    (tmp_path / left).write_bytes(b"half")
    (tmp_path / "victim").write_bytes(b"mine")
    (tmp_path / linked).symlink_to(tmp_path / "victim")
    (tmp_path / other).mkdir()
    (tmp_path / ".notes.sweep.tmp").touch()
    files.sweep_temporary(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [linked, other, ".notes.sweep.tmp", "victim"]
    files.sweep_temporary(tmp_path / "missing")


def test_a_file_that_is_being_written_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = []

    def meanwhile(descriptor: int) -> None:
        files.sweep_temporary(tmp_path)
        swept.append(os.listdir(tmp_path))

    monkeypatch.setattr(files.os, "fsync", meanwhile)
    files.replace(tmp_path / "file", b"new")
    assert all(len(names) == 1 for names in swept)
    assert (tmp_path / "file").read_bytes() == b"new"
