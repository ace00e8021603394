"""Makes what ships worked out before: profiles of the shipped models, and surveys of the presets.

Run as ``python -m tests.sweep.predict.memory.shipping`` with ``profiles`` (`make profiles`: all is
traced, which takes hours) or ``surveys`` (`make surveys`: only what is asked and does not ship),
and with the names of models where only those are to be looked over, or traced anew: of the others
what ships is kept. The same contents make the same file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZIP_LZMA, ZipFile, ZipInfo

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.linears import linear_shapes
from qlora_sweep.search_spaces.loading import load_space, shipped_presets
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec, shipped_models
from qlora_sweep.search_spaces.presets import DEMO, preset_space, preset_texts
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.sweep.planning.candidates import single_changes
from qlora_sweep.sweep.planning.survey import SURVEYS, shipped_name, survey
from qlora_sweep.sweep.predict.forecast import Forecaster
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor, one_of_each_kind
from qlora_sweep.sweep.predict.memory.profile_store import (
    Traced,
    Tracer,
    TracingChildren,
    trace_layers,
    versions,
)
from qlora_sweep.sweep.predict.memory.profiles import Change, Profile, Structure
from qlora_sweep.sweep.predict.memory.shipped import (
    NOTHING,
    PROFILES,
    VERSIONS,
    ShippedProfiles,
    read,
)
from qlora_sweep.sweep.predict.speed.layers import SHIPPED as LAYERS
from tests.sweep.predict.forecasters import forecaster_on

_DATE = (1980, 1, 1, 0, 0, 0)


def preset_spaces() -> list[SearchSpace]:
    return [load_space(preset.name) for preset in shipped_presets()]


def forecaster_of(space: SearchSpace, model: ModelSpec, predictor: Any = None) -> Forecaster:
    return forecaster_on(space.gpu, model, predictor=predictor)


def predictor_of(space: SearchSpace, model: ModelSpec, **about: Any) -> TracingPredictor:
    capability = find_gpu(space.gpu).compute_capability
    return TracingPredictor(model, compute_capability=capability, **about)


def recommended(space: SearchSpace, model: ModelSpec, **about: Any) -> list[TrialConfig]:
    """What a plan finds of a preset for a model, and the fastest of each class of numerics, of
    which it shows what single changes would do; the baseline, which a study asks for as well."""
    predictor = predictor_of(space, model, **about)
    forecaster = forecaster_of(space, model, predictor)
    baseline = space.baseline_config()
    if forecaster.is_valid(baseline):
        predictor.predict_all([baseline])
    try:
        found = survey(space, forecaster).fastest_by_numerics.values()
    except InputError:
        return []
    return [best.config for best in found]


class Kept:
    """A tracer that keeps the answers of another, by the model's fingerprint."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.answers: dict[str, dict[Structure, Traced]] = {}

    def trace_all(
        self, model: ModelSpec, structures: Iterable[Structure]
    ) -> Generator[tuple[Structure, Traced]]:
        for structure, answer in self._tracer.trace_all(model, structures):
            self.answers.setdefault(model.fingerprint, {})[structure] = answer
            yield structure, answer

    def close(self) -> None:
        self._tracer.close()


def kept_of(model: ModelSpec, archive: Path) -> dict[Structure, Traced]:
    """What ships of a model, as it was traced."""
    shipped = ShippedProfiles(model, archive)
    members = read(archive, model.fingerprint) or {}
    found = {one: shipped.get(one) for one in map(structure_of, members.get("profiles", ()))}
    return {
        structure: asdict(known) if isinstance(known, Profile) else known
        for structure, known in found.items()
        if known is not None
    }


def structure_of(key: str) -> Structure:
    """The structure of a `Structure.key`."""
    shaping, is_checkpointed, *rest = json.loads(key)
    shaping = {"trainer": "sweep", **shaping, "checkpoint_fraction": float(is_checkpointed)}
    config = TrialConfig.model_construct(**shaping)
    return Structure(config, *rest)


def packed(model: ModelSpec, answers: Mapping[Structure, Traced]) -> dict[str, Any]:
    """What `ShippedProfiles` reads: see there for what a code is."""
    happenings: dict[Any, int] = {}
    codes: dict[tuple[int, ...], int] = {}
    sizes: dict[str, int] = {}
    profiles: dict[str, Any] = {}
    # In whatever order they were traced.
    for structure, answer in sorted(answers.items(), key=lambda each: each[0].key):
        if not isinstance(answer, dict):
            profiles[structure.key] = str(answer).removeprefix(f"model '{model.name}': ")
            continue
        own = [sizes.setdefault(json.dumps(size), len(sizes)) for size in answer["sizes"]]
        segments = {}
        for name, segment in answer["segments"].items():
            code, alive = [], list[int]()
            for what, key, size, purpose, by in segment["tape"]:
                happening = (what, key, own[size], purpose, by)
                if what == Change.BIRTH:
                    alive.append(key)
                    happening = (what, None, own[size], purpose, by)
                elif what == Change.DEATH:
                    later = alive[::-1].index(key)
                    alive.remove(key)
                    happening = (what, later, None, None, None)
                code.append(happenings.setdefault(happening, len(happenings)))
            segments[name] = codes.setdefault(tuple(code), len(codes)), segment["highest"]
        profiles[structure.key] = {**answer, "segments": segments}
        del profiles[structure.key]["sizes"]
    return {
        "profiles": profiles,
        "happenings": list(happenings),
        "codes": list(codes),
        "sizes": list(map(json.loads, sizes)),
    }


def write(archive: Path, members: Iterable[tuple[str, Any]]) -> None:
    """Write JSON values, so that the same ones make the same file."""
    with ZipFile(archive, "w", ZIP_LZMA) as file:
        for name, values in members:
            text = json.dumps(values, separators=(",", ":"))
            file.writestr(ZipInfo(name, _DATE), text, ZIP_LZMA)


def profiles(
    tracer: Tracer, names: Sequence[str] = (), *, is_anew: bool = False
) -> Iterator[tuple[str, Any]]:
    """All that a study or a plan of a preset asks of a shipped model; of models that are not among
    ``names``, where any are given, what ships.

    Args:
        tracer: traces what does not ship.
        names: of models.
        is_anew: whether nothing is kept of what ships of those.
    """
    yield VERSIONS, versions()
    tracer = Kept(tracer)
    with TemporaryDirectory() as empty:
        for model in shipped_models():
            is_asked = not names or model.name in names
            kept = NOTHING if is_anew and is_asked else PROFILES
            shipped = ShippedProfiles(model, kept)
            about: dict[str, Any] = {
                "cache_dir": Path(empty),
                "tracer": tracer,
                "shipped": shipped,
            }
            asked = TracingPredictor(model, **about)
            for preset in preset_texts() if is_asked else ():
                space = preset_space(preset, model=None if preset == DEMO else model.name)
                if space.gpu != "cpu":
                    for config in recommended(space, model, **about):
                        changes = single_changes(config, forecaster_of(space, model))
                        asked.predict_all(list(changes))
                elif space.model == model.name:
                    asked.predict_all(list(one_of_each_kind(space)))
            known = kept_of(model, kept) | tracer.answers.get(model.fingerprint, {})
            print(f"{model.name}: {len(known)} structures", file=sys.stderr)
            yield model.fingerprint, packed(model, known)


def layers() -> dict[str, Any]:
    """The layers of shipped models whose type is not known, by the model's fingerprint."""
    return {
        model.fingerprint: trace_layers(model)
        for model in shipped_models()
        if linear_shapes(model) is None
    }


def surveys() -> Iterator[tuple[str, Any]]:
    """The presets' surveys, from profiles that ship."""
    for space in preset_spaces():
        if space.gpu != "cpu":
            model = load_model_spec(space.model)
            shipped, nowhere = ShippedProfiles(model, PROFILES), Path("/nonexistent")
            predictor = predictor_of(space, model, cache_dir=nowhere, shipped=shipped)
            forecaster = forecaster_of(space, model, predictor)
            found = survey(space, forecaster).found
            values = found.model_dump(mode="json", exclude_defaults=True)
            yield shipped_name(space, forecaster), values


def main() -> None:
    is_anew = sys.argv[1] == "profiles"
    LAYERS.write_text(json.dumps(layers(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    with closing(TracingChildren(outlive=True)) as children:
        members = sorted(profiles(children, sys.argv[2:], is_anew=is_anew))
    write(PROFILES, members)
    write(SURVEYS, surveys())


if __name__ == "__main__":
    main()
