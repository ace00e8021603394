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
from search_spaces.prices import PRICE_OPTION, TYPED_PROVIDER
from search_spaces.space import SearchSpace
from storage.files import make_directory
from storage.files import replace as put
from storage.outputs import checked_output, write_output
from sweep.data.texts import prepare_texts
from sweep.launching.costing import foreseen
from sweep.launching.inputs import carried, located
from sweep.launching.job_files import job_directory
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
    RunOptions,
    asked_machine,
    plan_request,
    refuse_options,
    refuse_what_cannot_be,
)
from sweep.paths import cache_directory, runs_directory
from sweep.planning.question import Predictor, Question, resolve_request
from sweep.planning.survey import START_SECONDS
from sweep.predict.cost import SECONDS_PER_HOUR
from sweep.predict.forecast import Progress
from sweep.predict.memory.profile_store import TracingChildren
from sweep.study.asked import named
from sweep.terminal.console import confirmed, folded, note, say, say_json, width_of
from sweep.terminal.plan.command import tracing
from sweep.terminal.typed import call, respelled
from sweep.terminal.working import working

DONE = 0
TOKEN = "HF_TOKEN"


def launch(
    request: LaunchRequest,
    *,
    command: Any,
    predictor: Predictor | None = None,
    ready: Callable[[Provider, Machine], None] = require,
    start: Callable[[Sequence[str]], int] | None = None,
    pack: Callable[[Path], Path] = package,
) -> int:
    """Write a study's job for a rented machine, say what it costs, and start it where asked.

    Args:
        request: what was typed.
        command: `sweep run`, which reads the words for it.
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
    job = partial(
        _launch,
        request=request,
        command=command,
        predictor=predictor,
        ready=ready,
        start=start or _run(as_json=request.as_json),
        pack=pack,
    )
    return call(command, [request.space, *request.words], drive=job)


def _launch(
    space_name: str,
    *,
    request: LaunchRequest,
    command: Any,
    predictor: Predictor | None,
    ready: Callable[[Provider, Machine], None],
    start: Callable[[Sequence[str]], int],
    pack: Callable[[Path], Path],
    overrides: Mapping[str, Any],
    held: Mapping[str, Any],
    **others: Any,
) -> int:
    """Do it once the run's own options are read."""
    run = RunOptions(overrides, held, others)
    refuse_options(run)
    provider = provider_named(request.on)
    output = checked_output(
        request.output,
        what=f"a job for {provider.title}",
        endings=(Path(provider.file_name).suffix,),
        is_forced=request.is_forced,
    )
    is_file = output is not None and (output.is_file() or not output.exists())
    if request.output is not None and not is_file:
        raise InputError("--output: the job needs the package's wheel beside it: name a file")
    machine = asked_machine(request, load_space(space_name))
    provider.check(machine)
    changed = {
        **run.overrides,
        "gpu": None if request.gpu is None else machine.card.name,
        "max_dollars": request.max_dollars,
    }
    # As `sweep run` would read them there.
    study, typed = named(request.space, overrides=changed, held=run.held, study=request.study)
    volume = provider.volume(machine, request.volume)
    is_started = request.output is None and (request.is_sure or sys.stdin.isatty())
    if is_started:
        with working(f"asking {provider.title} for your account"):
            ready(provider, machine)
    question, cost = _question_and_cost(
        request, run, machine, provider, typed=typed, predictor=predictor
    )
    file = output or job_directory(runs_directory() / study) / provider.file_name
    parcel = _parcel(request, question, directory=file.parent, pack=pack)
    arguments = _arguments(request, machine, question, command=command, study=study)
    rental = Rental(
        study=study,
        machine=machine,
        arguments=arguments,
        parcel=parcel,
        cost=cost,
        volume=volume,
        secrets=(TOKEN,) if question.model.source == "hub" and os.environ.get(TOKEN) else (),
    )
    _write(file, provider.text(rental).encode(), is_chosen=output is not None)
    words = provider.start(rental, file)
    note(folded(cost_words(cost, machine), width_of(sys.stderr), indent=2))
    if is_started and not request.is_sure:
        is_started = confirmed(f"Start it on {provider.title} now?")
    if is_started:
        _start(words, provider, rental, start)
    _tell(request, provider, rental, file=file, command=words, is_started=is_started)
    return DONE


def _question_and_cost(
    request: LaunchRequest,
    run: RunOptions,
    machine: Machine,
    provider: Provider,
    *,
    typed: SearchSpace,
    predictor: Predictor | None,
) -> tuple[Question, Cost]:
    with working("predicting") as progress, closing(TracingChildren(outlive=True)) as children:
        question = resolve_request(
            plan_request(request, run, machine),
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
        # One card measures the winner again.
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
        f"{PRICE_OPTION} {machine.card.name}=0.75 say, or a file with --prices"
    )


def _arguments(
    request: LaunchRequest,
    machine: Machine,
    question: Question,
    *,
    command: Any,
    study: str,
) -> tuple[str | Input, ...]:
    """Return what `sweep` is given there; what is a file here is named as it is called there."""
    space, files = _located(request, question)
    words = [request.space, *request.words]
    dollars = request.max_dollars
    return (
        *("run", space, "--gpu", machine.card.name, "--study", study),
        *(() if dollars is None else ("--max-dollars", f"{dollars:g}")),
        *(() if machine.cards == 1 else ("--cards", "all")),
        *respelled(command, words, without={"space", *files}),
        *(word for option, one in files.items() for word in (f"--{option}", one)),
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
    space, files = _located(request, question)
    is_random = question.space is None or question.space.weights == "random"
    inputs = carried(space, files, are_weights_random=is_random)
    try:
        if request.output is None:
            make_directory(directory)
    except OSError as error:
        raise EnvironmentFault(f"cannot write to {directory}: {error.strerror or error}") from error
    with working("building the package"):
        return Parcel(python_version(), requirements(), pack(directory), inputs)


def _write(file: Path, job: bytes, *, is_chosen: bool) -> None:
    if is_chosen:
        write_output(file, job)
        return
    try:
        put(file, job)
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
