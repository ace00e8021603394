"""A foreign module under one of our names is told by its path, with what to do, before its use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sweep.namesakes
from sweep.namesakes import EXIT_CODE, NAMES, changed_files, namesakes
from sweep.predict.memory import profile_store
from sweep.running import child
from sweep.terminal.doctor import PROBE

ROOT = Path(sweep.namesakes.__file__).parents[1]
STARTS = [["-m", "qlora_sweep"], ["-m", "sweep"], ["-m", "sweep.cli"]]
CHILDREN = ["sweep.running", "sweep.predict.memory.tracing", "sweep.training.libraries"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the packages as an installation has them."""
    site = tmp_path_factory.mktemp("site-packages")
    for name in NAMES:
        shutil.copytree(ROOT / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "sweep" / "entry_point.py").rename(site / "qlora_sweep.py")
    return site


def run(
    site: Path, *arguments: str, cwd: Path, before: Path | None = None
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(one) for one in (before, site) if one is not None)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_our_own_packages_are_no_namesakes() -> None:
    assert list(namesakes()) == []


def test_a_start_reads_nothing_of_what_else_is_installed(site: Path, tmp_path: Path) -> None:
    """That takes a second where much is; it waits until something is wrong."""
    program = "import sys, sweep; print('importlib.metadata' in sys.modules, sweep.__name__)"
    done = run(site, "-S", "-P", "-c", program, cwd=tmp_path)
    assert done.stdout.split() == ["False", "sweep"], done.stderr


@pytest.mark.parametrize("start", STARTS, ids=" ".join)
def test_a_file_of_the_users_directory_is_named_where_python_looks_there(
    site: Path, tmp_path: Path, start: list[str]
) -> None:
    (tmp_path / "storage.py").write_text("raise SystemExit('never run')")
    done = run(site, *start, "--version", cwd=tmp_path)
    assert done.returncode == EXIT_CODE
    assert str(tmp_path / "storage.py") in done.stderr
    assert "start it by the command `sweep`" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_of_the_users_directory_is_no_matter_where_python_does_not_look(
    site: Path, tmp_path: Path
) -> None:
    (tmp_path / "storage.py").write_text("raise SystemExit('never run')")
    done = run(site, "-P", "-m", "qlora_sweep", "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout.split()[0]) == (0, "sweep")


def test_a_directory_of_results_is_no_package(site: Path, tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
    done = run(site, "-m", "qlora_sweep", "--version", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_package_in_pythonpath_is_named_whichever_name_it_takes(
    site: Path, tmp_path: Path, name: str
) -> None:
    foreign = tmp_path / "theirs"
    (foreign / name).mkdir(parents=True)
    (foreign / name / "__init__.py").write_text("")
    done = run(site, "-m", "qlora_sweep", "--version", cwd=tmp_path, before=foreign)
    assert done.returncode == EXIT_CODE
    assert f"'{name}' is not ours: Python finds {foreign / name} first" in done.stderr
    assert f"take {foreign} out of PYTHONPATH" in done.stderr


def test_the_import_offers_its_names_and_touches_nothing(site: Path, tmp_path: Path) -> None:
    (tmp_path / "storage.py").write_text("raise SystemExit('never run')")
    program = (
        "import signal, sys, qlora_sweep; "
        "print(sorted({'torch', 'optuna', 'transformers', 'pydantic'} & sys.modules.keys())); "
        "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL); "
        "print({'plan', 'tune', 'best'} <= {*dir(qlora_sweep)}, hasattr(qlora_sweep, 'json')); "
        "from qlora_sweep import InputError, Plan, best, plan, tune; "
        "print(sorted({'torch', 'optuna', 'transformers'} & sys.modules.keys()))"
    )
    done = run(site, "-P", "-c", program, cwd=tmp_path)
    assert done.stdout.splitlines() == ["[]", "True", "True False", "[]"], done.stderr


def test_the_import_names_a_namesake_in_an_exception(site: Path, tmp_path: Path) -> None:
    (tmp_path / "storage.py").write_text("raise SystemExit('never run')")
    program = (
        "import qlora_sweep\n"
        "try: from qlora_sweep import plan\n"
        "except ImportError as error: print(error)"
    )
    done = run(site, "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"'storage' is not ours: Python finds {tmp_path / 'storage.py'} first" in done.stdout


def test_an_installation_without_its_packages_is_told(site: Path, tmp_path: Path) -> None:
    alone = tmp_path / "site-packages"
    alone.mkdir()
    shutil.copy(site / "qlora_sweep.py", alone)
    # -S: this environment's own installation of the packages does not count.
    done = run(alone, "-S", "-P", "-m", "qlora_sweep", "--version", cwd=tmp_path)
    assert done.returncode == EXIT_CODE
    assert "qlora-sweep is incomplete" in done.stderr


@pytest.mark.parametrize("module", CHILDREN)
def test_a_child_refuses_too(site: Path, tmp_path: Path, module: str) -> None:
    foreign = tmp_path / "theirs"
    foreign.mkdir()
    (foreign / "storage.py").write_text("")
    done = run(site, "-P", "-m", module, "0", cwd=tmp_path, before=foreign)
    assert done.returncode == EXIT_CODE
    assert str(foreign / "storage.py") in done.stderr


def test_children_never_look_in_the_users_directory() -> None:
    assert PROBE[1] == profile_store._COMMAND[1] == "-P"
    source = Path(child.__file__).read_text(encoding="utf-8")
    assert '[sys.executable, "-P", "-m", module' in source


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("content", "words"), [("# theirs\n", "has replaced"), (None, "is incomplete")]
)
def test_a_package_that_was_overwritten_or_half_removed_is_told(
    site: Path, tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    mixed = tmp_path / "site-packages"
    shutil.copytree(site, mixed)
    replaced = mixed / name / "__init__.py"
    replaced.unlink()
    if content is not None:
        replaced.write_text(content)
    done = run(mixed, "-P", "-m", "qlora_sweep", "--version", cwd=tmp_path)
    assert done.returncode == EXIT_CODE
    assert words in done.stderr
    assert str(replaced) in done.stderr
    assert "pip install --force-reinstall --no-deps qlora-sweep" in done.stderr


def test_a_checkout_has_no_files_that_should_be_as_installed() -> None:
    assert changed_files() == []
