"""Rentals for tests: a study on one GPU, a machine's bill, and a wheel that needs nothing."""

from __future__ import annotations

import datetime
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.sweep.launching import there
from qlora_sweep.sweep.launching.rented import Cost, Rental, RentalRequest, providers


def an_offer(**changes: Any) -> Offer:
    terms = {
        "gpu": "a10",
        "provider": "Modal",
        "usd_per_hour": 1.2,
        "boot_seconds": 60.0,
        "date": datetime.date(2026, 11, 1),
        "source": "a test",
    }
    return Offer(**(terms | changes))


def a_cost(**changes: Any) -> Cost:
    cost = Cost(
        an_offer(), hours=(0.1, 0.2), usd=(0.12, 0.24), usd_per_hour_most=1.5, limit_seconds=3600
    )
    return replace(cost, **changes)


def a_machine(
    gpu: str = "a10", gpus: int = 1, cloud: str | None = None, is_spot: bool = False
) -> RentalRequest:
    return RentalRequest(find_gpu(gpu), gpus, cloud, is_spot)


def a_rental(provider: str, machine: RentalRequest | None = None, **changes: Any) -> Rental:
    machine = machine or a_machine()
    rental = Rental(
        study="mine",
        provider=providers()[provider].of(machine),
        machine=machine,
        cost=a_cost(),
        volume="kept",
        wheel=Path("/somewhere/qlora_sweep-0.1.0-py3-none-any.whl"),
        inputs={},
    )
    return replace(rental, **changes)


def a_parcel(directory: Path) -> Path:
    """Write a wheel that needs nothing, with all that goes beside one; return it."""
    wheel = directory / "qlora_sweep-9.0-py3-none-any.whl"
    info = "qlora_sweep-9.0.dist-info"
    files = {
        "qlora_sweep/__init__.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: qlora-sweep\nVersion: 9.0\n"
        "Provides-Extra: gpu\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    (directory / "constraints.txt").write_text("torch==2.13.0\n")
    shutil.copy(there.__file__, directory / "there.py")
    return wheel


def a_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
