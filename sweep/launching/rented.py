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
from dataclasses import dataclass, replace
from functools import cache
from getpass import getuser
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from search_spaces.config import TrialConfig
from search_spaces.costs import SECONDS_PER_HOUR, Bill, Workload, checkpoint_bytes, usd_per_hour
from search_spaces.documents import Strict
from search_spaces.errors import (
    EnvironmentFault,
    InputError,
    NothingFits,
    did_you_mean,
    listed,
    quote,
    words_of,
)
from search_spaces.gpus import GpuSpec
from search_spaces.prices import TYPED_PROVIDER, Offer
from search_spaces.space import SearchSpace
from storage.confirmations import RUNS_TO_CONFIRM
from sweep.launching import parcel
from sweep.launching.volume import STOP_SECONDS
from sweep.planning.question import Question
from sweep.planning.survey import (
    COMPILE_SECONDS,
    START_SECONDS,
    STEPS_OVER_FEWEST,
    TRIAL_SECONDS,
    Survey,
    survey,
)
from sweep.predict.forecast import Progress
from sweep.request import REQUEST

HOURS_MAX = 24.0
"""Modal ends a function after a day, and no study is known to take so long."""
HOURS_LEAST = 1.0
SLACK = 2.0
"""Of the longest that a study is predicted to take, where nobody says what it may cost."""
RESULTS = "rented"
"""Directory that results are fetched to, where no database takes the place of a local one."""
NAME_MAX = 40
"""Letters of an app or a machine."""
LOGIN_SECONDS = 300.0
"""SkyPilot starts a server of its own at the first question, which took a minute here."""
LIMITS = ("trials", "time_budget_seconds")
"""Of a search, by the keys of a space."""
_DIRECTORY = "launch"


@dataclass(frozen=True)
class Machine:
    """What is asked of a provider."""

    gpu: GpuSpec
    gpus: int = 1
    cloud: str | None = None
    """Where the provider is a broker; None leaves the choice to it."""
    is_spot: bool = False


class Provider(Strict):
    """Who rents machines, or one of its clouds: ``providers.yaml`` explains the keys."""

    name: str
    title: str
    tool: str
    package: str
    template: str
    login: str
    logged_in: str
    log_in: str
    gpus: dict[str, str]
    gpus_max: int | None = None
    gpus_max_of: Mapping[str, int] = {}
    usd_factor: float = 1.0
    usd_beside: float = 0.0
    idle_seconds: float = 0.0
    spot_refusal: str | None = None
    store: str
    volume: str | None
    volume_pattern: str
    volume_words: str
    start: str
    stop: str
    start_spot: str | None = None
    stop_spot: str | None = None
    results: dict[str, str]
    sold_by: str | None = None
    """What price lists call it; None for the names of all its clouds, or its title."""
    clouds: Mapping[str, dict[str, Any]] = {}

    def on(self, cloud: str | None) -> Provider:
        """Return it with what one of its clouds has of its own."""
        if cloud is None:
            return self
        if cloud not in self.clouds:
            raise InputError(
                f"--with cloud: unknown cloud '{cloud}'{did_you_mean(cloud, self.clouds)}"
            )
        return Provider(**{**self.model_dump(), "clouds": {}, **self.clouds[cloud]})

    def check(self, machine: Machine) -> None:
        """Raise an `InputError` where it has no such machine."""
        gpu, where = machine.gpu.name, self.sold_by or self.title
        if gpu not in self.gpus:
            raise InputError(f"--gpu: {where} has no {gpu}; it has {listed(self.gpus)}")
        most = self.gpus_max_of.get(gpu, self.gpus_max)
        if most is not None and machine.gpus > most:
            raise InputError(
                f"--devices must be at most {most}: {where} has no container with more of {gpu}, "
                f"got {machine.gpus}"
            )
        if machine.is_spot and self.spot_refusal is not None:
            raise InputError(f"--with spot: {self.spot_refusal}")

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
            got = "" if typed is None else f", got {quote(typed)}"
            raise InputError(f"--with volume: {self.volume_words}{got}")
        return typed

    def offer(self, machine: Machine, offers: Sequence[Offer]) -> Offer:
        """Return the cheapest whole machine of its own, or what was typed, by the hour.

        The time until it is gone is paid for, as is the time until it is there.

        Raises:
            InputError: no price is known, or the GPU is rented by more at once alone.
        """
        sellers = {self.sold_by or self.title, *(one["sold_by"] for one in self.clouds.values())}
        own = [
            one
            for one in offers
            if one.provider == TYPED_PROVIDER
            or (one.provider in sellers and one.is_spot is machine.is_spot)
        ]
        gpu = machine.gpu.name
        if not own:
            on = f"{machine.cloud} with " if machine.cloud else ""
            raise InputError(
                f"no price is known of {gpu}{' spot' if machine.is_spot else ''} on "
                f"{on}{self.title}: give the dollars of an hour, --with price=0.75 say, or a "
                "file, --with prices=FILE"
            )
        if (least := min(one.gpus for one in own)) > machine.gpus:
            raise InputError(
                f"--devices must be at least {least}: {own[0].provider} rents {gpu} by {least}, "
                f"got {machine.gpus}"
            )
        whole = [
            one.model_copy(
                update={
                    "usd_per_hour": usd_per_hour(one, machine.gpus),
                    "gpus": 1,
                    "boot_seconds": one.boot_seconds + self.idle_seconds,
                    "provider": self.title if one.provider == TYPED_PROVIDER else one.provider,
                }
            )
            for one in own
            if one.gpus <= machine.gpus
        ]
        return min(whole, key=lambda one: one.usd_per_hour)

    def usd_per_hour_most(self, offer: Offer) -> float:
        """Return what an hour may cost at most, with what is billed beside the GPU."""
        return math.ceil((offer.usd_per_hour * self.usd_factor + self.usd_beside) * 100) / 100

    def require(self, machine: Machine) -> None:
        """Check that its tool is installed and knows an account.

        Raises:
            EnvironmentFault: it is not, or does not; the message says what to type.
        """
        alone = "or write the file alone, with --dry-run"
        if shutil.which(self.tool) is None:
            raise EnvironmentFault(
                f"{self.title}'s command {self.tool} is not installed: "
                f"pip install {self.package} (in an environment of its own), {alone}"
            )
        cloud, words = machine.cloud, [*self.login.split(), *filter(None, [machine.cloud])]
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LOGIN_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EnvironmentFault(f"{self.tool} does not answer: {words_of(error)}") from error
        pattern = self.logged_in.format(cloud=cloud or r"[^\"]*")
        if done.returncode or not re.search(pattern, done.stdout, re.IGNORECASE):
            where = "" if cloud is None else f" for {cloud}"
            log_in = f"{self.log_in} {cloud or ''}".strip()
            raise EnvironmentFault(f"{self.title} knows no account{where}: {log_in}, {alone}")


@cache
def providers() -> Mapping[str, Provider]:
    """Return the providers by their names, as they are typed."""
    text = resources.files("sweep.launching").joinpath("providers.yaml").read_text("utf-8")
    return {name: Provider(name=name, **values) for name, values in yaml.safe_load(text).items()}


# What it costs.


@dataclass(frozen=True)
class Course:
    """How a study goes on one machine."""

    seconds: tuple[float, float] | None
    """The least and the most, confirmation included; None where speed has no prediction."""
    least_seconds: float
    """Of the start and one trial."""
    download_bytes: float
    note: str | None = None
    """Why nothing is predicted."""


def predicted(
    question: Question, machine: Machine, *, typed: SearchSpace, cache: Path, progress: Progress
) -> Course:
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
    # The space is run as it is: another GPU's own does not take its place.
    space = replace(question, has_own_spaces=False).about(machine.gpu)
    if isinstance(space, TrialConfig):
        raise InputError(
            "what is typed leaves nothing to search: rent for a study, and leave one setting open"
        )
    assert isinstance(space, SearchSpace)
    space = space.model_copy(update={key: getattr(typed, key) for key in LIMITS})
    is_fetched = space.weights == "pretrained" and question.model.source == "hub"
    download = checkpoint_bytes(question.model) if is_fetched else 0.0
    least = START_SECONDS + TRIAL_SECONDS
    try:
        looked = survey(space, question.forecaster(machine.gpu), directory=cache, progress=progress)
    except InputError as error:
        return Course(None, least, download, note=str(error))
    found, steps = looked.found, space.steps
    if not found.fit + found.uncertain:
        raise NothingFits(
            f"space '{space.name}': nothing of it is predicted to fit {machine.gpu.name}, so none "
            f"is rented: sweep plan {space.name} --gpu {machine.gpu.name} says by how much"
        )
    least += found.compiled_share * COMPILE_SECONDS
    least += (steps.warmup_min + steps.measured_min) * (found.step_seconds or 0.0)
    seconds = looked.study_seconds()
    if seconds is not None:
        # Trials are spread over the GPUs, each of which starts a worker; one confirms the winner.
        again = _confirming(looked, typed)
        low, high = (
            START_SECONDS + max(0.0, one - START_SECONDS) / machine.gpus + more
            for one, more in zip(seconds, again, strict=True)
        )
        seconds = low, high
    return Course(seconds, least, download)


def _confirming(looked: Survey, typed: SearchSpace) -> tuple[float, float]:
    """Return what follows the search: the runs of the winner and its rivals, and the soak.

    The winner and what its gain is stated over are measured whatever that takes, and what was begun
    when the budget's time is over ends first.
    """
    budget, step = typed.confirm, looked.found.step_seconds
    if budget is None or step is None:
        return 0.0, 0.0
    error = min(looked.found.step_uncertainty, 0.9)
    fewest = looked.space.steps.warmup_min + looked.space.steps.measured_min
    ends = []
    for step_seconds in (step * (1.0 - error), step * (1.0 + error)):
        soak = min(budget.soak_seconds, budget.soak_steps * step_seconds)
        ends.append(TRIAL_SECONDS + soak if budget.soak_seconds else 0.0)
    runs = 2 * RUNS_TO_CONFIRM
    most = TRIAL_SECONDS + STEPS_OVER_FEWEST * fewest * step * (1.0 + error)
    low = runs * (TRIAL_SECONDS + fewest * step * (1.0 - error))
    return low + ends[0], max(runs * most, budget.seconds + most) + ends[1]


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
        return {
            "usd": None if self.usd is None else self.usd[1],
            "usd_range": None if self.usd is None else list(self.usd),
            "usd_max": self.usd_max,
            "hours": None if self.hours is None else self.hours[1],
            "hours_max": self.limit_seconds / SECONDS_PER_HOUR,
            "usd_per_hour": self.offer.usd_per_hour,
            "usd_per_hour_max": self.usd_per_hour_most,
            "provider": self.offer.provider,
            "date": self.offer.date.isoformat(),
            "source": self.offer.source,
        }


def cost_of(
    course: Course, offer: Offer, *, usd_per_hour_most: float, max_dollars: float | None
) -> Cost:
    """Return what a study costs by the planner's bill.

    Args:
        course: how long it takes.
        offer: the whole machine's.
        usd_per_hour_most: what an hour may cost at most.
        max_dollars: what it may cost; None limits it by its time.

    Raises:
        InputError: the limit does not pay for one trial.
    """
    hours = usd = None
    if course.seconds is not None:
        # Its time is one long step.
        work = Workload(1, 1, 1.0, download_bytes=course.download_bytes)
        low, high = (Bill(work, step_seconds=one, offer=offer) for one in course.seconds)
        hours, usd = (low.billed_hours, high.billed_hours), (low.usd, high.usd)
    if max_dollars is not None:
        most = max_dollars / usd_per_hour_most
    else:
        most = HOURS_MAX if hours is None else max(HOURS_LEAST, SLACK * hours[1])
    limit = int(min(most, HOURS_MAX) * SECONDS_PER_HOUR)
    least = course.least_seconds + offer.boot_seconds + STOP_SECONDS
    if max_dollars is not None and limit < least:
        needed = math.ceil(least * usd_per_hour_most / SECONDS_PER_HOUR * 100) / 100
        raise InputError(
            f"--max-dollars {max_dollars:g} pays for {limit} s at ${usd_per_hour_most:.2f} an "
            f"hour, and the start, one trial and the end take about {math.ceil(least)} s: give at "
            f"least {needed:.2f}"
        )
    return Cost(offer, hours, usd, usd_per_hour_most, limit)


# The job.


@dataclass(frozen=True)
class Rental:
    """A study on a rented machine."""

    study: str
    provider: Provider
    """With what its cloud has of its own."""
    machine: Machine
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

    def _said(self, command: str, **words: object) -> str:
        volume = self.volume.rstrip("/")
        words |= {"volume": self.volume, "study": self.study, "address": volume}
        if "://" not in volume:
            words["address"] = f"{self.provider.store}://{volume}"
        words |= {"into": RESULTS, "to": f"{RESULTS}/{self.study}"}
        quoted = {key: shlex.quote(str(word)) for key, word in words.items()}
        secrets = "".join(f" --secret {one}" for one in self.secrets)
        return command.format(name=self.name, secrets=secrets, **quoted)

    def start(self, file: Path | str) -> str:
        """Return the command that starts its job, and resumes it."""
        spot = self.provider.start_spot if self.machine.is_spot else None
        return self._said(spot or self.provider.start, file=file)

    @property
    def stop(self) -> str:
        """The command that ends it before its time."""
        spot = self.provider.stop_spot if self.machine.is_spot else None
        return self._said(spot or self.provider.stop)

    @property
    def results(self) -> str:
        """The command that fetches report and database from where they are kept."""
        scheme, is_address, _ = self.volume.partition("://")
        return self._said(self.provider.results[scheme if is_address else self.provider.store])

    def text(self) -> str:
        """Return its job."""
        environment = Environment(
            loader=PackageLoader("sweep.launching"),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        # What was typed stays a value: Python and YAML both read JSON's texts.
        environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.filters["quote"] = shlex.quote
        parcel_files = [self.wheel.with_name(name) for name in (parcel.CONSTRAINTS, parcel.THERE)]
        return environment.get_template(f"{self.provider.template}.j2").render(
            rental=self,
            cost=self.cost,
            machine=self.machine,
            gpu=self.provider.gpus[self.machine.gpu.name],
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            parcel={one.name: str(one) for one in (self.wheel, *parcel_files)},
            inputs={name: str(path) for name, path in self.inputs.items()},
            request=REQUEST,
        )


def job_directory(study: Path) -> Path:
    """Return where jobs of a study are written, below its own directory."""
    return study / _DIRECTORY


def remove_jobs(study: Path) -> tuple[Path, ...]:
    """Remove the jobs of a study that is gone, with their wheels, and return those files.

    Whatever else is there is somebody else's, and stays; so does a link in the directory's place.

    Raises:
        EnvironmentFault: a file cannot be removed.
    """
    directory = job_directory(study)
    if directory.is_symlink() or not directory.is_dir():
        return ()
    names = (*(one.template for one in providers().values()), parcel.CONSTRAINTS, parcel.THERE)
    patterns = (*names, parcel.WHEELS, REQUEST)
    files = tuple(sorted(path for pattern in patterns for path in directory.glob(pattern)))
    try:
        for path in files:
            path.unlink()
    except OSError as error:
        raise EnvironmentFault(f"cannot remove {directory}: {words_of(error)}") from error
    # Not where something else is in them.
    with suppress(OSError):
        directory.rmdir()
        study.rmdir()
    return files
