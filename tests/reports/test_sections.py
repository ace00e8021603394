"""The page's sections of words alone say what the records say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reports.advice import how_to_go_faster
from reports.page import render
from reports.sections import environment_rows, next_steps_of, texts_of, trials_of
from reports.view import view_of
from search_spaces.config import TrialConfig
from storage.records import OutOfMemory, Verdict
from tests.reports.on_texts import LONG, SHORT, of_texts, trained
from tests.reports.synthetic import HOSTILE, fits, one_of_each, record, snapshot
from tests.sweep.prepared_texts import a_summary


def test_the_trials_can_be_filtered_by_the_verdicts_that_occurred_with_their_counts() -> None:
    section = trials_of(snapshot([fits(0, 8_000.0), record(1, OutOfMemory(stage="forward"))]))
    assert section is not None
    assert list(section.verdicts.values()) == ["fits (1)", "ran out of memory (1)"]
    assert trials_of(snapshot()) is None
    every = trials_of(snapshot(one_of_each()))
    assert every is not None
    assert list(every.verdicts) == [str(verdict) for verdict in Verdict]
    assert all(meaning.endswith(".") for meaning in every.meanings.values())


def test_the_environment_names_target_host_and_every_stored_version() -> None:
    rows = {row.name: row.value for row in environment_rows(snapshot())}
    known = {"target GPU": "a10", "measured on": "NVIDIA H200", "memory budget": "21.50 GiB"}
    assert rows.items() >= (known | {"torch": "2.13.0", "commit": "4f2c1d9"}).items()


def test_what_comes_next_is_said_of_a_winner_alone() -> None:
    section = next_steps_of(snapshot([fits(0, 8_000.0)]))
    assert section is not None
    assert section.commands[-1] == "sweep best a10-mistral --json"
    assert '"micro_batch_size": 8' in section.configuration
    assert next_steps_of(snapshot()) is None


def test_the_fastest_of_each_length_is_shown_with_what_it_leaves_out() -> None:
    known = of_texts(
        trained(0, 5_000.0, LONG, tokens_cut=0.0, tokens_left_out=0.0, loss_tokens=3_000_000),
        trained(1, 8_000.0, SHORT.model_copy(update={"lora_rank": 8})),
        trained(2, 7_000.0, SHORT.model_copy(update={"lora_rank": 64})),
    )
    section = texts_of(known)
    assert section is not None
    assert section.cuts == (
        ("512", "1", "8,000", "4.3 %", "6 min 0 s"),
        ("2,048", "0", "5,000", "0 %", "10 min 0 s"),
    )
    assert texts_of(snapshot([fits(0, 8_000.0)])) is None


def test_the_names_of_datasets_are_escaped() -> None:
    known = of_texts(trained(0, 8_000.0, SHORT))
    about = known.definition.model_copy(update={"texts": a_summary(source=HOSTILE)})
    assert HOSTILE not in render(replace(known, definition=about))


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

    def advised() -> str:
        return "\n".join(how_to_go_faster(view_of(known)))

    assert ("Offer larger values of seq_len" in advised()) is is_advised
    limited = known.definition.model | {"config": {"max_position_embeddings": seq_len}}
    known = replace(known, definition=known.definition.model_copy(update={"model": limited}))
    assert "Offer larger values" not in advised()
