"""The out-of-memory boundary of a study: which micro-batches and lengths fit, by panel.

A panel has the trials of one checkpoint fraction and one kind of kernels, as far as several were
tried, and of one value of whatever else divides what fits from what does not. A cell is the best of
the trials at its size; one where nothing fits has what came nearest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reports import units, words
from reports.document import memory_unit, sort_place
from reports.words import VERDICT_LABELS
from search_spaces.config import KNOBS, SIZE_KEYS, TrialConfig, canonical
from search_spaces.space import SearchSpace
from storage.definition import MemoryForecast, StudySnapshot
from storage.ranking import fitting, measured_of, rank_study
from storage.records import (
    OUT_OF_MEMORY,
    Need,
    TrialRecord,
    Verdict,
    nearest_to_fitting,
    need_of,
    predicted_need,
)

PANEL_KNOBS = ("checkpoint_fraction", "kernels")
"""What parts the panels wherever it was tried at several values."""
PANELS_MAX = 12
BATCHES_MAX, LENGTHS_MAX = 14, 8
"""With more values than these, neighbours share a row or a column."""
NEAREST_SHOWN = 3

_EXPECTED = {
    "yes": ("○", "predicted to fit"),
    "no": ("△", "predicted not to fit"),
    "uncertain": ("?", "too close to say"),
}
"""The mark and the words of what was not tried."""
_CERTAINTY = {"yes": 0, "uncertain": 1, "no": 2}

CellKind = Literal["fits", "partial", "oom", "refused", "unknown", "expected", "untried"]
"""Measured to the end; stopped as slow; out of memory for real; not launched, by prediction or by
comparison with one that ran out; came to nothing that tells; not tried, but predicted; neither."""


@dataclass(frozen=True)
class Cell:
    """What the trials of one panel at one size came to."""

    kind: CellKind
    text: str = ""
    """The speed, or the mark of why there is none."""
    memory: str = ""
    """Peak or need in the study's unit; a lower bound begins with a sign that says so."""
    words: str = "not tried"
    """The same in a sentence."""
    level: float = 0.0
    """Its speed over that of the fastest cell."""
    trial: int | None = None
    """The trial that it speaks of."""


@dataclass(frozen=True)
class Panel:
    """The sizes of one structure."""

    title: str
    trials: int
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    """A micro-batch, or several, with a cell for each length."""


@dataclass(frozen=True)
class Nearest:
    """A configuration that did not fit, by how little it is predicted to miss."""

    number: int
    changes: str
    need: str
    excess: str
    tokens_per_second: str
    """As predicted."""


@dataclass(frozen=True)
class Wall:
    """Where the memory of a study's trials ends."""

    lengths: tuple[str, ...]
    panels: tuple[Panel, ...]
    first: int
    """Index of the panel to show first: the winner's, else that of the most trials."""
    common: tuple[str, ...]
    """What all panels have in common of the settings that usually part them."""
    best_over: tuple[str, ...]
    """Settings that vary within a panel: a cell is the best over them."""
    nearest: tuple[Nearest, ...]
    unpredicted: int
    """Trials that did not fit and whose need nothing predicted: they cannot be ranked."""
    budget: str
    unit: str
    """Of memory in the cells."""

    @property
    def has_expected(self) -> bool:
        """Whether any cell tells of what was not tried."""
        rows = (cells for panel in self.panels for _, cells in panel.rows)
        return any(cell.kind == "expected" for cells in rows for cell in cells)


def wall_of(snapshot: StudySnapshot) -> Wall | None:
    """Return the wall of a study; None where it has no trial of its space.

    A baseline that the space does not hold is left out: it differs in what the space fixes.
    """
    records = rank_study(snapshot).of_space
    if not records:
        return None
    knobs = _panel_knobs(records)
    groups = _by_values(records, knobs)
    forecasts = snapshot.memory_forecasts
    is_predicted = any(r.config in forecasts for _, group in groups for r in _structures(group))
    # Where what was not tried can be predicted, the space's own sizes are worth a row as well.
    beside = snapshot.definition.space if is_predicted else None
    batches = _bands(_values(records, "micro_batch_size", beside), most=BATCHES_MAX)
    lengths = _bands(_values(records, "seq_len", beside), most=LENGTHS_MAX)
    cells = _Cells(snapshot, _fastest(records), memory_unit(snapshot))
    winner = rank_study(snapshot).winner
    sizes = [(winner in group, len(group)) for _, group in groups]
    panels = (
        Panel(_title(values), len(group), cells.rows(group, batches=batches, lengths=lengths))
        for values, group in groups
    )
    return Wall(
        lengths=tuple(map(_band_name, lengths)),
        panels=tuple(panels),
        first=sizes.index(max(sizes)),
        common=_common(records, knobs),
        best_over=tuple(KNOBS[k].label for k in _varying(records, without=(*SIZE_KEYS, *knobs))),
        nearest=tuple(
            _miss(record, snapshot) for record in nearest_to_fitting(records)[:NEAREST_SHOWN]
        ),
        unpredicted=sum(predicted_need(r) is None for r in records if r.verdict in OUT_OF_MEMORY),
        budget=units.gib(snapshot.definition.target.budget_bytes, cells.unit),
        unit=cells.unit.name,
    )


def _values(records: Sequence[TrialRecord], key: str, space: SearchSpace | None) -> set[int]:
    """Return the values of a size that were tried, and those of a space."""
    tried = {getattr(record.config, key) for record in records}
    return tried if space is None else tried | set(space.values_of(key))


def _structures(records: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the trials whose structure tells where a panel's wall is: the fastest and the leanest.

    The leanest took the least memory a token.
    """
    measured = [record for record in records if record.measurement is not None]
    if not measured:
        return tuple(records[-1:])
    fastest = max(measured, key=lambda record: measured_of(record).tokens_per_second)
    leanest = min(measured, key=_bytes_per_token)
    is_one = _at(fastest.config, 1, 1) == _at(leanest.config, 1, 1)
    return (fastest,) if is_one else (fastest, leanest)


def _bytes_per_token(record: TrialRecord) -> float:
    return measured_of(record).peak_allocated_bytes / record.config.tokens_per_micro_batch


def _at(config: TrialConfig, batch: int, length: int) -> TrialConfig:
    """Return a configuration at another size."""
    return config.model_copy(update={"micro_batch_size": batch, "seq_len": length})


def _value(record: TrialRecord, key: str) -> Any:
    return getattr(canonical(record.config), key)


def _varying(records: Sequence[TrialRecord], *, without: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the settings that were tried at several values, less what follows from another."""
    skipped = {*without, "lora_alpha", "effective_batch_size", "learning_rate"}
    configs = [canonical(record.config) for record in records]
    return tuple(
        key
        for key in KNOBS
        if key not in skipped and len({getattr(config, key) for config in configs}) > 1
    )


def _panel_knobs(records: Sequence[TrialRecord]) -> tuple[str, ...]:
    """Return what parts the panels: the usual settings, then what divides the wall the most.

    A cell that holds both trials that fit and trials that do not is divided by none of them yet.
    """
    varying = _varying(records, without=SIZE_KEYS)
    chosen = tuple(key for key in PANEL_KNOBS if key in varying)
    left = _mixed(records, chosen)
    while left:
        wider = [(*chosen, key) for key in varying if key not in chosen]
        few = [keys for keys in wider if len({_settings(r, keys) for r in records}) <= PANELS_MAX]
        best = min(few, key=lambda keys: _mixed(records, keys), default=chosen)
        # What parts a single cell, or a few of many, is no reason for twice the panels.
        parted = left - _mixed(records, best)
        if parted < max(2, 0.3 * left):
            break
        chosen, left = best, _mixed(records, best)
    return chosen


def _mixed(records: Sequence[TrialRecord], keys: Sequence[str]) -> int:
    """Return in how many cells some trials fit and others do not."""
    seen: dict[Values, set[bool]] = defaultdict(set)
    for record in records:
        if record.verdict in OUT_OF_MEMORY or record.measurement is not None:
            place = _settings(record, (*SIZE_KEYS, *keys))
            seen[place].add(record.measurement is not None)
    return sum(len(ends) > 1 for ends in seen.values())


Values = tuple[tuple[str, Any], ...]
"""Settings with their values."""


def _settings(record: TrialRecord, keys: Sequence[str]) -> Values:
    config = canonical(record.config)
    return tuple((key, getattr(config, key)) for key in keys)


def _by_values(
    records: Sequence[TrialRecord], keys: Sequence[str]
) -> list[tuple[Values, list[TrialRecord]]]:
    """Return the trials by the values of some settings, in order."""
    groups: dict[Values, list[TrialRecord]] = defaultdict(list)
    for record in records:
        groups[_settings(record, keys)].append(record)
    return sorted(groups.items(), key=lambda item: [sort_place(*pair) for pair in item[0]])


def _title(values: Values) -> str:
    words = [units.short(units.phrase(key, value)) for key, value in values]
    return ", ".join(words) if words else "all trials"


def _common(records: Sequence[TrialRecord], knobs: Sequence[str]) -> tuple[str, ...]:
    alike = (key for key in PANEL_KNOBS if key not in knobs)
    return tuple(units.phrase(key, _value(records[0], key)) for key in alike)


Band = tuple[int, int]
"""The first and the last value that share a row or a column."""


def _bands(values: set[int], *, most: int) -> tuple[Band, ...]:
    ordered = sorted(values)
    size = -(-len(ordered) // most)
    parts = (ordered[start : start + size] for start in range(0, len(ordered), size))
    return tuple((part[0], part[-1]) for part in parts)


def _band_name(band: Band) -> str:
    first, last = band
    return units.count(first) if first == last else f"{units.count(first)}–{units.count(last)}"


def _fastest(records: Iterable[TrialRecord]) -> float:
    return max((r.measurement.tokens_per_second for r in records if r.measurement), default=0.0)


@dataclass(frozen=True)
class _Cells:
    """Makes cells that compare with each other."""

    snapshot: StudySnapshot
    fastest: float
    """Tokens/s of the fastest trial of the wall."""
    unit: units.MemoryUnit

    @property
    def budget_bytes(self) -> int:
        """What a trial may allocate."""
        return self.snapshot.definition.target.budget_bytes

    def rows(
        self, records: Sequence[TrialRecord], *, batches: Sequence[Band], lengths: Sequence[Band]
    ) -> tuple[tuple[str, tuple[Cell, ...]], ...]:
        """Return the cells of a panel."""
        known: dict[tuple[Band, Band], list[TrialRecord]] = defaultdict(list)
        for record in records:
            config = record.config
            place = _band_of(config.micro_batch_size, batches), _band_of(config.seq_len, lengths)
            known[place].append(record)
        structures = _structures(records)
        return tuple(
            (
                _band_name(batch),
                tuple(
                    self._cell(known[batch, length])
                    if (batch, length) in known
                    else self._expected(structures, batch, length)
                    for length in lengths
                ),
            )
            for batch in batches
        )

    def _expected(self, structures: Sequence[TrialRecord], batch: Band, length: Band) -> Cell:
        """Return the cell of what was not tried, and is predicted where that is at hand.

        As of what was tried, it is the best of the panel's structures: the fastest that fits.
        """
        if batch[0] != batch[1] or length[0] != length[1]:
            return Cell("untried")
        known: list[tuple[MemoryForecast, TrialRecord]] = []
        for record in structures:
            config = _at(record.config, batch[0], length[0])
            forecast = self.snapshot.memory_forecasts.get(config)
            if forecast is not None and self.snapshot.definition.space.params_of(config):
                known.append((forecast, record))
                if forecast.fits == "yes":
                    break
        if not known:
            return Cell("untried")
        # The first that fits, else one that may, and of those that do not the least.
        forecast, record = min(
            known, key=lambda pair: (_CERTAINTY[pair[0].fits], pair[0].peak_allocated_bytes)
        )
        text, words = _EXPECTED[forecast.fits]
        need = units.gib(forecast.peak_allocated_bytes, self.unit)
        as_what = f"{need} with the other settings of trial {record.number}"
        memory = self._size(forecast.peak_allocated_bytes)
        return Cell("expected", text, memory, f"not tried, {words}: {as_what}")

    def _cell(self, records: Sequence[TrialRecord]) -> Cell:
        if not records:
            return Cell("untried")
        best = next(iter(fitting(records)), None)
        if best is not None:
            return self._measured("fits", best, records)
        partial = [record for record in records if record.measurement is not None]
        if partial:
            fastest = max(partial, key=lambda record: measured_of(record).tokens_per_second)
            return self._measured("partial", fastest, records)
        unfit = [record for record in records if record.verdict in OUT_OF_MEMORY]
        if unfit:
            return self._unfit(unfit, len(records))
        last = records[-1]
        return Cell(
            "unknown", "?", "", f"{VERDICT_LABELS[last.verdict]}: no speed", 0.0, last.number
        )

    def _measured(self, kind: CellKind, best: TrialRecord, records: Sequence[TrialRecord]) -> Cell:
        measured = measured_of(best)
        unfit = sum(record.verdict in OUT_OF_MEMORY for record in records)
        mark = {"fits": "", "partial": "~"}.get(kind, "")
        part = " so far: it was stopped as too slow" if kind == "partial" else ""
        beside = (
            f"; {unfit} of {units.plural(len(records), 'trial')} here did not fit" if unfit else ""
        )
        return Cell(
            kind,
            f"{mark}{units.short_rate(measured.tokens_per_second)}{' ◩' if unfit else ''}",
            self._size(measured.peak_allocated_bytes),
            f"trial {best.number}: {units.rate(measured.tokens_per_second)} tokens/s{part}, "
            f"peak {units.gib(measured.peak_allocated_bytes, self.unit)}, "
            f"best of {len(records)}{beside}",
            measured.tokens_per_second / self.fastest,
            best.number,
        )

    def _unfit(self, records: Sequence[TrialRecord], tried: int) -> Cell:
        """Return the cell of what did not fit: where a trial ran out a fact, else as foreseen."""
        real = [record for record in records if record.verdict is Verdict.OOM]
        needs = [(_need(record, self.budget_bytes), record) for record in real or records]
        need, nearest = min(needs, key=lambda pair: (pair[0].allocated_bytes, pair[1].number))
        sign = "≥ " if need.is_lower_bound else ""
        return Cell(
            "oom" if real else "refused",
            "✕" if real else "△",
            f"{sign}{self._size(need.allocated_bytes)}",
            f"trial {nearest.number}: {VERDICT_LABELS[nearest.verdict]}, needs "
            f"{words.need(need, self.unit)}; {units.plural(tried, 'trial')} here",
            0.0,
            nearest.number,
        )

    def _size(self, count: int) -> str:
        """Return bytes for a cell, which has no room for the unit."""
        return f"{count / self.unit.bytes:.1f}"


def _need(record: TrialRecord, budget_bytes: int) -> Need:
    need = need_of(record, budget_bytes=budget_bytes)
    assert need is not None, "what did not fit has a need"
    return need


def _band_of(value: int, bands: Sequence[Band]) -> Band:
    return next(band for band in bands if band[0] <= value <= band[1])


def _miss(record: TrialRecord, snapshot: StudySnapshot) -> Nearest:
    budget_bytes = snapshot.definition.target.budget_bytes
    need = _need(record, budget_bytes)
    expected = None if record.prediction is None else record.prediction.tokens_per_second
    baseline = snapshot.definition.space.baseline_config()
    return Nearest(
        record.number,
        units.changes(record.config, baseline=baseline),
        words.need(need, memory_unit(snapshot)),
        words.excess(need, budget_bytes=budget_bytes),
        units.rate(expected),
    )
