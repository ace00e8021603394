"""Owns the terminal: options, and the one place where errors become a message and an exit code.

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
from typing import Annotated, Any

import typer

from search_spaces.errors import EnvironmentFault, InputError, SweepError, words_of
from sweep.paths import crash_log_directory
from sweep.terminal.console import ReaderGoneError, note, prepare_streams
from sweep.terminal.knob_options import add_knobs, takes_knobs

app = typer.Typer(
    name="sweep",
    help="Name a GPU, get the fastest QLoRA configuration that fits it, and proof.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

STDOUT = "-"
"""Name of standard output."""


@app.callback(invoke_without_command=True)
def front_door(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> int:
    """Name a GPU, get the fastest QLoRA configuration that fits it, and proof."""
    if version:
        from sweep.terminal import commands

        commands.version()
        raise typer.Exit
    return 0


StorageOption = Annotated[
    str | None,
    typer.Option("--storage", help="Database URL; sqlite:///runs/sweep.db by default."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")
]


def _named(option: str) -> Callable[[str | None], str | None]:
    """Return a check that an option, where it is given, names something."""

    def check(typed: str | None) -> str | None:
        if typed == "":
            raise InputError(f"{option}: an empty text names nothing; leave the option out")
        return typed

    return check


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", help="Shipped architecture, directory or hub id.", callback=_named("--model")
    ),
]
StudyArgument = Annotated[str, typer.Argument(metavar="STUDY", help="Name of a study.")]


@app.command()
def run(
    space: Annotated[str, typer.Argument(metavar="SPACE", help="A preset or a YAML file.")],
    gpu: Annotated[
        str | None, typer.Option(help="Card whose budget counts; auto is the one that is here.")
    ] = None,
    model: ModelOption = None,
    study: Annotated[str | None, typer.Option(help="Name; the space's by default.")] = None,
    storage: StorageOption = None,
    trials: Annotated[
        int | None, typer.Option(help="Trials of the study in all, earlier runs included.")
    ] = None,
    time_budget: Annotated[
        str | None, typer.Option(help="Stop this run after 10m, 1h30m, 90s.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling, weights and tokens.")] = None,
    sampler: Annotated[str | None, typer.Option(help="tpe, gp, random or grid.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Start or resume a study."""
    from sweep.terminal import commands

    overrides = {
        "gpu": gpu,
        "model": model,
        "trials": trials,
        "time_budget_seconds": None if time_budget is None else _seconds(time_budget),
        "seed": seed,
        "sampler": sampler,
    }
    return commands.run(space, overrides=overrides, study=study, storage=storage, as_json=as_json)


def _seconds(time_budget: str) -> float:
    from search_spaces.loading import parse_duration

    try:
        return parse_duration(time_budget)
    except InputError as error:
        raise InputError(f"--time-budget: {error}") from error


@app.command()
@takes_knobs
def plan(
    space: Annotated[
        str | None, typer.Argument(metavar="SPACE", help="A preset, a YAML file or a card.")
    ] = None,
    gpu: Annotated[
        list[str] | None, typer.Option(help="Card; name several to compare them.")
    ] = None,
    model: ModelOption = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Ask about one configuration: the recipe, but for what is typed."
        ),
    ] = False,
    from_file: Annotated[
        str | None,
        typer.Option(
            help="Configurations, one JSON object a line; - is stdin.",
            callback=_named("--from-file"),
        ),
    ] = None,
    prices: Annotated[
        str | None,
        typer.Option(
            help="Your prices; runs/prices.yaml where that is there.", callback=_named("--prices")
        ),
    ] = None,
    study: Annotated[str | None, typer.Option(help="Calibrate by this study's trials.")] = None,
    storage: StorageOption = None,
    steps: Annotated[int | None, typer.Option(help="Cost of so many steps; 1000.")] = None,
    samples: Annotated[int | None, typer.Option(help="Cost of so many samples.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Cost of so many tokens.")] = None,
    dataset_samples: Annotated[int | None, typer.Option(help="Samples of an epoch.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs of that dataset; 1.")] = None,
    as_json: JsonOption = False,
    *,
    configuration: dict[str, Any],
) -> int:
    """Predict what fits, how fast and at what cost; needs no GPU.

    Options of a configuration are held fixed and the rest of the space is searched. With --exact
    one configuration is asked about: what is not typed is the standard recipe's.
    """
    from sweep.planning.cost import AskedWork
    from sweep.planning.question import PlanRequest
    from sweep.terminal.plan import command as plan_command

    return plan_command.plan(
        PlanRequest(
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
    )


@app.command()
def status(
    study: Annotated[
        str | None, typer.Argument(metavar="[STUDY]", help="One study; all of them without.")
    ] = None,
    storage: StorageOption = None,
) -> int:
    """Show what ran, what is running, and the best so far."""
    from sweep.terminal import commands

    return commands.status(study, storage=storage)


@app.command()
def best(study: StudyArgument, storage: StorageOption = None, as_json: JsonOption = False) -> int:
    """Show a study's winner."""
    from sweep.terminal import commands

    return commands.best(study, storage=storage, as_json=as_json)


@app.command()
def report(
    study: StudyArgument,
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            help="runs/STUDY/report.html; - is stdout.",
            callback=_named("--output"),
        ),
    ] = None,
    storage: StorageOption = None,
) -> int:
    """Write a study's report, one HTML file."""
    from sweep.terminal import commands

    return commands.report(study, storage=storage, output=_output(output))


@app.command()
def export(
    study: StudyArgument,
    format: Annotated[
        str,
        typer.Option("--format", help="script, json, axolotl, llama-factory or trl."),
    ] = "script",
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", help="A file; - or nothing is stdout.", callback=_named("--output")
        ),
    ] = None,
    storage: StorageOption = None,
) -> int:
    """Write a study's winner as a recipe that runs."""
    from sweep.terminal import commands

    return commands.export(study, format=format, storage=storage, output=_output(output))


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
    if typed[:1] == ["plan"]:
        from search_spaces.knobs import KNOBS

        add_knobs(plan, KNOBS)
    return guarded(lambda: app(typed or ["--help"], prog_name="sweep", standalone_mode=False))


def guarded(command: Callable[[], int | None]) -> int:
    """Run a command; return its exit code, or that of its error once that has been told."""
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
    said = redact(f"error: {words_of(error)}")
    for directory in (crash_log_directory(), Path(tempfile.gettempdir())):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text, encoding="utf-8")
        except OSError:
            continue
        return f"{said}\nThis is a mistake in sweep; the traceback is in {directory / name}"
    return said
