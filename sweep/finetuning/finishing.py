"""What a training leaves: adapter, tokenizer, model card, figures and loss curve, all or none under
their names.

They are written under a name that begins with a dot, and given their own once the disk has them
all; `training.json`, which says that it is done, comes last.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from search_spaces.checkpoints import identity_of
from search_spaces.errors import EnvironmentFault, words_of
from search_spaces.redaction import redacted
from search_spaces.texts import TextsSummary
from sweep.data.tokenizers import TokenizerFiles
from sweep.finetuning import checkpoints, output
from sweep.finetuning.card import base_of, compared, deviation, incomparable, model_card
from sweep.finetuning.checkpoints import ADAPTER, ADAPTER_CONFIG
from sweep.finetuning.loss_page import loss_page
from sweep.finetuning.wire import TrainingJob, TrainingResult

_STAGING = ".finishing"


def finish(
    job: TrainingJob,
    result: TrainingResult,
    *,
    texts: TextsSummary | None,
    tokenizer: TokenizerFiles,
    subject: str,
    environment: dict[str, Any],
) -> dict[str, Any]:
    """Write what a training came to, and return what `training.json` says.

    Args:
        job: the training.
        result: what it came to.
        texts: that it was trained on.
        tokenizer: what they were tokenized by.
        subject: what was trained, in words.
        environment: of the machine, as `storage.environment.fingerprint` returns it.

    Raises:
        EnvironmentFault: the disk does not take it; the last checkpoint stays.
    """
    directory, staging = Path(job.output), Path(job.output, _STAGING)
    output.release(directory)
    document = training_document(job, result, texts=texts, subject=subject, environment=environment)
    card = model_card(job, result, texts=texts, subject=subject, environment=environment)
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        _put_adapter(job, result, staging)
        for file in tokenizer.files:
            shutil.copyfile(file, staging / file.name)
        _write_pages(job, result, staging, card=card, document=document)
        checkpoints.synchronize(staging)
        _give_names(staging, directory)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write {directory}: {words_of(error)}. Nothing is lost: the last checkpoint is "
            "there, and the same command with --resume writes the adapter"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    checkpoints.remove_all(directory)
    return document


def _write_pages(
    job: TrainingJob, result: TrainingResult, staging: Path, *, card: str, document: dict[str, Any]
) -> None:
    pages = {
        "README.md": card,
        "loss.html": _loss_page(job, result),
        output.TRAINING: json.dumps(document, indent=2) + "\n",
    }
    for name, text in pages.items():
        (staging / name).write_text(text, encoding="utf-8")


def training_document(
    job: TrainingJob,
    result: TrainingResult,
    *,
    texts: TextsSummary | None,
    subject: str,
    environment: dict[str, Any],
) -> dict[str, Any]:
    """Return what `training.json` says, and ``--json`` prints."""
    promise = job.promise
    speed, memory = compared(job, result) or (None, None)
    different = deviation(job, result, environment=environment)
    figures = result.model_dump(mode="json", exclude={"kind", "checkpoint"})
    return {
        "steps": result.steps,
        "tokens": result.tokens,
        "tokens_per_second": result.tokens_per_second,
        "promised_tokens_per_second": None if promise is None else promise.tokens_per_second,
        "peak_allocated_bytes": result.peak_allocated_bytes,
        "promised_peak_allocated_bytes": None if promise is None else promise.peak_allocated_bytes,
        "train_loss": result.train_loss,
        "eval_loss": result.eval_loss,
        "config": job.config.model_dump(mode="json"),
        "texts": None if texts is None else redacted(texts.model_dump(mode="json")),
        "versions": environment.get("versions"),
        **{key: value for key, value in figures.items() if key not in ("steps", "tokens")},
        "promise": None if promise is None else redacted(promise.model_dump(mode="json")),
        "incomparable": incomparable(job, result),
        "ratios": {
            "tokens_per_second": None if speed is None else speed.ratio,
            "peak_allocated_bytes": None if memory is None else memory.ratio,
        },
        "differences": []
        if different is None
        else redacted([*different.figures, *different.causes]),
        "trained": subject,
        "model": redacted({"name": job.spec.name, "base": base_of(job.spec)})
        | identity_of(job.spec, is_loaded=job.weights == "pretrained"),
        "weights": job.weights,
        "seed": job.seed,
        "eval_fraction": job.eval_fraction,
        "environment": {key: environment[key] for key in environment if key != "versions"},
    }


def _put_adapter(job: TrainingJob, result: TrainingResult, staging: Path) -> None:
    assert result.checkpoint is not None, "a training that keeps nothing is not finished"
    checkpoint = Path(result.checkpoint)
    _link(checkpoint / ADAPTER, staging / ADAPTER)
    # safetensors makes files that nobody else can read; an adapter is there to be given away.
    (staging / ADAPTER).chmod(stat.S_IMODE((checkpoint / ADAPTER_CONFIG).stat().st_mode))
    values = json.loads((checkpoint / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    # Built from an architecture alone, the base has no name that PEFT could have taken.
    values["base_model_name_or_path"] = base_of(job.spec)
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    (staging / ADAPTER_CONFIG).write_text(text, encoding="utf-8")


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, which takes no room; copy it where that cannot be done."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _loss_page(job: TrainingJob, result: TrainingResult) -> str:
    assert result.checkpoint is not None
    course = Path(result.checkpoint) / checkpoints.COURSE
    values = json.loads(course.read_text(encoding="utf-8"))
    return loss_page(
        title=f"{job.spec.name} · loss",
        losses=values["losses"],
        learning_rates=values["learning_rates"],
        evaluations=[(int(step), float(loss)) for step, loss in values["evaluations"]],
        final=None if result.eval_loss is None else (result.steps, result.eval_loss),
    )


def _give_names(staging: Path, directory: Path) -> None:
    """Give all files their names, the one that says that all are there last."""
    names = sorted(path.name for path in staging.iterdir() if path.name != output.TRAINING)
    for name in (*names, output.TRAINING):
        (staging / name).replace(directory / name)
    checkpoints.synchronize_names(directory)
