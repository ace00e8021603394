"""The options that several commands share, how settings are read, and what a shell completes.

Help and completion are made from it, so nothing heavy is imported before something was typed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from qlora_sweep import search_spaces
from qlora_sweep.search_spaces.errors import InputError, did_you_mean, listed, quote
from qlora_sweep.search_spaces.kinds import COMPUTE_DTYPES, QUANTIZATIONS, TRAINER_LABELS
from qlora_sweep.sweep.paths import STORAGE, runs_directory

_SHIPPED = Path(search_spaces.__file__).parent


def completed(*lists: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return what completes a name from some lists."""

    def complete(incomplete: str) -> list[str]:
        names = dict.fromkeys(name for known in lists for name in known())
        return [name for name in names if name.startswith(incomplete)]

    return complete


def presets() -> list[str]:
    """Return the shipped presets; a shell adds files by itself."""
    return sorted(path.stem for path in (_SHIPPED / "presets").glob("*.yaml"))


def models() -> list[str]:
    """Return the shipped architectures."""
    found = (_SHIPPED / "architectures").glob("*.json")
    return sorted(path.name.removesuffix(".json") for path in found)


def gpus() -> list[str]:
    """Return the GPUs of the catalogue; to parse all of it takes half a second."""
    text = (_SHIPPED / "gpus.yaml").read_text(encoding="utf-8")
    return re.findall(r"^  - name: (\S+)$", text, re.MULTILINE)


def studies() -> list[str]:
    """Return the studies of the SQLite file that is the database; none where it cannot be read."""
    import sqlite3
    from urllib.parse import quote

    from qlora_sweep.search_spaces.documents import home_expanded

    scheme, _, named = os.environ.get(STORAGE, "").partition(":///")
    path = runs_directory() / "sweep.db"
    if scheme.startswith("sqlite"):
        path = home_expanded(named)
    if (scheme and not named) or not path.is_file():
        return []
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=0.5)) as db,
    ):
        rows = db.execute("SELECT study_name FROM studies ORDER BY study_id")
        return [str(name) for (name,) in rows.fetchall()]
    return []


# Declared once each; a command has one under the name of its parameter, unless it says another.

_PRESETS: dict[str, Any] = {"autocompletion": completed(presets)}
_MODELS: dict[str, Any] = {"autocompletion": completed(models)}
_GPUS: dict[str, Any] = {"autocompletion": completed(gpus)}
_BOTH: dict[str, Any] = {"autocompletion": completed(presets, gpus)}
_BUDGETS: dict[str, Any] = {"autocompletion": completed(lambda: ("auto", "cpu"), gpus)}
_STUDIES: dict[str, Any] = {"autocompletion": completed(studies)}

Space = Annotated[str, Argument(metavar="SPACE", help="A preset or a YAML file.", **_PRESETS)]
SpaceOrGpu = Annotated[
    str | None, Argument(metavar="SPACE", help="A preset, a YAML file or a GPU.", **_BOTH)
]
Study = Annotated[str, Argument(metavar="STUDY", help="Name of a study.", **_STUDIES)]
AnyStudy = Annotated[
    str | None, Argument(metavar="[STUDY]", help="One study; all without.", **_STUDIES)
]
Reported = Annotated[
    list[str] | None,
    Argument(metavar="STUDY|SURFACE...", help="One, or several to compare.", **_STUDIES),
]
Contributions = Annotated[
    list[str], Argument(metavar="FILE...", help="Files of `sweep contribute`.")
]
Trained = Annotated[
    str, Argument(metavar="STUDY|CONFIG", help="Or a shipped model's name.", **_STUDIES)
]
Verified = Annotated[
    str, Argument(metavar="STUDY|EXPORT", help="A file of sweep export, or a study.", **_STUDIES)
]
_DATASET = "A file, a directory of files, or a hub id."
Dataset = Annotated[str, Argument(metavar="DATASET", help=_DATASET)]
Adapter = Annotated[str, Argument(metavar="ADAPTER", help="Directory with a LoRA adapter.")]

Version = Annotated[bool, Option("--version", help="Print the version and exit.", is_eager=True)]
Storage = Annotated[
    str | None, Option(help="Database URL; $SWEEP_STORAGE, or sqlite:///runs/sweep.db.")
]
Json = Annotated[bool, Option("--json", help="Print one JSON document on stdout, nothing else.")]
Yes = Annotated[bool, Option("-y", "--yes", help="Do not ask.")]
YesCut = Annotated[bool, Option("-y", "--yes", help="Train, however much the length cuts off.")]
Force = Annotated[bool, Option("--force", help="Replace a file that sweep did not write.")]
ForceExport = Annotated[
    bool,
    Option(
        "--force",
        help="Replace a file that sweep did not write, and write one that runs out of memory.",
    ),
]
Details = Annotated[bool, Option("--details", help="Print all of the answer, not one screen.")]
Output = Annotated[str | None, Option("-o", "--output", help="A file; - is stdout.")]
NewDirectory = Annotated[str, Option("-o", "--output", help="A new directory.")]
Model = Annotated[str | None, Option(help="Shipped name, directory or hub id.", **_MODELS)]
Data = Annotated[str | None, Option(metavar="DATASET", help=_DATASET)]
Gpu = Annotated[str | None, Option(help="GPU whose memory is the budget.", **_BUDGETS)]
Gpus = Annotated[list[str] | None, Option("--gpu", help="Several: they are compared.", **_GPUS)]
Seed = Annotated[int | None, Option(min=0, max=2**32 - 1, help="Of sampling, weights and tokens.")]
Trial = Annotated[int | None, Option(help="Another trial than the winner.")]
Set = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting, as compile=true or data.tokenizer=demo; repeatable (docs/settings.md).",
    ),
]
Method = Annotated[str | None, Option(help="sft on texts, dpo on pairs; grpo in a plan.")]
Rank = Annotated[int | None, Option("--rank", "--lora-rank", help="Rank of the adapters.")]
TargetModules = Annotated[str | None, Option(help="qv, attention, all-linear, or names.")]
MicroBatch = Annotated[int | None, Option(help="Sequences in one pass of one GPU.")]
SeqLen = Annotated[int | None, Option(help="Tokens in a sequence.")]
ImageSize = Annotated[
    int | None,
    Option(metavar="PIXELS", help="Side of the image in each sequence, of a model that sees."),
]
ComputeDtype = Annotated[str | None, Option(help=f"{listed(COMPUTE_DTYPES)}.")]
Quantization = Annotated[str | None, Option(help=f"{listed(QUANTIZATIONS)}.")]
Trainer = Annotated[
    str | None,
    Option(
        "--for",
        metavar="TRAINER",
        help=f"What is to train: {listed(TRAINER_LABELS)}.",
        autocompletion=completed(lambda: TRAINER_LABELS),
    ),
]

On = Annotated[
    str | None,
    Option(
        metavar="PLACE",
        help="Where it runs: local, ray:ADDRESS, ssh:USER@HOST, slurm, modal, skypilot, or "
        "recorded:SURFACE, whose trials answer as they did.",
    ),
]
With = Annotated[
    list[str] | None,
    Option(
        "--with",
        metavar="KEY=VALUE",
        help="A setting of that place, as time=4h of slurm; repeatable (docs/guide/machines.md).",
    ),
]
DryRun = Annotated[bool, Option("--dry-run", help="Say what would run, and start nothing.")]
Devices = Annotated[str | None, Option(help="GPUs to use: all, how many (2), or which (0,1).")]
StudyName = Annotated[str | None, Option("--study", help="Name; the space's by default.")]
Trials = Annotated[int | None, Option(help="Trials at most, earlier runs included.")]
TimeBudget = Annotated[str | None, Option(help="Stop this run after 10m, 1h30m, 90s.")]
MaxDollars = Annotated[float | None, Option(help="What the study may cost in all.")]
Sampler = Annotated[str | None, Option(help="guided, tpe, gp, random or grid.")]
From = Annotated[
    str | None,
    Option("--from", metavar="STUDY", help="Whose measurements to take over.", **_STUDIES),
]
NoConfirm = Annotated[bool, Option("--no-confirm", help="Do not measure the winner again.")]
Soak = Annotated[str | None, Option(help="Let the winner train for 10m in one go; 15s.")]
Watch = Annotated[bool, Option("--watch", help="Follow the study until it stops.")]

Exact = Annotated[bool, Option("--exact", help="Ask about one configuration.")]
FromFile = Annotated[str | None, Option(help="Configurations, as JSON lines; - is stdin.")]
Longest = Annotated[bool, Option("--longest", help="Ask for the longest sequences that fit.")]
Cheapest = Annotated[bool, Option("--cheapest", help="Ask which GPU costs least.")]
Within = Annotated[str | None, Option(help="Deadline of --cheapest: 6h, 90m.")]
Calibrate = Annotated[
    bool, Option("--calibrate", help="Ask for trials that narrow the speed's interval.")
]
Together = Annotated[
    int | None,
    Option("--devices", min=2, max=64, help="Of so many GPUs: is one, DDP or FSDP the fastest?"),
]
Price = Annotated[
    list[str] | None,
    Option(metavar="GPU=DOLLARS|FILE", help="Dollars an hour, a10=0.75, or a file; repeatable."),
]
Work = Annotated[
    list[str] | None,
    Option(
        metavar="KEY=NUMBER",
        help="Training to price: tokens, dataset-samples, epochs; in a plan train-steps, samples.",
    ),
]

Format = Annotated[
    str | None,
    Option(
        help="script (default), trl, axolotl, llama-factory, unsloth, peft, json, yaml or surface."
    ),
]
Figure = Annotated[str | None, Option(help="Which figure, where -o ends in .png or .svg.")]
Base = Annotated[str | None, Option("--model", help="The 16-bit base; the adapter's own.")]
MergedDtype = Annotated[str | None, Option(help="bf16 or fp16; what the base is stored in.")]
Rows = Annotated[int, Option(min=0, help="Sequences to compare logits on; 0 for none.")]
Steps = Annotated[int, Option(min=8, help="Optimizer steps to run.")]
"""Of fewer nothing is left after a training's warm-up."""
Weights = Annotated[str | None, Option("--model", help="Weights to load; random by default.")]
MaxSteps = Annotated[int | None, Option(min=1, help="Optimizer steps, however many epochs.")]
Epochs = Annotated[float | None, Option(help="Passes over the dataset; 1.")]
CheckpointEvery = Annotated[int | None, Option(min=1, help="Steps between checkpoints.")]
Resume = Annotated[bool, Option("--resume", help="Resume from the newest checkpoint.")]
TrainSet = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="learning_rate, micro_batch_size, effective_batch_size, checkpoint_fraction, "
        "checkpoint_offload, packing, weights (pretrained or random), data.eval_fraction (0.05) or "
        "another data.KEY; repeatable (docs/guide/train.md).",
    ),
]
Port = Annotated[int, Option(min=0, max=65535, help="To listen on; 0 is any that is free.")]
Browser = Annotated[bool, Option("--browser/--no-browser", help="Open a browser, or do not.")]

DATA_SETTINGS = (
    "data.format",
    "data.text_column",
    "data.prompt_column",
    "data.completion_column",
    "data.completions_only",
    "data.tokenizer",
)
"""How a dataset is read: settings that `--set` takes wherever a dataset is named."""
_NAMES = ("data.text_column", "data.prompt_column", "data.completion_column", "data.tokenizer")
"""Of these, what is typed is a name, also where it reads like a number."""
SPACE_SETTINGS = ("numerics", "weights") + DATA_SETTINGS
"""Keys of a space that `--set` takes beside the settings of a configuration."""


def pairs(option: str, typed: Sequence[str] | None, *, bare: bool = False) -> dict[str, str]:
    """Return what a repeatable option was given, each ``KEY=VALUE``, by key.

    Args:
        option: its name, for messages.
        typed: its values.
        bare: whether a key may stand alone; its value is empty then.

    Raises:
        InputError: one is not written so, or a key is given twice.
    """
    found: dict[str, str] = {}
    for each in typed or ():
        key, sign, value = each.partition("=")
        key = key.strip()
        is_bare = bare and not sign
        if not key or not (value or is_bare):
            raise InputError(f"{option} {each}: write it as {key or 'KEY'}=VALUE")
        if key in found:
            raise InputError(f"{option} {each}: {key} is given twice: keep one")
        found[key] = value.strip()
    return found


def settings(
    params: Mapping[str, Any],
    typed: Sequence[str] | None,
    *,
    also: Sequence[str] = SPACE_SETTINGS,
    only: Sequence[str] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a configuration that were typed, and those of the space.

    Args:
        params: all options of the command; six settings have one of their own.
        typed: values of ``--set``.
        also: what ``--set`` takes beside the settings of a configuration.
        only: settings of a configuration that it takes; None for all.

    Raises:
        InputError: no such setting, a value that it does not take, or one that is given twice.
    """
    from qlora_sweep.search_spaces.config import OPTION_KEYS, SETTINGS
    from qlora_sweep.search_spaces.other_names import meant

    known = list(SETTINGS if only is None else only)
    known += also
    configuration: dict[str, Any] = {}
    space: dict[str, Any] = {}
    for key, option in OPTION_KEYS.items():
        if (value := params.get(key)) is not None:
            configuration[key] = _checked(key, value, name=option)
    for name, text in pairs("--set", typed).items():
        key = name.replace("-", "_")
        if key not in known:
            near = meant(key, known, lists="docs/settings.md")
            raise InputError(f"--set {name}={text}: unknown setting '{name}'{near}")
        if key in configuration or key in space:
            raise InputError(f"--set {name}={text}: {key} is given twice: keep one")
        if key in SETTINGS:
            configuration[key] = _checked(key, _value(text), name=f"--set {key}")
        else:
            space[key] = _value(text)
            if key in _NAMES:
                space[key] = text
    return configuration, space


def dataset(data: str | None, space: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was typed of a dataset, by the keys of a space's section about it."""
    from qlora_sweep.search_spaces.dataset_choice import DatasetChoice
    from qlora_sweep.search_spaces.documents import Document, validate

    section: dict[str, Any] = {}
    names: dict[str, str] = {}
    for typed_key, value in space.items():
        _, is_of_data, key = typed_key.partition("data.")
        if is_of_data:
            section[key] = value
            names[key] = f"--set {typed_key}"
    validate(DatasetChoice, {"texts": "named", **section}, Document("", names=names))
    if data is None:
        return section
    return {"texts": data, **section}


def _checked(key: str, value: Any, *, name: str) -> Any:
    from qlora_sweep.search_spaces.dimensions import read_value
    from qlora_sweep.search_spaces.documents import Document

    return read_value(key, value, document=Document("", names={key: name}))


def _value(text: str) -> Any:
    """Return a number, a truth value, null or a list as JSON has it; anything else is a word."""
    word = text.lower()
    if word in ("true", "false", "null"):
        return json.loads(word)
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


def seconds(option: str, typed: str | None) -> float | None:
    """Return the seconds of a duration that was typed; None where none was."""
    from qlora_sweep.search_spaces.space import parse_duration

    if typed is None:
        return None
    try:
        return parse_duration(typed)
    except InputError as error:
        raise InputError(f"{option}: {error}") from error


def prices(typed: Sequence[str] | None) -> tuple[Path | None, tuple[str, ...]]:
    """Return the file that ``--price`` names, and the prices of GPUs that were typed."""
    file = None
    of_gpus: list[str] = []
    for price in typed or ():
        if "=" in price:
            of_gpus.append(price)
        elif file is None:
            file = Path(price)
        else:
            raise InputError(f"--price {file} and --price {price} are both files: keep one")
    return file, tuple(of_gpus)


def amounts(typed: Sequence[str] | None, known: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of ``--work``, by key."""
    found: dict[str, Any] = {}
    for typed_key, text in pairs("--work", typed).items():
        key = typed_key.replace("-", "_")
        name = key.replace("_", "-")
        if key in found:
            raise InputError(f"--work {name} is given twice: keep one")
        number = found[key] = _value(text)
        if key not in known:
            names = (each.replace("_", "-") for each in known)
            raise InputError(f"--work {name}: unknown amount{did_you_mean(name, names)}")
        kind = "a whole number"
        if key == "epochs":
            kind = "a number"
        if type(number) not in (int, float) or (number % 1 and key != "epochs"):
            raise InputError(f"--work {name} must be {kind}, got {quote(number)}")
    return found


_EMPTY = "an argument is an empty text, which names nothing"


def refuse_mistyped(command: Any, words: Sequence[str]) -> None:
    """Raise `InputError` where an option of one value is given two, in whatever spelling, or where
    an empty text is one, or an argument."""
    options: dict[str, Any] = {}
    for parameter in command.params:
        if parameter.param_type_name == "option":
            options |= dict.fromkeys(parameter.opts + parameter.secondary_opts, parameter)
    given: dict[str, dict[str, None]] = {}
    rest = iter(words)
    for word in rest:
        name, sign, value = word.partition("=")
        if word == "--":
            break
        if not word:
            raise InputError(_EMPTY)
        if name not in options:
            continue
        option = options[name]
        if not option.is_flag:
            if not sign:
                value = next(rest, "missing")
            if not value:
                raise InputError(f"{name}: an empty text names nothing; leave the option out")
            name = f"{name} {value}"
        both = given.setdefault(option.name, {})
        both[name] = None
        if len(both) > 1 and not option.multiple:
            raise InputError(f"{' and '.join(both)} are both given: keep one")
    if "" in rest:
        raise InputError(_EMPTY)
