"""Owns `sweep launch` on the terminal: what it will cost, the question, the file, the start.

Knows no provider's spelling.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from reports import units
from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.loading import load_space
from search_spaces.prices import PRICE_OPTION
from search_spaces.space import SearchSpace
from storage.files import replace as put
from storage.files import write_chosen
from sweep.data.texts import prepare_texts
from sweep.launching.costing import Course, foreseen
from sweep.launching.inputs import carried, located, renamed
from sweep.launching.ledger import STOP_SECONDS
from sweep.launching.parcel import Input, Parcel, package, python_version, requirements
from sweep.launching.providers import provider_named, require
from sweep.launching.rental import (
    Cost,
    Machine,
    Provider,
    Rental,
    cost_of,
    machine_offer,
    shared,
)
from sweep.launching.request import (
    LaunchRequest,
    asked_machine,
    plan_request,
    refuse_what_cannot_be,
)
from sweep.paths import cache_directory, runs_directory
from sweep.planning.forecast import Progress
from sweep.planning.question import Predictor, Question, resolve_request
from sweep.planning.survey import START_SECONDS
from sweep.predict.cost import SECONDS_PER_HOUR
from sweep.predict.memory.tracing_children import TracingChildren
from sweep.study.session import default_study_name
from sweep.terminal.console import confirmed, folded, note, say, say_json, width_of
from sweep.terminal.plan.command import tracing
from sweep.terminal.working import working

DONE = 0
TOKEN = "HF_TOKEN"


def launch(
    request: LaunchRequest,
    *,
    limits: Mapping[str, Any],
    predictor: Predictor | None = None,
    ready: Callable[[Provider, Machine], None] = require,
    start: Callable[[Sequence[str]], int] | None = None,
    pack: Callable[[Path], Path] = package,
) -> int:
    """Write a study's job for a rented machine, say what it costs, and start it where asked.

    Args:
        request: what was typed.
        limits: of the search, by the keys of the space.
        predictor: makes what predicts memory; by default it traces the model's own code.
        ready: checks that a provider's tool and login are there.
        start: runs the provider's command to its end; returns its exit code.
        pack: puts this package into a directory.

    Raises:
        InputError: something that was typed or named is not right, or no price is known.
        EnvironmentFault: the provider's tool or login is not there, or it did not start.
        NothingFits: nothing of the space is predicted to fit the card.
    """
    refuse_what_cannot_be(request)
    provider = provider_named(request.on)
    space = load_space(request.space)
    machine = asked_machine(request, space)
    provider.check(machine)
    volume = request.volume or provider.volume(machine)
    is_started = request.output is None and (request.is_sure or sys.stdin.isatty())
    if is_started:
        with working(f"asking {provider.title} for your account"):
            ready(provider, machine)
    question, cost = _question_and_cost(request, machine, provider, limits, predictor)
    study = _study_name(request, space, machine, question)
    file = request.output or runs_directory() / study / "launch" / provider.file_name
    parcel = _parcel(request, question, directory=file.parent, pack=pack)
    rental = _rental(request, machine, question, parcel, cost=cost, study=study, volume=volume)
    _write(file, provider.text(rental), is_chosen=request.output is not None)
    command = provider.start(rental, file)
    note(folded(cost_words(cost, machine), width_of(sys.stderr), indent=2))
    if is_started and not request.is_sure:
        is_started = confirmed(f"Start it on {provider.title} now?")
    if is_started:
        _start(command, provider, rental, start or _run(as_json=request.as_json))
    _tell(request, provider, rental, file=file, command=command, is_started=is_started)
    return DONE


def _question_and_cost(
    request: LaunchRequest,
    machine: Machine,
    provider: Provider,
    limits: Mapping[str, Any],
    predictor: Predictor | None,
) -> tuple[Question, Cost]:
    with working("predicting") as progress, closing(TracingChildren(outlive=True)) as children:
        question = resolve_request(
            plan_request(request, machine),
            predictor=predictor or tracing(children),
            card=lambda: None,
            read_study=_no_study,
            read_texts=partial(_read_texts, progress=progress),
        )
        offers = provider.offers(machine, question.offers.get(machine.card.name, ()))
        offer = machine_offer(machine, offers, idle_seconds=provider.idle_seconds)
        if offer is None:
            raise InputError(_no_price(machine, provider))
        changes = {key: one for key, one in limits.items() if one is not None}
        course = foreseen(
            question,
            machine.card,
            changes=changes,
            cache=cache_directory() / "surveys",
            progress=progress,
        )
    if course.note is not None:
        note(folded(f"how long it takes is not predicted: {course.note}", width_of(sys.stderr)))
    cost = cost_of(
        _spread(course, machine),
        offer=offer,
        usd_per_hour_most=provider.dearest(machine, offer.usd_per_hour),
        download_bytes=course.download_bytes,
        max_dollars=request.max_dollars or _limit_of(question),
        least_seconds=course.least_seconds + offer.boot_seconds + STOP_SECONDS,
    )
    return question, cost


def _no_study(name: str, _storage: str | None) -> Any:
    raise AssertionError(f"nobody asked for study {name}")


def _read_texts(request: Any, *, progress: Progress) -> Any:
    return prepare_texts(request, on_progress=lambda what, done, of: progress(what)(done, of))


def _spread(course: Course, machine: Machine) -> tuple[float, float] | None:
    if course.seconds is None:
        return None
    return shared(course.seconds, cards=machine.cards, start=START_SECONDS)


def _no_price(machine: Machine, provider: Provider) -> str:
    kind = f"{machine.card.name}{' spot' if machine.is_spot else ''}"
    where = provider.title if machine.cloud is None else f"{machine.cloud} with {provider.title}"
    return (
        f"no price is known of {kind} on {where}: give the dollars of an hour, "
        f"{PRICE_OPTION} {machine.card.name}=0.75 say, or a file with --prices"
    )


def _study_name(
    request: LaunchRequest, space: SearchSpace, machine: Machine, question: Question
) -> str:
    """Return the study's name: what `sweep run` would call it."""
    if request.study is not None:
        return request.study
    changed: dict[str, Any] = dict(request.held)
    if request.gpu is not None and machine.card.name != space.gpu:
        changed["gpu"] = machine.card.name
    if "model" in request.run:
        changed["model"] = question.model.name
    if request.data["texts"] is not None and question.space is not None:
        changed["data"] = question.space.data
    return default_study_name(space, changed)


def _limit_of(question: Question) -> float | None:
    """Return what the space itself says that it may cost."""
    return None if question.space is None else question.space.max_dollars


def _rental(
    request: LaunchRequest,
    machine: Machine,
    question: Question,
    parcel: Parcel,
    *,
    cost: Cost,
    study: str,
    volume: str,
) -> Rental:
    space, named = _located(request, question)
    spent = () if request.max_dollars is None else ("--max-dollars", f"{request.max_dollars:g}")
    several = () if machine.cards == 1 else ("--cards", "all")
    is_hub = question.model.source == "hub"
    return Rental(
        study=study,
        machine=machine,
        arguments=(
            *("run", space, "--gpu", machine.card.name, "--study", study),
            *spent,
            *several,
            *renamed(request.words, named),
        ),
        parcel=parcel,
        cost=cost,
        volume=volume,
        secrets=(TOKEN,) if is_hub and os.environ.get(TOKEN) else (),
    )


def _located(request: LaunchRequest, question: Question) -> tuple[str | Input, dict[str, Input]]:
    choice = None if question.space is None else question.space.data
    return located(request.space, model=question.model, choice=choice)


def _parcel(
    request: LaunchRequest,
    question: Question,
    *,
    directory: Path,
    pack: Callable[[Path], Path],
) -> Parcel:
    space, named = _located(request, question)
    is_random = question.space is None or question.space.weights == "random"
    inputs = carried(space, named, are_weights_random=is_random)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(f"cannot write to {directory}: {error.strerror}") from error
    with working("building the package"):
        return Parcel(python_version(), requirements(), pack(directory), inputs)


def _write(file: Path, text: str, *, is_chosen: bool) -> None:
    write = write_chosen if is_chosen else put
    try:
        write(file, text.encode())
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
    request: LaunchRequest,
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
                "gpu": {"name": rental.machine.card.name, "cards": rental.machine.cards},
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
    rate = f"at ${cost.machine.usd_per_hour:.2f} an hour on {cost.machine.provider}"
    most = f"at most ${cost.usd_max:.2f}, stopped after {units.duration(cost.limit_seconds)}"
    if cost.usd is None or cost.hours is None:
        return f"{card} {rate}; {most}"
    dollars = _between(*(f"${usd:.2f}" for usd in cost.usd))
    hours = _between(*(units.duration(SECONDS_PER_HOUR * one) for one in cost.hours))
    return f"about {dollars}: {hours} of {card} {rate}; {most}"


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"
