"""The out-of-memory boundary of a study: which micro-batches and lengths fit, by panel.

A panel has the trials of one checkpoint fraction and one kind of kernels, as far as several were
tried. A cell is the best of the trials at its size; one where nothing fits has what came nearest,
and one that was not tried what is predicted of it where that is at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from qlora_sweep.reports import units, words
from qlora_sweep.reports.document import Document
from qlora_sweep.reports.figures import Section
from qlora_sweep.reports.words import VERDICT_LABELS
from qlora_sweep.search_spaces.config import KNOBS, SIZE_KEYS, canonical
from qlora_sweep.storage.ranking import fitting, measured_of
from qlora_sweep.storage.records import (
    OUT_OF_MEMORY,
    Need,
    TrialRecord,
    Verdict,
    nearest_to_fitting,
    need_of,
)

PANEL_KEYS = ("checkpoint_fraction", "kernels")
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


def boundary_of(document: Document) -> Section | None:
    """Return the boundary of a study; None where it has no trial of its space.

    A baseline that the space does not hold is left out: it differs in what the space fixes.
    """
    budget, records = document.snapshot.definition.target.budget_bytes, document.ranking.of_space
    if not records:
        return None
    varying = [key for key in KNOBS if len({_value(r, key) for r in records}) > 1]
    keys = [key for key in PANEL_KEYS if key in varying]
    groups: dict[tuple[object, ...], list[TrialRecord]] = {}
    for record in sorted(records, key=lambda r: tuple(str(_value(r, key)) for key in keys)):
        groups.setdefault(tuple(_value(record, key) for key in keys), []).append(record)
    lengths = sorted({record.config.seq_len for record in records})
    batches = sorted({record.config.micro_batch_size for record in records})
    cells = _Cells(document)
    winner = document.ranking.winner
    first = max(groups, key=lambda group: (winner in groups[group], len(groups[group])))
    panels = []
    for values, group in groups.items():
        named = map(units.phrase, keys, values)
        panels.append(
            Section(
                title=", ".join(map(units.short, named)) or "all trials",
                trials=len(group),
                rows=[(batch, list(cells.row(group, batch, lengths))) for batch in batches],
                is_open=values == first,
            )
        )
    of_cells = (*SIZE_KEYS, "lora_alpha", "effective_batch_size", *keys)
    return Section(
        lengths=lengths,
        panels=panels,
        # A cell is the best over these.
        best_over=[KNOBS[key].label for key in varying if key not in of_cells],
        nearest=[_nearest(document, r) for r in nearest_to_fitting(records)[:NEAREST_SHOWN]],
        budget=units.gib(budget, document.unit),
        unit=document.unit.name,
    )


def _value(record: TrialRecord, key: str) -> object:
    return getattr(canonical(record.config), key)


def _nearest(document: Document, record: TrialRecord) -> tuple[str, ...]:
    """Return what did not fit: trial, changes, need, excess, predicted tokens/s."""
    definition, ranking = document.snapshot.definition, document.ranking
    need = _need(record, definition.target.budget_bytes)
    expected = ranking.expected_speed(record)
    return (
        str(record.number),
        units.changes(record.config, baseline=definition.space.baseline_config()),
        words.need(need, document.unit),
        words.excess(need, budget_bytes=definition.target.budget_bytes),
        units.rate(expected),
    )


def _need(record: TrialRecord, budget_bytes: int) -> Need:
    need = need_of(record, budget_bytes=budget_bytes)
    assert need is not None, "what did not fit has a need"
    return need


@dataclass(frozen=True)
class _Cells:
    """Makes cells that compare with each other."""

    document: Document

    @cached_property
    def fastest(self) -> float:
        """The speed that the others are shares of."""
        return max(map(self._speed, self.document.ranking.of_space), default=0.0)

    def _speed(self, record: TrialRecord) -> float:
        """Return the speed of a trial that decides; 0 of one that was not measured."""
        return 0.0 if record.measurement is None else self.document.ranking.speed_of(record)

    def row(
        self, group: Sequence[TrialRecord], batch: int, lengths: Iterable[int]
    ) -> Iterator[Cell]:
        """Yield the cells of one micro-batch of a panel."""
        # What was not tried is as the panel's fastest at that size.
        model = max(group, key=self._speed)
        of_batch = [record for record in group if record.config.micro_batch_size == batch]
        for length in lengths:
            here = [record for record in of_batch if record.config.seq_len == length]
            yield self._tried(here) if here else self._expected(model, batch, length)

    def _expected(self, model: TrialRecord, batch: int, length: int) -> Cell:
        if not model.config.takes_micro_batch(batch):
            return Cell("untried")
        snapshot = self.document.snapshot
        config = model.config.changed(micro_batch_size=batch, seq_len=length)
        forecast = snapshot.memory_forecasts.get(config)
        if forecast is None or snapshot.definition.space.params_of(config) is None:
            return Cell("untried")
        (text, words), peak = _EXPECTED[forecast.fits], forecast.peak_allocated_bytes
        need = f"{units.gib(peak, self.document.unit)} as trial {model.number} otherwise"
        return Cell("expected", text, self._size(peak), f"not tried, {words}: {need}")

    def _tried(self, records: Sequence[TrialRecord]) -> Cell:
        unfit = [record for record in records if record.verdict in OUT_OF_MEMORY]
        measured = [record for record in records if record.measurement is not None]
        best = max(fitting(records) or measured, key=self._speed, default=None)
        if best is not None:
            return self._measured(best, len(records), len(unfit))
        if unfit:
            return self._unfit(unfit, len(records))
        last = records[-1]
        return Cell("unknown", "?", "", f"{VERDICT_LABELS[last.verdict]}: no speed", 0, last.number)

    def _measured(self, best: TrialRecord, tried: int, unfit: int) -> Cell:
        is_whole, speed = best.verdict is Verdict.FITS, self._speed(best)
        peak = measured_of(best).peak_allocated_bytes
        part = "" if is_whole else " so far: it was stopped as too slow"
        beside = f"; {unfit} of {units.plural(tried, 'trial')} here did not fit" if unfit else ""
        return Cell(
            "fits" if is_whole else "partial",
            f"{'' if is_whole else '~'}{units.short_rate(speed)}{' ◩' if unfit else ''}",
            self._size(peak),
            f"trial {best.number}: {units.rate(speed)} tokens/s{part}, "
            f"peak {units.gib(peak, self.document.unit)}, best of {tried}{beside}",
            speed / self.fastest,
            best.number,
        )

    def _unfit(self, records: Sequence[TrialRecord], tried: int) -> Cell:
        """Return the cell of what did not fit: where a trial ran out a fact, else as predicted."""
        real = [record for record in records if record.verdict is Verdict.OOM]
        budget = self.document.snapshot.definition.target.budget_bytes
        needs = [(_need(record, budget), record) for record in real or records]
        need, nearest = min(needs, key=lambda pair: (pair[0].allocated_bytes, pair[1].number))
        return Cell(
            "oom" if real else "refused",
            "✕" if real else "△",
            f"{'≥ ' if need.is_lower_bound else ''}{self._size(need.allocated_bytes)}",
            f"trial {nearest.number}: {VERDICT_LABELS[nearest.verdict]}, needs "
            f"{words.need(need, self.document.unit)}; {units.plural(tried, 'trial')} here",
            0.0,
            nearest.number,
        )

    def _size(self, count: int) -> str:
        """Return bytes for a cell, which has no room for the unit."""
        return f"{count / self.document.unit.bytes:.1f}"
