"""A foreign module under one of our names is told by its path, with what to do, before its use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import qlora_sweep.sweep.namesakes
from qlora_sweep.sweep.namesakes import EXIT_CODE, NAMES, changed_files, namesakes

ROOT = Path(sweep.namesakes.__file__).parents[1]
NEVER = "raise SystemExit('never run')"
COMMAND = ("-m", "qlora_sweep", "--version")
SAFE = ("-P", *COMMAND)
"""Python then does not look in the user's directory."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the packages as an installation has them."""
    site = tmp_path_factory.mktemp("site-packages")
    for name in NAMES:
        shutil.copytree(ROOT / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "sweep" / "entry_point.py").rename(site / "qlora_sweep.py")
    return site


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A directory with a file under one of our names."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "storage.py").write_text(NEVER)
    return tmp_path / "theirs"


def run(*words: str, cwd: Path, paths: list[Path]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, paths))
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_what_is_ours_is_no_namesake_nor_changed() -> None:
    assert list(namesakes()) == []
    assert changed_files() == []


def test_a_start_reads_nothing_of_what_else_is_installed(site: Path, tmp_path: Path) -> None:
    """That takes a second where much is; it waits until something is wrong."""
    program = "import sys, sweep; print('importlib.metadata' in sys.modules, sweep.__name__)"
    done = run("-S", "-P", "-c", program, cwd=tmp_path, paths=[site])
    assert done.stdout.split() == ["False", "sweep"], done.stderr


@pytest.mark.parametrize(
    ("words", "is_in_pythonpath"),
    [
        # A file of the user's directory, where Python looks there.
        (COMMAND, False),
        (("-m", "sweep", "--version"), False),
        (("-m", "qlora_sweep.sweep.cli", "--version"), False),
        # Children refuse too.
        (("-P", "-m", "qlora_sweep.sweep.running", "0"), True),
        (("-P", "-m", "qlora_sweep.sweep.predict.memory.tracing", "0"), True),
        (("-P", "-m", "qlora_sweep.sweep.training.libraries", "0"), True),
    ],
)
def test_a_file_under_one_of_our_names_is_told_by_its_path(
    words: tuple[str, ...], is_in_pythonpath: bool, site: Path, theirs: Path
) -> None:
    cwd, before = (theirs.parent, [theirs]) if is_in_pythonpath else (theirs, [])
    done = run(*words, cwd=cwd, paths=[*before, site])
    assert done.returncode == EXIT_CODE
    assert str(theirs / "storage.py") in done.stderr
    assert "Traceback" not in done.stderr
    assert is_in_pythonpath or "start it by the command `sweep`" in done.stderr


def test_what_python_does_not_look_at_and_directories_of_results_are_no_matter(
    site: Path, theirs: Path
) -> None:
    done = run(*SAFE, cwd=theirs, paths=[site])
    assert (done.returncode, done.stdout.split()[0]) == (0, "sweep")
    (theirs / "storage.py").unlink()
    for name in NAMES:
        (theirs / name).mkdir()
    assert run(*COMMAND, cwd=theirs, paths=[site]).returncode == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_package_in_pythonpath_is_named_whichever_name_it_takes(
    name: str, site: Path, tmp_path: Path
) -> None:
    (tmp_path / "theirs" / name).mkdir(parents=True)
    (tmp_path / "theirs" / name / "__init__.py").write_text("")
    done = run(*COMMAND, cwd=tmp_path, paths=[tmp_path / "theirs", site])
    assert done.returncode == EXIT_CODE
    assert f"'{name}' is not ours: Python finds {tmp_path / 'theirs' / name} first" in done.stderr
    assert f"take {tmp_path / 'theirs'} out of PYTHONPATH" in done.stderr


IMPORT = """
import signal, sys, qlora_sweep
print(sorted({'torch', 'optuna', 'transformers', 'pydantic'} & sys.modules.keys()))
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
try:
    print({'plan', 'tune', 'best'} <= {*dir(qlora_sweep)}, hasattr(qlora_sweep, 'json'))
    from qlora_sweep import InputError, Plan, best, plan, tune
except ImportError as error:
    print(error)
print(sorted({'torch', 'optuna', 'transformers'} & sys.modules.keys()))
"""


def test_the_import_offers_its_names_touches_nothing_and_names_a_namesake_in_an_exception(
    site: Path, theirs: Path
) -> None:
    done = run("-P", "-c", IMPORT, cwd=theirs, paths=[site])
    assert done.stdout.splitlines() == ["[]", "True", "True False", "[]"], done.stderr
    done = run("-c", IMPORT, cwd=theirs, paths=[site])
    assert done.returncode == 0, done.stderr
    assert f"'storage' is not ours: Python finds {theirs / 'storage.py'} first" in done.stdout


def test_an_installation_without_its_packages_is_told(site: Path, tmp_path: Path) -> None:
    shutil.copy(site / "qlora_sweep.py", tmp_path)
    # -S: this environment's own installation of the packages does not count.
    done = run("-S", *SAFE, cwd=tmp_path, paths=[tmp_path])
    assert done.returncode == EXIT_CODE
    assert "qlora-sweep is incomplete" in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [("storage", "# theirs\n", "has replaced"), ("reports", None, "is incomplete")],
)
def test_a_package_that_was_overwritten_or_half_removed_is_told(
    name: str, content: str | None, words: str, site: Path, tmp_path: Path
) -> None:
    mixed = tmp_path / "site-packages"
    shutil.copytree(site, mixed)
    replaced = mixed / name / "__init__.py"
    replaced.unlink()
    if content is not None:
        replaced.write_text(content)
    done = run(*SAFE, cwd=tmp_path, paths=[mixed])
    assert done.returncode == EXIT_CODE
    assert words in done.stderr
    assert str(replaced) in done.stderr
    assert "pip install --force-reinstall --no-deps qlora-sweep" in done.stderr
