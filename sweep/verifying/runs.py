"""A verification: what was measured is run for some steps, as our training, as the exported script
or in TRL, and held against its record. Nothing here imports torch.
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.checkpoints import check_weights
from qlora_sweep.search_spaces.config import TrialConfig, allocator_settings
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, NothingFits
from qlora_sweep.search_spaces.kinds import COMPUTE_DTYPES
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.search_spaces.space import Weights
from qlora_sweep.storage.files import make_directory
from qlora_sweep.sweep.child_environment import child_environment
from qlora_sweep.sweep.data.kinds import on_completions
from qlora_sweep.sweep.data.prepared_dataset import dataset_directory
from qlora_sweep.sweep.export.record import Record, RecordedDataset
from qlora_sweep.sweep.finetuning.protocol import (
    Event,
    TrainingJob,
    TrainingProgress,
    TrainingResult,
)
from qlora_sweep.sweep.finetuning.results import Comparison, compared
from qlora_sweep.sweep.finetuning.training import fault_of, follow
from qlora_sweep.sweep.json_child import last_words
from qlora_sweep.sweep.paths import runs_directory
from qlora_sweep.sweep.processes import Child
from qlora_sweep.sweep.running.device_info import environment_with, read_gpu
from qlora_sweep.sweep.scratch import scratch

STEPS = 40
_CHILD = [sys.executable, "-P", "-m", "qlora_sweep.sweep.verifying"]
_LOADING_SECONDS_MAX = 1800.0
"""Of a script, which loads weights from a cold disk, and compiles."""
_SLOWER_MAX = 20.0
"""Times as long as was measured a script may train; beyond that it hangs."""
_TEXT_TOKENS_MAX = 2_000_000
"""Of generated texts; a longer run reads them again."""
_WORDS = ("the", "training", "of", "a", "language", "model")
_WORDS_A_TEXT = 200
_TEXT_TOKENS = 100
"""Of so many words, at least: a tokenizer may join words."""

Tell = Callable[[str, int, int], None]
"""Hears what is done, how much of it, of how much."""


class Reached(BaseModel):
    """What a run did; an exported script leaves it as its metrics."""

    steps: int = Field(gt=0)
    tokens_per_second: float = Field(gt=0, allow_inf_nan=False)
    """Supervised ones, at the median step."""
    peak_allocated_bytes: int | None = Field(gt=0)
    """None where nothing counted it, as nothing does for a script on a CPU."""
    adapter_dtypes: list[str] = []


@dataclass(frozen=True)
class Verification:
    """How a run compares with its record."""

    record: Record
    steps: int
    comparison: Comparison

    @property
    def differences(self) -> tuple[str, ...]:
        """All that differs, in words."""
        return self.comparison.figures + self.comparison.causes

    def to_json(self) -> dict[str, Any]:
        """Return the document that `sweep verify --json` prints."""
        return {
            "ok": self.comparison.is_within,
            "what": self.record.label,
            "run": self.record.kind,
            "steps": self.steps,
            "tokens_per_second": self.comparison.speed.to_json(),
            "peak_allocated_bytes": self.comparison.memory.to_json(),
            "differences": list(self.differences),
        }


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
    gpus = record.config.data_parallel
    if gpus > 1:
        raise InputError(
            f"{record.label}: it was measured on {gpus} GPUs at once (data_parallel), and a "
            "verification runs on one: name a trial of one GPU with --trial, or run the exported "
            "script with torchrun, which compares itself"
        )
    gpu = None
    if record.gpu.target.is_on_gpu:
        gpu = read_gpu()
        if gpu is None:
            raise EnvironmentFault(
                f"{record.label} was measured on a GPU, and there is none here; `sweep doctor` "
                "says more"
            )
    if model is None:
        spec = record.model.spec
        weights = record.weights
    else:
        spec = load_model_spec(model)
        weights = "pretrained"
    make_directory(runs_directory())
    with scratch("verify", parent=runs_directory()) as place:
        if record.kind == "training":
            reached = _train(record, spec, place, steps=steps, weights=weights, tell=tell)
        else:
            assert path is not None, "an export is a file"
            reached = _run_export(record, path, spec, place, steps=steps, tell=tell)
    return judge(record, reached, steps=steps, environment=environment_with(gpu))


def judge(
    record: Record, reached: Reached, *, steps: int, environment: Mapping[str, Any]
) -> Verification:
    """Return how a run compares with what was recorded.

    Args:
        record: what was measured.
        reached: by the run.
        steps: that were asked for.
        environment: this machine's fingerprint.
    """
    comparison = compared(
        record,
        tokens_per_second=reached.tokens_per_second,
        peak_allocated_bytes=reached.peak_allocated_bytes,
        environment=environment,
    )
    notes = []
    if reached.steps != steps:
        notes.append(f"it ended after {reached.steps} of {steps} steps")
    if reached.peak_allocated_bytes is None:
        notes.append("peak allocated is not compared: nothing counts a script's memory on a CPU")
    if record.kind == "trl":
        notes += [f"TRL: {sentence}" for sentence in record.unsupported]
    kinds = reached.adapter_dtypes
    measured = COMPUTE_DTYPES[record.config.adapter_dtype].torch_name
    if kinds and kinds != [measured]:
        notes.append(f"TRL trained adapters of {' and '.join(kinds)}, measured were {measured}")
    # Our training begins with the longest examples; others take them in the dataset's order.
    is_padded = record.texts is not None and record.config.packing != "packed"
    memory = comparison.memory
    is_lower = (memory.ratio or 1.0) < 1.0 and not memory.is_within
    if record.kind != "training" and is_padded and is_lower:
        comparison = replace(comparison, memory=replace(memory, reached=None))
        notes.append(
            "the peak is lower and not compared: a script's few steps on padded texts may meet "
            "none of the longest rows"
        )
    comparison = replace(comparison, causes=comparison.causes + tuple(notes))
    return Verification(record, reached.steps, comparison)


def _train(
    record: Record, spec: ModelSpec, place: Path, *, steps: int, weights: Weights, tell: Tell
) -> Reached:
    """Train as `sweep train` does, on sequences like the study's own."""

    def observe(event: Event) -> None:
        if isinstance(event, TrainingProgress):
            tell("steps", event.step, steps)

    dataset = None
    eval_fraction = 0.0
    seed = 0
    if record.texts is not None:
        dataset = str(_prepared_directory(record, record.texts, spec))
        eval_fraction = record.texts.eval_fraction
        seed = record.texts.seed
    job = TrainingJob(
        config=record.config,
        model=spec.to_json(),
        weights=weights,
        dataset=dataset,
        eval_fraction=eval_fraction,
        seed=seed,
        max_steps=steps,
        device=record.gpu.target.device,
        budget_bytes=record.gpu.budget_bytes,
        output=str(place),
        keeps_checkpoints=False,
    )
    result = follow(job, observe=observe)
    if not isinstance(result, TrainingResult):
        raise fault_of(result)
    if result.steps_measured == 0:
        raise NothingFits(f"{record.label}: {result.steps} steps are too few to tell a speed")
    return Reached.model_validate(result, from_attributes=True)


def _prepared_directory(record: Record, recorded: RecordedDataset, spec: ModelSpec) -> Path:
    """Return the prepared dataset that was measured on.

    Raises:
        InputError: it is not prepared here.
    """
    directory = dataset_directory() / recorded.summary.fingerprint
    if not directory.is_dir():
        raise InputError(
            f"{record.label} was measured on {recorded.summary.source}, which is not prepared "
            f"here: `{_preparing(recorded, spec)}` does that"
        )
    return directory


def _preparing(recorded: RecordedDataset, spec: ModelSpec) -> str:
    """Return what to type to prepare the dataset of a study as it was read there."""
    summary = recorded.summary
    settings: dict[str, object] = {
        "tokenizer": recorded.tokenizer,
        "format": summary.format,
        "text_column": summary.text_column,
    }
    if summary.completions_only != on_completions(summary.kind, None):
        settings["completions_only"] = json.dumps(summary.completions_only)
    model = spec.name
    if spec.source == "directory":
        model = str(spec.path)
    words = ["sweep", "data", recorded.source, "--model", model]
    for key, value in settings.items():
        if value is not None:
            words += ["--set", f"data.{key}={value}"]
    return shlex.join(words)


def _run_export(
    record: Record, path: Path, spec: ModelSpec, place: Path, *, steps: int, tell: Tell
) -> Reached:
    """Run an exported file as it is, on the study's dataset, or on one that is made for it."""
    dataset = record.texts
    if dataset is not None and not Path(dataset.summary.source).exists():
        raise InputError(
            f"{record.label} was measured on {dataset.summary.source}, which is not here"
        )
    command = [sys.executable]
    if record.kind == "trl":
        command = list(_CHILD)
        if find_spec("trl") is None:
            raise EnvironmentFault("TRL is not installed here: `pip install trl`")
    weights = _weights(record, spec, place, tell=tell)
    tokens = steps * record.config.tokens_per_step
    if dataset is None:
        data = place / "texts.jsonl"
        if record.config.is_on_pairs:
            examples = _made_pairs(record.config, steps)
        elif record.kind == "trl":
            # The last sequence of an epoch is shorter, and the mask that comes with it has the
            # peak: a run is several epochs.
            examples = _made(record.config.tokens_per_step)
        else:
            examples = _made(tokens)
        lines = (f"{json.dumps(example)}\n" for example in examples)
        data.write_text("".join(lines), encoding="utf-8")
    else:
        # It reads the whole dataset, and evaluates what is held out of it.
        data = Path(dataset.summary.source).resolve()
        tokens += dataset.summary.tokens
    tell("steps", 0, steps)
    metrics = place / "metrics.json"
    command += [str(path), "--model", str(weights), "--data", str(data)]
    command += ["--output", str(place / "adapter"), "--max-steps", str(steps)]
    command += ["--metrics", str(metrics)]
    if record.kind == "trl" and record.gpu.target.is_on_gpu:
        command += ["--budget-bytes", str(record.gpu.budget_bytes)]
    seconds = _LOADING_SECONDS_MAX + _SLOWER_MAX * tokens / record.measurement.tokens_per_second
    _run(record, command, seconds=seconds, what=f"its {steps} steps")
    try:
        return Reached.model_validate_json(metrics.read_bytes())
    except (OSError, ValidationError) as error:
        raise InputError(
            f"{record.label}: the script ended and left no figures of what it reached: export it "
            "again"
        ) from error


def _made(tokens: int) -> Iterator[dict[str, str]]:
    """Yield texts of so many tokens."""
    drawn = random.Random(0)
    for _ in range(int(min(tokens, _TEXT_TOKENS_MAX) / _TEXT_TOKENS) + 1):
        yield {"text": " ".join(drawn.choices(_WORDS, k=_WORDS_A_TEXT))}


def _made_pairs(config: TrialConfig, steps: int) -> Iterator[dict[str, str]]:
    """Yield the pairs of so many steps, so long that each sequence is cut, and full."""
    drawn = random.Random(0)
    words = config.seq_len * _WORDS_A_TEXT // _TEXT_TOKENS
    most = _TEXT_TOKENS_MAX // config.seq_len + config.samples_per_step
    for _ in range(min(steps * config.samples_per_step, most)):
        chosen = " ".join(drawn.choices(_WORDS, k=words))
        rejected = " ".join(drawn.choices(_WORDS, k=words))
        yield {"prompt": _WORDS[0], "chosen": f" yes {chosen}", "rejected": f" no {rejected}"}


def _run(record: Record, command: list[str], *, seconds: float, what: str) -> None:
    """Run a command to its end, on one GPU, with the recorded allocator.

    Raises:
        NothingFits: it ran out of memory.
        EnvironmentFault: it failed in another way, or took too long.
    """
    variables = child_environment(with_hub_token=record.model.spec.source == "hub")
    if not record.gpu.target.is_on_gpu:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    variables.setdefault("CUDA_VISIBLE_DEVICES", "0")
    variables |= allocator_settings(record.config.expandable_segments)
    _run_child(command, label=record.label, variables=variables, seconds=seconds, what=what)


def _run_child(
    command: list[str], *, label: str, variables: Mapping[str, str], seconds: float, what: str
) -> None:
    """Run a command to its end.

    Raises:
        NothingFits: it ran out of memory.
        EnvironmentFault: it failed in another way, or took too long.
    """
    with tempfile.TemporaryFile() as printed:
        child = Child(
            command,
            stdin=None,
            stdout=printed.fileno(),
            stderr=printed.fileno(),
            environment=variables,
        )
        try:
            child.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise EnvironmentFault(
                f"{label}: the script was ended after {units.duration(seconds)}, in which "
                f"{what} should long have been done{last_words(printed)}"
            ) from error
        finally:
            end = child.end()
        words = f"{label}: the script ended with {end}{last_words(printed)}"
    if end.status != 0:
        if "out of memory" in words.lower() or "OutOfMemoryError" in words:
            raise NothingFits(words)
        raise EnvironmentFault(words)


def _weights(record: Record, spec: ModelSpec, place: Path, *, tell: Tell) -> Path:
    """Return the directory that an export loads: weights with a tokenizer beside them."""
    if spec.path is not None and spec.source != "shipped":
        check_weights(spec)
        return spec.path
    tell("models written", 0, 1)
    return write_weights(spec, place)


def write_weights(spec: ModelSpec, place: Path) -> Path:
    """Write random weights of an architecture, with a tokenizer beside them, into a directory of a
    directory; return it.

    Raises:
        EnvironmentFault: they cannot be written.
    """
    # A tokenizer whose tokens the architecture knows: its own, or the demo's small one.
    tokenizer = spec.tokenizer_path or load_model_spec("demo").tokenizer_path
    directory = place / "model"
    file = place / "model.json"
    file.write_text(json.dumps(spec.to_json()), encoding="utf-8")
    command = _CHILD + [str(file), "--model", str(tokenizer), "--output", str(directory)]
    _run_child(
        command,
        label=f"model '{spec.name}'",
        variables=child_environment(),
        seconds=_LOADING_SECONDS_MAX,
        what="random weights",
    )
    return directory
