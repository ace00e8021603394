"""What a person names becomes a search space: a shipped preset or a YAML file of theirs, with the
settings that they typed and what their dataset makes worth searching."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from qlora_sweep.search_spaces.config import Packing, TrialConfig, needed_by, parse_config
from qlora_sweep.search_spaces.dataset_choice import DatasetChoice
from qlora_sweep.search_spaces.dimensions import Choices, read_value
from qlora_sweep.search_spaces.documents import (
    Document,
    exists,
    home_expanded,
    parse_yaml,
    read_text,
    validate,
)
from qlora_sweep.search_spaces.errors import InputError, did_you_mean, in_percent
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.gpus import find_gpu, match_product
from qlora_sweep.search_spaces.kinds import METHODS
from qlora_sweep.search_spaces.learning_rates import learning_rate_of
from qlora_sweep.search_spaces.models import ModelSpec, located
from qlora_sweep.search_spaces.presets import preset_space, preset_texts
from qlora_sweep.search_spaces.rules import own_settings
from qlora_sweep.search_spaces.space import SearchSpace, largest_whole
from qlora_sweep.search_spaces.vision import least_length, seen_image

PACKINGS: tuple[str, ...] = get_args(Packing)
"""How sequences are put into micro-batches; the first is the standard recipe's."""

_LENGTH_STEP = 64
"""Tokens in whose multiples a length is chosen that nobody named."""


def preset_name(typed: str) -> str | None:
    """Return the shipped preset that a name means, whatever its case; None where none does.

    A path, or the name of a file that is there, is no preset unless it is written just like one.
    """
    presets = preset_texts()
    if typed in presets:
        return typed
    wanted = typed.strip().lower()
    is_free = wanted in presets and not _is_path(typed, home_expanded(typed))
    return wanted if is_free else None


def _is_path(text: str, path: Path) -> bool:
    return (
        path.suffix in (".yaml", ".yml") or "/" in text or (text != "" and exists(path, label=text))
    )


_DATASET_ENDINGS = frozenset({".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt"})


def load_space(name_or_path: str) -> SearchSpace:
    """Return the space of a shipped preset, whatever the case of its name, or of a YAML file.

    Raises:
        InputError: neither a preset nor a file, or a file that does not describe a space.
        EnvironmentFault: the file is there and cannot be read.
    """
    preset = preset_name(name_or_path)
    if preset is not None:
        return preset_space(preset)
    path = home_expanded(name_or_path)
    if not _is_path(name_or_path, path):
        gpu = match_product(name_or_path)
        if gpu is not None:
            written = f"`sweep init --gpu {gpu.name} -o {gpu.name}.yaml`"
            raise InputError(f"the {gpu.name} has no preset: {written} writes a space for it")
        raise InputError(
            f"unknown preset '{name_or_path}'"
            f"{did_you_mean(name_or_path, preset_texts(), lists='sweep presets')} "
            "(a preset, or the path of a YAML file)"
        )
    if path.suffix.lower() in _DATASET_ENDINGS:
        raise InputError(
            f"{name_or_path} is no search space (YAML) but, by its name, a dataset: name a preset "
            f"or a space, and the dataset with --data {shlex.quote(name_or_path)}"
        )
    space = parse_space(read_text(path, label=name_or_path), label=name_or_path)
    data = None if space.data is None else located_dataset(space.data, beside=path.parent)
    here = {"model": located(space.model, beside=path.parent), "data": data}
    return replaced(space, **here)


def located_dataset(choice: DatasetChoice, *, beside: Path) -> DatasetChoice:
    """Return a choice of a dataset as a file in the directory ``beside`` means its names.

    What is not there beside the file is left as it is: a path from where the command runs, or a hub
    id.
    """
    found: dict[str, str] = {}
    for key in ("texts", "tokenizer"):
        name = getattr(choice, key)
        if name and exists(path := beside / home_expanded(name), label=name):
            found[key] = str(path.absolute())
    return replaced(choice, **found)


def shipped_presets() -> list[SearchSpace]:
    """Return the shipped presets by name."""
    return [load_space(name) for name in preset_texts()]


def parse_space(text: str, *, label: str) -> SearchSpace:
    """Read a space from YAML.

    Args:
        text: the YAML.
        label: the file as the person named it, for messages; its stem is the default name.

    Raises:
        InputError: an unknown key, a value that cannot be, or keys that contradict each other.
    """
    document = parse_yaml(text, label=label)
    stem = re.sub(r"[^\w.-]+", "-", unicodedata.normalize("NFC", Path(label).stem))
    values = {"name": stem.strip(".-")[:64] or "space", **document.values}
    space = validate(SearchSpace, values, document)
    if space.gpu not in ("auto", "cpu"):
        try:
            find_gpu(space.gpu)
        except InputError as error:
            raise InputError(f"{document.where('gpu')}: gpu: {error}") from error
    validate(TrialConfig, space.baseline, document, at=("baseline",), about="baseline: ")
    try:
        space.baseline_config()
    except InputError as error:
        raise InputError(f"{document.where('baseline')}: {error}") from error
    return space


def with_fixed(space: SearchSpace, fixed_settings: Mapping[str, Any]) -> SearchSpace | TrialConfig:
    """Return ``space`` with some settings fixed; one configuration where nothing is free.

    What a typed value needs of settings that are neither typed nor searched is fixed too, and a
    baseline's micro-batch gives way to an effective batch that is typed: the file knew nothing of
    it.

    Raises:
        InputError: no configuration takes such a value, no batch of the space goes with it, or it
            is of pairs and the space is not.
    """
    options = Document("options")
    values = {
        key: read_value(key, value, document=options) for key, value in fixed_settings.items()
    }
    if values.get("trainer") == "sweep" and "trainer" not in space.fixed:
        # That is what a space says where it names none.
        del values["trainer"]
    method = values.get("method", space.values_of("method")[0])
    if not METHODS[method].is_on_pairs:
        standard = TrialConfig()
        for key in ("loss_type", "dpo_beta", "reference"):
            if key in values and values[key] != getattr(standard, key):
                raise InputError(f"{key} is of training on pairs: add --method dpo")
    needed = {k: v for k, v in needed_by(values).items() if k not in space.dimensions}
    fixed = {**space.fixed, **needed, **values}
    free = {key: dimension for key, dimension in space.dimensions.items() if key not in values}
    if not free:
        return parse_config(fixed, where="options")
    baseline = dict(space.baseline)
    effective = values.get("effective_batch_size")
    if "seq_len" in values and "seq_len" in baseline:
        baseline |= _at_length(baseline, values["seq_len"])
    if effective and "micro_batch_size" in baseline and "effective_batch_size" not in baseline:
        share = effective // baseline.get("data_parallel", fixed.get("data_parallel", 1))
        baseline["micro_batch_size"] = largest_whole(baseline["micro_batch_size"], share)
    # What is typed is asked for, whatever the file leaves out.
    left_out = [entry for entry in space.leave_out if not entry.keys() <= values.keys()]
    changes = {"dimensions": free, "fixed": fixed, "baseline": baseline, "leave_out": left_out}
    return space.changed(changes)


def _at_length(baseline: Mapping[str, Any], seq_len: int) -> dict[str, int]:
    """Return the size of a baseline at another length: about as many tokens in a micro-batch, at
    least one sequence, as published recipes have it."""
    known = parse_config(baseline, where="baseline")
    tokens = known.micro_batch_size * known.seq_len
    return {"seq_len": seq_len, "micro_batch_size": max(1, tokens // seq_len)}


def with_room_for_images(space: SearchSpace, model: ModelSpec) -> SearchSpace:
    """Return a space whose baseline has rows that its image goes into; a preset's knows of none."""
    least = missing_length(space.baseline_config(), model)
    if least is None:
        return space
    length = min(filter(least.__le__, space.values_of("seq_len")), default=least)
    return space.changed({"baseline": {**space.baseline, **_at_length(space.baseline, length)}})


def missing_length(config: TrialConfig, model: ModelSpec) -> int | None:
    """Return a length that a configuration's image goes into; None where it has no image, or its
    own length will do."""
    image = seen_image(config, model)
    if image is None or config.seq_len >= least_length(image):
        return None
    return -(-least_length(image) // _LENGTH_STEP) * _LENGTH_STEP


@dataclass(frozen=True)
class Length:
    """A sequence length, and what it cuts off the examples."""

    seq_len: int
    supervised_cut: float
    """Share of the dataset's supervised tokens that it cuts off, 0 to 1."""


@dataclass(frozen=True)
class Offered:
    """A space as a dataset makes it, and what was done to it."""

    space: SearchSpace
    notes: tuple[str, ...] = ()
    """For a person, a sentence each."""


def with_own_settings(
    space: SearchSpace,
    model: ModelSpec,
    *,
    is_preset: bool,
    fixed_settings: Collection[str] = (),
) -> Offered:
    """Return a space with the settings that the model decides (`own_settings`), where the person
    named none.

    Args:
        space: as it was named.
        model: what is trained.
        is_preset: whether what the space says of them is ours.
        fixed_settings: settings that were typed.
    """
    free = dict(space.dimensions)
    fixed = dict(space.fixed)
    baseline = dict(space.baseline)
    reasons = []
    for key, (value, why) in own_settings(model).items():
        is_named = key in space.dimensions or key in space.fixed
        if key in fixed_settings or (is_named and not is_preset):
            continue
        free.pop(key, None)
        baseline.pop(key, None)
        fixed[key] = value
        reasons.append(f"{why}.")
    if not reasons:
        return Offered(space)
    changes = {"dimensions": free, "fixed": fixed, "baseline": baseline}
    return Offered(space.changed(changes), tuple(dict.fromkeys(reasons)))


def with_learning_rate(space: SearchSpace, model: ModelSpec) -> Offered:
    """Return a space of held-out loss that begins at the learning rate of the rule.

    Where rates are searched the baseline, which is the first trial, has the rule's. Elsewhere every
    trial has that of its own configuration.

    Args:
        space: with held-out loss among its objectives.
        model: what is trained.
    """
    rate = learning_rate_of(space.baseline_config(), model.config)
    between = f"{{low: {rate.low:g}, high: {rate.high:g}, log: true}}"
    if "learning_rate" in space.dimensions:
        note = f"The search begins at the baseline's learning rate, {rate.words}."
        baseline = {**space.baseline, "learning_rate": rate.value}
        return Offered(space.changed({"baseline": baseline}), (note,))
    if space.fixed.get("learning_rate") is not None:
        return Offered(space)
    note = f"Each trial has the learning rate of its own rank, the baseline {rate.words}"
    return Offered(space, (f"{note}; learning_rate: {between} under dimensions searches it.",))


def with_dataset(
    space: SearchSpace,
    lengths: Sequence[Length],
    *,
    names_its_lengths: bool,
    fixed_settings: Collection[str] = (),
    is_on_pairs: bool = False,
) -> Offered:
    """Return a space that searches what a dataset makes worth searching.

    Packing is searched where it is not fixed. Lengths are, where the person named none: those of a
    preset are for random sequences. The baseline stays the published recipe, which does not pack.

    Args:
        space: as it was named.
        lengths: to offer, at least one.
        names_its_lengths: whether the space's lengths are the person's own.
        fixed_settings: settings that were typed.
        is_on_pairs: whether the texts are pairs, which are never packed.

    Raises:
        InputError: what is left makes no space.
    """
    dimensions: dict[str, Any] = dict(space.dimensions)
    fixed = dict(space.fixed)
    notes = []
    if not any("packing" in named for named in (dimensions, fixed, fixed_settings)):
        packings = [packing for packing in PACKINGS if packing != "packed" or not is_on_pairs]
        dimensions["packing"] = Choices(choices=tuple(packings))
        notes.append(f"Packing is searched as well: {', '.join(packings)}.")
    if not names_its_lengths and "seq_len" not in fixed_settings:
        fixed.pop("seq_len", None)
        choices = []
        cuts = []
        for length in lengths:
            choices.append(length.seq_len)
            cuts.append(f"{length.seq_len} (cuts {in_percent(length.supervised_cut)})")
        dimensions["seq_len"] = Choices(choices=tuple(choices))
        shown = ", ".join(cuts)
        had = ", ".join(map(str, space.values_of("seq_len")))
        own = f" in place of {had}" if "seq_len" in space.dimensions else ""
        notes.append(
            f"Lengths are those of the dataset{own}: {shown} of all supervised tokens; "
            "--seq-len, or seq_len in a space file of your own, keeps another."
        )
    baseline = {"packing": PACKINGS[0], **space.baseline}
    changes = {"dimensions": dimensions, "fixed": fixed, "baseline": baseline}
    return Offered(space.changed(changes), tuple(notes))
