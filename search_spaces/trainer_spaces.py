"""A search space for a trainer: the part of it that the trainer can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from qlora_sweep.search_spaces.config import as_typed
from qlora_sweep.search_spaces.dimensions import Choices, FloatRange
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.kinds import QUANTIZATIONS, TrainerName
from qlora_sweep.search_spaces.loading import Offered
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.search_spaces.trainers import SHARES, Trainer, trainer_named


def for_trainer(
    space: SearchSpace,
    model: ModelSpec,
    *,
    is_preset: bool,
    fixed_settings: Mapping[str, Any] = MappingProxyType({}),
) -> Offered:
    """Return the part of a space that its trainer can run: the one typed, or named by the space.

    Values that it cannot run are left out of what is searched, and what is not named takes a value
    that it runs. The baseline is what the trainer does in its place.

    Args:
        space: as it was named.
        model: what is trained.
        is_preset: whether no person wrote the space, so that what it fixes gives way too.
        fixed_settings: settings that were typed.

    Raises:
        InputError: what was typed, or all that a person lists of a setting, is what the trainer
            cannot run; the message names the trainer, the setting and the value.
    """
    name: TrainerName = fixed_settings.get("trainer", space.values_of("trainer")[0])
    trainer = trainer_named(name, fixed_settings.get("method", space.values_of("method")[0]))
    if trainer.runs_everything:
        return Offered(space)
    free: dict[str, Any] = dict(space.dimensions)
    fixed = dict(space.fixed)
    if name != "sweep":
        fixed["trainer"] = name
    left_out: list[str] = []
    for key in list(trainer.runs) + ["checkpoint_fraction"]:
        if key == "method":
            continue
        named = _named(key, space, fixed_settings)
        allowed = trainer.runs.get(key) or _recomputable(named, trainer, model)
        kept = []
        dropped = []
        for value in named:
            if value in allowed:
                kept.append(value)
            else:
                dropped.append(as_typed(value))
        is_named = key in free or key in fixed
        is_own = key in fixed_settings or (is_named and not is_preset)
        if not kept and is_own:
            raise _refusal(trainer, key, named, allowed)
        is_listed = key not in free or free[key].values() is not None
        if key in fixed_settings or (len(kept) == len(named) and is_listed):
            continue
        if key in free and dropped:
            left_out.append(f"{key} {', '.join(dropped)}")
        _put(key, kept or [allowed[0]], free, fixed)
    if trainer.decides_adapter_dtype:
        _check_adapters(trainer, free, fixed, fixed_settings)
        free.pop("adapter_dtype", None)
        fixed.pop("adapter_dtype", None)
    notes: tuple[str, ...] = ()
    if left_out and not is_preset:
        notes = (f"Not searched, as {trainer.label} cannot run it: {'; '.join(left_out)}.",)
    baseline = _baseline(space, trainer, name, model)
    changes = {"dimensions": free, "fixed": fixed, "baseline": baseline}
    return Offered(space.changed(changes), notes)


def _put(key: str, values: Sequence[Any], free: dict[str, Any], fixed: dict[str, Any]) -> None:
    """Let a setting have some values: fixed where it is one, else searched."""
    free.pop(key, None)
    fixed.pop(key, None)
    if len(values) == 1:
        fixed[key] = values[0]
    else:
        free[key] = Choices(choices=tuple(values))


def _baseline(
    space: SearchSpace, trainer: Trainer, name: TrainerName, model: ModelSpec
) -> dict[str, Any]:
    """Return what the trainer does in the baseline's place."""
    asked = space.baseline_config()
    run = trainer.as_run(asked, model=model, half="bf16").changed(trainer=name)
    # The method is the space's, which has no other baseline.
    return {**space.baseline, **run.changed(method=asked.method).changes_from(asked)}


def _named(key: str, space: SearchSpace, fixed_settings: Mapping[str, Any]) -> Sequence[Any]:
    """Return the values of a setting that a space has, or the one that was typed; of a range
    without steps those in it that a trainer may take."""
    if key in fixed_settings:
        return (fixed_settings[key],)
    dimension = space.dimensions.get(key)
    if not isinstance(dimension, FloatRange) or dimension.values() is not None:
        return space.values_of(key)
    return [share for share in SHARES if dimension.low <= share <= dimension.high]


def _recomputable(shares: Sequence[float], trainer: Trainer, model: ModelSpec) -> list[float]:
    """Return the shares of recomputed layers that a trainer can run: those that are named, first,
    and none or all of them."""
    able = [share for share in shares if trainer.recomputable(share, model.hidden_layers)]
    return list(dict.fromkeys(able + [0.0, 1.0]))


def _refusal(
    trainer: Trainer, key: str, values: Sequence[Any], allowed: Sequence[Any]
) -> InputError:
    named = " or ".join(map(as_typed, values)) or "of that range"
    instead = " or ".join(map(as_typed, allowed))
    if key == "checkpoint_fraction":
        instead = trainer.shares_in_words
    return InputError(f"{trainer.label} cannot run {key} {named}: use {instead}")


def _check_adapters(
    trainer: Trainer,
    free: dict[str, Any],
    fixed: dict[str, Any],
    fixed_settings: Mapping[str, Any],
) -> None:
    """Keep the bases that the trainer gives a typed type of the adapters, and refuse one that it
    gives none of the space."""
    if "adapter_dtype" not in fixed_settings:
        return
    bases: Sequence[Any] = [fixed_settings.get("quantization", fixed.get("quantization", "nf4"))]
    is_free = "quantization" in free and "quantization" not in fixed_settings
    if is_free:
        bases = free["quantization"].values()
    typed = fixed_settings["adapter_dtype"]
    given = {base: trainer.adapter_dtypes[QUANTIZATIONS[base].bits < 16][0] for base in bases}
    kept = [base for base in bases if given[base] == typed]
    if not kept:
        allowed = set(given.values())
        raise _refusal(trainer, "adapter_dtype", [typed], sorted(allowed))
    if is_free:
        _put("quantization", kept, free, fixed)
