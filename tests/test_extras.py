"""An extra installs under the tested pins, and what is missing without it says how to get it."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from search_spaces.config import TrialConfig
from search_spaces.errors import install_extra
from search_spaces.models import load_model_spec
from sweep.cli import main
from tests.sweep.training.tiny import tiny_base

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
ENABLED = {
    "gpu": "liger_kernel",
    "postgresql": "psycopg",
    "dashboard": "optuna_dashboard",
    "images": "kaleido",
    "ray": "ray",
}
"""What each of the users' extras makes importable."""
UNPINNED = {"triton"}
"""Torch's build for a GPU says which."""


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in found}


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
    pinned = pins()
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
        assert requirement.specifier.contains(pinned[name], prereleases=True), requirement


@pytest.mark.parametrize("extra", sorted(ENABLED))
def test_what_an_extra_enables_is_importable_where_it_is_installed(extra: str) -> None:
    (line,) = EXTRAS[extra]
    try:
        files = distribution(Requirement(line).name).files or []
    except PackageNotFoundError:
        pytest.skip(f"{extra} is not installed")
    assert any(file.parts[0] == ENABLED[extra] for file in files)
    assert install_extra(extra) == f"pip install 'qlora-sweep[{extra}]'"


def test_a_database_without_its_driver_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    code = main(["status", "--storage", "postgresql://nobody@localhost/nothing"])
    assert code == 3
    assert install_extra("postgresql") in capsys.readouterr().err


@pytest.mark.parametrize("kernels", ["fused-loss", "liger"])
def test_kernels_without_their_package_name_the_extra(
    monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    from sweep.training.model import Unavailable

    for module in ("liger_kernel", "liger_kernel.transformers.monkey_patch"):
        monkeypatch.setitem(sys.modules, module, None)
    config = TrialConfig.model_validate({"kernels": kernels, "compute_dtype": "fp32"})
    with pytest.raises(Unavailable, match=r"pip install 'qlora-sweep\[gpu\]'"):
        tiny_base(config, spec=load_model_spec("demo")).__enter__()
