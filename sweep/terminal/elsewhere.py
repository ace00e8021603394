"""`sweep run --on ssh|slurm|modal|skypilot`: a study that another machine drives: what is sent
there, what is shown here, and what is fetched."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qlora_sweep.reports import format as units
from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.costs import SECONDS_PER_HOUR
from qlora_sweep.search_spaces.documents import home_expanded
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, NothingFits, quote
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.prices import PRICE_OPTION
from qlora_sweep.search_spaces.redaction import redact
from qlora_sweep.search_spaces.space import SearchSpace, parse_duration
from qlora_sweep.storage.files import replace as put
from qlora_sweep.storage.reading import identity_in, read_study
from qlora_sweep.storage.transfer import refuse_local, take_in
from qlora_sweep.storage.urls import SqliteUrl, parse_url
from qlora_sweep.sweep.data.tokenizers import find_tokenizer
from qlora_sweep.sweep.launching import parcel, remote, rented, slurm
from qlora_sweep.sweep.paths import STORAGE, cache_directory, runs_directory, storage_url
from qlora_sweep.sweep.planning.answers import stored_study, tracing
from qlora_sweep.sweep.planning.question import PlanRequest, Predictor, resolve_request
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from qlora_sweep.sweep.request import REQUEST, RunRequest, Where
from qlora_sweep.sweep.running.device_info import check_spelling
from qlora_sweep.sweep.scratch import scratch
from qlora_sweep.sweep.stop_signals import INTERRUPTED
from qlora_sweep.sweep.study.events import Interruption
from qlora_sweep.sweep.terminal.console import (
    confirmed,
    note,
    note_folded,
    say,
    say_json,
    say_result,
    working,
)
from qlora_sweep.sweep.terminal.dataset import prepared
from qlora_sweep.sweep.terminal.edge import WORST_FIRST

_INPUTS = "inputs"
"""Directory on the machine that is reached by ssh, below the study's."""


def on_ssh(request: RunRequest, where: Where, *, is_dry: bool) -> int:
    """Run a study on another machine, show it here, and fetch it; return its exit code.

    Args:
        request: what was typed.
        where: the machine, and the Python of an environment there; by default one of sweep's own.
        is_dry: whether nothing is started, and what would be is said.

    Raises:
        InputError: something that was typed is not right; nothing was started.
        EnvironmentFault: the machine, or something on it, is not to be had.
    """
    address = remote.checked_address(where.address)
    url = storage_url(request.storage)
    parse_url(url)
    sent, files = parcel.packed(request)
    assert sent.study is not None, "what is packed has a name"
    refuse_local(sent.study, host=address, url=url, home=runs_directory())
    if is_dry:
        place = f"{remote.HOME}/{sent.study}"
        would = f"Would start or resume study {sent.study} on {address}, in {place}."
        lines = [would]
        lines += [f"Would go along: {name}" for name in files]
        document = {"study": sent.study, "on": str(where), "files": list(files)}
        say_result(document, "\n".join(lines), as_json=request.as_json)
        return 0
    with remote.SshConnection(address) as connection, scratch("request") as directory:
        there = remote.RemoteStudy(connection, sent.study, python=where.settings.get("python"))
        # Before anything there is touched: what runs reads it.
        seen = there.look()
        is_running = seen.runs
        if not is_running:
            there.prepare(seen.target, say=note_folded)
        own = directory / REQUEST
        own.write_text(sent.model_dump_json(), encoding="utf-8")
        shipped = {f"{_INPUTS}/{name}": file for name, file in {REQUEST: own, **files}.items()}
        interruption = Interruption()
        with interruption.handling_signals():
            command = ("run", f"{_INPUTS}/{REQUEST}")
            variables = parcel.hub_variables(request)
            if is_running or there.start(command, shipped, variables):
                note(f"Study {sent.study} runs on {address} already; it is followed from here.")
            followed = Followed(there, sent.study, address, url=url, as_json=request.as_json)
            return followed.to_its_end(interruption)


@dataclass(frozen=True)
class Followed:
    """A study on another machine, which is kept here once it has ended.

    Attributes:
        there: the study.
        name: of it.
        address: of the machine.
        url: of the database here.
        as_json: whether a document is printed.
    """

    there: remote.RemoteStudy
    name: str
    address: str
    url: str
    as_json: bool

    def to_its_end(self, interruption: Interruption) -> int:
        """Follow the study until it has ended, keep it here, and return its exit code.

        Raises:
            EnvironmentFault: what the machine says or sends is not what a study is.
        """
        try:
            end = self.there.follow(
                hear=note, requests=lambda: int(interruption.is_requested()), say=note_folded
            )
        except remote.ConnectionLostError as lost:
            runs = "The study keeps running there; the same command follows and fetches it."
            note_folded(f"{lost}. {runs}")
            if interruption.is_requested():
                return INTERRUPTED
            return EnvironmentFault.exit_code
        is_kept = False
        try:
            is_kept = self._keep()
        finally:
            # What came of it is worth knowing where it cannot be kept here, too.
            self._print(end.stdout, is_kept=is_kept)
        if end.exit not in WORST_FIRST:
            # Killed there, say.
            how = "an unknown result"
            if end.exit is not None:
                how = f"exit code {end.exit}"
            ended = f"Study {self.name} ended on {self.address}, with {how}"
            note_folded(f"{ended}; the same command resumes it.")
            return EnvironmentFault.exit_code
        if not is_kept and end.exit in (0, NothingFits.exit_code):
            place = f"{self.there.directory}/runs on {self.address}"
            raise EnvironmentFault(
                f"study {self.name} ended as if it were done, and no results are in {place}: did "
                "somebody remove them, or is another program started there as sweep? The same "
                "command starts it again"
            )
        return end.exit

    def _print(self, text: str, *, is_kept: bool) -> None:
        """Print what the study printed there, as what another machine says may be shown."""
        if not self.as_json:
            if text:
                say(text.removesuffix("\n"))
            return
        document = None
        with suppress(ValueError, RecursionError):
            document = json.loads(text)
        if isinstance(document, dict):
            say_json(document)
        elif is_kept:
            # Whoever started it asked for no document.
            say_json(view_of(read_study(self.name, url=self.url, home=runs_directory())).document())

    def _keep(self) -> bool:
        """Fetch the study; return whether there was one.

        Raises:
            EnvironmentFault: it cannot be had, or what is sent is none.
        """
        with scratch("fetched") as directory:
            try:
                database, files, left_out = self.there.fetch(directory)
            except remote.ConnectionLostError as lost:
                raise EnvironmentFault(f"{lost}. The same command fetches the study") from lost
            is_there = False
            if database.exists():
                try:
                    is_there = identity_in(SqliteUrl(database.resolve()), self.name) is not None
                except EnvironmentFault as fault:
                    raise remote.not_understood(self.address, str(fault)) from fault
            if is_there:
                home = runs_directory()
                take_in(
                    self.name,
                    host=self.address,
                    database=database,
                    files=files,
                    url=self.url,
                    home=home,
                )
        if left_out:
            place = f"left on {self.address} in {self.there.directory}/runs/{self.name}"
            note_folded(f"Too large to be fetched, and {place}: {', '.join(left_out)}.")
        return is_there


def on_slurm(request: RunRequest, where: Where, *, is_dry: bool) -> int:
    """Submit a study as a job that requeues itself before each time limit; or print its script.

    Args:
        request: what was typed.
        where: what the job asks the queue for, and the environment that it runs in.
        is_dry: whether the script is printed, and nothing submitted.

    Raises:
        InputError: of study, job or queue, what was typed is not right. Nothing was submitted.
        EnvironmentFault: there is no queue here, or a file cannot be written.
    """
    name, space = request.named()
    devices = request.devices
    on_cpu = space.gpu == "cpu"
    if space.data is not None:
        # What is on the hub is fetched where the job runs.
        with suppress(KeyError):
            not_here: dict[str, Path] = {}
            model = load_model_spec(space.model)
            find_tokenizer(space.data.tokenizer, model, fetch=not_here.__getitem__)
    if devices is not None:
        # Whether there are such GPUs, the job sees.
        check_spelling(devices)
        if on_cpu:
            raise InputError(f"--devices {devices}: {space.name} is for the CPU, which is one")
    if request.carried is not None:
        from qlora_sweep.sweep.terminal.driving import carried_source

        carried_source(request.carried, of=name, url=storage_url(request.storage))
    gpus_per_trial = 0 if on_cpu else space.gpus_per_trial
    allocation = _allocation(where, devices=devices, least=gpus_per_trial)
    if not on_cpu and allocation.gpu_count > 1 and devices is None:
        # What was asked of the queue is there to be used.
        devices = "all"
    files = runs_directory().absolute() / name
    changes = {"study": name, "devices": devices, "storage": _storage_of_job(request.storage)}
    script = slurm.job_script(
        name,
        allocation,
        python=_python(where.settings.get("env")),
        request=replaced(request, **changes).model_dump_json(),
        files=files,
    )
    about = {"study": name, "on": "slurm"}
    if is_dry:
        note(f"Not submitted. SLURM writes its log only where this is there: {files}")
        say_result({**about, "script": script}, script, as_json=request.as_json)
        return 0
    number = slurm.submit(script, files / "slurm.sh")
    note(f"Its log: {files}/slurm-{number}.log. How it stands: sweep status {name} --watch")
    words = f"Submitted study {name} as job {number}."
    say_result({**about, "job": number}, words, as_json=request.as_json)
    return 0


def _allocation(where: Where, *, devices: str | None, least: int) -> slurm.Allocation:
    """Return what was typed of the job: settings that are not ours are sbatch's own options.

    Args:
        where: those settings.
        devices: that were typed.
        least: GPUs that a trial needs.
    """
    wanted = least
    if devices is not None and devices != "all":
        if not devices.isdecimal():
            raise InputError(f"--devices {devices}: SLURM numbers a job's GPUs: name how many")
        wanted = int(devices)
    settings = dict(where.settings)
    settings.pop("env", None)
    gpus = settings.pop("gpus", str(wanted))
    time = settings.pop("time", None)
    seconds = None
    if time is not None:
        try:
            seconds = parse_duration(time)
        except InputError as error:
            raise InputError(f"--with time: {error}") from error
    allocation = slurm.Allocation(
        limit_seconds=seconds,
        gpus=None if gpus == "0" else gpus,
        options=tuple(f"{key}={value}" if value else key for key, value in settings.items()),
    )
    if allocation.gpu_count < wanted:
        raise InputError(f"--with gpus={gpus}: the study runs on {wanted}: ask for as many")
    return allocation


def _python(environment: str | None) -> str:
    """Return the Python of an environment; of this one where none was named."""
    if environment is None:
        return sys.executable
    python = home_expanded(environment).absolute() / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise InputError(f"--with env={environment}: {quote(str(python))} is no program")
    return str(python)


def _storage_of_job(typed: str | None) -> str | None:
    """Return the database for the job's script; None where the job inherits the variable, as others
    may read a password in the script."""
    url = storage_url(typed)
    database = parse_url(url)
    if isinstance(database, SqliteUrl):
        return str(database)
    if redact(url) == url:
        return url
    if typed is not None:
        cure = f"set {STORAGE} instead, which the job inherits, or leave it to ~/.pgpass"
        raise InputError(f"--storage: its password would stand in the job's script: {cure}")
    return None


def on_rented(
    request: RunRequest,
    where: Where,
    *,
    is_sure: bool,
    is_dry: bool,
    predictor: Predictor | None = None,
) -> int:
    """Write a study's job for a rented machine, say what it costs, and start it where asked.

    Args:
        request: what was typed.
        where: the provider, and what is asked of it.
        is_sure: whether it is started without a question.
        is_dry: whether the job is written alone.
        predictor: makes what predicts memory; by default it traces the model's own code.

    Raises:
        InputError: something that was typed or named is not right, or no price is known.
        EnvironmentFault: the provider's tool or login is not there, or it did not start.
        NothingFits: nothing of the space is predicted to fit the GPU.
    """
    for typed, option in ((request.storage, "--storage"), (request.carried, "--from")):
        if typed is not None:
            raise InputError(f"{option} names what a rented machine cannot see: leave it out")
    study, space = request.named()
    machine = _machine(request, where, space)
    provider = rented.providers()[where.kind].of(machine)
    there = _as_read_there(request, study, machine)
    volume = provider.checked_volume(where.settings.get("volume"))
    may_start = not is_dry and (is_sure or sys.stdin.isatty())
    if may_start:
        with working(f"asking {provider.title} for your account"):
            provider.require(machine.cloud)
    _, space = there.named()
    cost = _cost(there, where.settings, machine, provider, typed=space, predictor=predictor)
    file, rental = _written(there, study, machine, provider, cost, volume)
    note_folded(cost_words(cost, machine), indent=2)
    is_started = may_start and (is_sure or confirmed(f"Start it on {provider.title} now?"))
    command = rental.command("start", file)
    results = rental.command("results")
    text = f"What came of it, once it has begun:\n  {results}"
    variables = parcel.hub_variables(there)
    if is_started:
        _start(command, variables, rental)
    else:
        wrote = f"Wrote {file}; nothing was started. What starts it, and resumes it:\n  {command}"
        text = f"{wrote}\n{text}"
        if variables.keys() - os.environ.keys():
            note_folded(f"It hands on {parcel.TOKEN}, which is not set here: export it first.")
    document = {
        "provider": provider.name,
        "study": study,
        "file": str(file),
        "command": command,
        "results": results,
        "gpu": {"name": machine.gpu.name, "count": machine.gpus},
        "volume": volume,
        "cost": cost.to_json(),
        "started": is_started,
    }
    say_result(document, text, as_json=request.as_json)
    return 0


def _as_read_there(request: RunRequest, study: str, machine: rented.RentalRequest) -> RunRequest:
    """Return a request as the rented machine runs it."""
    changes = {
        "study": study,
        "overrides": {**request.overrides, "gpu": machine.gpu.name},
        "devices": None if machine.gpus == 1 else "all",
    }
    return replaced(request, **changes)


def _written(
    request: RunRequest,
    study: str,
    machine: rented.RentalRequest,
    provider: rented.Provider,
    cost: rented.Cost,
    volume: str,
) -> tuple[Path, rented.Rental]:
    """Write the job, the request and the package that it takes along; return the job's file."""
    file = rented.job_directory(runs_directory() / study) / provider.template
    sent, files = parcel.packed(request, with_weights=True)
    request_file = file.with_name(REQUEST)
    with working("building the package"):
        wheel = parcel.write(file.parent)
    inputs = {REQUEST: request_file.absolute(), **files}
    secrets = tuple(parcel.hub_variables(request))
    rental = rented.Rental(study, provider, machine, cost, volume, wheel, inputs, secrets)
    put(request_file, sent.model_dump_json().encode())
    put(file, rental.text().encode())
    return file, rental


def _start(command: str, variables: Mapping[str, str], rental: rented.Rental) -> None:
    """Start a rental by its provider's command."""
    try:
        # What it prints is progress.
        done = subprocess.run(
            shlex.split(command),
            stdout=sys.stderr.fileno(),
            env={**os.environ, **variables},
            check=False,
        )
    except KeyboardInterrupt:
        title = rental.provider.title
        note(f"It may keep running at {title}; what stops it: {rental.command('stop')}")
        raise
    if done.returncode:
        raise EnvironmentFault(
            f"`{command}` ended with exit code {done.returncode}, as it says above"
        )


def _machine(request: RunRequest, where: Where, space: SearchSpace) -> rented.RentalRequest:
    """Return the machine that is asked for; with the space's own GPU where none was typed, and as
    many of it as one trial trains on.

    Raises:
        InputError: neither names a GPU of the catalogue, a setting is none, or fewer GPUs were
            typed than a trial trains on.
    """
    typed = request.overrides.get("gpu")
    needed = space.gpus_per_trial
    devices = request.devices or str(needed)
    if typed in ("auto", "cpu"):
        raise InputError(f"--gpu {typed} is no GPU to rent: name one (`sweep gpus`)")
    if space.gpu in ("auto", "cpu"):
        cure = "name the GPU to rent with --gpu (`sweep gpus`)"
        raise InputError(f"space '{space.name}' is for gpu {space.gpu}: {cure}")
    if not (devices.isascii() and devices.isdecimal() and int(devices) >= 1):
        raise InputError(f"--devices must be how many GPUs to rent, at least 1, got {devices}")
    if int(devices) < needed:
        why = f"data_parallel {needed} trains on {needed} GPUs at once"
        raise InputError(f"--devices {devices}: {why}: rent as many")
    spot = where.settings.get("spot", "false")
    if spot not in ("true", "false"):
        raise InputError(f"--with spot must be true or false, got {spot}")
    cloud = where.settings.get("cloud")
    if cloud is not None:
        cloud = cloud.lower()
    return rented.RentalRequest(find_gpu(space.gpu), int(devices), cloud, spot == "true")


def _cost(
    request: RunRequest,
    settings: Mapping[str, str],
    machine: rented.RentalRequest,
    provider: rented.Provider,
    *,
    typed: SearchSpace,
    predictor: Predictor | None,
) -> rented.Cost:
    """Return what the study costs on a machine, at the price that is known or was typed."""
    gpu = machine.gpu
    prices = None
    if "prices" in settings:
        prices = Path(settings["prices"])
    typed_prices: tuple[str, ...] = ()
    if "price" in settings:
        typed_prices = (f"{gpu.name}={settings['price']}",)
    asked = PlanRequest(
        space=request.space,
        gpus=(gpu.name,),
        model=request.overrides.get("model"),
        data=request.overrides.get("data") or {},
        configuration=request.fixed_settings,
        prices=prices,
        typed_prices=typed_prices,
    )
    with working("predicting") as progress, closing(TracingChildren(outlive=True)) as children:
        question = resolve_request(
            asked,
            predictor=predictor or tracing(children),
            read_gpu=lambda: None,
            read_study=stored_study,
            read_dataset=partial(prepared, progress=progress),
        )
        offer = provider.offer(machine, question.offers.get(gpu.name, ()))
        surveys = cache_directory() / "surveys"
        course = rented.predicted(question, machine, typed=typed, cache=surveys, progress=progress)
    if course.note is not None:
        note_folded(f"how long it takes is not predicted: {course.note}")
    return rented.cost_of(course, offer, provider, typed.max_dollars)


def cost_words(cost: rented.Cost, machine: rented.RentalRequest) -> str:
    """Return what a rental costs: ``about $0.21 to $0.35: 11 min to 19 min of a10 at ...``."""
    gpu = machine.gpu.name
    if machine.gpus > 1:
        gpu = f"{machine.gpus} x {gpu}"
    if machine.is_spot:
        gpu += " spot"
    rate = f"at ${cost.offer.usd_per_hour:.2f} an hour"
    if cost.offer.source == PRICE_OPTION:
        rate += ", the price that you gave,"
    rate += f" on {cost.offer.provider}"
    most = f"at most ${cost.usd_max:.2f}, stopped after {units.duration(cost.limit_seconds)}"
    if cost.usd is None or cost.hours is None:
        return f"{gpu} {rate}; {most}"
    dollars = dict.fromkeys(f"${usd:.2f}" for usd in cost.usd)
    hours = dict.fromkeys(units.duration(SECONDS_PER_HOUR * hours) for hours in cost.hours)
    return f"about {' to '.join(dollars)}: {' to '.join(hours)} of {gpu} {rate}; {most}"
