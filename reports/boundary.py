"""The out-of-memory boundary of a study: which micro-batches and lengths fit, by panel.

A panel has the trials of one checkpoint fraction and one kind of kernels, as far as several were
tried. A cell is the best of the trials at its size; one where nothing fits has what came nearest,
and one that was not tried what is predicted of it where that is at hand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Literal

from qlora_sweep.reports import format as units
from qlora_sweep.reports import words
from qlora_sweep.reports.document import TrialTable
from qlora_sweep.reports.figures import Section
from qlora_sweep.reports.view import StudyView
from qlora_sweep.reports.words import VERDICT_LABELS
from qlora_sweep.search_spaces.config import SETTINGS, SIZE_KEYS, canonical
from qlora_sweep.storage.ranking import fitting
from qlora_sweep.storage.records import (
    OUT_OF_MEMORY,
    Need,
    TrialRecord,
    Verdict,
    nearest_to_fitting,
)

PANEL_KEYS = ("checkpoint_fraction", "kernels")
_OF_CELLS = SIZE_KEYS + ("lora_alpha", "effective_batch_size")
"""What the place of a cell says, or follows from that."""
NEAREST_SHOWN = 3
_EXPECTED = {
    "yes": ("○", "predicted to fit"),
    "uncertain": ("?", "too close to say"),
    "no": ("△", "predicted not to fit"),
}
"""The mark and the words of what was not tried, the best first."""

CellKind = Literal["fits", "partial", "oom", "refused", "unknown", "expected", "untried"]
"""Measured to the end; stopped as slow; out of memory for real; not launched, by prediction or by
comparison with one that ran out; came to nothing that tells; not tried, but predicted; neither."""


@dataclass(frozen=True)
class Cell:
    """What the trials of one panel at one size came to."""

    kind: CellKind
    text: str = "·"
    """The speed, or the mark of why there is none."""
    memory: str = ""
    """Peak or need; a lower bound begins with a sign that says so."""
    words: str = "not tried"
    """The same in a sentence."""
    level: float = 0.0
    """Its speed over that of the fastest."""
    trial: int | None = None


def boundary_of(document: TrialTable) -> Section | None:
    """Return the boundary of a study; None where it has no trial of its space.

    A baseline that the space does not hold is left out: it differs in what the space fixes.
    """
    view = document.view
    records = view.of_space
    if not records:
        return None
    configs = [canonical(record.config) for record in records]
    values_of = {key: set(map(attrgetter(key), configs)) for key in SETTINGS}
    varying = [key for key in SETTINGS if len(values_of[key]) > 1]
    panel_keys = [key for key in PANEL_KEYS if key in varying]
    # A group: the trials of one panel, by the values of the panel's keys.
    groups: dict[tuple[object, ...], list[TrialRecord]] = defaultdict(list)
    for record, config in zip(records, configs, strict=True):
        groups[tuple(getattr(config, key) for key in panel_keys)].append(record)
    lengths = sorted(values_of["seq_len"])
    batches = sorted(values_of["micro_batch_size"])
    cells = _Cells(document)
    order = sorted(groups, key=lambda values: list(map(str, values)))

    def prominence(values: tuple[object, ...]) -> tuple[bool, int]:
        group = groups[values]
        return view.winner is not None and view.winner.record in group, len(group)

    opened = max(order, key=prominence)
    panels = []
    for values in order:
        phrases = map(units.phrase, panel_keys, values)
        rows = []
        for batch in batches:
            rows.append((batch, list(cells.row(groups[values], batch, lengths))))
        panels.append(
            Section(
                title=", ".join(map(units.short, phrases)) or "all trials",
                trials=len(groups[values]),
                rows=rows,
                is_open=values == opened,
            )
        )
    best_over = []
    for key in varying:
        if key not in _OF_CELLS and key not in panel_keys:
            best_over.append(SETTINGS[key].label)
    return Section(
        lengths=lengths,
        panels=panels,
        best_over=best_over,
        nearest=list(_nearest(document)),
        budget=units.gib(view.gpu.budget_bytes, document.unit),
        unit=document.unit.name,
    )


def _nearest(document: TrialTable) -> Iterator[tuple[str, ...]]:
    """Yield what came nearest to fitting: trial, changes, need, excess, predicted tokens/s."""
    view = document.view
    for record in nearest_to_fitting(view.of_space)[:NEAREST_SHOWN]:
        need = _need(view, record)
        yield (
            str(record.number),
            view.changes(record.config),
            words.need(need, document.unit),
            words.excess(need, budget_bytes=view.gpu.budget_bytes),
            units.rate(view.expected_speed(record)),
        )


def _need(view: StudyView, record: TrialRecord) -> Need:
    need = view.need_of(record)
    assert need is not None, "what did not fit has a need"
    return need


@dataclass(frozen=True)
class _Cells:
    """Makes cells that compare with each other."""

    document: TrialTable

    @cached_property
    def fastest(self) -> float:
        """The speed that the others are shares of."""
        return max(map(self._speed, self.document.view.of_space), default=0.0)

    def _speed(self, record: TrialRecord) -> float:
        """Return the speed of a trial that decides; 0 of one that was not measured."""
        trial = self.document.view.measured_trials.get(record.number)
        if trial is None:
            return 0.0
        return trial.estimate.value

    def row(
        self, group: Sequence[TrialRecord], batch: int, lengths: Iterable[int]
    ) -> Iterator[Cell]:
        """Yield the cells of one micro-batch of a panel."""
        # What was not tried is as the panel's fastest at that size.
        model = max(group, key=self._speed)
        by_length: dict[int, list[TrialRecord]] = defaultdict(list)
        for record in group:
            if record.config.micro_batch_size == batch:
                by_length[record.config.seq_len].append(record)
        for length in lengths:
            if length in by_length:
                yield self._tried(by_length[length])
            else:
                yield self._expected(model, batch, length)

    def _expected(self, model: TrialRecord, batch: int, length: int) -> Cell:
        if not model.config.takes_micro_batch(batch):
            return Cell("untried")
        view = self.document.view
        config = model.config.changed(micro_batch_size=batch, seq_len=length)
        forecast = view.memory_forecast(config)
        if forecast is None or view.space.params_of(config) is None:
            return Cell("untried")
        mark, words = _EXPECTED[forecast.fits]
        peak = forecast.peak_allocated_bytes
        need = f"{units.gib(peak, self.document.unit)} as trial {model.number} otherwise"
        return Cell("expected", mark, self._size(peak), f"not tried, {words}: {need}")

    def _tried(self, records: Sequence[TrialRecord]) -> Cell:
        unfit = []
        measured = []
        for record in records:
            if record.verdict in OUT_OF_MEMORY:
                unfit.append(record)
            elif record.measurement is not None:
                measured.append(record)
        best = max(fitting(records) or measured, key=self._speed, default=None)
        if best is not None:
            return self._measured(best, len(records), len(unfit))
        if unfit:
            return self._unfit(unfit, len(records))
        last = records[-1]
        return Cell("unknown", "?", "", f"{VERDICT_LABELS[last.verdict]}: no speed", 0, last.number)

    def _measured(self, best: TrialRecord, tried: int, unfit: int) -> Cell:
        speed = self._speed(best)
        peak = self.document.view.measured_trials[best.number].measurement.peak_allocated_bytes
        kind: CellKind = "fits"
        text = units.short_rate(speed)
        rate = f"{units.rate(speed)} tokens/s"
        if best.verdict is not Verdict.FITS:
            kind = "partial"
            text = f"~{text}"
            rate += " so far: it was stopped as too slow"
        size = units.gib(peak, self.document.unit)
        words = f"trial {best.number}: {rate}, peak {size}, best of {tried}"
        if unfit:
            text += " ◩"
            words += f"; {unfit} of {units.plural(tried, 'trial')} here did not fit"
        return Cell(kind, text, self._size(peak), words, speed / self.fastest, best.number)

    def _unfit(self, records: Sequence[TrialRecord], tried: int) -> Cell:
        """Return the cell of what did not fit: where a trial ran out a fact, else as predicted."""
        kind: CellKind = "refused"
        mark = "△"
        real = [record for record in records if record.verdict is Verdict.OOM]
        if real:
            kind = "oom"
            mark = "✕"
            records = real
        view = self.document.view
        nearest = min(records, key=lambda r: (_need(view, r).allocated_bytes, r.number))
        need = _need(view, nearest)
        memory = self._size(need.allocated_bytes)
        if need.is_lower_bound:
            memory = f"≥ {memory}"
        sentence = (
            f"trial {nearest.number}: {VERDICT_LABELS[nearest.verdict]}, needs "
            f"{words.need(need, self.document.unit)}; {units.plural(tried, 'trial')} here"
        )
        return Cell(kind, mark, memory, sentence, 0.0, nearest.number)

    def _size(self, count: int) -> str:
        """Return bytes for a cell, which has no room for the unit."""
        return f"{self.document.in_unit(count):.1f}"
