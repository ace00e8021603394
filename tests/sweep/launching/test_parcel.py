"""What is installed on a rented machine."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sweep.launching.parcel import package, requirements


def test_everything_that_this_package_needs_is_pinned_but_what_is_not_installed() -> None:
    needed = {one.name.lower(): one for one in map(Requirement, requirements())}
    assert {"torch", "transformers", "optuna", "liger-kernel", "tokenizers"} <= needed.keys()
    assert "pytest" not in needed
    assert "qlora-sweep" not in needed
    # A build for the CPU is none that a GPU can use.
    assert "+" not in str(needed["torch"].specifier)
    assert str(needed["torch"].specifier).startswith("==")


@pytest.mark.slow
def test_a_checkout_goes_along_as_a_wheel_and_other_wheels_stay(tmp_path: Path) -> None:
    (tmp_path / "another-1.0-py3-none-any.whl").touch()
    wheel = package(tmp_path)
    assert isinstance(wheel, Path)
    assert wheel.is_absolute()
    names = zipfile.ZipFile(wheel).namelist()
    assert "sweep/launching/keeping.py" in names
    assert "sweep/launching/templates/modal_app.py.j2" in names
    assert "sweep/launching/ledger.py" in names
    assert (tmp_path / "another-1.0-py3-none-any.whl").exists()
    # Replaced whole: what a link leads to is not written over.
    (tmp_path / "mine").write_text("mine")
    wheel.unlink()
    wheel.symlink_to(tmp_path / "mine")
    assert zipfile.is_zipfile(package(tmp_path))
    assert (tmp_path / "mine").read_text() == "mine"
