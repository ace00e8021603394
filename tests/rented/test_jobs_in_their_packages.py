"""Written jobs as Modal's and SkyPilot's own packages read them, without an account, and what uv
installs.

They have an environment of their own, `build/rented`: `make test-rented` makes it and runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.sweep.launching.rented import Rental
from tests.sweep.launching.rentals import a_cost, a_machine, a_parcel, a_rental

HERE = Path(__file__).parent
ENVIRONMENT = Path(os.environ.get("RENTED", HERE.parent.parent / "build" / "rented"))

pytestmark = pytest.mark.slow


def run(*command: str | Path, home: Path) -> str:
    """Run something in the environment of both packages, in a home without an account."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        missing = pytest.fail if "RENTED" in os.environ else pytest.skip
        missing(f"{ENVIRONMENT} is missing: `make test-rented` makes it")
    home.mkdir(exist_ok=True)
    path = f"{ENVIRONMENT}/bin:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(home), "HF_TOKEN": "hf_made_up"}
    done = subprocess.run(
        [str(word) for word in command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def seen(rentals: list[Rental], tmp_path: Path) -> list[dict[str, Any]]:
    """Return what the provider's package reads in each job."""
    paths = [tmp_path / f"{number}-{one.provider.template}" for number, one in enumerate(rentals)]
    for path, rental in zip(paths, rentals, strict=True):
        path.write_text(rental.text())
    look = run(ENVIRONMENT / "bin" / "python", HERE / "look.py", *paths, home=tmp_path / "home")
    found: list[dict[str, Any]] = json.loads(look.splitlines()[-1])
    return found


def a_job(provider: str, tmp_path: Path, **changes: Any) -> Rental:
    """Return a rental that has everything that one can have."""
    dataset = tmp_path / 'it\'s "mine".jsonl'
    dataset.touch()
    wheel = a_parcel(tmp_path)
    inputs = {"data/texts.jsonl": dataset}
    return a_rental(provider, wheel=wheel, inputs=inputs, secrets=("HF_TOKEN",), **changes)


@pytest.mark.parametrize("has_files", [True, False], ids=["here", "in the container"])
def test_modal_reads_the_app_and_its_function_ends_as_its_command(
    has_files: bool, tmp_path: Path
) -> None:
    rental = a_job("modal", tmp_path, machine=a_machine(gpus=2))
    if not has_files:
        for path in (rental.wheel, *rental.inputs.values()):
            path.unlink()
    (found,) = seen([rental], tmp_path)
    assert found["app"] == "sweep-mine"
    assert (found["entrypoints"], found["functions"]) == (["main"], ["study"])
    assert found["gpu"] == "A10:2"
    assert found["volumes"] == {"/volume": "kept", "/cache": "kept-cache"}
    assert found["secrets"] == 1
    assert found["command"][-2:] == ["run", "/inputs/request.run.json"]
    assert found["ends"] == [["", 1], ["RuntimeError", 1], ["KeyboardInterrupt", 1]]


def test_skypilot_reads_the_task(tmp_path: Path) -> None:
    places = [
        ("a10", None, False, "A10"),
        ("a10g", "aws", True, "A10G"),
        ("a100-80gb", "gcp", True, "A100-80GB"),
        ("a10", "lambda", False, "A10"),
        ("h100-80gb", "runpod", False, "H100-SXM"),
    ]
    cost = a_cost(usd_per_hour_most=2.75)
    rentals = [
        a_job("skypilot", tmp_path, cost=cost, machine=a_machine(gpu, 4, cloud, is_spot))
        for gpu, cloud, is_spot, _ in places
    ]
    for place, rental, found in zip(places, rentals, seen(rentals, tmp_path), strict=True):
        _, cloud, is_spot, accelerator = place
        dataset, is_network = "data/texts.jsonl", cloud == "runpod"
        assert found["files"].pop(f"~/sweep-inputs/{dataset}") == str(rental.inputs[dataset])
        assert len(found.pop("files")) == 3
        assert found == {
            "name": "sweep-mine",
            "cloud": cloud,
            "accelerators": {accelerator: 4},
            "spot": is_spot,
            "max_hourly_cost": 2.75,
            "idle_minutes": 5,
            "down": True,
            "secrets": ["HF_TOKEN"],
            "volumes": {"/sweep-volume": "kept"} if is_network else {},
            "buckets": {} if is_network else {"~/sweep-volume": "kept"},
        }


def test_uv_installs_the_wheel_where_it_is_there(tmp_path: Path) -> None:
    wheel, python = a_parcel(tmp_path), tmp_path / "venv" / "bin" / "python"
    for _ in range(2):
        install = ["install", python, wheel, "", "gpu", tmp_path / "studies"]
        run(ENVIRONMENT / "bin" / "python", tmp_path / "there.py", *install, home=tmp_path / "home")
    run(python, "-I", "-c", "import qlora_sweep", home=tmp_path / "home")
    assert not list(tmp_path.glob("venv/lib/*/site-packages/pip"))
