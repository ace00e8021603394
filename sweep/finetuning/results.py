"""What a training or a run came to: beside what its record promises, as `training.json` and as a
model card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from qlora_sweep.reports import format as units
from qlora_sweep.reports.words import reward_accuracy
from qlora_sweep.search_spaces.checkpoints import identity_of
from qlora_sweep.search_spaces.config import KNOBS, canonical
from qlora_sweep.search_spaces.errors import in_percent
from qlora_sweep.search_spaces.gpus import match_product
from qlora_sweep.search_spaces.models import ModelSpec, is_hub_id
from qlora_sweep.search_spaces.redaction import redacted, shown
from qlora_sweep.search_spaces.texts import TextsSummary
from qlora_sweep.storage.reading import changed_versions
from qlora_sweep.storage.records import EightBitProducts
from qlora_sweep.sweep.data.study_epochs import TruncatedDataset
from qlora_sweep.sweep.export.record import Record
from qlora_sweep.sweep.finetuning.planned import Prediction
from qlora_sweep.sweep.finetuning.protocol import TrainingJob, TrainingResult
from qlora_sweep.sweep.finetuning.subject import Subject
from qlora_sweep.sweep.predict.forecast import Basis

SPEED_TOLERANCE, MEMORY_TOLERANCE = 0.05, 0.02
"""Of tokens/s at the median step, and of peak allocated bytes, either way."""
FEW_STEPS = 35
"""After the warm-up; `sweep verify` measures as many where nobody says how many."""
_UNMEASURED = "no step was measured after warm-up and compilation, so the speed is an estimate"
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
    predicted_range: tuple[float, float] | None = None
    """Where what is promised is predicted, what holds the reached one nine times in ten."""

    @property
    def ratio(self) -> float | None:
        """Reached over promised; None where they cannot be compared."""
        if not self.is_comparable or self.promised is None or self.reached is None:
            return None
        return self.reached / self.promised

    @property
    def is_within(self) -> bool:
        """Whether it is within the tolerance, or the interval of its prediction; or cannot be
        compared."""
        if self.ratio is None or self.reached is None:
            return True
        if self.predicted_range is not None:
            low, high = self.predicted_range
            return low <= self.reached <= high
        return abs(self.ratio - 1.0) <= self.tolerance

    def row(self) -> tuple[str, str, str, str]:
        """Return name, promised, reached and ratio in words."""
        ratio = units.DASH if self.ratio is None else f"{self.ratio:.3f}"
        promised = self.shown(self.promised)
        if self.predicted_range is not None:
            low, high = map(self.shown, self.predicted_range)
            promised = f"{promised} (predicted, {low} to {high})"
        return self.name, promised, self.shown(self.reached), ratio

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
    is_predicted: bool = False
    """Whether what is promised is predicted, and no record's."""

    @property
    def basis(self) -> Basis | None:
        """Where what is promised comes from; None where nothing is."""
        if self.speed.promised is None and self.memory.promised is None:
            return None
        return "predicted" if self.is_predicted else "measured"

    @property
    def is_within(self) -> bool:
        """Whether both are as promised, as far as they can be compared."""
        return self.speed.is_within and self.memory.is_within

    @property
    def figures(self) -> tuple[str, ...]:
        """Those that are not as promised, in words; none where all are, or cannot be compared."""
        promised_by = "prediction" if self.is_predicted else "record"
        return tuple(
            f"{one.name} {100 * abs(one.ratio - 1.0):.1f} % "
            f"{'above' if one.ratio > 1.0 else 'below'} the {promised_by}: "
            f"{one.shown(one.reached)} beside {one.shown(one.promised)}"
            for one in (self.speed, self.memory)
            if one.ratio is not None and not one.is_within
        )

    def words(self) -> str | None:
        """Return what is not as promised with likely causes, or why that cannot be said; None
        where all is as promised."""
        if self.incomparable is not None:
            return f"Not comparable: {self.incomparable}."
        figures = "; ".join(self.figures)
        if self.is_predicted and figures:
            return f"Not as predicted: {figures}."
        causes = "; ".join(self.causes) or "nothing that is recorded explains it"
        return f"Not as promised: {figures}. Likely causes: {causes}." if figures else None


def compared(
    record: Record | None,
    *,
    tokens_per_second: float | None,
    peak_allocated_bytes: int | None,
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
    speed = peak = None
    if record is not None:
        speed = record.measurement.tokens_per_second
        peak = record.measurement.peak_allocated_bytes
    can = incomparable is None
    return Comparison(
        speed=_speed(speed, tokens_per_second, can=can),
        memory=_peak(peak, peak_allocated_bytes, can=can),
        causes=() if record is None else tuple(_causes(record, environment)),
        incomparable=incomparable,
    )


def compared_with_prediction(
    predicted: Prediction, reached: TrainingResult, *, incomparable: str | None
) -> Comparison:
    """Return how what was reached compares with what was predicted; see `compared`."""
    speed, peak, can = reached.tokens_per_second, reached.peak_allocated_bytes, incomparable is None
    speed_range = predicted.tokens_per_second_range
    peak_range = predicted.peak_allocated_bytes_range
    return Comparison(
        speed=_speed(predicted.tokens_per_second, speed, can=can, within=speed_range),
        memory=_peak(predicted.peak_allocated_bytes, peak, can=can, within=peak_range),
        causes=(),
        incomparable=incomparable,
        is_predicted=True,
    )


def _speed(
    promised: float | None,
    reached: float | None,
    *,
    can: bool,
    within: tuple[float, float] | None = None,
) -> Compared:
    return Compared("tokens/s", promised, reached, SPEED_TOLERANCE, units.rate, can, within)


def _peak(
    promised: int | None,
    reached: int | None,
    *,
    can: bool,
    within: tuple[float, float] | None = None,
) -> Compared:
    return Compared("peak allocated", promised, reached, MEMORY_TOLERANCE, units.gib, can, within)


def _causes(record: Record, environment: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs between two machines, and what makes a record doubtful."""
    recorded, versions = record.environment, environment.get("versions") or {}
    before = recorded.get("versions") or {}
    # What the record does not know is no difference.
    keys = ("gpu", "driver", "cuda_driver", "python", "commit")
    known = {key: recorded[key] for key in keys if recorded.get(key) is not None}
    here = {key: environment.get(key) for key in known}
    now = {name: versions.get(name) for name in before}
    yield from changed_versions({**known, "versions": before}, {**here, "versions": now})
    cpus = recorded.get("cpu"), environment.get("cpu")
    if recorded.get("gpu") is None and all(cpus) and cpus[0] != cpus[1]:
        yield f"processor {cpus[0]} -> {cpus[1]}"
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
    texts: TextsSummary
    environment: Mapping[str, Any]
    """Of the machine, as `storage.environment.fingerprint` returns it."""
    truncation: TruncatedDataset | None = None
    """What its length cut off the examples; None where nobody looked."""
    prediction: Prediction | None = None
    """What it was predicted to take, where nobody measured it so."""

    @cached_property
    def comparison(self) -> Comparison:
        """What was reached beside what the subject's record promises, or what was predicted."""
        if self.prediction is not None:
            few = _UNMEASURED if self.result.steps_measured == 0 else None
            return compared_with_prediction(self.prediction, self.result, incomparable=few)
        found = compared(
            self.subject.record,
            tokens_per_second=self.result.tokens_per_second,
            peak_allocated_bytes=self.result.peak_allocated_bytes,
            environment=self.environment,
            incomparable=self._incomparable(),
        )
        if self.result.steps_measured >= FEW_STEPS or found.speed.is_within:
            return found
        few = f"the speed is of {units.plural(self.result.steps_measured, 'step')} alone"
        return replace(found, causes=(*found.causes, few))

    def _incomparable(self) -> str | None:
        record, reached = self.subject.record, self.result.device_name
        if record is None:
            return "nothing was measured of this configuration"
        known = match_product(record.device)
        is_same = known is not None and known is match_product(reached)
        if not is_same and record.device.casefold() != reached.casefold():
            return f"promised on another device, {record.device}"
        if record.config.data_parallel != self.job.config.data_parallel:
            return f"promised on {units.plural(record.config.data_parallel, 'GPU')}"
        if record.texts is None:
            return (
                "promised on full sequences of random tokens, where every token counts; a "
                "dataset's examples are padded"
            )
        if record.texts.summary.fingerprint != self.texts.fingerprint:
            return "promised on another dataset"
        if self.result.steps_measured == 0:
            return _UNMEASURED
        return None

    def to_json(self) -> dict[str, Any]:
        """Return what `training.json` says, and ``--json`` prints."""
        job, found = self.job, self.comparison
        model = {"name": job.spec.name, "base": base_of(job.spec)}
        figures = found.figures
        return {
            **self.result.model_dump(mode="json", exclude={"verdict", "checkpoint"}),
            "reward_accuracy_ci95": self.result.reward_accuracy_ci95,
            "promised_tokens_per_second": found.speed.promised,
            "promised_peak_allocated_bytes": found.memory.promised,
            "promised_basis": found.basis,
            "promised_tokens_per_second_range": found.speed.predicted_range,
            "promised_peak_allocated_bytes_range": found.memory.predicted_range,
            "truncation": None if self.truncation is None else self.truncation.to_json(),
            **job.model_dump(mode="json", include={"config", "weights", "seed", "eval_fraction"}),
            "learning_rate": self.subject.learning_rate.model_dump(mode="json"),
            "texts": redacted(self.texts.model_dump(mode="json")),
            "versions": self.environment.get("versions"),
            "incomparable": found.incomparable,
            "ratios": {
                "tokens_per_second": found.speed.ratio,
                "peak_allocated_bytes": found.memory.ratio,
            },
            "differences": redacted([*figures, *found.causes]) if figures else [],
            "trained": self.subject.words,
            "model": redacted(model) | identity_of(job.spec, is_loaded=job.weights == "pretrained"),
            "environment": {k: v for k, v in self.environment.items() if k != "versions"},
        }


def words_of_8_bits(found: EightBitProducts) -> str:
    """Return what 8-bit compute makes of the real weights, and what stays in 16 bits at what
    cost."""
    worst = max(found.errors, key=lambda one: one.forward_worst)
    said = (
        "8-bit compute on these weights: the loss of the first examples is "
        f"{found.loss_8_bit:.4f}, in 16-bit compute {found.loss_16_bit:.4f}; the worst product, a "
        f"{worst.projection}, is {in_percent(worst.forward_worst)} off."
    )
    kept = found.kept_in_16_bits
    if not kept:
        return f"{said} None stays in 16 bits."
    return (
        f"{said} {units.plural(len(kept), 'layer')} of {sum(one.layers for one in found.errors)} "
        f"{'stays' if len(kept) == 1 else 'stay'} in 16 bits, for at most "
        f"{in_percent(found.share_in_16_bits)} of the speed."
    )


def _products(found: EightBitProducts) -> str:
    """Return how far products in 8 bits are off, by projection, as a table."""
    rows = [
        (
            f"`{one.projection}`",
            in_percent(one.forward),
            in_percent(one.forward_worst),
            in_percent(one.gradient),
            in_percent(one.gradient_worst),
        )
        for one in found.errors
    ]
    return _table(("", "product", "worst layer", "input's gradient", "worst layer"), rows)


def model_card(trained: TrainedAdapter) -> str:
    """Return the model card, as Markdown with the hub's own header."""
    # Whoever trains nothing does not wait for it.
    from huggingface_hub import ModelCard, ModelCardData

    spec, config, source = trained.job.spec, trained.job.config, trained.texts.source
    kind = "qlora" if config.is_4bit else f"lora-{config.weight_bits}bit"
    data = ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        base_model=spec.name if spec.source == "hub" else None,
        datasets=[source] if is_hub_id(source) else None,
        tags=["lora", kind, "qlora-sweep"],
    )
    sections = "\n\n".join(_sections(trained))
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{sections}\n"))


def _sections(trained: TrainedAdapter) -> Iterator[str]:
    job, found, record = trained.job, trained.comparison, trained.subject.record
    yield f"# LoRA adapter for {shown(job.spec.name)}"
    yield f"Trained by qlora-sweep as {shown(trained.subject.words)}."
    if job.weights == "random":
        yield (
            "**The base's weights are random**: this shows how a training runs; the adapter has no "
            "other use."
        )
    yield "## Training\n\n" + _table(("", ""), _facts(trained))
    heads, rows = ("", "promised", "reached", "ratio"), (found.speed.row(), found.memory.row())
    yield "## Promised and reached\n\n" + _table(heads, rows)
    if (products := trained.result.eight_bit) is not None:
        yield "## 8-bit compute\n\n" + words_of_8_bits(products)
        yield _products(products)
        if products.kept_in_16_bits:
            yield "In 16 bits: " + ", ".join(f"`{name}`" for name in products.kept_in_16_bits)
    if trained.result.documents_apart is False:
        yield f"**{TOGETHER.capitalize()}.**"
    if (words := found.words()) is not None:
        yield words
    if trained.prediction is not None:
        yield "Promised: predicted, as nothing measured it at this size."
    elif record is not None:
        yield f"Promised: {shown(record.label)}, measured on {shown(record.device)}."
    # Every default written out, and no setting that has no say here.
    used = canonical(job.config).model_dump(mode="json")
    used["learning_rate"] = trained.subject.learning_rate.value
    idle = {key for key, knob in KNOBS.items() if knob.applies and not knob.applies(job.config)}
    settings = [(f"`{key}`", f"`{value}`") for key, value in used.items() if key not in idle]
    yield "## Configuration\n\n" + _table(("key", "value"), settings)
    versions = (trained.environment.get("versions") or {}).items()
    packages = [(name, str(version)) for name, version in versions if version]
    yield "## Versions\n\n" + _table(("package", "version"), packages)


def _facts(trained: TrainedAdapter) -> Iterator[tuple[str, str]]:
    job, result, texts = trained.job, trained.result, trained.texts
    yield "base", f"`{shown(base_of(job.spec))}` ({job.weights} weights)"
    yield "dataset", f"`{shown(texts.source)}`, fingerprint `{texts.fingerprint}`"
    yield "kind", texts.kind + (", loss on completions only" if texts.completions_only else "")
    yield "tokenizer", f"`{shown(texts.tokenizer)}`"
    packed = "" if result.packed_rows is None else f", packed into {result.packed_rows:,}"
    yield "examples trained on", units.count(result.texts_rows or result.rows) + packed
    yield "examples held out", units.count(result.rows_held_out)
    yield "examples left out, without a supervised token", units.count(result.rows_left_out)
    if trained.truncation is not None:
        yield "cut", trained.truncation.words("pair" if texts.are_pairs else "example")
    yield "broken examples, left out", units.count(texts.broken)
    for note in texts.notes:
        yield "of the dataset", shown(note)
    yield "learning rate", trained.subject.learning_rate.words
    yield "seed", str(job.seed)
    yield "optimizer steps", f"{units.count(result.steps)}, {result.epochs:.2f} epochs"
    yield "supervised tokens", units.count(result.tokens)
    yield "training loss, last tenth", f"{result.final_train_loss:.4f}"
    yield "training loss, mean", f"{result.train_loss:.4f}"
    held_out = units.DASH if result.eval_loss is None else f"{result.eval_loss:.4f}"
    yield "held-out loss", held_out + reward_accuracy(result.eval_wins, result.eval_pairs)
    yield "trainable parameters", units.count(result.trainable_parameters)
    yield "time", units.duration(result.seconds)
    yield "device", shown(result.device_name)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
