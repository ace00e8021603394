"""The wheel, installed into an environment of its own and used far from the repository.

An editable install hides what a package forgets. The environment sees what the running one has
installed, so that nothing is downloaded, and nothing of the checkout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from qlora_sweep.sweep.namesakes import EXIT_CODE, NAMES

pytest.importorskip("hatchling", reason="hatchling builds the wheel: `make test` installs it")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[1]
DEPENDENCIES = sorted({path for path in sys.path if Path(path).name == "site-packages"})


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
    """An environment with the wheel in it, and a directory that is not the repository."""

    environment: Path
    directory: Path

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    def pip(self, *arguments: str | Path) -> None:
        pip("--python", self.python, *arguments)

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        hidden = ("PYTHONPATH", "SWEEP_HOME", "PYTHONSAFEPATH")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        return subprocess.run(
            [self.environment / "bin" / program, *arguments],
            cwd=self.directory,
            env=environment | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )

    def try_sweep(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("sweep", *arguments)

    def sweep(self, *arguments: str) -> str:
        done = self.try_sweep(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


Install = Callable[[Path, Path], Installed]


@pytest.fixture(scope="module")
def install() -> Install:
    def install(where: Path, wheel: Path) -> Installed:
        environment, directory = where / "environment", where / "elsewhere"
        directory.mkdir()
        venv.create(environment, symlinks=True)
        paths = sysconfig.get_paths(vars={"base": str(environment)})
        # Lines of a .pth file are directories: what other .pth files there name stays unseen.
        Path(paths["purelib"], "dependencies.pth").write_text("\n".join(DEPENDENCIES))
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


def test_every_file_of_the_packages_is_in_the_wheel_and_nothing_else(wheel: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout to compare with")
    listed = call("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *NAMES)
    expected = {name for name in listed.splitlines() if (ROOT / name).exists()}
    packed = {name for name in files_of(wheel) if ".dist-info/" not in name}
    assert packed == expected - {"sweep/entry_point.py"} | {"qlora_sweep.py"}


def test_the_source_distribution_builds_the_same_wheel(
    built: Path, wheel: Path, tmp_path: Path
) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=unpacked)
    assert files_of(tmp_path / wheel.name) == files_of(wheel)


def test_what_runs_repacks_to_the_wheel_that_it_came_from(
    installed: Installed, wheel: Path
) -> None:
    program = "from qlora_sweep.sweep.launching.parcel import make_wheel as m; open('w','wb').write(m()[1])"
    assert installed.run("python", "-c", program).returncode == 0
    ours, again = files_of(wheel), files_of(installed.directory / "w")
    for files in (ours, again):
        for name in [name for name in files if ".dist-info/" in name]:
            del files[name]
    assert again == ours


def test_an_editable_installation_runs_the_checkout_and_refuses_namesakes(
    install: Install, editable: Path, tmp_path: Path
) -> None:
    made = install(tmp_path, editable)
    where = "import sweep; print(*sweep.__path__)"
    assert made.run("python", "-c", where).stdout.strip() == str(ROOT / "sweep")
    assert made.sweep("--version").startswith("sweep ")

    site = next(made.environment.glob("lib/python*/site-packages"))
    (site / "sweep.py").write_text("raise SystemExit('never run')")
    refused = made.try_sweep("--version")
    assert refused.returncode == EXIT_CODE
    assert f"'sweep' is not ours: Python finds {site / 'sweep.py'} first" in refused.stderr


def test_it_goes_from_a_plan_to_a_study_and_its_report_far_from_the_repository(
    installed: Installed,
) -> None:
    answer = json.loads(installed.sweep("plan", "a10", "--model", "demo", "--exact", "--json"))
    assert answer["gpu"]["name"] == "a10"
    assert answer["fits"] is True
    installed.sweep("run", "cpu-demo", "--trials", "1", "--no-confirm", "--study", "demo")
    installed.sweep("report", "demo", "-o", "report.html")
    page = (installed.directory / "report.html").read_text(encoding="utf-8")
    assert page.count("<section") > 3
    assert "def main" in installed.sweep("export", "demo", "-o", "-")
    program = (
        "import qlora_sweep as q, sweep, search_spaces as s; w = q.best('demo'); "
        "print(w.config.lora_rank == w.peft_config().r, s.__file__, *sweep.__path__)"
    )
    is_same, *places = installed.run("python", "-c", program).stdout.split()
    assert (is_same, len(places)) == ("True", 2)
    assert all(place.startswith(str(installed.environment)) for place in places)


def test_a_plan_of_a_preset_works_nothing_out_that_ships(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert json.loads(installed.sweep("plan", "a10", "--json"))["gpu"]["name"] == "a10"
    assert not (tmp_path / "cache" / "qlora-sweep").exists()


def blobs(directory: Path) -> Path:
    """Return another distribution that installs a package `storage`."""
    files = {
        "storage/__init__.py": "# Keeps blobs.\n",
        "storage/study.py": "# Not about studies of ours.\n",
        "blobs-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: blobs\nVersion: 1.2\n",
        "blobs-1.2.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any",
    }
    record = "blobs-1.2.dist-info/RECORD"
    path = directory / "blobs-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(record, "".join(f"{name},,\n" for name in (*files, record)))
    return path


def test_a_distribution_that_overwrites_a_package_is_named_until_it_is_gone(
    installed: Installed, wheel: Path, tmp_path: Path
) -> None:
    """The last of them: the installation is spoilt."""
    made = installed
    again = ("install", "--quiet", "--no-deps", "--force-reinstall", wheel)
    made.pip("install", "--quiet", "--no-deps", blobs(tmp_path))
    for command in ("--version", "doctor"):
        refused = made.try_sweep(command)
        assert refused.returncode == EXIT_CODE
        assert "'storage' is not ours any more: blobs 1.2 has replaced" in refused.stderr
        assert "pip uninstall blobs" in refused.stderr

    made.pip(*again)
    assert made.sweep("--version")
    note = made.try_sweep("doctor").stdout
    assert "note  installation" in note
    assert "blobs 1.2 installed files under" in note

    made.pip("uninstall", "--quiet", "--yes", "blobs")
    refused = made.try_sweep("--version")
    assert refused.returncode == EXIT_CODE
    assert "'storage' is incomplete" in refused.stderr

    made.pip(*again)
    (replaced,) = made.environment.glob("lib/python*/site-packages/storage/study.py")
    replaced.write_text(replaced.read_text(encoding="utf-8") + "\n# Not as installed.\n")
    done = made.try_sweep("doctor")
    assert done.returncode == EXIT_CODE
    assert "storage/study.py: not what was installed" in done.stdout
