"""The way from a person's choice of texts to prepared ones, and to the space that they make.

What runs, plans and trains on texts comes by here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from qlora_sweep.search_spaces.dataset_choice import CUT_MAX, DatasetChoice
from qlora_sweep.search_spaces.documents import Document, exists, home_expanded, validate
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.feasibility import HOW_TO_NAME_A_DATASET
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.kinds import METHODS
from qlora_sweep.search_spaces.loading import Length, Offered, located_dataset, with_dataset
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.definition import StudyDefinition
from qlora_sweep.sweep.data.lengths import worthwhile_lengths
from qlora_sweep.sweep.data.prepared_dataset import (
    DatasetRequest,
    PreparedDataset,
    dataset_directory,
    open_prepared,
)
from qlora_sweep.sweep.data.study_epochs import StudyEpochs

ReadDataset = Callable[[DatasetRequest], PreparedDataset]
"""Reads and tokenizes texts, or finds what did so before."""

_OF_THE_FILE = ("text_column", "prompt_column", "completion_column", "format")
"""What is said of one file's rows and of no other's."""


def typed_dataset(known: DatasetChoice | None, typed: Mapping[str, Any]) -> DatasetChoice | None:
    """Return the choice of a dataset with what was typed in place of what was known.

    Args:
        known: of the space or the study; None where it has no texts.
        typed: keys of the choice; None leaves what is known.

    Raises:
        InputError: a value that cannot be, or an option of a dataset, and none is named.
    """
    given = {key: value for key, value in typed.items() if value is not None}
    if not given:
        return known
    if known is None and "texts" not in given:
        key = next(iter(given))
        raise InputError(
            f"data.{key} is about a dataset, and none is named: {HOW_TO_NAME_A_DATASET}"
        )
    before: dict[str, Any] = {}
    if known is not None:
        before = known.model_dump()
    if "texts" in given:
        for key in _OF_THE_FILE:
            before.pop(key, None)
    choice = validate(DatasetChoice, {**before, **given}, Document("options"))
    return located_dataset(choice, beside=Path.cwd())


def is_same_choice(known: DatasetChoice | None, given: DatasetChoice) -> bool:
    """Whether a study's texts are those that a space names.

    A study knows a file by its whole path. Where that is gone, a space file's name for it is not
    found any more, and is the same where the path ends in it.
    """
    if known is None or known == given:
        return known is not None
    name = Path(given.texts).parts
    is_its_name = bool(name) and Path(known.texts).parts[-len(name) :] == name
    if not is_its_name or replaced(known, texts=given.texts) != given:
        return False
    return not (_is_here(known) or _is_here(given))


def _is_here(choice: DatasetChoice) -> bool:
    return exists(home_expanded(choice.texts), label=choice.texts)


def dataset_of_study(
    stored: StudyDefinition, *, model: ModelSpec, read: ReadDataset
) -> PreparedDataset | None:
    """Return the texts that a study goes on with; None of a study without.

    Where their source is not there any more, what was prepared of it is enough. Where it is there,
    it is looked at: a changed one has another fingerprint.

    Raises what ``read`` raises.
    """
    choice = stored.space.data
    if choice is None:
        return None
    if stored.texts is not None and not _is_here(choice):
        with suppress(EnvironmentFault):
            return open_prepared(dataset_directory() / stored.texts.fingerprint)
    return read(DatasetRequest.of(choice, model))


def space_with_dataset(
    space: SearchSpace,
    dataset: PreparedDataset,
    *,
    model: ModelSpec,
    is_preset: bool,
    fixed_settings: Mapping[str, Any] = MappingProxyType({}),
) -> Offered:
    """Return the space as its texts make it, and what that changed.

    Args:
        space: as it was named.
        dataset: what its trials would train on.
        model: what would be trained.
        is_preset: whether it was not written for this dataset.
        fixed_settings: settings that were typed.

    Raises:
        InputError: what is left makes no space.
    """
    refuse_other_kind(fixed_settings.get("method", space.values_of("method")[0]), dataset)
    has_length = "seq_len" in space.dimensions or "seq_len" in space.fixed
    is_own = has_length and not is_preset
    epochs = StudyEpochs.of_all(dataset)
    are_pairs = dataset.summary.are_pairs
    lengths = worthwhile_lengths(
        dataset.lengths(), max_positions=model.max_positions, truncation_at=epochs.truncation
    )
    offered = with_dataset(
        space,
        [Length(length, epochs.truncation(length).supervised_share) for length in lengths],
        names_its_lengths=is_own,
        fixed_settings=fixed_settings,
        is_on_pairs=are_pairs,
    )
    if not is_own and "seq_len" not in fixed_settings:
        return offered
    noun = "example"
    if are_pairs:
        noun = "pair"
    named = offered.space.values_of("seq_len")
    if "seq_len" in fixed_settings:
        named = (fixed_settings["seq_len"],)
    notes = list(offered.notes)
    for length in named:
        truncation = epochs.truncation(length)
        if truncation.supervised_share > CUT_MAX:
            notes.append(f"{truncation.words(noun)}.")
    return replace(offered, notes=tuple(notes))


def refuse_other_kind(method: str, dataset: PreparedDataset) -> None:
    """Refuse texts where pairs are trained on, and the other way round.

    Raises:
        InputError: says which method the dataset is for.
    """
    refuse_planned_alone(method)
    are_pairs = dataset.summary.are_pairs
    source = dataset.summary.source
    needs_pairs = METHODS[method].is_on_pairs
    if are_pairs and not needs_pairs:
        alone = "--set data.text_column=chosen"
        prompt = dataset.summary.columns_read.get("prompt")
        if prompt is not None:
            # Of an answer alone nothing is learned.
            alone = f"--set data.prompt_column={prompt} --set data.completion_column=chosen"
        raise InputError(
            f"{source}: its rows are pairs of a chosen and a rejected completion, which method "
            "dpo trains on: `sweep run --method dpo`, then `sweep train` of that study; or take "
            f"the chosen ones alone with {alone}"
        )
    if needs_pairs and not are_pairs:
        read = f"{source}: its rows are read as {dataset.summary.kind}, and method dpo needs pairs"
        cure = "columns chosen and rejected, as texts or as turns, with or without prompt"
        if {"chosen", "rejected"} <= set(dataset.summary.columns):
            cure = "--set data.format=preference"
        raise InputError(f"{read}: {cure}")


def refuse_planned_alone(method: str) -> None:
    """Refuse a method that nothing here trains by.

    Raises:
        InputError: says what does.
    """
    if method in METHODS and METHODS[method].generates:
        raise InputError(
            "method grpo is planned, and neither tried nor trained: nothing here generates "
            "completions. `sweep plan --method grpo`, without a dataset, says what the training "
            "step of TRL's GRPOTrainer needs"
        )
