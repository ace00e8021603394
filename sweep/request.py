"""What was typed for a study, and where it is to run; resolved before anything is imported that
drives one."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import unicodedata
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from qlora_sweep.search_spaces.config import SETTINGS, TrialConfig, as_options
from qlora_sweep.search_spaces.dataset_choice import DatasetChoice
from qlora_sweep.search_spaces.documents import exists, explain, home_expanded, read_text
from qlora_sweep.search_spaces.errors import InputError, did_you_mean, quote
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.loading import load_space, preset_name, with_fixed
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.presets import preset_space
from qlora_sweep.search_spaces.redaction import STARS, remember
from qlora_sweep.search_spaces.space import ConfirmBudget, SearchSpace
from qlora_sweep.search_spaces.trainer_spaces import for_trainer
from qlora_sweep.search_spaces.trainers import trainer_named
from qlora_sweep.storage.definition import NAME_MAX, check_name, is_file_name
from qlora_sweep.sweep.data.choice import refuse_planned_alone, typed_dataset
from qlora_sweep.sweep.data.files import is_on_hub
from qlora_sweep.sweep.data.prepared_dataset import DatasetRequest, look_at
from qlora_sweep.sweep.paths import RESERVED, runs_directory

if TYPE_CHECKING:
    from qlora_sweep.storage.definition import StudyDefinition

_DIGITS = 6
"""Of a digest in a study's name; two of one name would be refused for what they search."""
REQUEST = "request.run.json"
"""File of a request that goes to another process or machine, which runs it as its SPACE."""
BESIDE = "./beside/"
"""What a request's file calls the directory that it is in."""
PLACES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "local": ("local", ()),
    "ray": ("ray:ADDRESS", ()),
    "recorded": ("recorded:SURFACE", ()),
    "ssh": ("ssh:USER@HOST[:PORT]", ("python",)),
    "slurm": ("slurm", ("time", "gpus", "env")),
    "modal": ("modal", ("volume", "price", "prices")),
    "skypilot": ("skypilot", ("cloud", "spot", "volume", "price", "prices")),
}
"""Where a study can run: how each is typed, and its settings; slurm takes every option of sbatch
besides."""


@dataclass(frozen=True)
class Where:
    """Where a study is to run, as it was typed."""

    kind: str = "local"
    address: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, on: str | None, settings: Mapping[str, str] | None = None) -> Where:
        """Read ``--on`` and the settings of that place.

        Raises:
            InputError: no such place, or it has no such setting.
        """
        kind, sign, address = (on or "local").partition(":")
        hidden = None
        if kind != "recorded":
            hidden = without_password(on or "")
        if hidden is not None:
            raise InputError(
                f"--on {hidden}: a password has no place there, and the list of processes and the "
                "shell's history may have it now: let a key in with ssh-copy-id, leave the "
                "password out, and change it"
            )
        if kind not in PLACES:
            raise InputError(f"--on {on}: unknown place{did_you_mean(kind, PLACES)}")
        form, known = PLACES[kind]
        if (":" in form) != bool(address) or (sign and not address):
            raise InputError(f"--on must be {form}, got {quote(on)}")
        for key, value in (settings or {}).items():
            if key in known and not value:
                raise InputError(f"--with {key}: write it as {key}=VALUE")
            if key not in known and kind != "slurm":
                has = ", ".join(known) or "none"
                raise InputError(f"--with {key}: {kind} has no such setting; it has {has}")
        return cls(kind, address, settings or {})

    def __str__(self) -> str:
        if not self.address:
            return self.kind
        return f"{self.kind}:{self.address}"


def without_password(typed: str) -> str | None:
    """Return an address like ``ssh:user:password@box`` with stars for the password, which no text
    has from here on; None where it has none."""
    place, at, host = typed.rpartition("@")
    kind, sign, login = place.partition(":")
    user, colon, password = login.removeprefix("//").partition(":")
    slashes = "//" if login.startswith("//") else ""
    if not at or not colon or not password:
        return None
    remember(password)
    return f"{kind}{sign}{slashes}{user}:{STARS}@{host}"


class RunRequest(BaseModel):
    """A study that was asked for, unchanged from the command line to the machine that drives it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    space: str
    """A preset or a YAML file."""
    overrides: dict[str, Any] = {}
    """Keys of the space with what was typed instead; None leaves the space's value. Under
    ``confirm`` false, or some keys of the section, which they switch on; under ``data`` some keys
    of the section."""
    fixed_settings: dict[str, Any] = {}
    """Settings that are fixed, while the rest of the space is searched."""
    study: str | None = None
    storage: str | None = None
    """URL of the database; None for the default."""
    devices: str | None = None
    """GPUs of the machine that trials run on."""
    carried: str | None = None
    """A study, or the spool of one, whose trials are taken over."""
    as_json: bool = False

    @field_validator("overrides")
    @classmethod
    def _of_a_space(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        if not overrides.keys() <= SearchSpace.model_fields.keys():
            raise ValueError("has a key that no space has")
        if not isinstance(overrides.get("data") or {}, dict):
            raise ValueError("has a dataset that is no section")
        return overrides

    @classmethod
    def read(cls, name: str) -> RunRequest:
        """Read a request's file; a name that begins with ``BESIDE`` is of a file beside it.

        Raises:
            InputError: it holds no request.
        """
        path = home_expanded(name)
        try:
            request = cls.model_validate_json(read_text(path, label=name))
        except ValidationError as error:
            words = explain(error, cls)
            raise InputError(f"{name}: holds no request of `sweep run`: {words}") from error
        directory = path.parent.absolute()

        def there(named: str) -> str:
            if not named.startswith(BESIDE):
                return named
            return str(directory / named.removeprefix(BESIDE))

        return request.renamed(there)

    def renamed(self, rename: Callable[[str], str]) -> RunRequest:
        """Return the request with other names of the files and directories in it."""

        def renamed_in(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
            changed = dict(values)
            for key in keys:
                if changed.get(key):
                    changed[key] = rename(changed[key])
            return changed

        overrides = renamed_in(self.overrides, "model")
        if overrides.get("data"):
            overrides["data"] = renamed_in(overrides["data"], "texts", "tokenizer")
        changes: dict[str, Any] = {"space": rename(self.space), "overrides": overrides}
        if self.carried is not None:
            changes["carried"] = rename(self.carried)
        return replaced(self, **changes)

    def named(self) -> tuple[str, SearchSpace]:
        """Return a name for the study and its space, for whoever runs it elsewhere.

        Neither GPU nor dataset is looked at. Named so, the same request always resumes one study.

        Raises:
            InputError: something that was typed or named is not right.
        """
        space, changed = overridden(self.space, self.overrides, None)
        space, changed = fixed_in(space, self.fixed_settings, changed, typed=self.space)
        name = self.study
        if name is None:
            name = default_study_name(space, changed)
        return checked_name(name), space


def refuse_mistakes(request: RunRequest, *, storage: str) -> None:
    """Refuse mistakes that show in what was typed and in the first rows of a dataset.

    Args:
        request: what was typed.
        storage: URL of the database, which may have the study.

    Raises:
        InputError: something that was typed or named is not right.
        EnvironmentFault: the network for a hub id is not to be had.
    """
    if not (request.overrides.get("data") or {}).get("texts"):
        # The others may be about the dataset of the study.
        request = replaced(request, overrides={**request.overrides, "data": {}})
    name, space = request.named()
    model = load_model_spec(space.model)
    choice = space.data
    if space.gpu not in ("auto", "cpu"):
        find_gpu(space.gpu)
    is_preset = preset_name(request.space) is not None
    refuse_unmeasured(
        for_trainer(space, model, is_preset=is_preset, fixed_settings=request.fixed_settings).space
    )
    if choice is None or is_on_hub(choice.texts):
        return
    is_known = (runs_directory() / name).is_dir()
    if is_known and not exists(home_expanded(choice.texts), label=choice.texts):
        from qlora_sweep.storage.reading import read_study

        # What was prepared of it for its study may be there still.
        with suppress(InputError):
            read_study(name, url=storage, home=runs_directory())
            return
    look_at(DatasetRequest.of(choice, model))


def refuse_unmeasured(space: SearchSpace) -> None:
    """Refuse a study for a trainer whose steps no trial of ours can run.

    Raises:
        InputError: says what there is instead.
    """
    (name,) = space.values_of("trainer")
    trainer = trainer_named(name, "sft")
    if trainer.measured is not None:
        raise InputError(
            f"a trial cannot run {trainer.label}'s step, whose kernels are its own: `sweep plan "
            f"--for {name}` predicts it by what was measured, and a study for another trainer "
            f"exports a file for it (`sweep export STUDY --format {name}`)"
        )


def checked_name(name: str) -> str:
    """Return a study's name, refused where it cannot be one, or is that of a file of sweep's."""
    check_name(name)
    if name in RESERVED:
        raise InputError(f"study name '{name}' is a file of sweep's: choose another with --study")
    return name


def with_confirm(space: SearchSpace, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of how the winner is measured again, switched on, with what was typed."""
    return {**(space.confirm or ConfirmBudget()).model_dump(), **typed}


def overridden(
    name: str, overrides: Mapping[str, Any], stored: StudyDefinition | None
) -> tuple[SearchSpace, Mapping[str, Any]]:
    """Return the space that was named, as it was overridden, and what that changed.

    Raises:
        InputError: a value that the space does not take.
    """
    declared = load_space(name)
    offered = _for_what_is_there(name, declared, overrides)
    known = declared.data
    if known is None and stored is not None:
        known = stored.space.data
    values = dict(overrides)
    values["data"] = typed_dataset(known, overrides.get("data") or {})
    if isinstance(overrides.get("confirm"), Mapping):
        values["confirm"] = with_confirm(declared, overrides["confirm"])
    given = {key: value for key, value in values.items() if value is not None}
    changed = {key: value for key, value in given.items() if value != getattr(declared, key)}
    budget = declared.budget_gib_on(overrides.get("gpu") or declared.gpu)
    names = {key: f"--{key.replace('_', '-')}" for key in changed}
    names |= {"numerics": "--set numerics", "weights": "--set weights"}
    return offered.changed({"budget_gib": budget, **changed}, names=names), changed


def _for_what_is_there(
    name: str, declared: SearchSpace, overrides: Mapping[str, Any]
) -> SearchSpace:
    """Return a preset for the GPU and the model that were typed in place of its own; a person's own
    space as it is."""
    preset = preset_name(name)
    gpu = overrides.get("gpu")
    model = overrides.get("model")
    if gpu in ("auto", "cpu"):
        gpu = None
    if preset is None or not (gpu or model):
        return declared
    return preset_space(preset, gpu, model)


def fixed_in(
    space: SearchSpace, fixed_settings: Mapping[str, Any], changed: Mapping[str, Any], *, typed: str
) -> tuple[SearchSpace, Mapping[str, Any]]:
    """Return the space, as it was typed, with what was fixed and all that was changed.

    Raises:
        InputError: a value that a configuration does not take, or nothing left free.
    """
    refuse_planned_alone(fixed_settings.get("method") or space.values_of("method")[0])
    if not fixed_settings:
        return space, changed
    rest = with_fixed(space, fixed_settings)
    if isinstance(rest, SearchSpace):
        fixed: dict[str, Any] = {}
        for key in fixed_settings:
            if key in rest.fixed and rest.fixed[key] != space.fixed.get(key):
                fixed[key] = rest.fixed[key]
        return rest, {**changed, **fixed}
    cure = "leave one of them out"
    if space.gpu != "cpu":
        # What answers for one configuration; its budget is the space's own.
        about: dict[str, Any] = {}
        if space.gpu != "auto":
            about["gpu"] = space.gpu
        about["model"] = space.model
        if space.data is not None:
            about["data"] = space.data.texts
        options = as_options({**about, **rest.changes_from(TrialConfig())})
        command = shlex.join(["sweep", "plan", typed, "--exact"] + options)
        cure += f", or ask about this one configuration with {command}"
    nothing = f"with {', '.join(fixed_settings)} fixed nothing is left to search"
    raise InputError(f"space '{space.name}': {nothing}: {cure}")


def default_study_name(space: SearchSpace, changed: Mapping[str, Any]) -> str:
    """Return the space's name, with the GPU, the model, the dataset and the trainer that were
    changed, and a digest of the settings that were: ``a10-l4-trl-3f9c2a``.

    Raises:
        InputError: a letter of it cannot stand in a study's name, and without it two studies could
            be taken for one.
    """
    parts = [space.name]
    for key in ("gpu", "model"):
        if key in changed:
            parts.append(str(changed[key]))
    data = changed.get("data")
    if isinstance(data, DatasetChoice):
        parts.append(Path(data.texts).stem)
    trainer = changed.get("trainer", "sweep")
    if trainer != "sweep":
        parts.append(trainer)
    settings: dict[str, Any] = {}
    for key, value in changed.items():
        if key != "trainer" and (key in SETTINGS or key == "numerics"):
            settings[key] = value
    digest = ""
    if settings:
        written = json.dumps(settings, sort_keys=True).encode()
        digest = f"-{hashlib.sha256(written).hexdigest()[:_DIGITS]}"
    whole = unicodedata.normalize("NFC", "-".join(parts))
    name = re.sub(r"[^\w.-]+", "-", whole).strip("-._")[: NAME_MAX - len(digest)] + digest
    replaced = re.findall(r"[^\w.-]", whole)
    lost = [letter for letter in replaced if unicodedata.category(letter)[0] in "LMN"]
    if lost or not is_file_name(name):
        named = "no study can be named after it: choose a name with --study"
        raise InputError(f"space {quote(space.name)}: {named}")
    return name
