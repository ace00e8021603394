"""How a rental is written for Modal: an app as a Python file, run once.

Written for Modal 1.1 and later, and tried with 1.6.4.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from search_spaces.errors import InputError, quote
from search_spaces.prices import TYPED_PROVIDER, Offer
from sweep.launching.rental import RESULTS, Machine, Rental, card_name, short_name

CARDS: Mapping[str, str] = {
    "t4": "T4",
    "l4": "L4",
    "a10": "A10",
    "l40s": "L40S",
    # Without the size Modal may hand out a larger one, and without the mark an H200 for an H100.
    "a100-40gb": "A100-40GB",
    "a100-80gb": "A100-80GB",
    "rtx-pro-6000": "RTX-PRO-6000",
    "h100-80gb": "H100!",
    "h200": "H200",
    "b200": "B200",
}
"""Names by the catalogue's: https://modal.com/docs/guide/gpu, read on 2026-11-22."""
CARDS_MAX, CARDS_MAX_OF = 8, {"a10": 4}
"""GPUs of a container: the same page."""
INPUTS, VOLUME, CACHE = "/inputs", "/volume", "/cache"
CORES, CORES_MAX = 2, 4
MEMORY_GIB, MEMORY_GIB_MAX = 8, 32
"""Reserved, and the most that is ever used: Modal bills the larger of use and reservation."""
USD_PER_CORE_SECOND, USD_PER_GIB_SECOND = 0.0000131, 0.00000222
"""Billed beside the GPU, per physical core and GiB: https://modal.com/pricing, as of 2025."""
NAME_MAX, CACHE_VOLUME = 63, "-cache"
"""Of everything that is Modal's, and what is behind the volume's name in that of weights."""
SIGNAL_SECONDS = 25
"""Modal ends a container 30 s after the signal."""


class Modal:
    """Modal, which has GPUs of its own and charges by the second."""

    name, title, tool, package = "modal", "Modal", "modal", "modal"
    file_name = "modal_app.py"
    idle_seconds = 0.0

    def check(self, machine: Machine) -> None:
        """Raise an `InputError` where Modal has no such machine."""
        card_name(machine, CARDS, where=self.title)
        most = CARDS_MAX_OF.get(machine.card.name, CARDS_MAX)
        if machine.cards > most:
            raise InputError(
                f"--devices must be at most {most}: Modal has no container with more of "
                f"{machine.card.name}, got {machine.cards}"
            )

    def offers(self, machine: Machine, offers: Sequence[Offer]) -> list[Offer]:
        """Return Modal's offers of the GPU, or what was typed."""
        return [one for one in offers if one.provider in (self.title, TYPED_PROVIDER)]

    def dearest(self, machine: Machine, usd_per_hour: float) -> float:
        """Return the GPU's price and the most that processors and memory can cost beside it."""
        host = CORES_MAX * USD_PER_CORE_SECOND + MEMORY_GIB_MAX * USD_PER_GIB_SECOND
        return usd_per_hour + 3600 * host

    def volume(self, machine: Machine, typed: str | None = None) -> str:
        """Return the volume of all studies: each has a directory in it.

        Raises:
            InputError: Modal takes no such name.
        """
        most = NAME_MAX - len(CACHE_VOLUME)
        if typed is not None and (len(typed) > most or not re.fullmatch(r"[a-zA-Z0-9._-]+", typed)):
            raise InputError(
                f"--with volume: a volume of Modal's is named by at most {most} letters, digits, "
                f"'.', '_' and '-', got {quote(typed)}"
            )
        return typed or "qlora-sweep"

    def text(self, rental: Rental) -> str:
        """Return the app."""
        machine = rental.machine
        count = f":{machine.cards}" if machine.cards > 1 else ""
        return _template().render(
            app=_app(rental),
            study=rental.study,
            command=_command(rental),
            gpu=f"{card_name(machine, CARDS, where=self.title)}{count}",
            timeout=rental.cost.limit_seconds,
            usd_max=f"${rental.cost.usd_max:.2f}",
            volume=rental.volume,
            cache_volume=f"{rental.volume}{CACHE_VOLUME}",
            python=rental.parcel.python,
            requirements=rental.parcel.requirements,
            wheel=str(rental.parcel.package),
            inputs=[(str(one.local), f"{INPUTS}/{one.name}") for one in rental.parcel.inputs],
            directories={str(one.local) for one in rental.parcel.inputs if one.local.is_dir()},
            secrets=list(rental.secrets),
            volume_path=VOLUME,
            cache_path=CACHE,
            cpu=(float(CORES), float(CORES_MAX)),
            memory=(MEMORY_GIB * 1024, MEMORY_GIB_MAX * 1024),
            signal_seconds=SIGNAL_SECONDS,
        )

    def start(self, rental: Rental, file: Path) -> list[str]:
        """Return the command that runs the app; it goes on where this terminal is closed."""
        return [self.tool, "run", "--detach", str(file)]

    def stop(self, rental: Rental) -> str:
        """Return the command that stops the app."""
        return f"modal app stop {_app(rental)}"

    def results(self, rental: Rental) -> str:
        """Return the command that fetches report and database."""
        study, volume = shlex.quote(rental.study), shlex.quote(rental.volume)
        # What was fetched before gives way.
        return f"mkdir -p {RESULTS} && modal volume get --force {volume} {study} {RESULTS}"

    def login(self, machine: Machine) -> list[str]:
        """Return the command that asks Modal who is there."""
        return [self.tool, "token", "info"]

    def is_logged_in(self, machine: Machine, code: int, said: str) -> bool:
        """Whether Modal knows the token."""
        return code == 0

    def how_to_log_in(self, machine: Machine) -> str:
        """Return the command that makes a token."""
        return "modal token new"


def _app(rental: Rental) -> str:
    whole = f"sweep-{rental.study}"
    return short_name(re.sub(r"[^a-zA-Z0-9-]+", "-", whole), of=whole, most=NAME_MAX)


def _command(rental: Rental) -> list[str]:
    keeper = ["python", "-P", "-m", "sweep.launching.keeping"]
    keeper += ["--volume", f"{VOLUME}/{rental.study}"]
    keeper += ["--limit-seconds", str(rental.cost.limit_seconds)]
    keeper += ["--overhead-seconds", f"{rental.cost.machine.boot_seconds:g}"]
    return [*keeper, "--", *rental.words(INPUTS)]


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("sweep.launching"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["py"] = _python
    return environment.get_template("modal_app.py.j2")


def _python(value: Any) -> str:
    """Return a value as Python writes it: whatever was typed stays a value."""
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{', '.join(map(_python, value))}]"
        case _:
            return repr(value)
