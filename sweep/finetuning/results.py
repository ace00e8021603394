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
from qlora_sweep.search_spaces.config import SETTINGS, canonical
from qlora_sweep.search_spaces.dataset_choice import DatasetSummary
from qlora_sweep.search_spaces.errors import in_percent
from qlora_sweep.search_spaces.gpus import match_product
from qlora_sweep.search_spaces.models import ModelSpec, is_hub_id
from qlora_sweep.search_spaces.redaction import redacted, shown
from qlora_sweep.storage.reading import changed_versions
from qlora_sweep.storage.records import EightBitProducts
from qlora_sweep.sweep.data.study_epochs import TruncatedDataset
from qlora_sweep.sweep.export.record import Record
from qlora_sweep.sweep.finetuning.planned import Prediction
from qlora_sweep.sweep.finetuning.protocol import TrainingJob, TrainingResult
from qlora_sweep.sweep.finetuning.subject import Subject
from qlora_sweep.sweep.predict.forecast import Basis

SPEED_TOLERANCE = 0.05
"""Of tokens/s at the median step, either way."""
MEMORY_TOLERANCE = 0.02
"""Of peak allocated bytes, either way."""
FEW_STEPS = 35
"""After the warm-up; `sweep verify` measures as many by default."""
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
        ratio = units.DASH
        if self.ratio is not None:
            ratio = f"{self.ratio:.3f}"
        promised = self.shown(self.promised)
        if self.predicted_range is not None:
            low, high = map(self.shown, self.predicted_range)
            promised = f"{promised} (predicted, {low} to {high})"
        return self.name, promised, self.shown(self.reached), ratio

    def difference(self, promised_by: str) -> str | None:
        """Return how far it is off what was promised, in words; None where it is as promised,
        or cannot be compared."""
        if self.ratio is None or self.is_within:
            return None
        side = "above" if self.ratio > 1.0 else "below"
        return (
            f"{self.name} {100 * abs(self.ratio - 1.0):.1f} % {side} the {promised_by}: "
            f"{self.shown(self.reached)} beside {self.shown(self.promised)}"
        )

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
        differences = (self.speed.difference(promised_by), self.memory.difference(promised_by))
        return tuple(filter(None, differences))

    def words(self) -> str | None:
        """Return what is not as promised with likely causes, or why that cannot be said; None
        where all is as promised."""
        if self.incomparable is not None:
            return f"Not comparable: {self.incomparable}."
        figures = "; ".join(self.figures)
        if not figures:
            return None
        if self.is_predicted:
            return f"Not as predicted: {figures}."
        causes = "; ".join(self.causes) or "nothing that is recorded explains it"
        return f"Not as promised: {figures}. Likely causes: {causes}."


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
    can = incomparable is None
    speed = Compared("tokens/s", None, tokens_per_second, SPEED_TOLERANCE, units.rate, can)
    memory = Compared(
        "peak allocated", None, peak_allocated_bytes, MEMORY_TOLERANCE, units.gib, can
    )
    causes: tuple[str, ...] = ()
    if record is not None:
        speed = replace(speed, promised=record.measurement.tokens_per_second)
        memory = replace(memory, promised=record.measurement.peak_allocated_bytes)
        causes = tuple(_causes(record, environment))
    return Comparison(speed, memory, causes, incomparable)


def compared_with_prediction(
    predicted: Prediction, reached: TrainingResult, *, incomparable: str | None
) -> Comparison:
    """Return how what was reached compares with what was predicted; see `compared`."""
    measured = compared(
        None,
        tokens_per_second=reached.tokens_per_second,
        peak_allocated_bytes=reached.peak_allocated_bytes,
        environment={},
        incomparable=incomparable,
    )
    speed = replace(
        measured.speed,
        promised=predicted.tokens_per_second,
        predicted_range=predicted.tokens_per_second_range,
    )
    memory = replace(
        measured.memory,
        promised=predicted.peak_allocated_bytes,
        predicted_range=predicted.peak_allocated_bytes_range,
    )
    return replace(measured, speed=speed, memory=memory, is_predicted=True)


def _causes(record: Record, environment: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs between two machines, and what makes a record doubtful."""
    recorded = record.environment
    recorded_versions = recorded.get("versions") or {}
    versions = environment.get("versions") or {}
    before: dict[str, Any] = {"versions": recorded_versions}
    now: dict[str, Any] = {"versions": {name: versions.get(name) for name in recorded_versions}}
    for key in ("gpu", "driver", "cuda_driver", "python", "commit"):
        # What the record does not know is no difference.
        if recorded.get(key) is not None:
            before[key] = recorded[key]
            now[key] = environment.get(key)
    yield from changed_versions(before, now)
    recorded_cpu = recorded.get("cpu")
    cpu = environment.get("cpu")
    if recorded.get("gpu") is None and recorded_cpu and cpu and recorded_cpu != cpu:
        yield f"processor {recorded_cpu} -> {cpu}"
    for flag in record.measurement.flags:
        if flag in _FLAGS:
            yield f"the record is flagged {flag}: {_FLAGS[flag]}"
    if not record.confirmed:
        yield "the record is not confirmed: `sweep confirm` measures it again"


def base_of(spec: ModelSpec) -> str:
    """Return what an adapter's config names as its base: a hub id, a directory, or a name."""
    if spec.source == "directory" and spec.path:
        return str(spec.path)
    return spec.name


@dataclass(frozen=True)
class TrainedAdapter:
    """A training with what it came to."""

    job: TrainingJob
    result: TrainingResult
    subject: Subject
    dataset: DatasetSummary
    environment: Mapping[str, Any]
    """Of the machine, as `storage.environment.fingerprint` returns it."""
    truncation: TruncatedDataset | None = None
    """What its length cut off the examples; None where it was not looked at."""
    prediction: Prediction | None = None
    """What it was predicted to take, where it was not measured so."""

    @cached_property
    def comparison(self) -> Comparison:
        """What was reached beside what the subject's record promises, or what was predicted."""
        if self.prediction is not None:
            unmeasured = None
            if self.result.steps_measured == 0:
                unmeasured = _UNMEASURED
            return compared_with_prediction(self.prediction, self.result, incomparable=unmeasured)
        comparison = compared(
            self.subject.record,
            tokens_per_second=self.result.tokens_per_second,
            peak_allocated_bytes=self.result.peak_allocated_bytes,
            environment=self.environment,
            incomparable=self._incomparable(),
        )
        if self.result.steps_measured >= FEW_STEPS or comparison.speed.is_within:
            return comparison
        few = f"the speed is of {units.plural(self.result.steps_measured, 'step')} alone"
        return replace(comparison, causes=comparison.causes + (few,))

    def _incomparable(self) -> str | None:
        record = self.subject.record
        reached = self.result.device_name
        if record is None:
            return "nothing was measured of this configuration"
        gpu = match_product(record.device)
        is_same = gpu is not None and gpu is match_product(reached)
        if not is_same and record.device.casefold() != reached.casefold():
            return f"promised on another device, {record.device}"
        if record.config.data_parallel != self.job.config.data_parallel:
            return f"promised on {units.plural(record.config.data_parallel, 'GPU')}"
        if record.texts is None:
            return (
                "promised on full sequences of random tokens, where every token counts; a "
                "dataset's examples are padded"
            )
        if record.texts.summary.fingerprint != self.dataset.fingerprint:
            return "promised on another dataset"
        if self.result.steps_measured == 0:
            return _UNMEASURED
        return None

    def to_json(self) -> dict[str, Any]:
        """Return what `training.json` says, and ``--json`` prints."""
        job = self.job
        comparison = self.comparison
        model = {"name": job.spec.name, "base": base_of(job.spec)}
        differences: list[str] = []
        if comparison.figures:
            differences += comparison.figures
            differences += comparison.causes
        return {
            **self.result.model_dump(mode="json", exclude={"verdict", "checkpoint"}),
            "reward_accuracy_ci95": self.result.reward_accuracy_ci95,
            "promised_tokens_per_second": comparison.speed.promised,
            "promised_peak_allocated_bytes": comparison.memory.promised,
            "promised_basis": comparison.basis,
            "promised_tokens_per_second_range": comparison.speed.predicted_range,
            "promised_peak_allocated_bytes_range": comparison.memory.predicted_range,
            "truncation": None if self.truncation is None else self.truncation.to_json(),
            **job.model_dump(mode="json", include={"config", "weights", "seed", "eval_fraction"}),
            "learning_rate": self.subject.learning_rate.model_dump(mode="json"),
            "texts": redacted(self.dataset.model_dump(mode="json")),
            "versions": self.environment.get("versions"),
            "incomparable": comparison.incomparable,
            "ratios": {
                "tokens_per_second": comparison.speed.ratio,
                "peak_allocated_bytes": comparison.memory.ratio,
            },
            "differences": redacted(differences),
            "trained": self.subject.words,
            "model": redacted(model) | identity_of(job.spec, is_loaded=job.weights == "pretrained"),
            "environment": {k: v for k, v in self.environment.items() if k != "versions"},
        }


def words_of_8_bits(products: EightBitProducts) -> str:
    """Return what 8-bit compute makes of the real weights, and what stays in 16 bits at what
    cost."""
    worst = max(products.errors, key=lambda one: one.forward_worst)
    said = (
        "8-bit compute on these weights: the loss of the first examples is "
        f"{products.loss_8_bit:.4f}, in 16-bit compute {products.loss_16_bit:.4f}; the worst "
        f"product, a {worst.projection}, is {in_percent(worst.forward_worst)} off."
    )
    kept = products.kept_in_16_bits
    if not kept:
        return f"{said} None stays in 16 bits."
    layers = sum(one.layers for one in products.errors)
    verb = "stays" if len(kept) == 1 else "stay"
    return (
        f"{said} {units.plural(len(kept), 'layer')} of {layers} {verb} in 16 bits, for at most "
        f"{in_percent(products.share_in_16_bits)} of the speed."
    )


def _products(products: EightBitProducts) -> str:
    """Return how far products in 8 bits are off, by projection, as a table."""
    rows = []
    for one in products.errors:
        errors = (one.forward, one.forward_worst, one.gradient, one.gradient_worst)
        rows.append([f"`{one.projection}`"] + list(map(in_percent, errors)))
    return _table(("", "product", "worst layer", "input's gradient", "worst layer"), rows)


def model_card(trained: TrainedAdapter) -> str:
    """Return the model card, as Markdown with the hub's own header."""
    # Imported here, as it takes a while.
    from huggingface_hub import ModelCard, ModelCardData

    spec = trained.job.spec
    config = trained.job.config
    source = trained.dataset.source
    kind = f"lora-{config.weight_bits}bit"
    if config.is_4bit:
        kind = "qlora"
    data = ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["lora", kind, "qlora-sweep"],
    )
    if spec.source == "hub":
        data.base_model = spec.name
    if is_hub_id(source):
        data.datasets = [source]
    sections = "\n\n".join(_sections(trained))
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{sections}\n"))


def _sections(trained: TrainedAdapter) -> Iterator[str]:
    job = trained.job
    comparison = trained.comparison
    record = trained.subject.record
    yield f"# LoRA adapter for {shown(job.spec.name)}"
    yield f"Trained by qlora-sweep as {shown(trained.subject.words)}."
    if job.weights == "random":
        yield (
            "**The base's weights are random**: this shows how a training runs; the adapter has no "
            "other use."
        )
    yield "## Training\n\n" + _table(("", ""), _facts(trained))
    header = ("", "promised", "reached", "ratio")
    rows = (comparison.speed.row(), comparison.memory.row())
    yield "## Promised and reached\n\n" + _table(header, rows)
    products = trained.result.eight_bit
    if products is not None:
        yield "## 8-bit compute\n\n" + words_of_8_bits(products)
        yield _products(products)
        if products.kept_in_16_bits:
            yield "In 16 bits: " + ", ".join(f"`{name}`" for name in products.kept_in_16_bits)
    if trained.result.documents_apart is False:
        yield f"**{TOGETHER.capitalize()}.**"
    words = comparison.words()
    if words is not None:
        yield words
    if trained.prediction is not None:
        yield "Promised: predicted, as nothing measured it at this size."
    elif record is not None:
        yield f"Promised: {shown(record.label)}, measured on {shown(record.device)}."
    # Every default written out, and no setting that has no say here.
    used = canonical(job.config).model_dump(mode="json")
    used["learning_rate"] = trained.subject.learning_rate.value
    settings = []
    for key, value in used.items():
        applies = SETTINGS[key].applies
        if applies is None or applies(job.config):
            settings.append((f"`{key}`", f"`{value}`"))
    yield "## Configuration\n\n" + _table(("key", "value"), settings)
    versions = (trained.environment.get("versions") or {}).items()
    packages = [(name, str(version)) for name, version in versions if version]
    yield "## Versions\n\n" + _table(("package", "version"), packages)


def _facts(trained: TrainedAdapter) -> Iterator[tuple[str, str]]:
    job = trained.job
    result = trained.result
    dataset = trained.dataset
    yield "base", f"`{shown(base_of(job.spec))}` ({job.weights} weights)"
    yield "dataset", f"`{shown(dataset.source)}`, fingerprint `{dataset.fingerprint}`"
    kind: str = dataset.kind
    if dataset.completions_only:
        kind += ", loss on completions only"
    yield "kind", kind
    yield "tokenizer", f"`{shown(dataset.tokenizer)}`"
    examples = units.count(result.dataset_rows or result.rows)
    if result.packed_rows is not None:
        examples += f", packed into {result.packed_rows:,}"
    yield "examples trained on", examples
    yield "examples held out", units.count(result.rows_held_out)
    yield "examples left out, without a supervised token", units.count(result.rows_left_out)
    if trained.truncation is not None:
        yield "cut", trained.truncation.words("pair" if dataset.are_pairs else "example")
    yield "broken examples, left out", units.count(dataset.broken)
    for note in dataset.notes:
        yield "of the dataset", shown(note)
    yield "learning rate", trained.subject.learning_rate.words
    yield "seed", str(job.seed)
    yield "optimizer steps", f"{units.count(result.steps)}, {result.epochs:.2f} epochs"
    yield "supervised tokens", units.count(result.tokens)
    yield "training loss, last tenth", f"{result.final_train_loss:.4f}"
    yield "training loss, mean", f"{result.train_loss:.4f}"
    held_out = units.DASH
    if result.eval_loss is not None:
        held_out = f"{result.eval_loss:.4f}"
    yield "held-out loss", held_out + reward_accuracy(result.eval_wins, result.eval_pairs)
    yield "trainable parameters", units.count(result.trainable_parameters)
    yield "time", units.duration(result.seconds)
    yield "device", shown(result.device_name)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    table = [header, ["---"] * len(header)]
    table += rows
    lines = []
    for row in table:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
