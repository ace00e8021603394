"""Running what is verified: our training, an exported script or TRL, in a process of its own.

What they need and a study does not have is made for them: weights of an architecture, texts. Knows
nothing of tolerances, and nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reports import units
from search_spaces.checkpoints import check_weights
from search_spaces.config import TORCH_DTYPES, allocator_settings
from search_spaces.errors import EnvironmentFault, InputError, NothingFits, words_of
from search_spaces.models import ModelSpec, load_model_spec
from storage.files import make_directory
from sweep.child_environment import child_environment
from sweep.export.record import Record
from sweep.finetuning.job import run_job
from sweep.finetuning.wire import Event, Progressed, Promise, TrainingJob
from sweep.paths import runs_directory
from sweep.processes import Child
from sweep.running.device_info import environment_with, read_card
from sweep.subprocess_jobs import last_words, run_subprocess
from sweep.verifying.verdict import Reached, Verification, judge

STEPS = 40
STEPS_MIN = 8
"""Below, nothing is left of the steps behind a training's warm-up."""
_ERRAND = (sys.executable, "-P", "-m", "sweep.verifying")
_LOADING_SECONDS_MAX, _SLOWER_MAX = 1800.0, 20.0
"""Beyond these a script hangs: it loads weights from a cold disk, and compiles."""
_TEXT_TOKENS_MAX = 2_000_000
"""Of generated texts; a longer run reads them again."""
_WORD_TOKENS = 0.5
"""Tokens that a word makes at least, joined to its neighbours."""
_WORDS_A_TEXT = 200

Tell = Callable[[str, int, int], None]
"""Hears what is done, how much of it, of how much."""


def verify(
    record: Record,
    *,
    path: Path | None = None,
    steps: int = STEPS,
    model: str | None = None,
    tell: Tell = lambda what, done, of: None,
) -> Verification:
    """Run what was recorded for some steps and say how it compares.

    Args:
        record: what was measured.
        path: the exported file that runs; None for a training of ours.
        steps: optimizer steps.
        model: directory or hub id of the weights that a script loads; None for the recorded ones,
            or for random ones of the same architecture.
        tell: hears how far it is.

    Raises:
        InputError: the steps are too few, or something that was named is not right.
        NothingFits: it ran out of memory.
        EnvironmentFault: no device, a library that is missing, a process that failed.
    """
    if steps < STEPS_MIN:
        raise InputError(f"--steps must be at least {STEPS_MIN}, got {steps}")
    cards = record.config.data_parallel
    if cards > 1:
        raise InputError(
            f"{record.label}: it was measured on {cards} GPUs at once (data_parallel), and a "
            "verification runs on one: name a trial of one GPU with --trial, or run the exported "
            "script with torchrun, which compares itself"
        )
    _check_device(record)
    match record.kind:
        case "training":
            reached = _train(record, steps=steps, model=model, tell=tell)
        case "script" | "trl":
            assert path is not None, "an export is a file"
            reached = _run_export(record, path, steps=steps, model=model, tell=tell)
    card = read_card() if record.gpu.target.device == "cuda" else None
    return judge(record, reached, environment=environment_with(card))


def _check_device(record: Record) -> None:
    if record.gpu.target.device == "cuda" and read_card() is None:
        raise EnvironmentFault(
            f"{record.label} was measured on a GPU, and there is none here; `sweep doctor` says "
            "more"
        )


def _train(record: Record, *, steps: int, model: str | None, tell: Tell) -> Reached:
    """Train as `sweep train` does, on rows like the study's own."""

    def observe(event: Event) -> None:
        if isinstance(event, Progressed):
            tell("steps", event.step, steps)

    with _workplace() as place:
        spec = record.model.spec if model is None else load_model_spec(model)
        job = TrainingJob(
            config=record.config,
            model=spec.to_json(),
            weights=record.weights if model is None else "pretrained",
            **_texts_of(record),
            max_steps=steps,
            seed=0 if record.texts is None else record.texts.seed,
            device=record.gpu.target.device,
            budget_bytes=record.gpu.target.budget_bytes,
            output=str(place),
            keeps_checkpoints=False,
            promise=_promise(record),
        )
        result = run_job(job, observe=observe)
    if result.tokens_per_second is None or result.steps_measured == 0:
        raise NothingFits(f"{record.label}: {result.steps} steps are too few to tell a speed")
    return Reached(
        steps=result.steps,
        tokens_per_second=result.tokens_per_second,
        peak_allocated_bytes=result.peak_allocated_bytes,
    )


def _promise(record: Record) -> Promise:
    return Promise(
        tokens_per_second=record.measurement.tokens_per_second,
        peak_allocated_bytes=record.measurement.peak_allocated_bytes,
        source=record.label,
        device=record.device,
        texts=None if record.texts is None else record.texts.summary.fingerprint,
    )


def _texts_of(record: Record) -> dict[str, Any]:
    """Return the texts that a study was measured on, where it was on any.

    Raises:
        InputError: they are not prepared here.
    """
    if record.texts is None:
        return {}
    summary = record.texts.summary
    directory = runs_directory() / ".texts" / summary.fingerprint
    if not directory.is_dir():
        raise InputError(
            f"{record.label} was measured on {summary.source}, which is not prepared here: "
            f"`sweep data {summary.source}` does that"
        )
    return {
        "texts": str(directory),
        "fingerprint": record.texts.summary.fingerprint,
        "tokenizer": record.texts.summary.tokenizer,
        "eval_fraction": record.texts.eval_fraction,
    }


def _run_export(
    record: Record, path: Path, *, steps: int, model: str | None, tell: Tell
) -> Reached:
    """Run an exported file as it is, on texts that are made for it."""
    _refuse_texts(record)
    if record.kind == "trl" and find_spec("trl") is None:
        raise EnvironmentFault("TRL is not installed here: `pip install trl`")
    with _workplace() as place:
        weights = _weights(record, place, model=model, tell=tell)
        texts = _texts_to_read(record, place, weights, steps=steps)
        tell("steps", 0, steps)
        run = _script if record.kind == "script" else _trl
        reached = run(record, path, weights=weights, texts=texts, place=place, steps=steps)
    return Reached(
        steps=reached["steps"],
        tokens_per_second=reached["tokens_per_second"],
        peak_allocated_bytes=reached["peak_allocated_bytes"],
        notes=tuple(_notes(record, reached, steps=steps)),
    )


def _refuse_texts(record: Record) -> None:
    """Refuse an export of a study with texts that it cannot be held against, before weights are
    made for it.

    Raises:
        InputError: they are not here, or what is run does not count their tokens.
    """
    if record.texts is None:
        return
    if record.kind == "trl":
        raise InputError(
            f"{record.label} was measured on texts, whose tokens that carry loss TRL does not "
            "count: verify the study, or its script"
        )
    if not Path(record.texts.summary.source).exists():
        raise InputError(
            f"{record.label} was measured on {record.texts.summary.source}, which is not here"
        )


def _texts_to_read(record: Record, place: Path, weights: Path, *, steps: int) -> Path:
    """Return the texts that an export is run on: the study's own, or random words."""
    if record.texts is not None:
        return Path(record.texts.summary.source).resolve()
    path = place / "texts.jsonl"
    _write_texts(path, weights, tokens=steps * record.config.tokens_per_step)
    return path


def _notes(record: Record, reached: Mapping[str, Any], *, steps: int) -> Iterator[str]:
    if reached["steps"] != steps:
        yield f"it ended after {reached['steps']} of {steps} steps"
    if reached["peak_allocated_bytes"] is None:
        yield "peak allocated is not compared: nothing counts a script's memory on a CPU"
    if record.kind == "trl":
        yield from (f"TRL: {sentence}" for sentence in record.unsupported)
    kinds = reached.get("adapter_dtypes")
    measured = TORCH_DTYPES[record.config.adapter_dtype]
    if kinds and kinds != [measured]:
        yield f"TRL trained adapters of {' and '.join(kinds)}, measured were {measured}"


def _script(
    record: Record, path: Path, *, weights: Path, texts: Path, place: Path, steps: int
) -> Mapping[str, Any]:
    metrics = place / "metrics.json"
    command = [
        *(sys.executable, str(path), "--model", str(weights), "--data", str(texts)),
        *("--output", str(place / "adapter"), "--max-steps", str(steps)),
        *("--metrics", str(metrics)),
    ]
    with tempfile.TemporaryFile() as printed:
        child = Child(
            command,
            stdin=None,
            stdout=printed.fileno(),
            stderr=printed.fileno(),
            environment=_environment(record),
        )
        seconds = _seconds_max(record, steps=steps)
        try:
            child.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise EnvironmentFault(
                f"{record.label}: the script was ended after {units.duration(seconds)}, in which "
                f"its {steps} steps should long have been done{last_words(printed)}"
            ) from error
        finally:
            end = child.end()
        words = last_words(printed)
    if end.status != 0:
        raise _failed(f"{record.label}: the script ended with {end}{words}")
    return _figures(metrics, label=record.label)


def _seconds_max(record: Record, *, steps: int) -> float:
    """Return how long a script may take: to load, and for texts and steps that go slower than
    recorded; it reads all the texts, and evaluates those that are held out."""
    tokens = steps * record.config.tokens_per_step
    if record.texts is not None:
        tokens += record.texts.summary.tokens
    expected = tokens / record.measurement.tokens_per_second
    return _LOADING_SECONDS_MAX + _SLOWER_MAX * expected


def _figures(metrics: Path, *, label: str) -> Mapping[str, Any]:
    """Return what a script says that it reached.

    Raises:
        InputError: it says nothing of the kind, so it is not as it was exported.
    """
    try:
        values = json.loads(metrics.read_text(encoding="utf-8"))
        rate, peak = float(values["tokens_per_second"]), values["peak_allocated_bytes"]
        peak = None if peak is None else int(peak)
        steps = int(values["steps"])
        is_told = 0 < rate < math.inf and (peak is None or peak > 0) and steps > 0
    except (OSError, ValueError, KeyError, TypeError):
        is_told = False
    if not is_told:
        raise InputError(
            f"{label}: the script ended and left no figures of what it reached: export it again"
        )
    return {"steps": steps, "tokens_per_second": rate, "peak_allocated_bytes": peak}


def _failed(text: str) -> EnvironmentFault | NothingFits:
    """Return an error for a process that did not come to its end."""
    is_memory = "out of memory" in text.lower() or "OutOfMemoryError" in text
    return NothingFits(text) if is_memory else EnvironmentFault(text)


def _trl(
    record: Record, path: Path, *, weights: Path, texts: Path, place: Path, steps: int
) -> Mapping[str, Any]:
    request = {
        "do": "trl",
        "file": str(path),
        "model": str(weights),
        "texts": str(texts),
        "output": str(place / "adapter"),
        "steps": steps,
        "tokens_per_step": record.config.tokens_per_step,
    }
    try:
        return run_subprocess(
            _ERRAND, request, on_news=lambda _: None, environment=_environment(record)
        )
    except (EnvironmentFault, OSError) as error:
        raise _failed(f"{record.label}: TRL: {words_of(error)}") from error


def _environment(record: Record) -> dict[str, str]:
    """Return the variables of a child that trains on one GPU, with the recorded allocator."""
    variables = child_environment(with_hub_token=record.model.spec.source == "hub")
    if record.gpu.target.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    else:
        variables.setdefault("CUDA_VISIBLE_DEVICES", "0")
    return variables | allocator_settings(record.config.expandable_segments)


def _weights(record: Record, place: Path, *, model: str | None, tell: Tell) -> Path:
    """Return the directory that an export loads: weights with a tokenizer beside them."""
    spec = record.model.spec if model is None else load_model_spec(model)
    if spec.path is not None and spec.source != "shipped":
        check_weights(spec)
        return spec.path
    directory = place / "model"
    request = {
        "do": "weights",
        "model": spec.to_json(),
        "directory": str(directory),
        "tokenizer": str(_tokenizer_of(spec)),
    }
    run_subprocess(
        _ERRAND,
        request,
        on_news=lambda news: tell(news["what"], news["done"], news["of"]),
        environment=child_environment(),
    )
    return directory


def _tokenizer_of(spec: ModelSpec) -> Path:
    """Return a tokenizer whose tokens the architecture knows: its own, or the demo's small one."""
    path = spec.tokenizer_path or load_model_spec("demo").tokenizer_path
    assert path is not None, "the demo has a tokenizer"
    return path


def _write_texts(path: Path, weights: Path, *, tokens: int) -> None:
    """Write texts of random words that make at least so many tokens."""
    tokenizer = json.loads((weights / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    known = [word for word in vocabulary if word.isascii() and word.isalpha()]
    words = known or ["the", "training", "of", "a", "language", "model"]
    drawn = random.Random(0)
    count = int(min(tokens, _TEXT_TOKENS_MAX) / _WORD_TOKENS / _WORDS_A_TEXT) + 1
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            text = " ".join(drawn.choices(words, k=_WORDS_A_TEXT))
            file.write(json.dumps({"text": text}) + "\n")


@contextlib.contextmanager
def _workplace() -> Iterator[Path]:
    """Yield a directory for what a run needs and leaves; it is gone afterwards."""
    runs = runs_directory()
    make_directory(runs)
    with tempfile.TemporaryDirectory(prefix=".verify-", dir=runs) as place:
        yield Path(place)
