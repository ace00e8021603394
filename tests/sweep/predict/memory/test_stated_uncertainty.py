"""Every uncertainty that is stated, derived again from the committed rows that it is claimed for.

Another one (of speed, of a GPU) is an entry of `STATEMENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from sweep.predict.memory import prediction as memory
from sweep.predict.memory.predictor import Fit, MemoryPrediction
from sweep.predict.memory.replay import runs_under
from tests.sweep.predict.rows import (
    COMPILED,
    EDGES,
    EIGHT_BIT,
    HELD_OUT,
    PACKED,
    SEVERAL_CARDS,
    TABLE,
    Predict,
    Row,
    config_of,
    is_compiled,
    is_recomputed,
    is_sharded,
)

ROUNDING = 0.005
"""Statements are made in half percents."""
CAP_STEP, CAP_RANGE = 0.0025, 0.05
"""How finely, and how far from a budget, caps are tried in the replay."""


@dataclass(frozen=True)
class Statement:
    """What is stated, and how far rows were off what was predicted of them."""

    stated: float
    errors: Sequence[float]
    """Measured over predicted, less 1."""
    share: float = 1.0
    """Of the rows, for which it is claimed; the others may be further off."""

    @property
    def supported(self) -> float:
        """The least that the rows allow to state.

        The error that the claimed share stayed within, widened by 3 / rows: of so many that did, up
        to that share of new ones may not, at 95 % confidence. Four rows are widened by three
        quarters and a hundred by 3 %.
        """
        sizes = sorted(map(abs, self.errors))
        return sizes[round(self.share * len(sizes)) - 1] * (1 + 3 / len(sizes))


def _rows(
    *,
    compiled: bool,
    recomputed: bool | None = None,
    upcast: bool | None = None,
    eight_bit: bool = False,
) -> list[Row]:
    return [
        row
        for row in (*TABLE, *HELD_OUT, *COMPILED, *EIGHT_BIT, *PACKED)
        if is_compiled(row) is compiled
        and (not compiled or config_of(row).is_8bit_compute is eight_bit)
        and recomputed in (None, is_recomputed(row))
        and upcast in (None, row["config"]["upcast_fp32"])
    ]


def _allocated(predict: Predict, rows: list[Row]) -> list[float]:
    return [row["peak_allocated_bytes"] / predict(row).peak_allocated_bytes - 1 for row in rows]


def _reserved(predict: Predict, rows: list[Row]) -> list[float]:
    return [row["peak_reserved_bytes"] / predict(row).peak_reserved_bytes - 1 for row in rows]


def _capped(predict: Predict) -> list[float]:
    """How far each edge row's budget is on the wrong side of the cap that the replay needs."""
    rows = {config_of(row).key(): row for row in EDGES}.values()
    return [_wrong_side(predict(row), row) for row in rows]


def _wrong_side(prediction: MemoryPrediction, row: Row) -> float:
    """Return the change of the cap up to which the replay contradicts what was seen; 0 for none."""
    ran, worst = row["verdict"] == "fits", 0.0
    for step in range(round(CAP_RANGE / CAP_STEP)):
        change = step * CAP_STEP if ran else -step * CAP_STEP
        cap = int(row["budget_bytes"] * (1 + change))
        if runs_under(prediction.step, limit_bytes=cap) is not ran:
            worst = change
    return worst


KINDS: dict[str, tuple[memory.Uncertainty, list[Row]]] = {
    "eager": (memory.EAGER, _rows(compiled=False)),
    "compiled": (memory.COMPILED, _rows(compiled=True, recomputed=False, upcast=False)),
    "compiled, upcast": (
        memory.COMPILED_UPCAST,
        _rows(compiled=True, recomputed=False, upcast=True),
    ),
    "compiled, 8 bits": (
        memory.COMPILED_8_BIT,
        _rows(compiled=True, recomputed=False, upcast=False, eight_bit=True),
    ),
    "sharded": (memory.SHARDED, [row for row in SEVERAL_CARDS if is_sharded(row)]),
    "compiled, recomputed": (memory.COMPILED_RECOMPUTED, _rows(compiled=True, recomputed=True)),
}


def _of_allocated(kind: str) -> Callable[[Predict], Statement]:
    stated, rows = KINDS[kind]
    return lambda predict: Statement(stated.allocated, _allocated(predict, rows))


def _of_reserved(kind: str) -> Callable[[Predict], Statement]:
    stated, rows = KINDS[kind]
    return lambda predict: Statement(stated.reserved, _reserved(predict, rows))


STATEMENTS: dict[str, Callable[[Predict], Statement]] = {
    **{f"peak allocated, {kind}": _of_allocated(kind) for kind in KINDS},
    **{f"peak reserved, {kind}": _of_reserved(kind) for kind in KINDS},
    "least cap": lambda predict: Statement(memory.CAPPED, _capped(predict)),
}


@pytest.fixture(scope="module", params=STATEMENTS)
def statement(request: pytest.FixtureRequest, predict_row: Predict) -> Statement:
    return STATEMENTS[request.param](predict_row)


def test_a_stated_uncertainty_covers_the_rows_it_is_claimed_for(statement: Statement) -> None:
    assert statement.stated >= statement.supported


def test_a_stated_uncertainty_is_not_far_more_than_the_rows_support(statement: Statement) -> None:
    assert statement.stated <= 2 * statement.supported + ROUNDING


def test_each_of_two_cards_is_predicted_as_surely_as_one(predict_row: Predict) -> None:
    rows = [row for row in SEVERAL_CARDS if not (is_sharded(row) or is_compiled(row))]
    assert {row["cards"] for row in rows} == {1, 2}
    assert max(map(abs, _allocated(predict_row, rows))) < memory.EAGER.allocated
    assert max(map(abs, _reserved(predict_row, rows))) < memory.EAGER.reserved


def test_packed_rows_are_predicted_as_surely_as_full_ones(predict_row: Predict) -> None:
    rows = [row for row in PACKED if not is_compiled(row)]
    assert all(row["documents_apart"] for row in rows)
    assert Statement(0.0, _allocated(predict_row, rows)).supported < memory.EAGER.allocated / 2
    assert Statement(0.0, _reserved(predict_row, rows)).supported < memory.EAGER.reserved / 2


@pytest.mark.parametrize(
    ("errors", "share", "supported"),
    [
        ([0.1] * 3, 1.0, 0.2),
        ([0.04, -0.08, 0.0, 0.0], 1.0, 0.14),
        ([0.01] * 299 + [-0.2], 1.0, 0.202),
        ([0.01] * 99 + [-0.2], 0.95, 0.0103),
    ],
)
def test_few_rows_support_less_than_many(
    errors: list[float], share: float, supported: float
) -> None:
    assert Statement(0.0, errors, share=share).supported == pytest.approx(supported)


@pytest.mark.parametrize("row", [TABLE[0], *filter(is_compiled, TABLE)], ids=["eager", "a", "b"])
def test_a_prediction_states_what_is_derived(predict_row: Predict, row: Row) -> None:
    compiled = memory.COMPILED_RECOMPUTED if is_recomputed(row) else memory.COMPILED
    stated = compiled if is_compiled(row) else memory.EAGER
    prediction = predict_row(row)
    assert prediction.uncertainty == stated.allocated
    assert prediction.reserved_uncertainty == stated.reserved


def test_what_fits_without_a_replay_fits_by_what_was_reserved(predict_row: Predict) -> None:
    worst = max(
        max(row["peak_reserved_bytes"], predict_row(row).peak_reserved_bytes)
        / min(row["peak_allocated_bytes"], predict_row(row).peak_allocated_bytes)
        for row in (*TABLE, *HELD_OUT)
    )
    assert worst <= memory.FRAGMENTATION <= 1.1 * worst


def test_an_uncertainty_has_one_meaning_wherever_it_decides(predict_row: Predict) -> None:
    for row in TABLE[::8]:
        prediction = predict_row(row)
        least = prediction.peak_allocated_bytes * (1 - prediction.uncertainty)
        assert prediction.fits(int(least) - 1) is Fit.NO


def test_a_compiled_configuration_at_three_quarters_of_a_budget_surely_fits(
    predict_row: Predict,
) -> None:
    (row,) = (r for r in TABLE if is_compiled(r) and not r["config"]["checkpoint_fraction"])
    prediction = predict_row(row)
    assert prediction.fits(int(prediction.peak_allocated_bytes / 0.77)) is Fit.YES


def test_compiled_layers_of_a_16_bit_base_keep_what_was_measured(predict_row: Predict) -> None:
    """The compiler keeps a copy of what an adapter reads, and not PEFT's wider casts of it."""
    rows = [row for row in COMPILED if row["config"]["quantization"] == "none"]
    assert len(rows) >= 2
    assert max(map(abs, _allocated(predict_row, rows))) < 0.01
