"""Written jobs as Modal's and SkyPilot's own packages read them, without an account.

They have an environment of their own, `build/rented`: `make test-rented` makes it and runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from search_spaces.gpus import find_gpu
from sweep.launching.modal import CARDS as MODAL_CARDS
from sweep.launching.modal import Modal
from sweep.launching.parcel import Input
from sweep.launching.rental import Machine, Rental
from sweep.launching.skypilot import SkyPilot
from tests.sweep.launching.rentals import a_cost, a_rental

HERE = Path(__file__).parent
ENVIRONMENT = Path(os.environ.get("RENTED", HERE.parent.parent / "build" / "rented"))

pytestmark = pytest.mark.slow


def seen(path: Path, *, home: Path) -> dict[str, Any]:
    """Return what the provider's package reads in a job."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        missing = pytest.fail if "RENTED" in os.environ else pytest.skip
        missing(f"{python} is missing: `make test-rented` makes it")
    home.mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "HF_TOKEN": "hf_made_up"}
    done = subprocess.run(
        [str(python), str(HERE / "look.py"), str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def a_job(tmp_path: Path, **changes: Any) -> Rental:
    """Return a rental that has everything that one can have."""
    wheel = tmp_path / "qlora_sweep-0.1.0-py3-none-any.whl"
    texts, model = tmp_path / "texts.jsonl", tmp_path / "model"
    wheel.touch()
    texts.touch()
    model.mkdir()
    (model / "config.json").write_text("{}")
    inputs = (Input(texts, "data/texts.jsonl"), Input(model, "model/mine"))
    return a_rental(wheel=wheel, inputs=inputs, secrets=("HF_TOKEN",), **changes)


def test_modal_reads_the_app(tmp_path: Path) -> None:
    path = tmp_path / "modal_app.py"
    path.write_text(Modal().text(a_job(tmp_path, machine=Machine(find_gpu("a10"), cards=2))))
    found = seen(path, home=tmp_path / "home")
    assert found["app"] == "sweep-mine"
    assert (found["entrypoints"], found["functions"]) == (["main"], ["study"])
    assert found["gpu"] == "A10:2"
    assert found["volumes"] == {"/volume": "kept", "/cache": "kept-cache"}
    assert found["secrets"] == 1
    assert found["timeout_is_known"]
    assert found["command"][-4:] == [
        *("--data", "/inputs/data/texts.jsonl"),
        *("--model", "/inputs/model/mine"),
    ]


def test_modal_s_container_loads_the_app_without_the_files_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "modal_app.py"
    rental = a_job(tmp_path)
    path.write_text(Modal().text(rental))
    for one in (rental.parcel.package, rental.parcel.inputs[0].local):
        Path(one).unlink()
    assert seen(path, home=tmp_path / "home")["functions"] == ["study"]


@pytest.mark.parametrize(
    ("card", "cloud", "is_spot", "accelerator"),
    [
        ("a10", None, False, "A10"),
        ("a10g", "aws", True, "A10G"),
        ("a100-80gb", "gcp", True, "A100-80GB"),
        ("a10", "lambda", False, "A10"),
        ("h100-80gb", "runpod", True, "H100-SXM"),
    ],
)
def test_skypilot_reads_the_task(
    card: str, cloud: str | None, is_spot: bool, accelerator: str, tmp_path: Path
) -> None:
    machine = Machine(find_gpu(card), cloud=cloud, is_spot=is_spot, cards=4)
    path = tmp_path / "task.yaml"
    path.write_text(
        SkyPilot().text(a_job(tmp_path, machine=machine, cost=a_cost(usd_per_hour_most=2.75)))
    )
    found = seen(path, home=tmp_path / "home")
    assert found["name"] == "sweep-mine"
    assert found["cloud"] == cloud
    assert found["accelerators"] == {accelerator: 4}
    assert found["spot"] is is_spot
    assert found["max_hourly_cost"] == 2.75
    assert found["autostop"] == {"idle_minutes": 5, "down": True}
    assert found["secrets"] == ["HF_TOKEN"]
    assert "~/sweep-inputs/data/texts.jsonl" in found["files"]
    if cloud == "runpod":
        assert found["volumes"] == {"/sweep-volume": "kept"}
    else:
        assert found["buckets"] == {"~/sweep-volume": {"name": "kept", "mode": "MOUNT"}}


def test_every_card_of_modal_is_one_that_its_package_takes(tmp_path: Path) -> None:
    path = tmp_path / "modal_app.py"
    path.write_text(Modal().text(a_rental(machine=Machine(find_gpu("h100-80gb")))))
    assert seen(path, home=tmp_path / "home")["gpu"] == MODAL_CARDS["h100-80gb"]
