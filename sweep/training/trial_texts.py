"""Owns what texts are to a trial: its micro-batches or the verdict that there are none, and what a
measurement says of them.

Knows nothing of steps or time.
"""

from __future__ import annotations

from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from storage.records import Ineffective, Invalid, Measurement
from sweep.data.probing import check_is_causal
from sweep.training.texts import Texts, TextsRound, is_packed, takes_positions

ROWS_OF_TEXTS = "texts-make-no-micro-batch"
TOKENS_OF_TEXTS = "tokens-beyond-vocabulary"
AHEAD_OF_TEXTS = "texts-need-a-causal-model"
DOCUMENTS_TOGETHER = "documents_together"
"""Flag of packed rows whose texts see each other."""
ROUND_EXTRAPOLATED = "round_extrapolated"
"""Flag of a speed that is derived from micro-batches of other sizes than the epoch's."""


def round_of(
    texts: Texts, config: TrialConfig, model: Any, *, micro_steps: int
) -> TextsRound | Invalid | Ineffective:
    """Return what stands for the texts' epoch, or why a model cannot be trained on it.

    Args:
        texts: that are trained on.
        config: what makes micro-batches of them.
        model: the base.
        micro_steps: of an optimizer step that are really run.
    """
    try:
        made = TextsRound.of(texts, config, micro_steps=micro_steps)
    except InputError as error:
        return Invalid(rule=ROWS_OF_TEXTS, detail=str(error))
    known = int(model.get_input_embeddings().num_embeddings)
    if made.largest_token >= known:
        words = f"the texts hold token {made.largest_token:,}, and the model knows {known:,}"
        return Invalid(rule=TOKENS_OF_TEXTS, detail=words)
    if is_packed(config) and not takes_positions(model):
        return Ineffective(knob="packing", detail="the model is told no positions of tokens")
    return made


def looks_ahead(model: Any) -> Invalid | None:
    """Return why rows of texts cannot be padded for a model; None where they can."""
    try:
        check_is_causal(model)
    except InputError as error:
        return Invalid(rule=AHEAD_OF_TEXTS, detail=str(error))
    return None


def with_texts(
    measured: Measurement,
    made: TextsRound,
    *,
    documents_apart: bool | None,
    batch_wait_share: float,
) -> Measurement:
    """Return a measurement with what is known of its texts.

    Args:
        measured: on them.
        made: what was trained on.
        documents_apart: whether the texts of a packed row did not see each other; None where no
            row has two.
        batch_wait_share: of the time, that the host waited for micro-batches.
    """
    pace, ends = made.pace, measured.step_seconds_ci95
    flags = {
        DOCUMENTS_TOGETHER: documents_apart is False,
        ROUND_EXTRAPOLATED: not made.is_as_its_epoch,
    }
    return measured.model_copy(
        update={
            "step_seconds": measured.step_seconds * pace,
            "step_seconds_ci95": None if ends is None else (ends[0] * pace, ends[1] * pace),
            "samples_per_second": measured.samples_per_second / pace,
            "loss_tokens_per_step": made.loss_tokens_per_step,
            "padding_waste": made.padding_waste,
            "documents_apart": documents_apart,
            "batch_wait_share": batch_wait_share,
            "flags": (*measured.flags, *(name for name, is_set in flags.items() if is_set)),
        }
    )
