"""What is said of a study's texts, of an epoch of them, and of what its trials learned."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from reports.decision import decision_of
from reports.page import figures_of, render
from reports.quality import rank_claim
from reports.summary import summary_of
from reports.texts import cut_words, epoch_words, texts_of
from search_spaces.config import TrialConfig
from search_spaces.prices import Offer
from storage.best import best_document
from storage.definition import StudySnapshot
from storage.epochs import epoch_cost
from storage.ranking import rank, rank_study
from storage.records import EpochRecord, TrialRecord
from sweep.terminal.summary import best_text, last_screen
from tests.reports.synthetic import HOSTILE, definition, fits, snapshot
from tests.storage.builders import confirmed
from tests.sweep.prepared_texts import a_summary

SHORT = TrialConfig(micro_batch_size=8, seq_len=512)
LONG = TrialConfig(micro_batch_size=8, seq_len=2048)
TARGET = {"emulated_on": None}


def an_epoch(**changes: Any) -> EpochRecord:
    values = {
        "rows": 9_400,
        "rows_cut": 900,
        "rows_left_out": 100,
        "tokens": 3_000_000,
        "tokens_cut": 0.032,
        "tokens_left_out": 0.011,
        "padded_tokens": 4_000_000,
        "loss_tokens": 2_880_000,
        "steps": 1200,
    }
    return EpochRecord.model_validate(values | changes)


def of_texts(*records: TrialRecord, **space: Any) -> StudySnapshot:
    values = {
        "data": "mine.jsonl",
        "dimensions": {
            "lora_rank": {"choices": [8, 16, 64]},
            "seq_len": {"choices": [512, 2048]},
        },
        "fixed": {"micro_batch_size": 8},
    }
    about = definition(space=values | space, **TARGET)
    known = about.model_copy(update={"texts": a_summary(source="mine.jsonl")})
    return snapshot(records, definition=known)


def trained(number: int, speed: float, config: TrialConfig, **epoch: Any) -> TrialRecord:
    return fits(number, speed, config).model_copy(update={"epoch": an_epoch(**epoch)})


def priced(known: StudySnapshot) -> StudySnapshot:
    offer = Offer(
        gpu="a10", usd_per_hour=3.6, provider="here", source="a list", date=date(2026, 11, 1)
    )
    return replace(known, offer=offer)


def test_an_epoch_is_its_loss_tokens_over_the_speed_and_costs_what_the_card_does() -> None:
    known = priced(of_texts(trained(0, 8_000.0, SHORT)))
    cost = epoch_cost(known, known.records[0])
    assert cost is not None
    assert cost.seconds == pytest.approx(360.0)
    assert cost.dollars == pytest.approx(0.36)
    assert cost.seconds_low is not None
    assert cost.seconds_high is not None
    assert cost.seconds_low < 360.0 < cost.seconds_high
    epoch = best_document(known)["epoch"]
    assert epoch["seconds"] == pytest.approx(360.0)
    assert epoch["dollars"] == pytest.approx(0.36)
    assert (epoch["loss_tokens"], epoch["tokens_cut"]) == (2_880_000, 0.032)


def test_without_texts_nothing_is_said_of_an_epoch() -> None:
    known = snapshot([fits(0, 8_000.0)], definition=definition(**TARGET))
    assert not {"epoch", "texts"} & best_document(known).keys()
    assert texts_of(known) is None
    assert "epoch" not in last_screen(known)
    assert "One epoch" not in render(known)


def test_an_epoch_on_a_card_that_another_stood_in_for_takes_the_predicted_speed() -> None:
    known = of_texts(trained(0, 8_000.0, SHORT))
    about = known.definition.model_copy(
        update={"target": known.definition.target.model_copy(update={"emulated_on": "H200"})}
    )
    other = replace(known, definition=about)
    assert best_document(other)["epoch"]["seconds"] is None
    assert epoch_words(other, other.records[0]) is None


def test_what_a_length_cuts_off_stands_beside_its_speed() -> None:
    known = of_texts(trained(0, 8_000.0, SHORT))
    assert cut_words(known.records[0]) == (
        "length 512 cuts off 3.2 % of the tokens (900 of 9,500 training rows); 100 more rows, "
        "1.1 % of the tokens, left out: nothing to learn is left of them"
    )
    for words in (last_screen(known), best_text(known), render(known)):
        assert "cuts off 3.2 % of the tokens" in " ".join(words.split())


def test_a_length_that_cuts_nothing_says_so() -> None:
    known = of_texts(trained(0, 8_000.0, LONG, rows_cut=0, rows_left_out=0, tokens_cut=0.0))
    assert cut_words(known.records[0]) == "length 2,048 cuts nothing off"
    one = of_texts(trained(0, 8_000.0, LONG, rows_cut=0, rows_left_out=1, tokens_cut=0.0))
    assert cut_words(one.records[0]) == (
        "length 2,048 cuts nothing off; 1 row, 1.1 % of the tokens, left out: nothing to learn "
        "is left of it"
    )


def test_the_fastest_of_each_length_is_shown_with_what_it_leaves_out() -> None:
    known = of_texts(
        trained(0, 5_000.0, LONG, tokens_cut=0.0, tokens_left_out=0.0, loss_tokens=3_000_000),
        trained(1, 8_000.0, SHORT.model_copy(update={"lora_rank": 8})),
        trained(2, 7_000.0, SHORT.model_copy(update={"lora_rank": 64})),
    )
    section = texts_of(known)
    assert section is not None
    assert [row[:4] for row in section.cuts] == [
        ("512", "1", "8,000", "4.3 %"),
        ("2,048", "0", "5,000", "0 %"),
    ]
    assert section.cuts[0][4] == "6 min 0 s"
    assert decision_of(known).job_tokens == 2_880_000


def test_the_names_of_texts_are_escaped() -> None:
    known = of_texts(trained(0, 8_000.0, SHORT))
    about = known.definition.model_copy(update={"texts": a_summary(source=HOSTILE)})
    assert HOSTILE not in render(replace(known, definition=about))


# Held-out losses


def learned(
    number: int, rank: int, loss: float, half: float | None = None, speed: float = 9_000.0
) -> TrialRecord:
    quality: dict[str, Any] = {
        "eval_loss": loss,
        "eval_tokens": 4_000,
        "eval_seq_len": 512,
        "train_tokens": 600_000,
        "train_loss": loss - 0.1,
        "steps": 100,
        "seconds": 60.0,
        "seed": 0,
    }
    if half is not None:
        quality |= {"seeds": (0, 1, 2), "eval_loss_ci95": (loss - half, loss + half)}
    config = SHORT.model_copy(update={"lora_rank": rank})
    record = fits(number, speed, config, quality=quality)
    return record.model_copy(update={"epoch": an_epoch(), "is_baseline": number == 0})


def about_loss(*records: TrialRecord) -> StudySnapshot:
    return of_texts(*records, objectives=["tokens_per_second", "eval_loss"], weights="pretrained")


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ((learned(0, 16, 2.0, 0.01), learned(1, 64, 1.9, 0.01)), "refuted on these texts"),
        ((learned(0, 16, 1.9, 0.01), learned(1, 64, 2.0, 0.01)), "confirmed on these texts"),
        ((learned(0, 16, 2.0, 0.1), learned(1, 64, 1.9, 0.1)), "intervals over seeds overlap"),
        ((learned(0, 16, 2.0), learned(1, 64, 1.9)), "not both were trained with several seeds"),
        ((learned(0, 8, 2.0), learned(1, 64, 1.9)), "rank 16 was not trained here"),
        ((learned(0, 16, 2.0, 0.1),), "any other rank was not trained here"),
    ],
)
def test_a_claim_about_rank_is_judged_by_the_intervals_over_seeds(
    records: tuple[TrialRecord, ...], said: str
) -> None:
    ranking = rank_study(about_loss(*records))
    assert said in rank_claim(ranking)


def at_rate(record: TrialRecord, rate: float) -> TrialRecord:
    config = record.config.model_copy(update={"learning_rate": rate})
    return record.model_copy(update={"config": config})


def test_a_claim_about_rank_is_not_judged_by_what_another_learning_rate_did() -> None:
    rates = {"learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}
    dimensions = {"lora_rank": {"choices": [8, 16, 64]}, **rates}

    def said(*records: TrialRecord) -> str:
        known = of_texts(
            *records,
            objectives=["tokens_per_second", "eval_loss"],
            weights="pretrained",
            dimensions=dimensions,
            fixed={"micro_batch_size": 8, "seq_len": 512},
        )
        return rank_claim(rank_study(known))

    own, faster = learned(0, 16, 2.0, 0.01), at_rate(learned(1, 8, 1.5, 0.01), 5e-3)
    assert "not judged, as no two trials differ in rank alone, but in learning rate too" in said(
        own, faster
    )
    alike = learned(2, 64, 2.1, 0.01)
    judged = said(own, faster, alike)
    assert "confirmed on these texts" in judged
    assert "that of rank 64, the lowest of those that differ in nothing else, is 2.1" in judged


def test_the_report_shows_loss_against_speed_and_against_rank() -> None:
    known = about_loss(learned(0, 16, 2.0, 0.01), learned(1, 64, 1.9, 0.02, speed=8_000.0))
    figures = {figure.id: figure for figure in figures_of(known)}
    assert {"loss-speed", "loss-rank"} <= figures.keys()
    (trace,) = figures["loss-rank"].plain["data"]
    assert sorted(trace["x"]) == [16, 64]
    assert trace["y"] == "@eval_loss"
    assert sorted(trace["error_y"]["array"]) == pytest.approx([0.01, 0.02])
    table = figures["loss-speed"].table
    assert table is not None
    assert {row[3] for row in table.rows} == {"2.0000 (1.99–2.01)", "1.9000 (1.88–1.92)"}
    assert "refuted on these texts" in render(known)
    assert "held-out loss" in {fact.label for fact in summary_of(known).facts}
    assert "held-out texts" in last_screen(known)


def test_a_study_that_asked_for_no_loss_has_no_such_section() -> None:
    known = of_texts(trained(0, 8_000.0, SHORT))
    assert not {"loss-speed", "loss-rank"} & {figure.id for figure in figures_of(known)}


def test_losses_whose_intervals_overlap_are_close_and_others_are_not() -> None:
    near = about_loss(learned(0, 16, 2.0, 0.1), learned(1, 64, 1.95, 0.1))
    assert rank_study(near).close
    far = about_loss(learned(0, 16, 2.0, 0.01), learned(1, 64, 1.9, 0.01))
    assert not rank(far.records, far.definition).close


def test_a_baseline_that_is_faster_and_no_answer_is_said_so_where_the_gain_is() -> None:
    """Its length is fast at leaving texts out, so the space does not offer it."""
    about = {
        "dimensions": {"seq_len": {"choices": [1024, 2048]}},
        "fixed": {"micro_batch_size": 8, "lora_rank": 16},
        "baseline": {"micro_batch_size": 8, "seq_len": 512},
    }
    baseline = trained(0, 8_000.0, SHORT, tokens_cut=0.4)
    winner = trained(1, 7_000.0, LONG)
    known = of_texts(baseline, winner, **about)
    words = (
        "the baseline was measured faster and is no answer: its length 512 cuts off 40 % of "
        "the tokens (900 of 9,500 training rows)"
    )
    again = replace(known, confirmations=confirmed(baseline, winner))
    for text in (last_screen(known), best_text(known), render(known), last_screen(again)):
        assert words in " ".join(text.split())
    for slow in (
        of_texts(trained(0, 6_000.0, SHORT), winner, **about),
        of_texts(baseline, winner),
        of_texts(winner),
    ):
        assert "is no answer" not in best_text(slow)
    plain = snapshot(
        [fits(0, 8_000.0, SHORT), fits(1, 7_000.0, LONG)],
        definition=definition(space=about, **TARGET),
    )
    assert (
        "the baseline was measured faster and is no answer: the space does not hold it"
        in best_text(plain)
    )


@pytest.mark.parametrize(
    ("lost", "is_advised"),
    [
        ({"rows_cut": 3}, True),
        ({"rows_cut": 0, "rows_left_out": 0}, False),
        ({"rows_cut": 0, "rows_left_out": 5}, True),
    ],
)
def test_longer_rows_are_advised_only_where_some_are_cut_or_left_out(
    lost: dict[str, int], is_advised: bool
) -> None:
    seq_len = 2048
    config = TrialConfig(micro_batch_size=8, seq_len=seq_len)
    known = of_texts(trained(0, 8_000.0, config, **lost))
    assert ("Offer larger values of seq_len" in best_text(known)) is is_advised
    limited = known.definition.model | {"config": {"max_position_embeddings": seq_len}}
    about = known.definition.model_copy(update={"model": limited})
    assert "Offer larger values" not in best_text(replace(known, definition=about))
