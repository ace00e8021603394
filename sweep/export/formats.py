"""The formats of an export by name: the way into this package."""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from qlora_sweep.search_spaces.config import LOGITS_AT_ONCE, allocator_settings
from qlora_sweep.search_spaces.errors import InputError, did_you_mean, quote
from qlora_sweep.search_spaces.kinds import COMPUTE_DTYPES
from qlora_sweep.search_spaces.quantized import stored_quantization
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.files import WRITTEN_BY
from qlora_sweep.storage.surfaces import surface_text
from qlora_sweep.sweep.export import trainers
from qlora_sweep.sweep.export.record import Record, Trainer, beside, facts, record_of
from qlora_sweep.sweep.export.rows import DATA_FILE, TEMPLATE_FILE, dataset_options

SURFACE = "surface"
"""The format of all of a study's trials; the others are of one."""
_ROWS = "rows.py"
"""What lies beside a script and reads examples; the same of the others."""
_OF_ROWS = ("files", "kinds", "rows", "encoding")
"""Modules of `sweep.data` that are joined in that file, each behind those it imports."""
_KERNELS = "eight_bit.py"
"""Stores and computes in 8 bits."""
_FITTING = "fitting.py"
"""Fits 8-bit products to the weights, and keeps some in 16 bits."""
_PAIRS = "preference.py"
"""Trains on pairs."""
_ALONE = {
    "from qlora_sweep.search_spaces.config import LOGITS_AT_ONCE": (
        f"LOGITS_AT_ONCE = {LOGITS_AT_ONCE}"
    ),
    "from qlora_sweep.sweep.data.rows import": "from rows import",
    "from qlora_sweep.sweep.training import eight_bit": "import eight_bit",
    "from qlora_sweep.sweep.training.eight_bit import": "from eight_bit import",
}
"""What is said otherwise in a file that lies there."""
_ANY_PAIRS = {
    "source": None,
    "tokenizer": None,
    "seed": 0,
    "eval_fraction": 0.0,
    "summary": {
        "kind": "preference",
        "text_column": None,
        "prompt_column": None,
        "completion_column": None,
        "completions_only": True,
    },
}
"""How a script of a study on random pairs reads those that it is given."""


@dataclass(frozen=True)
class Export:
    """What is written of a study in one format."""

    text: str
    """Of one file."""
    lost: tuple[str, ...] = ()
    """What the format cannot say of what was measured, and what its file does instead."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Texts of files that it needs in its directory, by their names."""
    record: str | None = None
    """Text of the record that `sweep verify` reads, of a file that it can run."""

    def files(self, path: Path) -> dict[Path, str]:
        """Return the texts of all files of an export to a path, that one first."""
        found = {path: self.text}
        found |= {path.with_name(name): text for name, text in self.beside.items()}
        return found if self.record is None else found | {beside(path): self.record}


def format_names() -> tuple[str, ...]:
    """Return the names of all formats of a winner, the one that expresses everything first."""
    return tuple(_FORMATS)


def endings_of(format: str) -> tuple[str, ...]:
    """Return the endings of a format's file, the usual one first.

    Raises:
        InputError: no such format.
    """
    if format == SURFACE:
        return (".jsonl", ".ndjson")
    if format not in _FORMATS:
        raise InputError(
            f"--format: unknown format {quote(format)}{did_you_mean(format, (*_FORMATS, SURFACE))}"
        )
    return _FORMATS[format][1]


def exported(snapshot: StudySnapshot, *, format: str, number: int | None = None) -> Export:
    """Return the winner of a study as a file, or its trials as a surface.

    Args:
        snapshot: the study.
        format: one of `format_names`, or a surface.
        number: of the trial that is wanted instead of the winner.

    Raises:
        InputError: no such trial that fits.
        NothingFits: nothing that was tried was measured to fit.
    """
    if format == SURFACE:
        if number is not None:
            raise InputError("--trial: a surface is of all trials; leave it out")
        return Export(surface_text(snapshot))
    return written(record_of(snapshot, number=number), format=format)


def written(record: Record, *, format: str) -> Export:
    """Return a record as a file of a format.

    Raises:
        InputError: the format is of a trainer that would train something else.
    """
    record = record.model_copy(update={"format": format})
    for why in trainers.unsupported(record, format, section="refused").values():
        raise InputError(f"--format {format}: {why}")
    return _FORMATS[format][0](record)


# Documents for programs


def _yaml(record: Record) -> Export:
    return Export(f"{comment(facts(record))}\n\n{_as_yaml(record.model_dump(mode='json'))}")


def _as_yaml(values: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(values), sort_keys=False, default_flow_style=False))


def _peft(record: Record) -> Export:
    """Return an ``adapter_config.json``, which `peft.PeftConfig` loads.

    PEFT warns of keys that it does not know. ``auto_mapping`` takes any, is kept when an adapter is
    saved, and is not looked at where a task type is given: what is known of the trial is in there.
    """
    told = record.model_dump(mode="json")
    kept = ("config", "learning_rate", "measurement", "texts", "is_predicted")
    more = {key: told[key] for key in kept}
    values = {
        "peft_type": "LORA",
        # Of a shipped architecture nobody knows where the weights are; PEFT notes it when it loads.
        "base_model_name_or_path": record.model.weights,
        "inference_mode": False,
        **lora_options(record),
        "auto_mapping": {"provenance": (told["provenance"] or {}) | more},
    }
    lost = (
        "adapter_config.json holds the adapters alone: rank, alpha, dropout and layers. What was "
        f"{record.basis} depends on the rest too, which formats json and script hold."
    )
    return Export(json.dumps(values, indent=2) + "\n", (lost,))


def lora_options(record: Record) -> dict[str, Any]:
    """Return what PEFT's `LoraConfig` is told of a record."""
    config, names = record.config, record.config.target_modules
    return {
        "task_type": "CAUSAL_LM",
        "r": config.lora_rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": names if isinstance(names, str) else list(names),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
    }


# Files that run


def _script(record: Record) -> Export:
    """Return a training script, which trains what was measured by transformers' `Trainer`."""
    config = record.config
    texts = record.texts or (_ANY_PAIRS if config.is_on_pairs else None)
    copied = dict[str, str]()
    if config.is_8bit_compute or config.weight_bits == 8:
        copied[_KERNELS] = "qlora_sweep.sweep.training"
    if config.is_8bit_compute:
        copied[_FITTING] = "qlora_sweep.sweep.training"
    told_of_rows = {key: getattr(config, key) for key in ("packing", "attention", "compile")}
    if config.is_on_pairs:
        copied[_PAIRS] = "qlora_sweep.sweep.training"
        keys = ("is_on_pairs", "loss_type", "dpo_beta")
        told_of_rows |= {key: getattr(config, key) for key in keys}
    sharding = trainers.unsupported(record, "trl").get("sharding")
    lost = (sharding.replace("the file", "the script"),) if sharding else ()
    is_whole = config.quantized_count(record.layers) == record.layers
    needs = ""
    if config.kernels_kind.fuses_loss:
        needs += ", liger-kernel"
    if texts:
        needs += ", trl"
    text = _template("script.py.j2").render(
        header=comment((*facts(record), trainers.trainers()["script"]["tried"], *lost)),
        record=record,
        config=config,
        texts=texts,
        told_of_rows=told_of_rows,
        grouped_pairs=config.is_on_pairs and config.packing == "grouped",
        beside=[_ROWS, *copied],
        gpus=config.data_parallel,
        lora=lora_options(record),
        dtype=COMPUTE_DTYPES[record.dtype].torch_name,
        adapter_dtype=COMPUTE_DTYPES[config.adapter_dtype].torch_name,
        quantized_whole=is_whole,
        stored=stored_quantization(record.model.config) is not None,
        partly_quantized=config.is_quantized and not is_whole,
        environment=allocator_settings(config.expandable_segments),
        needs=needs,
        training=trainers.spelled(record, "script"),
    )
    needed = {_ROWS: joined_rows()}
    needed |= {name: _alone(name, package) for name, package in copied.items()}
    return Export(text, lost, needed, _beside(record, lost))


def _alone(name: str, package: str) -> str:
    """Return a module of ours as a file that lies beside a script."""
    text = (files(package) / name).read_text(encoding="utf-8")
    for ours, alone in _ALONE.items():
        text = text.replace(ours, alone)
    return f"# {WRITTEN_BY}, for the scripts beside it.\n{text}"


def joined_rows() -> str:
    """Return what reads datasets as one file: its modules behind one another, their imports
    first."""
    modules = set[str]()
    names: dict[str, set[str]] = {}
    bodies: list[str] = []
    for name in _OF_ROWS:
        text = (files("qlora_sweep.sweep.data") / f"{name}.py").read_text(encoding="utf-8")
        docstring, *nodes = ast.parse(text).body
        end = docstring.end_lineno
        for node in nodes:
            if isinstance(node, ast.Import):
                modules.add(ast.unparse(node))
            elif isinstance(node, ast.ImportFrom):
                names.setdefault(str(node.module), set()).update(each.name for each in node.names)
            else:
                break
            end = node.end_lineno
        bodies.append("\n".join(text.splitlines()[end:]).strip())
    future = f"from __future__ import {', '.join(names.pop('__future__'))}"
    of_others = (module for module in sorted(names) if not module.startswith("qlora_sweep."))
    imported = [f"from {module} import {', '.join(sorted(names[module]))}" for module in of_others]
    head = "\n".join([*sorted(modules), *imported])
    title = f'# {WRITTEN_BY}, for the scripts beside it.\n"""How rows of a dataset are read."""'
    return "\n\n\n".join([f"{title}\n\n{future}\n\n{head}", *bodies]) + "\n"


def _beside(record: Record, lost: tuple[str, ...]) -> str:
    return record.model_copy(update={"unsupported": lost}).to_json()


def _unsloth(record: Record) -> Export:
    """Return a script that trains by Unsloth, with TRL's options for the rest."""
    told, lora = trainers.options(record, "trl"), lora_options(record)
    own = trainers.trainers()["unsloth"]["own"]
    lost = trainers.lost(record, "unsloth")
    text = _template("unsloth.py.j2").render(
        header=_header(record, "unsloth", lost),
        record=record,
        data=told["datasets"][0],
        held_out=told.get("test_split_size"),
        dtype=told["dtype"],
        loading=trainers.spelled(record, "unsloth"),
        adapters={key: lora[key] for key in lora if key not in ("task_type", "use_dora")},
        options={key: told[key] for key in told if not key.startswith(tuple(own))},
    )
    return Export(text, lost)


def _options(record: Record, *, trainer: Trainer) -> Export:
    """Return a trainer's file of options."""
    lost = trainers.lost(record, trainer)
    told = trainers.options(record, trainer)
    text = f"{_header(record, trainer, lost)}\n\n{_as_yaml(told)}"
    if trainer != "trl":
        return Export(text, lost)
    template = None if record.texts is None else record.texts.summary.marked_template
    needed = {}
    if template is not None and "chat_template_path" in told:
        needed[TEMPLATE_FILE] = template
    return Export(text, lost, needed, _beside(record, lost))


def _header(record: Record, trainer: Trainer, lost: Iterable[str]) -> str:
    """Return the comment over a trainer's file."""
    known = trainers.trainers()[trainer]
    name = known["name"]
    edits = []
    if not record.model.weights:
        edits.append(f"the model: its architecture alone was {record.basis}")
    if trainer == "llama-factory":
        also = f" with your {DATA_FILE} and" if record.texts is None else " with"
        edits.append(f"dataset_dir, a directory{also} a dataset_info.json of what is below")
    elif record.texts is None:
        edits.append("datasets")
    text = comment(
        (
            *facts(record),
            "",
            f"For {name}: {trainers.command(record, trainer)}",
            known["tried"].format(**known),
            "Schedule and epochs were not searched. "
            + ("To fill in:" if edits else "Nothing is to be filled in."),
            *(f"- {edit}" for edit in edits),
            "",
            f"Where {name} cannot do what was {record.basis}:",
            *(f"- {each}" for each in lost or ("nothing known: every setting is below",)),
        )
    )
    if trainer != "llama-factory":
        return text
    # A line of its own, to be taken as it is: in a paragraph a long path would be broken.
    info = {"texts": dataset_options(record, "dataset_info")}
    return f"{text}\n# dataset_info.json: {json.dumps(info)}"


def comment(paragraphs: Iterable[str]) -> str:
    """Return paragraphs as lines that begin with ``#``; nothing in them can end a line.

    A paragraph that begins with ``- `` is a list item.
    """
    wrapper = textwrap.TextWrapper(96, break_on_hyphens=False)
    lines: list[str] = []
    for text in paragraphs:
        wrapper.subsequent_indent = "  " if text.startswith("- ") else ""
        # What does not print, line ends included, is written as its escape.
        shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        lines += wrapper.wrap("".join(shown)) or [""]
    return "\n".join(f"# {line}".rstrip() for line in lines)


@cache
def _template(name: str) -> Any:
    environment = Environment(
        loader=PackageLoader("qlora_sweep.sweep.export"),
        # What it writes is Python, not markup; every text of people's goes through `python`.
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["python"] = _literal
    return environment.get_template(name)


def _literal(value: object) -> str:
    """Return a value as Python, in double quotes where nothing in it needs care."""
    text = repr(value)
    return text if '"' in text or "\\" in text else text.replace("'", '"')


_JSON, _YAML, _PYTHON = (".json",), (".yaml", ".yml"), (".py",)
_FORMATS: dict[str, tuple[Callable[[Record], Export], tuple[str, ...]]] = {
    "script": (_script, _PYTHON),
    "json": (lambda record: Export(record.to_json()), _JSON),
    "yaml": (_yaml, _YAML),
    "peft": (_peft, _JSON),
    "axolotl": (partial(_options, trainer="axolotl"), _YAML),
    "llama-factory": (partial(_options, trainer="llama-factory"), _YAML),
    "trl": (partial(_options, trainer="trl"), _YAML),
    "unsloth": (_unsloth, _PYTHON),
}
"""What writes each, and the endings of its file."""
