"""What a training or a run came to: beside what its record promises, as `training.json` and as a
model card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from reports import units
from search_spaces.checkpoints import identity_of
from search_spaces.config import KNOBS, canonical
from search_spaces.gpus import match_product
from search_spaces.models import ModelSpec, is_hub_id
from search_spaces.redaction import redacted, shown
from search_spaces.texts import TextsSummary
from storage.reading import changed_versions
from sweep.export.record import Record
from sweep.finetuning.protocol import TrainingJob, TrainingResult
from sweep.finetuning.subject import Subject

SPEED_TOLERANCE = 0.05
"""Of tokens/s at the median step, either way."""
MEMORY_TOLERANCE = 0.02
"""Of peak allocated bytes, either way."""
FEW_STEPS = 35
"""After the warm-up; `sweep verify` measures as many where nobody says how many."""
TOGETHER = "packed examples see each other: this model does not keep them apart"

_FLAGS = {
    "noisy": "its steps varied, so its speed is uncertain",
    "throttled": "the GPU was slowed down as it was measured",
    "neighbour": "something else used the GPU as it was measured",
    "accumulation_extrapolated": "a part of its accumulation was derived",
    "round_extrapolated": "its speed was derived from micro-batches of other sizes",
}


@dataclass(frozen=True)
class Compared:
    """One figure, promised and reached; None where it is not known."""

    name: str
    promised: float | None
    reached: float | None
    tolerance: float
    shown: Callable[[float | None], str]
    is_comparable: bool = True

    @property
    def ratio(self) -> float | None:
        """Reached over promised; None where they cannot be compared."""
        if not self.is_comparable or self.promised is None or self.reached is None:
            return None
        return self.reached / self.promised

    @property
    def is_within(self) -> bool:
        """Whether it is within the tolerance, or cannot be compared."""
        return self.ratio is None or abs(self.ratio - 1.0) <= self.tolerance

    def off(self) -> str | None:
        """Return how far it is off; None where it is within."""
        if self.ratio is None or self.is_within:
            return None
        side = "above" if self.ratio > 1.0 else "below"
        return (
            f"{self.name} {100 * abs(self.ratio - 1.0):.1f} % {side} the record: "
            f"{self.shown(self.reached)} beside {self.shown(self.promised)}"
        )

    def row(self) -> tuple[str, str, str, str]:
        """Return it as a row of a table: promised, reached, ratio."""
        ratio = units.DASH if self.ratio is None else f"{self.ratio:.3f}"
        return self.name, self.shown(self.promised), self.shown(self.reached), ratio

    def to_json(self) -> dict[str, float | None]:
        """Return what programs read."""
        return {"promised": self.promised, "reached": self.reached, "ratio": self.ratio}


@dataclass(frozen=True)
class Comparison:
    """Both figures, and likely causes of a difference."""

    speed: Compared
    memory: Compared
    causes: tuple[str, ...]
    incomparable: str | None = None
    """Why they are not comparable, in words."""

    @property
    def is_within(self) -> bool:
        """Whether both are as promised, as far as they can be compared."""
        return self.speed.is_within and self.memory.is_within

    @property
    def figures(self) -> tuple[str, ...]:
        """Those that are not as promised, in words."""
        return tuple(filter(None, (self.speed.off(), self.memory.off())))

    def words(self) -> str | None:
        """Return what is not as promised with likely causes, or why that cannot be said; None
        where all is as promised."""
        if self.incomparable is not None:
            return f"Not comparable: {self.incomparable}."
        if self.is_within:
            return None
        causes = "; ".join(self.causes) or "nothing that is recorded explains it"
        return f"Not as promised: {'; '.join(self.figures)}. Likely causes: {causes}."


def compared(
    record: Record | None,
    *,
    tokens_per_second: float | None,
    peak_allocated_bytes: float | None,
    environment: Mapping[str, Any],
    incomparable: str | None = None,
) -> Comparison:
    """Return how what was reached compares with a record.

    Args:
        record: None where nothing was measured.
        tokens_per_second: reached; None where it is not known.
        peak_allocated_bytes: as above.
        environment: this machine's fingerprint.
        incomparable: why it is no measure of the record.
    """
    measured = None if record is None else record.measurement
    comparable = incomparable is None
    return Comparison(
        Compared(
            "tokens/s",
            None if measured is None else measured.tokens_per_second,
            tokens_per_second,
            SPEED_TOLERANCE,
            units.rate,
            comparable,
        ),
        Compared(
            "peak allocated",
            None if measured is None else float(measured.peak_allocated_bytes),
            peak_allocated_bytes,
            MEMORY_TOLERANCE,
            units.gib,
            comparable,
        ),
        () if record is None else tuple(_causes(record, environment)),
        incomparable,
    )


def _causes(record: Record, environment: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs between two machines, and what makes a record doubtful."""
    recorded = record.environment
    # What the record does not know is no difference.
    keys = [
        key
        for key in ("gpu", "driver", "cuda_driver", "python", "commit")
        if recorded.get(key) is not None
    ]
    before = recorded.get("versions") or {}
    versions = environment.get("versions") or {}
    yield from changed_versions(
        {**{key: recorded[key] for key in keys}, "versions": before},
        {
            **{key: environment.get(key) for key in keys},
            "versions": {name: versions.get(name) for name in before},
        },
    )
    then, now = recorded.get("cpu"), environment.get("cpu")
    if recorded.get("gpu") is None and then and now and then != now:
        yield f"processor {then} -> {now}"
    for flag in record.measurement.flags:
        if flag in _FLAGS:
            yield f"the record is flagged {flag}: {_FLAGS[flag]}"
    if not record.confirmed:
        yield "the record is not confirmed: `sweep confirm` measures it again"


def base_of(spec: ModelSpec) -> str:
    """Return what an adapter's config names as its base: a hub id, a directory, or a name."""
    return str(spec.path) if spec.source == "directory" and spec.path else spec.name


@dataclass(frozen=True)
class TrainedAdapter:
    """A training with what it came to."""

    job: TrainingJob
    result: TrainingResult
    subject: Subject
    texts: TextsSummary | None
    environment: Mapping[str, Any]
    """Of the machine, as `storage.environment.fingerprint` returns it."""

    @cached_property
    def comparison(self) -> Comparison:
        """What was reached beside what the subject's record promises."""
        result = self.result
        found = compared(
            self.subject.record,
            tokens_per_second=result.tokens_per_second,
            peak_allocated_bytes=result.peak_allocated_bytes,
            environment=self.environment,
            incomparable=self._incomparable(),
        )
        if result.steps_measured < FEW_STEPS and not found.speed.is_within:
            few = f"the speed is of {units.plural(result.steps_measured, 'step')} alone"
            return replace(found, causes=(*found.causes, few))
        return found

    def _incomparable(self) -> str | None:
        record, texts = self.subject.record, self.texts
        if record is None:
            return "nothing was measured of this configuration"
        known, reached = match_product(record.device), self.result.device_name
        is_same = known is not None and known is match_product(reached)
        if not is_same and record.device.casefold() != reached.casefold():
            return f"promised on another device, {record.device}"
        if record.texts is None and texts is not None:
            return (
                "promised on full sequences of random tokens, where every token counts; a "
                "dataset's examples are padded"
            )
        promised = None if record.texts is None else record.texts.summary.fingerprint
        if promised != (None if texts is None else texts.fingerprint):
            return "promised on another dataset"
        if self.result.steps_measured == 0:
            return "no step was measured after warm-up and compilation, so the speed is an estimate"
        return None

    def to_json(self) -> dict[str, Any]:
        """Return what `training.json` says, and ``--json`` prints."""
        job, result, found = self.job, self.result, self.comparison
        record = self.subject.record
        return {
            **result.model_dump(mode="json", exclude={"verdict", "checkpoint"}),
            "promised_tokens_per_second": found.speed.promised,
            "promised_peak_allocated_bytes": None
            if record is None
            else record.measurement.peak_allocated_bytes,
            "config": job.config.model_dump(mode="json"),
            "texts": None if self.texts is None else redacted(self.texts.model_dump(mode="json")),
            "versions": self.environment.get("versions"),
            "promise": None
            if record is None
            else redacted({"source": record.label, "device": record.device}),
            "incomparable": found.incomparable,
            "ratios": {
                "tokens_per_second": found.speed.ratio,
                "peak_allocated_bytes": found.memory.ratio,
            },
            "differences": [] if found.is_within else redacted([*found.figures, *found.causes]),
            "trained": self.subject.words,
            "model": redacted({"name": job.spec.name, "base": base_of(job.spec)})
            | identity_of(job.spec, is_loaded=job.weights == "pretrained"),
            "weights": job.weights,
            "seed": job.seed,
            "eval_fraction": job.eval_fraction,
            "environment": {k: v for k, v in self.environment.items() if k != "versions"},
        }


def model_card(trained: TrainedAdapter) -> str:
    """Return the model card, as Markdown with the hub's own header."""
    # Whoever trains nothing does not wait for it.
    from huggingface_hub import ModelCard, ModelCardData

    spec, config, texts = trained.job.spec, trained.job.config, trained.texts
    kind = "qlora" if config.is_4bit else f"lora-{config.weight_bits}bit"
    data = ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        base_model=spec.name if spec.source == "hub" else None,
        datasets=[texts.source] if texts is not None and is_hub_id(texts.source) else None,
        tags=["lora", kind, "qlora-sweep"],
    )
    return str(
        ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(_sections(trained)) + "\n")
    )


def _sections(trained: TrainedAdapter) -> Iterator[str]:
    job, found, record = trained.job, trained.comparison, trained.subject.record
    yield f"# LoRA adapter for {shown(job.spec.name)}"
    yield f"TrainedAdapter by qlora-sweep as {shown(trained.subject.words)}."
    if job.weights == "random":
        yield (
            "**The base's weights are random**: this shows how a training runs; the adapter has no "
            "other use."
        )
    yield "## TrainedAdapter on\n\n" + _table(("", ""), _examples(trained))
    yield "## Result\n\n" + _table(("", ""), _outcome(trained.result))
    yield "## Promised and reached\n\n" + _table(
        ("", "promised", "reached", "reached / promised"), (found.speed.row(), found.memory.row())
    )
    if trained.result.documents_apart is False:
        yield f"**{TOGETHER.capitalize()}.**"
    if (words := found.words()) is not None:
        yield words
    if record is not None:
        yield f"Promised: {shown(record.label)}, measured on {shown(record.device)}."
    # Every default written out, and no setting that has no say here.
    used = canonical(job.config).model_dump(mode="json")
    idle = {key for key, knob in KNOBS.items() if knob.applies and not knob.applies(job.config)}
    yield "## Configuration\n\n" + _table(
        ("key", "value"), [(f"`{k}`", f"`{v}`") for k, v in used.items() if k not in idle]
    )
    versions = trained.environment.get("versions") or {}
    yield "## Versions\n\n" + _table(
        ("package", "version"), [(name, str(v)) for name, v in versions.items() if v]
    )


def _examples(trained: TrainedAdapter) -> list[tuple[str, str]]:
    job, result, texts = trained.job, trained.result, trained.texts
    if texts is None:
        return [("dataset", "full sequences of random tokens")]
    count = units.count(result.rows)
    if result.packed_rows is not None and result.texts_rows is not None:
        count = f"{units.count(result.texts_rows)}, packed into {units.count(result.packed_rows)}"
    return [
        ("base", f"`{shown(base_of(job.spec))}` ({job.weights} weights)"),
        ("dataset", f"`{shown(texts.source)}`"),
        ("fingerprint", f"`{texts.fingerprint}`"),
        ("kind", texts.kind + (", loss on completions only" if texts.completions_only else "")),
        ("tokenizer", f"`{shown(texts.tokenizer)}`"),
        ("examples trained on", count),
        ("examples held out", units.count(result.rows_held_out)),
        ("examples left out, without a supervised token", units.count(result.rows_left_out)),
        ("broken examples, left out", units.count(texts.broken)),
        ("seed", str(job.seed)),
    ]


def _outcome(result: TrainingResult) -> list[tuple[str, str]]:
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


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
