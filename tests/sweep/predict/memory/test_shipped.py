"""Profiles and surveys that ship: used at once, never stale, and where they are not, traced."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec, shipped_models
from qlora_sweep.search_spaces.presets import preset_space
from qlora_sweep.sweep.planning.answers import tracing
from qlora_sweep.sweep.planning.plan import what_ifs
from qlora_sweep.sweep.planning.survey import SURVEYS, Found, Survey, shipped_name, survey
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import (
    TRACED_BY,
    TracingChildren,
    source_digest,
    versions,
)
from qlora_sweep.sweep.predict.memory.profiles import Change, Profile, Structure
from qlora_sweep.sweep.predict.memory.shipped import (
    NOTHING,
    PROFILES,
    ROOT,
    VERSIONS,
    ShippedProfiles,
    read,
)
from tests.sweep.predict.memory import shipping
from tests.sweep.predict.memory.imagined_profile import MODEL, ImaginedTracer

CONFIG = TrialConfig()
STRUCTURE = Structure.of(CONFIG, is_checkpointed=True)
OTHERS = {**versions(), "torch": "1.0"}
RETRACED_OF_EACH_MODEL = 2


def archive(
    path: Path, of: dict[str, str], model: ModelSpec, answers: dict[Structure, Any]
) -> Path:
    members = [(VERSIONS, of), (model.fingerprint, shipping.packed(model, answers))]
    shipping.write(path / "profiles.zip", members)
    return path / "profiles.zip"


def imagined(path: Path, of: dict[str, str], **about: Any) -> ShippedProfiles:
    answers = {STRUCTURE: ImaginedTracer(**about).trace(MODEL, STRUCTURE)}
    return ShippedProfiles(MODEL, archive(path, of, MODEL, answers))


@pytest.mark.integration
@pytest.mark.parametrize("name", ["qwen3-8b", "gemma-3-12b", "phi-4"])
def test_the_presets_need_no_tracing_of_a_shipped_model(name: str, tmp_path: Path) -> None:
    model, tracer = load_model_spec(name), ImaginedTracer()
    shipped = ShippedProfiles(model, PROFILES)
    for gpu in (space.gpu for space in shipping.preset_spaces() if space.gpu != "cpu"):
        space = preset_space(gpu, model=name)
        about: dict[str, Any] = {"cache_dir": tmp_path, "tracer": tracer, "shipped": shipped}
        assert shipping.recommended(space, model, **about)
    assert not tracer.asked, f"run `make surveys` for {name}"
    assert not list(tmp_path.iterdir())


def test_plans_of_the_presets_need_no_tracing(tmp_path: Path) -> None:
    for space in filter(lambda one: one.gpu != "cpu", shipping.preset_spaces()):
        model, tracer = load_model_spec(space.model), ImaginedTracer()
        shipped = ShippedProfiles(model, PROFILES)
        about: dict[str, Any] = {"cache_dir": tmp_path, "tracer": tracer, "shipped": shipped}
        forecaster = shipping.forecaster_of(
            space, model, shipping.predictor_of(space, model, **about)
        )
        found = Found.model_validate(read(SURVEYS, shipped_name(space, forecaster)))
        shown = Survey(space, found, forecaster).recommended
        assert shown is not None
        assert what_ifs(shown)
        assert not tracer.asked, "run `make surveys`"


@pytest.mark.integration
def test_profiles_that_ship_are_what_is_traced_now(
    tracing_child: TracingChildren, tmp_path: Path
) -> None:
    """Of each model a few, chosen anew with every change of the code that traces."""
    if read(PROFILES, VERSIONS) != versions():
        pytest.skip("other versions trace here than traced what ships")
    choice = random.Random(source_digest(*TRACED_BY))
    for model in shipped_models():
        known = read(PROFILES, model.fingerprint)["profiles"]
        asked = map(
            shipping.structure_of,
            choice.sample(sorted(known), min(RETRACED_OF_EACH_MODEL, len(known))),
        )
        answers = dict(tracing_child.trace_all(model, asked))
        own = ShippedProfiles(model, archive(tmp_path, versions(), model, answers))
        shipped = ShippedProfiles(model, PROFILES)
        for structure in answers:
            is_same = contents(own.get(structure)) == contents(shipped.get(structure))
            assert is_same, f"{model.name}, {structure.key}: run `make profiles`"


GOING = (Change.DEATH, Change.FETCH, Change.FETCH_ALL)


def contents(known: Profile | InputError | None) -> Any:
    """All of a profile, but which of several alike goes first, and of several that go together:
    what a function held dies in an order that depends on what ran before."""
    if not isinstance(known, Profile):
        return str(known)
    tapes = {}
    for name, segment in known.segments.items():
        entries = [(what, str(key).partition("#")[0], *rest) for what, key, *rest in segment.tape]
        stretches = itertools.groupby(entries, lambda entry: entry[0] in GOING)
        tapes[name] = [sorted(stretch) if goes else list(stretch) for goes, stretch in stretches]
    highest = {name: segment.highest for name, segment in known.segments.items()}
    return replace(known, segments={}), tapes, highest


@pytest.mark.integration
def test_surveys_that_ship_are_what_plans_of_the_presets_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    predictor = tracing(ImaginedTracer())
    for space in filter(lambda one: one.gpu != "cpu", shipping.preset_spaces()):
        model = load_model_spec(space.model)
        memory = predictor(model, find_gpu(space.gpu))
        forecaster = shipping.forecaster_of(space, model, memory)
        shipped = read(SURVEYS, shipped_name(space, forecaster))
        assert shipped is not None, "run `make surveys`"
        now, then = survey(space, forecaster).found, Found.model_validate(shipped)
        # The last digit depends on how numpy was built.
        expected = {k: pytest.approx(v) if isinstance(v, float) else v for k, v in then}
        assert dict(now) == expected, "run `make surveys`"


def test_what_ships_predicts_what_is_traced(tmp_path: Path) -> None:
    tracers = [ImaginedTracer(), ImaginedTracer()]
    shipped = [imagined(tmp_path, versions()), ShippedProfiles(MODEL, NOTHING)]
    peaks = [
        TracingPredictor(MODEL, cache_dir=tmp_path / "cache", tracer=tracer, shipped=ships)
        .predict(CONFIG)
        .breakdown
        for tracer, ships in zip(tracers, shipped, strict=True)
    ]
    assert peaks[0] == peaks[1]
    assert [len(tracer.asked) for tracer in tracers] == [0, 1]


def shortened(data: bytes) -> bytes:
    return data[: len(data) // 2]


def altered(data: bytes) -> bytes:
    """A byte in the middle of the first member is another."""
    at = len(data) // 4
    return data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]


@pytest.mark.parametrize("spoilt", [shortened, altered, lambda _: b"", lambda _: b"none"])
def test_a_file_that_cannot_be_read_is_none(tmp_path: Path, spoilt: Any) -> None:
    imagined(tmp_path, versions())
    path = tmp_path / "profiles.zip"
    path.write_bytes(spoilt(path.read_bytes()))
    assert asked_with(ShippedProfiles(MODEL, path), tmp_path) == [STRUCTURE]


@pytest.mark.parametrize("broken", [[], {"profiles": []}, {"profiles": {STRUCTURE.key: {}}}])
def test_values_that_are_no_profile_are_none(tmp_path: Path, broken: Any) -> None:
    path = tmp_path / "profiles.zip"
    shipping.write(path, [(VERSIONS, versions()), (MODEL.fingerprint, broken)])
    assert asked_with(ShippedProfiles(MODEL, path), tmp_path) == [STRUCTURE]


def asked_with(shipped: ShippedProfiles, home: Path) -> list[Structure]:
    """What is traced to predict a configuration of which that ships."""
    tracer = ImaginedTracer()
    predictor = TracingPredictor(MODEL, cache_dir=home / "cache", tracer=tracer, shipped=shipped)
    assert predictor.predict(CONFIG).peak_allocated_bytes > 0
    return tracer.asked


# Other versions of the libraries are installed than traced what ships


def test_profiles_of_other_versions_are_used_and_it_is_said(tmp_path: Path) -> None:
    tracer = ImaginedTracer()
    shipped = imagined(tmp_path, OTHERS, loss_bytes=0)
    borrowing = TracingPredictor(MODEL, cache_dir=tmp_path / "c", tracer=tracer, shipped=shipped)
    assert not borrowing.other_versions
    borrowed = borrowing.predict(CONFIG).peak_allocated_bytes
    assert borrowing.other_versions == f"torch 1.0 (here: {versions()['torch']})"
    assert borrowing.origin(CONFIG)
    assert not tracer.asked
    nothing = ShippedProfiles(MODEL, NOTHING)
    own = TracingPredictor(MODEL, cache_dir=tmp_path / "c", tracer=tracer, shipped=nothing)
    assert own.predict(CONFIG).peak_allocated_bytes > borrowed
    assert not own.other_versions


def test_what_other_versions_could_not_trace_is_tried_with_what_is_installed(
    tmp_path: Path,
) -> None:
    answers = {STRUCTURE: "memory is not predicted: an older library cannot be traced"}
    shipped = ShippedProfiles(MODEL, archive(tmp_path, OTHERS, MODEL, answers))
    assert asked_with(shipped, tmp_path) == [STRUCTURE]


# Whether what ships holds for the code


def test_an_edited_checkout_works_out_everything_itself(tmp_path: Path) -> None:
    """What is edited beside the code that traces leaves its profiles alone."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no checkout")
    clone = tmp_path / "clone"
    subprocess.run(
        ("git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(clone)), check=True
    )
    program = (
        "from qlora_sweep.sweep.predict.memory.shipped import is_as_committed as a, ROOT;"
        "from qlora_sweep.sweep.predict.memory.profile_store import TRACED_BY as t;"
        "from qlora_sweep.sweep.planning.survey import SURVEYED_BY as s; print(a(*t), a(*s))"
    )

    def current() -> str:
        environment = {"PYTHONPATH": str(clone), "PATH": "/usr/bin:/bin:/usr/local/bin"}
        command = (sys.executable, "-P", "-c", program)
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
        )
        return done.stdout.strip()

    assert current() == "True True"
    for edited, expected in (
        ("sweep/predict/speed/steps.py", "True False"),
        ("sweep/training/model.py", "False False"),
    ):
        with (clone / edited).open("a") as file:
            file.write("# An edit.\n")
        assert current() == expected
