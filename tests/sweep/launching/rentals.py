"""Rentals for tests: a study on one GPU, and a machine's bill."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.gpus import find_gpu
from search_spaces.prices import Offer
from sweep.launching.parcel import Input, Parcel
from sweep.launching.rental import Cost, Machine, Rental


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
        machine=an_offer(),
        hours=(0.1, 0.2),
        usd=(0.12, 0.24),
        usd_per_hour_most=1.5,
        limit_seconds=3600,
    )
    return replace(cost, **changes)


WHEEL = Path("/somewhere/qlora_sweep-0.1.0-py3-none-any.whl")


def a_rental(*, wheel: Path = WHEEL, inputs: tuple[Input, ...] = (), **changes: Any) -> Rental:
    machine = changes.pop("machine", Machine(find_gpu("a10")))
    rental = Rental(
        study="mine",
        machine=machine,
        parcel=Parcel(
            "3.11",
            ("torch==2.13.0", "transformers==5.17.0"),
            wheel,
            inputs,
        ),
        cost=a_cost(),
        volume="kept",
    )
    return replace(rental, **changes)
