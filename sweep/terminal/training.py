"""Owns what `sweep train` shows: what is trained, how far it is, what came of it and was promised.

Progress goes to stderr: one line that is redrawn in a terminal, a line now and then elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO, assert_never, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from reports import units
from search_spaces.documents import read_json
from search_spaces.errors import EnvironmentFault, InputError, NothingFits, quote
from search_spaces.space import Weights
from storage.definition import StudySnapshot
from sweep.finetuning import checkpoints
from sweep.finetuning import output as directories
from sweep.finetuning.card import TOGETHER, deviation, incomparable, promised_and_reached
from sweep.finetuning.training import (
    PreparedTraining,
    TrainingRequest,
    finished,
    prepare_training,
    smaller_than,
)
from sweep.finetuning.training import (
    train as run_training,
)
from sweep.finetuning.wire import (
    Alive,
    End,
    Evaluated,
    Event,
    NotFinite,
    NotSaved,
    Progressed,
    RanOut,
    Refused,
    Saved,
    Started,
    Stopped,
    TrainingResult,
    Unable,
)
from sweep.paths import storage_url
from sweep.running.device_info import read_card
from sweep.stop_signals import INTERRUPTED
from sweep.terminal.console import (
    Synchronized,
    folded,
    note,
    say,
    say_json,
    table,
    width_of,
)
from sweep.terminal.listings import read
from sweep.terminal.texts import prepared as read_texts
from sweep.terminal.working import Rhythm

DONE = 0


def train(
    name: str,
    *,
    output: Path,
    texts: Mapping[str, Any],
    trial: int | None,
    model: str | None,
    weights: str | None,
    numbers: Mapping[str, Any],
    is_resumed: bool,
    storage: str | None,
    as_json: bool,
) -> int:
    """Train, and print what came of it beside what was promised."""
    _check(numbers, texts)
    if weights not in (None, "random", "pretrained"):
        raise InputError(f"--weights must be pretrained or random, got {quote(weights)}")
    request = TrainingRequest(
        name=name,
        output=output,
        texts=dict(texts),
        trial=trial,
        model=model,
        weights=cast(Weights | None, weights),
        is_resumed=is_resumed,
        **numbers,
    )
    is_begun = directories.known_run(output) is not None
    # A directory that is refused is not made, and one that is held is not again.
    with directories.held(output) if is_begun else nullcontext():
        return _train(request, is_held=is_begun, storage=storage, as_json=as_json)


def _check(numbers: Mapping[str, Any], texts: Mapping[str, Any]) -> None:
    """Refuse numbers that nothing can be trained by.

    Raises:
        InputError: names the option.
    """
    for key in ("max_steps", "checkpoint_every"):
        if numbers[key] is not None and numbers[key] < 1:
            option = f"--{key.replace('_', '-')}"
            raise InputError(f"{option} must be at least 1, got {numbers[key]}")
    epochs = numbers["epochs"]
    if epochs is not None and not 0 < epochs < float("inf"):
        raise InputError(f"--epochs must be a finite number above 0, got {epochs:g}")
    if numbers["seed"] is not None and not 0 <= numbers["seed"] < 2**32:
        raise InputError(f"--seed must be from 0 to {2**32 - 1:,}, got {numbers['seed']}")
    share = texts["eval_fraction"]
    if share is not None and not 0 <= share < 1:
        raise InputError(f"--eval-fraction must be at least 0 and below 1, got {share:g}")


def _train(request: TrainingRequest, *, is_held: bool, storage: str | None, as_json: bool) -> int:
    prepared = prepare_training(
        request,
        read_study=lambda name: _study(name, storage),
        read_texts=read_texts,
        card=read_card,
        warn=_warn,
    )
    width = width_of(sys.stderr)
    if request.is_resumed and directories.is_done(request.output):
        checkpoints.remove_all(request.output)
        note(f"{request.output} holds a training that is done: there is nothing left to do.")
        if as_json:
            say_json(read_json(request.output / directories.TRAINING, label=directories.TRAINING))
        return DONE
    note(folded(f"Training {prepared.subject.words} on {_words(prepared)}.", width))
    for text in prepared.notes:
        note(folded(text, width))
    resume_from = None
    if request.is_resumed:
        resume_from = checkpoints.newest(request.output, warn=_warn)
        if resume_from is None:
            note("No checkpoint had been written yet: it begins at the first step.")
    with _watching() as observe, nullcontext() if is_held else directories.held(request.output):
        end = run_training(
            prepared, is_resumed=request.is_resumed, resume_from=resume_from, observe=observe
        )
    return _conclude(prepared, end, as_json=as_json)


def _warn(text: str) -> None:
    note(f"warning: {text}")


def _study(name: str, storage: str | None) -> StudySnapshot:
    return read(name, url=storage_url(storage), warn=_warn)


def _words(prepared: PreparedTraining) -> str:
    summary, config = prepared.texts.summary, prepared.job.config
    return (
        f"{summary.source} ({units.plural(summary.rows, 'row')}, {units.count(summary.tokens)} "
        f"tokens), {units.size(config)}"
    )


def _conclude(prepared: PreparedTraining, end: End, *, as_json: bool) -> int:
    """Finish what came to its end, and say of anything else what it was and what to do."""
    resumed = "the same command with --resume goes on"
    match end:
        case TrainingResult() as result:
            document = finished(prepared, result)
            if as_json:
                say_json(document)
            else:
                here = {**document["environment"], "versions": document["versions"]}
                say(_result_text(prepared, result, environment=here))
            return DONE
        case Stopped() as stopped:
            note(
                f"Interrupted at step {stopped.step:,}; {_kept(stopped.checkpoint_step, resumed)}."
            )
            return INTERRUPTED
        case RanOut() as end:
            raise NothingFits(_ran_out(prepared, end))
        case NotFinite() as end:
            raise NothingFits(
                f"{end.what} at step {end.step:,}: the training ended there; "
                f"{_kept(end.checkpoint_step, 'it is sound')}. A lower --learning-rate may help"
            )
        case Refused(reason=reason):
            raise InputError(reason)
        case Unable(reason=reason, checkpoint_step=step):
            raise EnvironmentFault(f"{reason}; {_kept(step, resumed)}")
        case _:
            assert_never(end)


def _kept(step: int | None, then: str) -> str:
    if step is None:
        return "there is no checkpoint yet"
    return f"the checkpoint of step {step:,} is kept, {then}"


def _ran_out(prepared: PreparedTraining, end: RanOut) -> str:
    """Return that memory ran out, what is kept, and what would be smaller."""
    smaller = smaller_than(prepared)
    then = (
        "" if smaller is None else f". The next smaller one: {smaller.words(prepared.job.config)}"
    )
    kept = _kept(end.checkpoint_step, "and usable")
    return f"out of memory in {end.doing}, after step {end.step:,} ({end.detail}); {kept}{then}"


def _result_text(
    prepared: PreparedTraining, result: TrainingResult, *, environment: Mapping[str, Any]
) -> str:
    job, width = prepared.job, width_of(sys.stdout)
    held = result.eval_loss
    rows = promised_and_reached(job, result)
    why_not = incomparable(job, result)
    lines = [
        f"{units.plural(result.steps, 'step')}, {units.count(result.tokens)} tokens that carry "
        f"loss, in {units.duration(result.seconds)}",
        f"loss {result.final_train_loss:.4f} at the end, {result.train_loss:.4f} on the way"
        + ("" if held is None else f"; held out {held:.4f}"),
        table(("", "promised", "reached", "ratio"), rows, width=width),
    ]
    if why_not is not None:
        lines.append(folded(f"Not comparable: {why_not}.", width))
    different = deviation(job, result, environment=environment)
    if different is not None:
        lines.append(folded(different.words, width))
    if result.rows_left_out:
        lines.append(f"{units.plural(result.rows_left_out, 'row')} had no token that carries loss.")
    return "\n".join([*lines, f"Adapter: {prepared.job.output}"])


# While it runs


@contextmanager
def _watching() -> Iterator[Callable[[Event], None]]:
    """Show a training on stderr as long as the ``with`` lasts."""
    console = Console(file=cast(TextIO, Synchronized(sys.stderr)))
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        yield _Lines()
        return
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[words]}"),
        console=console,
        expand=True,
        transient=True,
    )
    with progress:
        yield _Bar(progress)


class _Bar:
    """One line, redrawn."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None, words="")
        self._is_training = False

    def __call__(self, event: Event) -> None:
        """Show what happened."""
        match event:
            case Started() as started:
                self._is_training = True
                self._progress.update(self._task, total=started.steps, completed=started.steps_done)
                if started.documents_apart is False:
                    self._progress.console.print(
                        f"warning: {TOGETHER}", markup=False, highlight=False
                    )
            case Progressed() as progressed:
                self._progress.update(
                    self._task,
                    completed=progressed.step,
                    description=f"step {progressed.step:,}",
                    words=_progress_words(progressed),
                )
            case Alive(doing=doing) if doing != "a training step" or not self._is_training:
                self._progress.update(self._task, description=doing)
            case NotSaved() as lost:
                self._progress.console.print(_not_saved(lost), markup=False, highlight=False)


class _Lines:
    """A line for what happens once, and one now and then for the steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._rhythm = Rhythm(clock)
        self._steps = 0

    def __call__(self, event: Event) -> None:
        """Say what happened."""
        match event:
            case Started() as started:
                self._steps = started.steps
                note(_started(started))
                if started.documents_apart is False:
                    note(f"warning: {TOGETHER}")
            case Progressed() as progressed if self._rhythm.is_due:
                self._rhythm.go_on()
                of = units.out_of(progressed.step, self._steps)
                note(f"step {of}: {_progress_words(progressed)}")
            case Evaluated(step=step, loss=loss):
                note(f"step {step:,}: held-out loss {loss:.4f}")
            case Saved(step=step):
                note(f"step {step:,}: checkpoint written")
            case NotSaved() as lost:
                note(_not_saved(lost))


def _started(started: Started) -> str:
    begun = f"from step {started.steps_done:,} " if started.steps_done else ""
    rows = units.plural(started.rows, "row")
    if started.texts_rows not in (None, started.rows):
        rows = f"{units.plural(started.texts_rows, 'row')} packed into {started.rows:,}"
    return (
        f"{started.device_name}: {units.plural(started.steps, 'step')} {begun}over {rows}, "
        f"{units.plural(started.rows_held_out, 'row')} held out; "
        f"{units.count(started.trainable_parameters)} trainable parameters"
    )


def _progress_words(progressed: Progressed) -> str:
    left = units.duration(progressed.seconds_left)
    rate = units.rate(progressed.tokens_per_second)
    return f"loss {progressed.loss:.4f}, {rate} tokens/s, {left} left"


def _not_saved(lost: NotSaved) -> str:
    return (
        f"warning: step {lost.step:,}: no checkpoint, as the disk does not take it "
        f"({lost.reason}); the training goes on, and the one before is kept"
    )
