"""A study on a rented machine: who rents it, what it costs and may cost, and the job that is
written for it. Providers are data (``providers.yaml``) and a template each.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from getpass import getuser
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from qlora_sweep.search_spaces.costs import (
    SECONDS_PER_HOUR,
    Bill,
    Workload,
    checkpoint_bytes,
    usd_per_hour,
)
from qlora_sweep.search_spaces.documents import Strict
from qlora_sweep.search_spaces.errors import (
    EnvironmentFault,
    InputError,
    NothingFits,
    did_you_mean,
    quote,
)
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.gpus import GpuSpec
from qlora_sweep.search_spaces.prices import TYPED_PROVIDER, Offer
from qlora_sweep.search_spaces.space import ConfirmBudget, SearchSpace
from qlora_sweep.storage.confirmations import RUNS_TO_CONFIRM
from qlora_sweep.sweep.launching import parcel
from qlora_sweep.sweep.launching.volume import STOP_SECONDS
from qlora_sweep.sweep.planning import survey
from qlora_sweep.sweep.planning.question import PlanQuestion
from qlora_sweep.sweep.predict.forecast import Progress
from qlora_sweep.sweep.predict.speed.predictor import within
from qlora_sweep.sweep.request import REQUEST

HOURS_MAX = 24.0
"""Modal ends a function after a day; no study that is known takes so long."""
HOURS_LEAST = 1.0
SLACK = 2.0
"""Of the longest that a study is predicted to take, where no limit of its cost is given."""
NAME_MAX = 40
"""Letters of an app or a machine."""


@dataclass(frozen=True)
class RentalRequest:
    """What is asked of a provider."""

    gpu: GpuSpec
    gpus: int = 1
    cloud: str | None = None
    """Where the provider is a broker; None leaves the choice to it."""
    is_spot: bool = False


class Provider(Strict):
    """Who rents machines: ``providers.yaml`` explains the keys."""

    name: str
    title: str
    tool: str
    template: str
    login: str
    logged_in: str
    log_in: str
    gpus: Mapping[str, str]
    gpus_max: Mapping[str, int] = {}
    usd_factor: float = 1.0
    usd_beside: float = 0.0
    idle_seconds: float = 0.0
    spot: str | Mapping[str, Any] = {}
    store: str
    volume: str | None
    volume_pattern: str
    volume_words: str
    commands: Mapping[str, str]
    sold_by: str | None = None
    clouds: Mapping[str, Mapping[str, Any]] = {}

    def of(self, machine: RentalRequest) -> Provider:
        """Return it with what its cloud and spot machines have of their own.

        Raises:
            InputError: it has no such machine.
        """
        cloud = machine.cloud
        gpu = machine.gpu.name
        own = self
        if cloud is not None:
            if cloud not in self.clouds:
                near = did_you_mean(cloud, self.clouds)
                raise InputError(f"--with cloud: unknown cloud '{cloud}'{near}")
            own = replaced(self, **{"clouds": {}, **self.clouds[cloud]})
        where = own.sold_by or own.title
        if gpu not in own.gpus:
            raise InputError(f"--gpu: {where} has no {gpu}; it has {', '.join(own.gpus)}")
        most = own.gpus_max.get(gpu, machine.gpus)
        if machine.gpus > most:
            raise InputError(f"--devices: {where} rents at most {most} {gpu}, got {machine.gpus}")
        if not machine.is_spot:
            return own
        if isinstance(own.spot, str):
            raise InputError(f"--with spot: {own.spot}")
        return replaced(own, commands={**own.commands, **own.spot})

    def checked_volume(self, typed: str | None) -> str:
        """Return the volume of all studies: what was typed, or the same at every call.

        Raises:
            InputError: it has to be named, or can have no such name.
        """
        if typed is None and self.volume is not None:
            # Others' names of buckets are taken.
            owner = hashlib.sha256(f"{getuser()}@{socket.gethostname()}".encode()).hexdigest()[:8]
            return self.volume.format(owner=owner)
        if typed is None or not re.fullmatch(self.volume_pattern, typed, re.ASCII):
            message = f"--with volume: {self.volume_words}"
            if typed is not None:
                message += f", got {quote(typed)}"
            raise InputError(message)
        return typed

    def offer(self, machine: RentalRequest, offers: Sequence[Offer]) -> Offer:
        """Return the cheapest whole machine of its own, or what was typed, by the hour.

        The time until it is gone is paid for, as is the time until it is there.

        Raises:
            InputError: no price is known, or only of more GPUs at once.
        """
        kinds = {(TYPED_PROVIDER, False), (self.sold_by or self.title, machine.is_spot)}
        for cloud in self.clouds.values():
            kinds.add((cloud["sold_by"], machine.is_spot))
        best: Offer | None = None
        for offer in offers:
            if (offer.provider, offer.is_spot) not in kinds or offer.gpus > machine.gpus:
                continue
            price = usd_per_hour(offer, machine.gpus)
            if best is None or price < usd_per_hour(best, machine.gpus):
                best = offer
        if best is None:
            what = f"{machine.gpus} x {machine.gpu.name}"
            if machine.is_spot:
                what += " spot"
            seller = self.title
            if machine.cloud:
                seller = f"{machine.cloud} with {seller}"
            cure = "give --with price=DOLLARS an hour, or --with prices=FILE"
            raise InputError(f"no price is known of {what} on {seller}: {cure}")
        changes: dict[str, Any] = {
            "usd_per_hour": usd_per_hour(best, machine.gpus),
            "gpus": 1,
            "boot_seconds": best.boot_seconds + self.idle_seconds,
        }
        if best.provider == TYPED_PROVIDER:
            changes["provider"] = self.title
        return replaced(best, **changes)

    def require(self, cloud: str | None) -> None:
        """Check that its tool is installed and knows an account.

        Raises:
            EnvironmentFault: it is not, or does not; the message says what to type.
        """
        alone = "or write the file alone, with --dry-run"
        if shutil.which(self.tool) is None:
            install = f"pip install {self.name} (in an environment of its own), {alone}"
            raise EnvironmentFault(f"{self.title}'s {self.tool} is not installed: {install}")
        words = f"{self.login} {cloud or ''}".split()
        try:
            # SkyPilot starts a server of its own at the first question, which took a minute here.
            done = subprocess.run(words, input="", capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EnvironmentFault(f"{self.tool} does not answer: {error}") from error
        pattern = self.logged_in.format(cloud=cloud or '[^"]*')
        if done.returncode or not re.search(pattern, done.stdout, re.IGNORECASE):
            where = f": {self.log_in}"
            if cloud:
                where = f" for {cloud}: {self.log_in} {cloud}"
            raise EnvironmentFault(f"{self.title} knows no account{where}, {alone}")


@cache
def providers() -> Mapping[str, Provider]:
    """Return the providers by their names, as they are typed."""
    text = (
        resources.files("qlora_sweep.sweep.launching").joinpath("providers.yaml").read_text("utf-8")
    )
    return {name: Provider(name=name, **values) for name, values in yaml.safe_load(text).items()}


# What it costs.


class StudyForecast(NamedTuple):
    """How a study goes on one machine."""

    seconds: tuple[float, float] | None
    """The least and the most, confirmation included; None where speed has no prediction."""
    least_seconds: float
    """Of the start and one trial."""
    download_bytes: float
    note: str | None = None
    """Why nothing is predicted."""


def predicted(
    question: PlanQuestion,
    machine: RentalRequest,
    *,
    typed: SearchSpace,
    cache: Path,
    progress: Progress,
) -> StudyForecast:
    """Return how long the study takes that `sweep run` would make of a space.

    Args:
        question: the space, its model and dataset, and the settings that are fixed.
        machine: what is rented.
        typed: the space as it was typed, which has its limits and how its winner is confirmed.
        cache: directory of what was predicted before.
        progress: told of what takes its time.

    Raises:
        NothingFits: by the prediction no configuration fits the GPU.
        InputError: what is fixed makes no space.
        EnvironmentFault: the tracing process does not answer.
    """
    gpu = machine.gpu
    model = question.model
    space = question.of_named_space().about(gpu)
    if not isinstance(space, SearchSpace):
        raise InputError("what is typed leaves nothing to search: leave one setting open")
    space = replaced(space, trials=typed.trials, time_budget_seconds=typed.time_budget_seconds)
    download = 0.0
    if space.weights == "pretrained" and model.source == "hub":
        download = checkpoint_bytes(model)
    least = survey.START_SECONDS + survey.TRIAL_SECONDS
    try:
        surveyed = survey.survey(
            space, question.forecaster(gpu), directory=cache, progress=progress
        )
    except InputError as error:
        return StudyForecast(None, least, download, str(error))
    found = surveyed.found
    seconds = surveyed.study_seconds()
    if not found.fit + found.uncertain:
        why = f"sweep plan {space.name} --gpu {gpu.name} says by how much"
        raise NothingFits(f"nothing of space '{space.name}' is predicted to fit {gpu.name}: {why}")
    if seconds is None or found.step_seconds is None:
        return StudyForecast(None, least, download)
    steps_fewest = space.steps.fewest
    step_low, step_high = within(found.step_seconds, found.step_log_spread).ends
    low = _on_lanes(seconds[0], machine, space)
    high = _on_lanes(seconds[1], machine, space)
    confirm = typed.confirm
    if confirm is not None:
        # Each of the runs is measured twice in any case.
        runs = 2 * RUNS_TO_CONFIRM
        low += runs * (survey.TRIAL_SECONDS + step_low * steps_fewest)
        low += _soak_seconds(confirm, step_low)
        # At most its time is over while a run is under way.
        steps_most = steps_fewest * survey.STEPS_OVER_FEWEST
        run = survey.TRIAL_SECONDS + step_high * steps_most
        high += max(runs * run, confirm.seconds + run)
        high += _soak_seconds(confirm, step_high)
    # A time budget is of the whole run.
    most = space.time_budget_seconds or math.inf
    least += found.compiled_share * survey.COMPILE_SECONDS + steps_fewest * found.step_seconds
    return StudyForecast((min(low, most), min(high, most)), least, download)


def _on_lanes(seconds: float, machine: RentalRequest, space: SearchSpace) -> float:
    """Return how long a search takes on a machine whose GPUs share its trials: as many GPUs as a
    trial takes are a lane, which starts its worker; one lane confirms the winner."""
    lanes = max(1, machine.gpus // space.gpus_per_trial)
    return survey.START_SECONDS + max(0.0, seconds - survey.START_SECONDS) / lanes


def _soak_seconds(confirm: ConfirmBudget, step_seconds: float) -> float:
    soak = min(confirm.soak_seconds, confirm.soak_steps * step_seconds)
    if soak == 0.0:
        return 0.0
    return survey.TRIAL_SECONDS + soak


@dataclass(frozen=True)
class Cost:
    """What a study costs on a machine, and what it may cost at most."""

    offer: Offer
    """The whole machine's: dollars an hour of all of its GPUs."""
    hours: tuple[float, float] | None
    """Billed, the least and the most that are expected; None where no time can be predicted."""
    usd: tuple[float, float] | None
    usd_per_hour_most: float
    """The machine's at most, with what a provider bills beside the GPU."""
    limit_seconds: int
    """Of the machine, after which it is stopped."""

    @property
    def usd_max(self) -> float:
        """What is spent at most."""
        return self.limit_seconds / SECONDS_PER_HOUR * self.usd_per_hour_most

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; dollars and hours are the most that is expected."""
        _, usd = self.usd or (None, None)
        _, hours = self.hours or (None, None)
        return {
            "usd": usd,
            "usd_range": self.usd and list(self.usd),
            "usd_max": self.usd_max,
            "hours": hours,
            "hours_max": self.limit_seconds / SECONDS_PER_HOUR,
            "usd_per_hour": self.offer.usd_per_hour,
            "usd_per_hour_max": self.usd_per_hour_most,
            "provider": self.offer.provider,
            "date": self.offer.date.isoformat(),
            "source": self.offer.source,
        }


def cost_of(
    course: StudyForecast, offer: Offer, provider: Provider, max_dollars: float | None
) -> Cost:
    """Return what a study costs by the planner's bill.

    Args:
        course: how long it takes.
        offer: the whole machine's.
        provider: who rents it.
        max_dollars: what it may cost; None limits it by its time.

    Raises:
        InputError: the limit does not pay for one trial.
    """
    rate = math.ceil((offer.usd_per_hour * provider.usd_factor + provider.usd_beside) * 100) / 100
    hours = None
    usd = None
    most = HOURS_MAX
    if course.seconds is not None:
        # Its time is one long step.
        work = Workload(1, 1, 1.0, download_bytes=course.download_bytes)
        low = Bill(work, step_seconds=course.seconds[0], offer=offer)
        high = Bill(work, step_seconds=course.seconds[1], offer=offer)
        hours = (low.billed_hours, high.billed_hours)
        usd = (low.usd, high.usd)
        most = max(HOURS_LEAST, SLACK * high.billed_hours)
    if max_dollars is not None:
        most = max_dollars / rate
    limit = int(min(most, HOURS_MAX) * SECONDS_PER_HOUR)
    least = course.least_seconds + offer.boot_seconds + STOP_SECONDS
    if max_dollars is not None and limit < least:
        needed = math.ceil(least * rate / SECONDS_PER_HOUR * 100) / 100
        paid = f"--max-dollars {max_dollars:g} pays for {limit} s at ${rate:.2f} an hour"
        takes = f"one trial takes about {math.ceil(least)} s in all"
        raise InputError(f"{paid}, and {takes}: give at least {needed:.2f}")
    return Cost(offer, hours, usd, rate, limit)


# The job.


@dataclass(frozen=True)
class Rental:
    """A study on a rented machine."""

    study: str
    provider: Provider
    """With what its cloud has of its own."""
    machine: RentalRequest
    cost: Cost
    volume: str
    wheel: Path
    """Of this package, with what is installed beside it in its directory."""
    inputs: Mapping[str, Path]
    """Files that the study reads, by their names below the directory of all of them."""
    secrets: tuple[str, ...] = ()
    """Names of variables that are handed on and stand in no file."""

    @property
    def name(self) -> str:
        """Of its app or machine: at most so many letters, and no other study's."""
        whole = f"sweep-{self.study}"
        slug = re.sub(r"[^a-z0-9]+", "-", whole.lower()).strip("-")
        if slug == whole and len(slug) <= NAME_MAX:
            return slug
        mark = hashlib.sha256(whole.encode()).hexdigest()[:8]
        return f"{slug[: NAME_MAX - len(mark) - 1].strip('-')}-{mark}"

    def command(self, what: str, file: Path | str = "") -> str:
        """Return a command of the provider's: to ``start`` the job of a file, which resumes it too,
        to ``stop`` it before its time, or to fetch the ``results`` from where they are kept.
        """
        volume = self.volume.rstrip("/")
        store = self.provider.store
        address = f"{store}://{volume}"
        if "://" in self.volume:
            store = self.volume.partition("://")[0]
            address = volume
        if what == "results":
            what = store
        return self.provider.commands[what].format(
            name=self.name,
            secrets="".join(f" --secret {secret}" for secret in self.secrets),
            file=shlex.quote(str(file)),
            volume=shlex.quote(volume),
            address=shlex.quote(address),
            study=shlex.quote(self.study),
            to=shlex.quote(f"rented/{self.study}"),
        )

    def text(self) -> str:
        """Return its job."""
        environment = Environment(
            loader=PackageLoader("qlora_sweep.sweep.launching"),
            undefined=StrictUndefined,
            trim_blocks=True,
        )
        # What was typed stays a value: Python and YAML both read JSON's texts.
        environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.filters["quote"] = shlex.quote
        files = (self.wheel.name,) + parcel.FILES[1:]
        return environment.get_template(f"{self.provider.template}.j2").render(
            rental=self,
            cost=self.cost,
            machine=self.machine,
            gpu=self.provider.gpus[self.machine.gpu.name],
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            parcel={name: str(self.wheel.with_name(name)) for name in files},
            inputs={name: str(path) for name, path in self.inputs.items()},
            request=REQUEST,
        )


def job_directory(study: Path) -> Path:
    """Return where jobs of a study are written, below its own directory."""
    return study / "launch"


def remove_jobs(study: Path) -> tuple[Path, ...]:
    """Remove the jobs of a study that is gone, with their wheels, and return those files.

    Other files there are a person's, and stay; so does a link in the directory's place.

    Raises:
        OSError: a file cannot be removed.
    """
    directory = job_directory(study)
    if directory.is_symlink() or not directory.is_dir():
        return ()
    patterns = [provider.template for provider in providers().values()]
    patterns += parcel.FILES
    patterns.append(REQUEST)
    files: list[Path] = []
    for pattern in patterns:
        files += directory.glob(pattern)
    files.sort()
    for path in files:
        path.unlink()
    # Not where something else is in them.
    with suppress(OSError):
        directory.rmdir()
        study.rmdir()
    return tuple(files)
