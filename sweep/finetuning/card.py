"""The model card of an adapter: what it is of, what it was trained on, what was promised of it and
reached.

Its header is huggingface_hub's, so that the hub reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reports import units
from search_spaces.config import KNOBS, TrialConfig, canonical
from search_spaces.gpus import match_product
from search_spaces.models import ModelSpec, is_hub_id
from search_spaces.redaction import shown
from search_spaces.texts import TextsSummary
from sweep.finetuning.beside import (
    Compared,
    Deviation,
    behind,
    compared_memory,
    compared_speed,
    off,
)
from sweep.finetuning.wire import TrainingJob, TrainingResult

Row = Sequence[str]

FEW_STEPS = 35
"""Behind the warm-up; `sweep verify` measures as many where nobody says how many."""
TOGETHER = "packed examples see each other: this model does not keep them apart"


def model_card(
    job: TrainingJob,
    result: TrainingResult,
    *,
    texts: TextsSummary | None,
    subject: str,
    environment: Mapping[str, Any],
) -> str:
    """Return the model card, as Markdown with the hub's header."""
    # Whoever trains nothing does not wait for it.
    from huggingface_hub import ModelCard, ModelCardData

    spec, config = job.spec, job.config
    kind = "qlora" if config.is_4bit else f"lora-{config.weight_bits}bit"
    data = ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        base_model=spec.name if spec.source == "hub" else None,
        datasets=[texts.source] if texts is not None and is_hub_id(texts.source) else None,
        tags=["lora", kind, "qlora-sweep"],
    )
    body = "\n\n".join(
        _sections(job, result, texts=texts, subject=subject, environment=environment)
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n"))


def base_of(spec: ModelSpec) -> str:
    """Return what an adapter's config names as its base: a hub id, a directory, or a name."""
    return str(spec.path) if spec.source == "directory" and spec.path else spec.name


def promised_and_reached(job: TrainingJob, result: TrainingResult) -> tuple[Row, ...]:
    """Return rows of what was promised, reached, and how the one is to the other."""
    promise = job.promise
    speed = None if promise is None else promise.tokens_per_second
    peak = None if promise is None else promise.peak_allocated_bytes
    ratios = [_ratio(one.ratio) for one in compared(job, result) or ()] or [units.DASH] * 2
    return (
        ("tokens/s", units.rate(speed), units.rate(result.tokens_per_second), ratios[0]),
        ("peak allocated", units.gib(peak), units.gib(result.peak_allocated_bytes), ratios[1]),
    )


def incomparable(job: TrainingJob, result: TrainingResult) -> str | None:
    """Return why promised and reached figures are not comparable; None if they are.

    Args:
        job: with what was promised.
        result: what was reached.
    """
    promise = job.promise
    if promise is None:
        return "nothing was measured of this configuration"
    if not _is_same(promise.device, result.device_name):
        return f"promised on another device, {promise.device}"
    if promise.texts is None and job.texts is not None:
        return (
            "promised on full sequences of random tokens, where every token counts; a dataset's "
            "examples are padded"
        )
    if promise.texts != job.fingerprint:
        return "promised on another dataset"
    if result.steps_measured == 0:
        return "no step was measured after warm-up and compilation, so the speed is an estimate"
    return None


def compared(job: TrainingJob, result: TrainingResult) -> tuple[Compared, Compared] | None:
    """Return speed and memory beside what was promised; None where that is no measure of them."""
    promise = job.promise
    if promise is None or incomparable(job, result) is not None:
        return None
    return (
        compared_speed(promise.tokens_per_second, result.tokens_per_second),
        compared_memory(promise.peak_allocated_bytes, result.peak_allocated_bytes),
    )


def deviation(
    job: TrainingJob, result: TrainingResult, *, environment: Mapping[str, Any]
) -> Deviation | None:
    """Return what is not as promised; None where nothing is, or nothing can be compared.

    Args:
        job: with what was promised.
        result: what was reached.
        environment: fingerprint of the machine that trained.
    """
    promise, both = job.promise, compared(job, result)
    if promise is None or both is None or all(one.is_within for one in both):
        return None
    causes = behind(
        promise.environment, environment, flags=promise.flags, is_confirmed=promise.is_confirmed
    )
    few = f"the speed is of {units.plural(result.steps_measured, 'step')} alone"
    is_short = result.steps_measured < FEW_STEPS and not both[0].is_within
    return Deviation(tuple(off(*both)), (*causes, *((few,) if is_short else ())))


def _is_same(promised: str, reached: str) -> bool:
    """Whether two names are of one device; a document may have the catalogue's."""
    known = match_product(promised)
    is_card = known is not None and known is match_product(reached)
    return is_card or promised.casefold() == reached.casefold()


def _ratio(ratio: float | None) -> str:
    return units.DASH if ratio is None else f"{ratio:.3f}"


def _sections(
    job: TrainingJob,
    result: TrainingResult,
    *,
    texts: TextsSummary | None,
    subject: str,
    environment: Mapping[str, Any],
) -> Iterable[str]:
    spec = job.spec
    yield f"# LoRA adapter for {shown(spec.name)}"
    yield f"Trained by qlora-sweep as {shown(subject)}."
    if job.weights == "random":
        yield (
            "**The base's weights are random**: this shows how a training runs; the adapter has no "
            "other use."
        )
    yield "## Trained on\n\n" + _table(("", ""), _texts(job, result, texts))
    yield "## Result\n\n" + _table(("", ""), _outcome(result))
    yield "## Promised and reached\n\n" + _table(
        ("", "promised", "reached", "reached / promised"), promised_and_reached(job, result)
    )
    if result.documents_apart is False:
        yield f"**{TOGETHER.capitalize()}.**"
    why_not = incomparable(job, result)
    if why_not is not None:
        yield f"Not comparable: {why_not}."
    different = deviation(job, result, environment=environment)
    if different is not None:
        yield different.words
    if job.promise is not None:
        yield f"Promised: {shown(job.promise.source)}, measured on {shown(job.promise.device)}."
    yield "## Configuration\n\n" + _table(("key", "value"), _configuration(job.config))
    versions = environment.get("versions") or {}
    known = [(name, str(version)) for name, version in versions.items() if version]
    yield "## Versions\n\n" + _table(("package", "version"), known)


def _configuration(config: TrialConfig) -> list[Row]:
    """Return what is used: every default written out, and no setting that has no say here."""
    values = canonical(config).model_dump(mode="json")
    idle = {key for key, knob in KNOBS.items() if knob.applies and not knob.applies(config)}
    return [(f"`{key}`", f"`{value}`") for key, value in values.items() if key not in idle]


def _texts(job: TrainingJob, result: TrainingResult, texts: TextsSummary | None) -> list[Row]:
    if texts is None:
        return [("dataset", "full sequences of random tokens")]
    return [
        ("base", f"`{shown(base_of(job.spec))}` ({job.weights} weights)"),
        ("dataset", f"`{shown(texts.source)}`"),
        ("fingerprint", f"`{texts.fingerprint}`"),
        ("kind", texts.kind + (", loss on completions only" if texts.completions_only else "")),
        ("tokenizer", f"`{shown(texts.tokenizer)}`"),
        ("examples trained on", _rows(result)),
        ("examples held out", units.count(result.rows_held_out)),
        ("examples left out, without a supervised token", units.count(result.rows_left_out)),
        ("broken examples, left out", units.count(texts.broken)),
        ("seed", str(job.seed)),
    ]


def _rows(result: TrainingResult) -> str:
    if result.packed_rows is None or result.texts_rows is None:
        return units.count(result.rows)
    return f"{units.count(result.texts_rows)}, packed into {units.count(result.packed_rows)}"


def _outcome(result: TrainingResult) -> list[Row]:
    held = result.eval_loss
    return [
        ("optimizer steps", units.count(result.steps)),
        ("epochs", f"{result.epochs:.2f}"),
        ("supervised tokens", units.count(result.tokens)),
        ("training loss, last tenth", f"{result.final_train_loss:.4f}"),
        ("training loss, mean", f"{result.train_loss:.4f}"),
        ("held-out loss", units.DASH if held is None else f"{held:.4f}"),
        ("trainable parameters", units.count(result.trainable_parameters)),
        ("time", units.duration(result.seconds)),
        ("device", shown(result.device_name)),
    ]


def _table(header: Row, rows: Iterable[Row]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
