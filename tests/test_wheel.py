"""The wheel, installed into an environment of its own and used far from the repository, in a
directory whose files have the names of the package's parts.

An editable install hides what a package forgets. The environment sees what the running one has
installed, so that nothing is downloaded, and nothing of the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.errors import EnvironmentFault
from tests.sweep.launching.ssh_server import environment as make_environment

pytest.importorskip("hatchling", reason="hatchling builds the wheel: `make test` installs it")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[1]
PARTS = ("qlora_sweep", "search_spaces", "storage", "reports", "sweep")
"""What the package is made of in the repository."""
FOREIGN = ("storage.py", "sweep.py", "reports/__init__.py", "search_spaces/__init__.py")
NEVER = "raise SystemExit('never run')"


def call(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [str(one) for one in command], cwd=cwd, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def pip(*arguments: str | Path) -> None:
    call(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that ``pip install --editable`` makes of the checkout."""
    out = tmp_path_factory.mktemp("editable")
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel:editable", "-d", out)
    (found,) = out.glob("*.whl")
    return found


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it, and a directory with foreign files that Python looks in
    before it."""

    environment: Path
    directory: Path

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    def pip(self, *arguments: str | Path) -> None:
        pip("--python", self.python, *arguments)

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        hidden = ("SWEEP_HOME", "PYTHONSAFEPATH")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        return subprocess.run(
            [self.environment / "bin" / program, *arguments],
            cwd=self.directory,
            env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.directory)},
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )

    def sweep(self, *arguments: str) -> str:
        done = self.run("sweep", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


Install = Callable[[Path, Path], Installed]


@pytest.fixture(scope="module")
def install() -> Install:
    def install(where: Path, wheel: Path) -> Installed:
        environment, directory = where / "environment", where / "elsewhere"
        for name in FOREIGN:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(NEVER)
        make_environment(environment)
        made = Installed(environment, directory)
        made.pip("install", "--quiet", "--no-deps", wheel)
        return made

    return install


@pytest.fixture(scope="module")
def installed(install: Install, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(tmp_path_factory.mktemp("installed"), wheel)


def files_of(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


@pytest.fixture(scope="module")
def listed() -> list[str]:
    """The files and links of the checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout to compare with")
    named = call("git", "ls-files", "--cached", "--others", "--exclude-standard")
    return [name for name in named.splitlines() if os.path.lexists(ROOT / name)]


def test_the_wheel_has_one_top_level_name_with_every_file_of_the_rooms(
    wheel: Path, listed: list[str]
) -> None:
    packed = set(files_of(wheel))
    assert {name.partition("/")[0] for name in packed} == {
        "qlora_sweep",
        wheel.name.partition("-py3")[0] + ".dist-info",
    }
    ours = [name for name in listed if name.startswith(tuple(f"{part}/" for part in PARTS))]
    files = [name.removeprefix("qlora_sweep/") for name in ours if (ROOT / name).is_file()]
    expected = {f"qlora_sweep/{name}" for name in files}
    assert {name for name in packed if ".dist-info/" not in name} == expected


def test_the_source_distribution_builds_the_same_wheel(
    built: Path, wheel: Path, tmp_path: Path
) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=unpacked)
    assert files_of(tmp_path / wheel.name) == files_of(wheel)


def test_a_copy_that_lost_its_links_builds_the_same_wheel_and_runs(
    listed: list[str], wheel: Path, tmp_path: Path
) -> None:
    """As Python unpacks a zip of the repository: each link is a file of what it leads to."""
    copy = tmp_path / "copy"
    for name in listed:
        if name.startswith(("tests/", "docs/")):
            continue
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (copy / name).write_text(os.readlink(ROOT / name))
        else:
            shutil.copy(ROOT / name, copy / name)
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=copy)
    assert files_of(tmp_path / wheel.name) == files_of(wheel)
    done = call(sys.executable, "-m", "qlora_sweep", "presets", cwd=copy)
    assert "a10" in done


def test_what_runs_repacks_to_the_wheel_that_it_came_from(
    installed: Installed, wheel: Path
) -> None:
    program = (
        "from qlora_sweep.sweep.launching.parcel import write; write(__import__('pathlib').Path())"
    )
    assert installed.run("python", "-c", program).returncode == 0
    ours, again = files_of(wheel), files_of(installed.directory / wheel.name)
    for files in (ours, again):
        for name in [name for name in files if ".dist-info/" in name]:
            del files[name]
    assert again == ours


def test_an_editable_installation_runs_the_checkout(
    install: Install, editable: Path, tmp_path: Path
) -> None:
    made = install(tmp_path, editable)
    where = "import qlora_sweep; print(*qlora_sweep.__path__)"
    assert made.run("python", "-c", where).stdout.strip() == str(ROOT / "qlora_sweep")
    assert made.sweep("--version").startswith("sweep ")


SCRIPT = """
import sys
from pathlib import Path
import qlora_sweep as q
from qlora_sweep.sweep.terminal.doctor import check, examine

assert q.plan("a10").config
# What ships of a preset was worked out before.
assert not Path(sys.argv[1], "qlora-sweep").exists()
study = q.tune("cpu-demo", trials=1, confirm=False, study="demo")
assert study.trials["total"] == 1, study.trials
winner = q.best(study)
assert winner.peft_config().r == winner.config.lora_rank
libraries = {"torch": "2", "cuda": None, "has_cuda": False, "errors": {}}
_, installation, *_ = check(examine(lambda: libraries))
assert installation.detail.startswith(f"in {sys.prefix}"), installation
ours = [module.__file__ for name, module in sys.modules.items() if name.startswith("qlora_sweep.")]
print(len({file for file in ours if file.startswith(sys.prefix)}) / len(ours))
"""


def test_a_script_beside_files_of_any_name_goes_from_a_plan_to_a_study(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (installed.directory / "script.py").write_text(SCRIPT)
    done = installed.run("python", "script.py", str(tmp_path))
    assert done.stdout.split() == ["1.0"], done.stderr
    installed.sweep("report", "demo", "-o", "report.html")
    page = (installed.directory / "report.html").read_text(encoding="utf-8")
    assert page.count("<section") > 3
    assert "def main" in installed.sweep("export", "demo", "-o", "-")


def test_a_file_that_is_not_as_installed_is_told(installed: Installed) -> None:
    """The last of them: the installation is spoilt."""
    (replaced,) = installed.environment.glob("lib/python*/site-packages/*/storage/study.py")
    replaced.write_text(replaced.read_text(encoding="utf-8") + "\n# Not as installed.\n")
    done = installed.run("sweep", "doctor")
    assert done.returncode == EnvironmentFault.exit_code
    assert "storage/study.py: not what was installed" in done.stdout
