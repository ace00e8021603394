"""Whether what is asked can be: a space with no valid configuration, or without the dataset that it
needs, is refused before anything runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.dimensions import FloatRange
from qlora_sweep.search_spaces.errors import InputError, quote
from qlora_sweep.search_spaces.rules import (
    MISNAMED,
    STORED,
    Setting,
    Violation,
    broken_rules,
    misnamed_targets,
    not_as_stored,
)
from qlora_sweep.search_spaces.space import SearchSpace

TRIED_MAX = 5_000
"""Configurations that are held against the rules: all of a space, or so many drawn from it."""
DRAWN_MIN = 500
"""Drawn ones from which a rule that forbids every one is taken to forbid all."""
HOW_TO_NAME_A_DATASET = "name one with --data DATASET, or under data in a space file"


def refuse_impossible(asked: SearchSpace | TrialConfig, setting: Setting) -> None:
    """Refuse a space in which nothing can be valid, and a configuration that names no real module
    or asks for other weights than the model's are stored as.

    Any other configuration that a rule forbids is one that does not fit: that is an answer. Without
    a compute capability only what no GPU could run is refused.

    Raises:
        InputError: names the rules, and why.
    """
    if isinstance(asked, SearchSpace):
        broken = obstacles(asked, setting)
        what = f"space '{asked.name}': no configuration is valid"
    else:
        reason = misnamed_targets(asked, setting.model)
        what = "target_modules"
        rule = MISNAMED
        if reason is None:
            reason = not_as_stored(asked, setting.model)
            what = "quantization"
            rule = STORED
        broken = ()
        if reason is not None:
            broken = (Violation(rule, reason),)
    if broken:
        reasons = "; ".join(f"{violation.rule}: {violation.reason}" for violation in broken)
        raise InputError(f"{what}: {reasons}")


def obstacles(space: SearchSpace, setting: Setting) -> tuple[Violation, ...]:
    """Return the rules that leave no configuration of ``space`` valid; none where one is.

    Of a space of more than `TRIED_MAX` configurations so many are drawn, and what is left is taken
    to be possible unless one rule forbids them all.
    """
    reasons: dict[str, str] = {}
    by_all: set[str] = set()
    tried = 0
    size = space.size()
    is_whole = size is not None and size <= TRIED_MAX
    candidates = _drawn(space)
    if is_whole:
        candidates = space.combinations()
    for params in candidates:
        broken = dict(broken_rules(space.config(params), setting))
        if not broken:
            return ()
        tried += 1
        for name, why in broken.items():
            # What the nearest to a valid one breaks is what all of them break.
            reasons[name] = min(reasons.get(name, why), why, key=len)
        if tried == 1:
            by_all = set(broken)
        by_all &= broken.keys()
    if not is_whole and (not by_all or tried < DRAWN_MIN):
        return ()
    violations = []
    for name, why in reasons.items():
        if not by_all or name in by_all:
            violations.append(Violation(name, why))
    return tuple(violations)


def _drawn(space: SearchSpace) -> Iterator[dict[str, Any]]:
    """Yield some combinations of a large space."""
    drawn = random.Random(0)
    values = {key: dimension.values() for key, dimension in space.dimensions.items()}
    for _ in range(TRIED_MAX):
        params: dict[str, Any] = {}
        if space.columns is not None:
            for column in space.columns:
                params |= drawn.choice(column)
            yield params
            continue
        for key, dimension in space.dimensions.items():
            if isinstance(dimension, FloatRange) and values[key] is None:
                params[key] = dimension.at(drawn.random())
            else:
                params[key] = drawn.choice(values[key] or ())
        if space.goes_together(params):
            yield params


def refuse_without_dataset(space: SearchSpace) -> None:
    """Refuse what only a dataset, or only its held-out loss, can show.

    Raises:
        InputError: names the key, what is missing, and what to do.
    """
    for words in _missing(space):
        raise InputError(f"space '{space.name}': {words}")


def _missing(space: SearchSpace) -> Iterator[str]:
    data = space.data
    if "eval_loss" in space.objectives:
        missing = []
        if data is None:
            missing.append(f"a dataset ({HOW_TO_NAME_A_DATASET})")
        elif data.eval_fraction == 0:
            missing.append("examples that are held out (data.eval_fraction above 0)")
        if space.weights != "pretrained":
            own = f"random where nothing is said, whatever model {quote(space.model)} has"
            missing.append(f"weights: pretrained in the space ({own})")
        if missing:
            yield f"objectives: eval_loss needs {', and '.join(missing)}"
    elif data is not None and data.quality_tokens is not None:
        trains = f"quality_tokens {data.quality_tokens} is what trials train on for a held-out loss"
        yield f"data: {trains}: add eval_loss to the objectives, or leave quality_tokens out"
    values = space.values_of("packing") + (space.baseline.get("packing", "none"),)
    packed = [value for value in values if value != "none"]
    if data is None and packed:
        needs = f"packing {packed[0]} needs a dataset, as random sequences are full as they are"
        yield f"{needs}: {HOW_TO_NAME_A_DATASET}, or leave packing out"
