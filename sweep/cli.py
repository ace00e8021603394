"""Owns the terminal: commands, and the one place where errors become a message and an exit code.

Imports nothing heavy, so that ``--help`` answers at once; commands import what they need when they
run. Exit codes: 0 done, 1 done and nothing fits, 2 bad input, 3 environment, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from search_spaces.errors import EnvironmentFault, InputError, SweepError, words_of
from sweep.paths import crash_log_directory, runs_directory, storage_url
from sweep.terminal import options as opt
from sweep.terminal.console import STDOUT, ReaderGoneError, note, prepare_streams
from sweep.terminal.knob_options import add_knobs, takes_knobs

if TYPE_CHECKING:
    from storage.definition import StudySnapshot

STEPS_WITHOUT_END = 1_000_000
"""Where a time was typed, steps do not end it sooner."""

app = typer.Typer(
    name="sweep",
    help="Name a GPU, get the fastest QLoRA configuration that fits it, and proof.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def front_door(version: opt.VersionOption = False) -> int:
    """Name a GPU, get the fastest QLoRA configuration that fits it, and proof."""
    if version:
        from sweep.terminal import commands

        commands.version()
        raise typer.Exit
    return 0


@app.command()
@takes_knobs
def run(
    space: opt.SpaceArgument,
    gpu: opt.GpuOption = None,
    model: opt.ModelOption = None,
    study: opt.StudyNameOption = None,
    storage: opt.StorageOption = None,
    trials: opt.TrialsOption = None,
    time_budget: opt.TimeBudgetOption = None,
    max_dollars: opt.MaxDollarsOption = None,
    seed: opt.SeedOption = None,
    sampler: opt.SamplerOption = None,
    no_confirm: opt.NoConfirmOption = False,
    soak: opt.SoakOption = None,
    as_json: opt.JsonOption = False,
    *,
    configuration: dict[str, Any],
) -> int:
    """Start or resume a study. Once the search has ended its winner is confirmed.

    Options of a configuration are held fixed and the rest of the space is searched.
    """
    from sweep.terminal import commands

    if no_confirm and soak is not None:
        raise InputError("--no-confirm and --soak are both given: keep one")
    overrides = {
        "gpu": gpu,
        "model": model,
        "trials": trials,
        "time_budget_seconds": _seconds("--time-budget", time_budget),
        "max_dollars": max_dollars,
        "confirm": False if no_confirm else _soak(soak),
        "seed": seed,
        "sampler": sampler,
    }
    return commands.run(
        space,
        overrides=overrides,
        held=configuration,
        study=study,
        storage=storage,
        as_json=as_json,
    )


def _seconds(option: str, typed: str | None) -> float | None:
    """Return the seconds of a duration that was typed; None where none was."""
    from search_spaces.loading import parse_duration

    try:
        return None if typed is None else parse_duration(typed)
    except InputError as error:
        raise InputError(f"{option}: {error}") from error


def _soak(typed: str | None) -> dict[str, float] | None:
    """Return how long to soak, as long as that takes in steps; None where nothing was typed."""
    seconds = _seconds("--soak", typed)
    return None if seconds is None else {"soak_seconds": seconds, "soak_steps": STEPS_WITHOUT_END}


@app.command()
@takes_knobs
def plan(
    space: opt.SpaceOrCardArgument = None,
    gpu: opt.GpusOption = None,
    model: opt.ModelOption = None,
    exact: opt.ExactOption = False,
    from_file: opt.FromFileOption = None,
    prices: opt.PricesOption = None,
    study: opt.CalibrateOption = None,
    storage: opt.StorageOption = None,
    steps: opt.StepsOption = None,
    samples: opt.SamplesOption = None,
    tokens: opt.TokensOption = None,
    dataset_samples: opt.DatasetOption = None,
    epochs: opt.EpochsOption = None,
    as_json: opt.JsonOption = False,
    *,
    configuration: dict[str, Any],
) -> int:
    """Predict what fits, how fast and at what cost; needs no GPU.

    Options of a configuration are held fixed and the rest of the space is searched. With --exact
    one configuration is asked about: what is not typed is the standard recipe's.
    """
    from sweep.planning.plan import AskedWork
    from sweep.planning.question import PlanRequest
    from sweep.terminal.plan import command

    request = PlanRequest(
        space=space,
        gpus=tuple(gpu or ()),
        model=model,
        configuration=configuration,
        is_exact=exact,
        from_file=from_file,
        work=AskedWork(steps, samples, tokens, dataset_samples, epochs),
        prices=None if prices is None else Path(prices),
        study=study,
        storage=storage,
        as_json=as_json,
    )
    return command.plan(request, read_study=_read_study)


def _read_study(name: str, storage: str | None) -> StudySnapshot:
    # Of all plans only one with --study needs Optuna, which takes longer to import than to answer.
    from storage.reading import read_study

    return read_study(name, url=storage_url(storage), home=runs_directory())


@app.command()
def status(study: opt.AnyStudyArgument = None, storage: opt.StorageOption = None) -> int:
    """Show what ran, what is running, and the best so far."""
    from sweep.terminal import commands

    return commands.status(study, storage=storage)


@app.command()
def confirm(
    study: opt.StudyArgument,
    soak: opt.SoakOption = None,
    storage: opt.StorageOption = None,
    as_json: opt.JsonOption = False,
) -> int:
    """Measure a study's winner again, beside its rivals, and train it for a while in one go."""
    from sweep.terminal import commands

    return commands.confirm(study, typed=_soak(soak) or {}, storage=storage, as_json=as_json)


@app.command()
def best(
    study: opt.StudyArgument, storage: opt.StorageOption = None, as_json: opt.JsonOption = False
) -> int:
    """Show a study's winner."""
    from sweep.terminal import commands

    return commands.best(study, storage=storage, as_json=as_json)


@app.command()
def report(
    studies: opt.StudiesArgument = None,
    plans: opt.PlanFilesOption = None,
    tokens: opt.TokensOption = None,
    dataset_samples: opt.DatasetOption = None,
    epochs: opt.EpochsOption = None,
    figure: opt.FigureOption = None,
    output: opt.ReportOption = None,
    storage: opt.StorageOption = None,
) -> int:
    """Write a study's report, with what your training costs, or compare cards; one HTML file.

    Several studies, and plans that `sweep plan --json` printed, are set beside each other: which
    card is the cheapest, which the soonest, and what cannot be told. Example: sweep report a10
    a100-40gb --plan l4.json --dataset-samples 50000

    A picture for slides, where the extra `images` is installed: sweep report a10 -o front.png
    """
    from reports.decision import Job
    from sweep.terminal import commands

    return commands.report(
        studies or (),
        plans=plans or (),
        job=Job(tokens=tokens, dataset_samples=dataset_samples, epochs=epochs),
        figure=figure,
        storage=storage,
        output=_output(output),
    )


@app.command()
def export(
    study: opt.StudyArgument,
    format: opt.FormatOption = "script",
    trial: opt.TrialOption = None,
    output: opt.ExportOption = None,
    storage: opt.StorageOption = None,
) -> int:
    """Write a study's winner as a recipe that runs; or another trial, with --trial."""
    from sweep.terminal import commands

    return commands.export(
        study, format=format, trial=trial, storage=storage, output=_output(output)
    )


@app.command()
def replay(
    surface: opt.SurfaceArgument,
    samplers: opt.SamplersOption = None,
    seeds: opt.SeedsOption = 20,
    budget_gib: opt.BudgetOption = None,
    as_json: opt.JsonOption = False,
) -> int:
    """Let samplers search recorded trials, and say how many each needs; needs no GPU."""
    from sweep.terminal import replay as command

    return command.replay(
        surface, samplers=samplers, seeds=seeds, budget_gib=budget_gib, as_json=as_json
    )


def _output(typed: str | None) -> Path | None:
    """Return the file that an output goes to; None for the usual place.

    Raises:
        InputError: it is a directory.
    """
    from search_spaces.documents import is_directory

    if typed is None:
        return None
    path = Path(typed)
    if typed != STDOUT and is_directory(path, label=f"--output: {typed}"):
        raise InputError(f"--output: {typed} is a directory: name a file in it")
    return path


@app.command()
def presets() -> int:
    """List the shipped search spaces."""
    from sweep.terminal import commands

    return commands.presets()


@app.command()
def gpus() -> int:
    """List the cards of the catalogue."""
    from sweep.terminal import commands

    return commands.gpus()


@app.command()
def models() -> int:
    """List the shipped architectures."""
    from sweep.terminal import commands

    return commands.models()


@app.command()
def doctor() -> int:
    """Check this machine, and say what to do."""
    from sweep.terminal import commands

    return commands.doctor()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that was typed and return the exit code."""
    prepare_streams()
    typed = list(sys.argv[1:] if arguments is None else arguments)
    for command in (run, plan):
        if typed[:1] == [command.__name__]:
            from search_spaces.knobs import KNOBS

            add_knobs(command, KNOBS)
    return guarded(lambda: app(typed or ["--help"], prog_name="sweep", standalone_mode=False))


def guarded(command: Callable[[], int | None]) -> int:
    """Run a command; return its exit code, or that of its error once that has been printed."""
    try:
        return command() or 0
    except SweepError as error:
        note(f"error: {error}")
        return error.exit_code
    except ReaderGoneError:
        return 0
    except typer.TyperException as error:
        note(f"error: {error.format_message()}")
        return InputError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        note("Interrupted.")
        return 130
    except OSError as error:
        note(f"error: {words_of(error)}{_cure(error)}")
        return EnvironmentFault.exit_code
    except MemoryError:
        note("error: this machine's memory is used up")
        return EnvironmentFault.exit_code
    except Exception as error:  # noqa: BLE001 - the edge: what is left is a mistake of ours
        note(_report_crash(error))
        return EnvironmentFault.exit_code


def _cure(error: OSError) -> str:
    """Return what to do where the system refuses something that is nobody's mistake."""
    match error.errno:
        case errno.EMFILE | errno.ENFILE:
            return ": raise the limit, with `ulimit -n 1024` say"
        case errno.ENOSPC | errno.EDQUOT:
            return ": free some space, or set SWEEP_HOME to another disk"
        case _:
            return ""


def _report_crash(error: Exception) -> str:
    """Keep the traceback in a file and return one line about it; no password is in either."""
    from storage.urls import redact

    text = redact("".join(traceback.format_exception(error)))
    name = f"crash-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"
    message = redact(f"error: {words_of(error)}")
    for directory in (crash_log_directory(), Path(tempfile.gettempdir())):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text, encoding="utf-8")
        except OSError:
            continue
        return f"{message}\nThis is a mistake in sweep; the traceback is in {directory / name}"
    return message
