"""`sweep run --on modal|skypilot`: what it will cost, the question, the file, the start."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from reports import units
from search_spaces.costs import SECONDS_PER_HOUR
from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.gpus import find_gpu
from search_spaces.prices import PRICE_OPTION, TYPED_PROVIDER
from search_spaces.space import SearchSpace
from storage.files import make_directory
from storage.files import replace as put
from sweep.data.texts import prepare_texts
from sweep.launching.costing import foreseen
from sweep.launching.inputs import packed
from sweep.launching.job_files import job_directory
from sweep.launching.ledger import STOP_SECONDS
from sweep.launching.parcel import Input, Parcel, package, python_version, requirements
from sweep.launching.providers import PROVIDERS, require
from sweep.launching.rental import (
    Cost,
    Machine,
    Provider,
    Rental,
    cost_of,
    machine_offer,
    shared,
)
from sweep.paths import cache_directory, runs_directory
from sweep.planning.question import PlanRequest, Predictor, Question, resolve_request
from sweep.planning.survey import START_SECONDS
from sweep.predict.forecast import Progress
from sweep.predict.memory.profile_store import TracingChildren
from sweep.request import REQUEST, RunRequest, Where
from sweep.terminal.commands import DONE
from sweep.terminal.console import confirmed, folded, note, say, say_json, width_of
from sweep.terminal.plan import tracing
from sweep.terminal.working import working

TOKEN = "HF_TOKEN"


def launch(
    request: RunRequest,
    where: Where,
    *,
    is_sure: bool,
    is_dry: bool,
    predictor: Predictor | None = None,
    ready: Callable[[Provider, Machine], None] = require,
    start: Callable[[Sequence[str]], int] | None = None,
    pack: Callable[[Path], Path] = package,
) -> int:
    """Write a study's job for a rented machine, say what it costs, and start it where asked.

    Args:
        request: what was typed.
        where: the provider, and what is asked of it.
        is_sure: whether it is started without a question.
        is_dry: whether the job is written alone.
        predictor: makes what predicts memory; by default it traces the model's own code.
        ready: checks that a provider's tool and login are there.
        start: runs the provider's command to its end; returns its exit code.
        pack: puts this package into a directory.

    Raises:
        InputError: something that was typed or named is not right, or no price is known.
        EnvironmentFault: the provider's tool or login is not there, or it did not start.
        NothingFits: nothing of the space is predicted to fit the GPU.
    """
    for typed, option in ((request.storage, "--storage"), (request.carried, "--from")):
        if typed is not None:
            raise InputError(f"{option} names what a rented machine cannot see: leave it out")
    provider = PROVIDERS[where.kind]
    study, space = request.named()
    machine = asked_machine(request, where, space)
    provider.check(machine)
    # As it is read there.
    changes = {
        "study": study,
        "overrides": {**request.overrides, "gpu": machine.card.name},
        "devices": None if machine.cards == 1 else "all",
    }
    request = request.model_copy(update=changes)
    _, space = request.named()
    volume = provider.volume(machine, where.settings.get("volume"))
    is_started = not is_dry and (is_sure or sys.stdin.isatty())
    if is_started:
        with working(f"asking {provider.title} for your account"):
            ready(provider, machine)
    question, cost = _question_and_cost(
        request, where, machine, provider, typed=space, predictor=predictor
    )
    file = job_directory(runs_directory() / study) / provider.file_name
    parcel = _parcel(request, directory=file.parent, pack=pack)
    rental = Rental(
        study=study,
        machine=machine,
        parcel=parcel,
        cost=cost,
        volume=volume,
        secrets=(TOKEN,) if question.model.source == "hub" and os.environ.get(TOKEN) else (),
    )
    _write(file, provider.text(rental).encode())
    words = provider.start(rental, file)
    note(folded(cost_words(cost, machine), width_of(sys.stderr), indent=2))
    if is_started and not is_sure:
        is_started = confirmed(f"Start it on {provider.title} now?")
    if is_started:
        _start(words, provider, rental, start or _run(as_json=request.as_json))
    _tell(request, provider, rental, file=file, command=words, is_started=is_started)
    return DONE


def asked_machine(request: RunRequest, where: Where, space: SearchSpace) -> Machine:
    """Return the machine that is asked for; with the space's own GPU where none was typed.

    Raises:
        InputError: neither names a GPU of the catalogue, or a setting is none.
    """
    typed = request.overrides.get("gpu")
    if typed in ("auto", "cpu"):
        raise InputError(f"--gpu {typed} is no GPU to rent: name one (`sweep gpus`)")
    if space.gpu in ("auto", "cpu"):
        raise InputError(
            f"space '{space.name}' is for gpu {space.gpu}: name the GPU to rent with --gpu "
            "(`sweep gpus`)"
        )
    devices = request.devices or "1"
    if not (devices.isascii() and devices.isdecimal() and int(devices) >= 1):
        raise InputError(f"--devices must be how many GPUs to rent, at least 1, got {devices}")
    spot = where.settings.get("spot", "false")
    if spot not in ("true", "false"):
        raise InputError(f"--with spot must be true or false, got {spot}")
    cloud = where.settings.get("cloud")
    cloud = None if cloud is None else cloud.strip().lower()
    return Machine(find_gpu(space.gpu), int(devices), cloud, spot == "true")


def _question_and_cost(
    request: RunRequest,
    where: Where,
    machine: Machine,
    provider: Provider,
    *,
    typed: SearchSpace,
    predictor: Predictor | None,
) -> tuple[Question, Cost]:
    with working("predicting") as progress, closing(TracingChildren(outlive=True)) as children:
        price, prices = where.settings.get("price"), where.settings.get("prices")
        asked = PlanRequest(
            space=request.space,
            gpus=(machine.card.name,),
            model=request.overrides.get("model"),
            data=request.overrides.get("data") or {},
            configuration=request.held,
            prices=None if prices is None else Path(prices),
            typed_prices=() if price is None else (f"{machine.card.name}={price}",),
        )
        question = resolve_request(
            asked,
            predictor=predictor or tracing(children),
            card=lambda: None,
            read_study=_no_study,
            read_texts=partial(_read_texts, progress=progress),
        )
        offers = provider.offers(machine, question.offers.get(machine.card.name, ()))
        offer = machine_offer(machine, offers, idle_seconds=provider.idle_seconds)
        if offer is None:
            raise InputError(_no_price(machine, provider))
        if offer.provider == TYPED_PROVIDER:
            offer = offer.model_copy(update={"provider": provider.title})
        course = foreseen(
            question,
            machine.card,
            typed=typed,
            cache=cache_directory() / "surveys",
            progress=progress,
        )
    if course.note is not None:
        note(folded(f"how long it takes is not predicted: {course.note}", width_of(sys.stderr)))
    spread = course.seconds
    if spread is not None:
        low, high = shared(spread, cards=machine.cards, start=START_SECONDS)
        # One GPU measures the winner again.
        spread = low + course.confirming[0], high + course.confirming[1]
    cost = cost_of(
        spread,
        offer=offer,
        usd_per_hour_most=provider.dearest(machine, offer.usd_per_hour),
        download_bytes=course.download_bytes,
        max_dollars=typed.max_dollars,
        least_seconds=course.least_seconds + offer.boot_seconds + STOP_SECONDS,
    )
    return question, cost


def _no_study(name: str, _storage: str | None) -> Any:
    raise AssertionError(f"nobody asked for study {name}")


def _read_texts(request: Any, *, progress: Progress) -> Any:
    return prepare_texts(request, on_progress=lambda what, done, of: progress(what)(done, of))


def _no_price(machine: Machine, provider: Provider) -> str:
    kind = f"{machine.card.name}{' spot' if machine.is_spot else ''}"
    where = provider.title if machine.cloud is None else f"{machine.cloud} with {provider.title}"
    return (
        f"no price is known of {kind} on {where}: give the dollars of an hour, "
        "--with price=0.75 say, or a file, --with prices=FILE"
    )


def _parcel(request: RunRequest, *, directory: Path, pack: Callable[[Path], Path]) -> Parcel:
    """Return what goes along: the package, the request, and the files that it names."""
    sent, files = packed(request, with_weights=True)
    own = directory / REQUEST
    try:
        make_directory(directory)
    except OSError as error:
        raise EnvironmentFault(f"cannot write to {directory}: {error.strerror or error}") from error
    _write(own, sent.model_dump_json().encode())
    inputs = tuple(Input(path, name) for name, path in {REQUEST: own.absolute(), **files}.items())
    with working("building the package"):
        return Parcel(python_version(), requirements(), pack(directory), inputs)


def _write(file: Path, content: bytes) -> None:
    try:
        put(file, content)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {file}: {error.strerror}") from error


def _run(*, as_json: bool) -> Callable[[Sequence[str]], int]:
    """Return what runs a command whose results are not to be taken for ours."""

    def run(command: Sequence[str]) -> int:
        out = sys.stderr.fileno() if as_json else None
        return subprocess.run(command, stdout=out, check=False).returncode

    return run


def _start(
    command: Sequence[str],
    provider: Provider,
    rental: Rental,
    start: Callable[[Sequence[str]], int],
) -> None:
    try:
        code = start(command)
    except KeyboardInterrupt:
        note(f"It may go on at {provider.title}; what stops it: {provider.stop(rental)}")
        raise
    except OSError as error:
        raise EnvironmentFault(f"cannot run {command[0]}: {error.strerror}") from error
    if code:
        raise EnvironmentFault(
            f"`{shlex.join(command)}` ended with exit code {code}: what it said is above"
        )


def _tell(
    request: RunRequest,
    provider: Provider,
    rental: Rental,
    *,
    file: Path,
    command: Sequence[str],
    is_started: bool,
) -> None:
    results = provider.results(rental)
    if request.as_json:
        say_json(
            {
                "provider": provider.name,
                "study": rental.study,
                "file": str(file),
                "command": shlex.join(command),
                "results": results,
                "gpu": {"name": rental.machine.card.name, "count": rental.machine.cards},
                "volume": rental.volume,
                "cost": rental.cost.to_json(),
                "started": is_started,
            }
        )
        return
    if not is_started:
        say(f"Wrote {file}; nothing was started. What starts it, and resumes it:")
        say(f"  {shlex.join(command)}")
    say("What came of it, once it has begun:")
    say(f"  {results}")


def cost_words(cost: Cost, machine: Machine) -> str:
    """Return what a rental costs: ``about $0.21 to $0.35: 11 min to 19 min of a10 at ...``."""
    cards = f"{machine.cards} x " if machine.cards > 1 else ""
    card = f"{cards}{machine.card.name}{' spot' if machine.is_spot else ''}"
    whose = ", the price that you gave," if cost.machine.source == PRICE_OPTION else ""
    rate = f"at ${cost.machine.usd_per_hour:.2f} an hour{whose} on {cost.machine.provider}"
    most = f"at most ${cost.usd_max:.2f}, stopped after {units.duration(cost.limit_seconds)}"
    if cost.usd is None or cost.hours is None:
        return f"{card} {rate}; {most}"
    dollars = _between(*(f"${usd:.2f}" for usd in cost.usd))
    hours = _between(*(units.duration(SECONDS_PER_HOUR * one) for one in cost.hours))
    return f"about {dollars}: {hours} of {card} {rate}; {most}"


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"
