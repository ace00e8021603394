"""The versions that pyproject.toml allows are those that are installed and tested."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import install_extra
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.cli import main
from tests.sweep.training.tiny import tiny_base

ROOT = Path(__file__).parents[1]
UNTESTED = {"torch", "liger-kernel"}
"""Their lowest versions run on the GPU machine, not in an environment of `make test-lowest`."""
OWN_TOOLS = {
    "furo",
    "hatchling",
    "import-linter",
    "mypy",
    "myst-parser",
    "ruff",
    "sphinx",
    "types-pyyaml",
}
"""CI's own tools, at the versions that it has; what needs one of them is skipped without it."""


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (line for lines in project["optional-dependencies"].values() for line in lines)
    found = [Requirement(line) for line in (*project["dependencies"], *extras)]
    return [one for one in found if one.name != project["name"]]


def pins(name: str) -> dict[str, Version]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(one.name): _only(one, "==") for one in found}


def _only(requirement: Requirement, operator: str) -> Version:
    (specifier,) = requirement.specifier
    assert specifier.operator == operator, f"{requirement} is not of the form x{operator}1.2"
    return Version(specifier.version)


def lower_bounds() -> dict[str, Version]:
    return {canonicalize_name(one.name): _only(one, ">=") for one in requirements()}


def test_every_lower_bound_is_what_make_test_lowest_installs() -> None:
    wanted = {
        name: bound for name, bound in lower_bounds().items() if name not in UNTESTED | OWN_TOOLS
    }
    lowest = pins("lowest-constraints.txt")
    assert {name: lowest.get(name) for name in wanted} == wanted


def test_ci_tests_versions_that_are_allowed() -> None:
    tested = pins("constraints.txt")
    for name, bound in lower_bounds().items():
        assert tested[name] >= bound, name
        is_exact = bound.release == tested[name].release[: len(bound.release)]
        assert name not in OWN_TOOLS or is_exact, name


@pytest.mark.parametrize("requirement", requirements(), ids=lambda one: one.name)
def test_what_is_installed_here_is_allowed(requirement: Requirement) -> None:
    try:
        installed = version(requirement.name)
    except ModuleNotFoundError:
        pytest.skip(f"{requirement.name} is not installed")
    assert requirement.specifier.contains(installed, prereleases=True)


def test_every_package_that_is_imported_is_declared() -> None:
    """What another package happens to bring may be gone with its next version."""
    modules = {"jinja2", "yaml", "pynvml", "bitsandbytes", "liger_kernel", "psycopg"}
    named = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py", "liger_kernel": "liger-kernel"}
    for package in ("search_spaces", "storage", "sweep", "reports"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    modules |= {name.name.partition(".")[0] for name in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    modules.add(node.module.partition(".")[0])
    # Triton is a part of torch where that is built for GPUs, and not asked for elsewhere.
    outside = modules - {"qlora_sweep"} - set(sys.stdlib_module_names) - {"triton"}
    missing = {canonicalize_name(named.get(m, m)) for m in outside} - lower_bounds().keys()
    assert missing == set()


# An extra installs under the tested pins, and what is missing without it says how to get it.

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
UNPINNED = {"triton"}
"""Torch's build for a GPU says which."""


def brought(lines: list[str], seen: set[str] | None = None) -> Iterator[Requirement]:
    """Yield everything that these requirements install, one after another's requirements.

    Raises:
        PackageNotFoundError: one of them is not installed here.
    """
    seen = set() if seen is None else seen
    for line in lines:
        requirement = Requirement(line)
        extras = sorted(requirement.extras) or [""]
        if not any(_applies(requirement, extra) for extra in ("", *extras)):
            continue
        yield requirement
        key = f"{canonicalize_name(requirement.name)}{extras}"
        if key in seen:
            continue
        seen.add(key)
        needed = distribution(requirement.name).requires or []
        wanted = [one for one in needed if any(_applies(Requirement(one), e) for e in extras)]
        yield from brought([one.split(";")[0] for one in wanted], seen)


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_what_an_extra_brings_is_pinned_at_a_version_that_everything_allows(extra: str) -> None:
    pinned = pins("constraints.txt")
    lines = [line for line in EXTRAS[extra] if not line.startswith(PROJECT["name"])]
    try:
        requirements = list(brought(lines))
    except PackageNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed")
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if name in UNPINNED:
            continue
        assert name in pinned, f"{name}, which {extra} brings, is not in constraints.txt"
        if Version(Version(version(name)).public) != pinned[name]:
            pytest.skip(f"{name} here is not CI's, and requires its own versions")
        assert requirement.specifier.contains(str(pinned[name]), prereleases=True), requirement


def test_a_database_without_its_driver_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    code = main(["status", "--storage", "postgresql://nobody@localhost/nothing"])
    assert code == 3
    assert install_extra("postgresql") in capsys.readouterr().err


def test_kernels_without_their_package_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from qlora_sweep.sweep.training.model import Unavailable

    for module in ("liger_kernel", "liger_kernel.transformers.monkey_patch"):
        monkeypatch.setitem(sys.modules, module, None)
    config = TrialConfig.model_validate({"kernels": "liger", "compute_dtype": "fp32"})
    with pytest.raises(Unavailable, match=r"pip install 'qlora-sweep\[gpu\]'"):
        tiny_base(config, spec=load_model_spec("demo")).__enter__()
