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
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.kinds import COMPUTE_DTYPES
from qlora_sweep.search_spaces.linears import EXPERT_WEIGHTS, FUSED_EXPERTS, READ_BY_CODE
from qlora_sweep.search_spaces.quantized import stored_quantization
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.files import WRITTEN_BY
from qlora_sweep.storage.surfaces import surface_text
from qlora_sweep.sweep.export import trainers
from qlora_sweep.sweep.export.datasets import DATA_FILE, TEMPLATE_FILE, dataset_options
from qlora_sweep.sweep.export.record import (
    Record,
    RecordedDataset,
    Trainer,
    beside,
    facts,
    record_of,
)

SURFACE = "surface"
"""The format of all of a study's trials; the others are of one."""
_ROWS = "rows.py"
"""What lies beside a script and reads examples; the same of the others."""
_OF_ROWS = ("files", "kinds", "collation", "encoding")
"""Modules of `sweep.data` that are joined in that file, each behind those it imports."""
_KERNELS = "eight_bit.py"
"""Stores and computes in 8 bits."""
_INT8_PRODUCTS = "int8_products.py"
"""Its products of integers."""
_EXPERTS = "experts.py"
"""Holds packed experts."""
_OFFLOAD = "offload.py"
"""Holds their weights on the host."""
_HOST = "host_memory.py"
"""Pins the host's memory."""
_RECOMPUTING = "recomputing.py"
"""Recomputes layers."""
_GROUPED = "grouped.py"
"""Multiplies by them."""
_FITTING = "fitting.py"
"""Fits 8-bit products to the weights, and keeps some in 16 bits."""
_PAIRS = "preference.py"
"""Trains on pairs."""
_ALONE = {
    "from qlora_sweep.search_spaces.config import LOGITS_AT_ONCE": (
        f"LOGITS_AT_ONCE = {LOGITS_AT_ONCE}"
    ),
    "from qlora_sweep.sweep.data.collation import": "from rows import",
    "from qlora_sweep.sweep.training import eight_bit": "import eight_bit",
    "from qlora_sweep.sweep.training import grouped": "import grouped",
    "from qlora_sweep.sweep.training import int8_products": "import int8_products",
    "from qlora_sweep.sweep.training.eight_bit import": "from eight_bit import",
    "from qlora_sweep.sweep.training.host_memory import": "from host_memory import",
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
        texts = {path: self.text}
        for name, text in self.beside.items():
            texts[path.with_name(name)] = text
        if self.record is not None:
            texts[beside(path)] = self.record
        return texts


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
        hint = did_you_mean(format, [*_FORMATS, SURFACE])
        raise InputError(f"--format: unknown format {quote(format)}{hint}")
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
    record = replaced(record, format=format)
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
    dumped = record.model_dump(mode="json")
    provenance = dumped["provenance"] or {}
    for key in ("config", "learning_rate", "measurement", "texts", "is_predicted"):
        provenance[key] = dumped[key]
    values = {
        "peft_type": "LORA",
        # None for a shipped architecture; PEFT notes the path when it loads the adapter.
        "base_model_name_or_path": record.model.weights,
        "inference_mode": False,
        **lora_options(record),
        "auto_mapping": {"provenance": provenance},
    }
    lost = (
        "adapter_config.json holds the adapters alone: rank, alpha, dropout and layers. What was "
        f"{record.basis} depends on the rest too, which formats json and script hold."
    )
    return Export(json.dumps(values, indent=2) + "\n", (lost,))


def lora_options(record: Record) -> dict[str, Any]:
    """Return the arguments of PEFT's `LoraConfig`."""
    config = record.config
    alpha: int | float = config.alpha
    if alpha == int(alpha):
        alpha = int(alpha)
    targets: Any = config.target_modules
    if not isinstance(targets, str):
        targets = list(targets)
    more: dict[str, Any] = {}
    if record.has_named_experts:
        of_experts = [name for name in targets if name in EXPERT_WEIGHTS]
        more["target_parameters"] = [f"experts.{name}" for name in of_experts]
        # No linear layer of a model with experts has that name; one may have the others.
        targets = [name for name in targets if name != FUSED_EXPERTS]
    return {
        "task_type": "CAUSAL_LM",
        "r": config.lora_rank,
        "lora_alpha": alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": targets,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        **more,
    }


# Files that run


def _script(record: Record) -> Export:
    """Return a training script, which trains what was measured by transformers' `Trainer`."""
    config = record.config
    dataset: RecordedDataset | dict[str, Any] | None = record.texts
    if dataset is None and config.is_on_pairs:
        dataset = _ANY_PAIRS
    collator_keys = ["packing", "attention", "compile"]
    files_beside = {_ROWS: joined_rows()}
    has_packed_experts = config.is_quantized and record.model.has_experts
    if config.is_8bit_compute or config.weight_bits == 8 or has_packed_experts:
        files_beside[_KERNELS] = _alone(_KERNELS)
        files_beside[_INT8_PRODUCTS] = _alone(_INT8_PRODUCTS)
    if config.is_8bit_compute:
        files_beside[_FITTING] = _alone(_FITTING)
    if has_packed_experts:
        files_beside[_EXPERTS] = _alone(_EXPERTS)
        files_beside[_GROUPED] = _alone(_GROUPED)
        files_beside[_OFFLOAD] = _alone(_OFFLOAD)
        files_beside[_HOST] = _alone(_HOST)
    if config.recomputes_as_nodes:
        files_beside[_RECOMPUTING] = _alone(_RECOMPUTING)
        files_beside[_HOST] = _alone(_HOST)
    if config.is_on_pairs:
        files_beside[_PAIRS] = _alone(_PAIRS)
        collator_keys += ["is_on_pairs", "loss_type", "dpo_beta"]
    lost: tuple[str, ...] = ()
    sharding = trainers.unsupported(record, "trl").get("sharding")
    if sharding is not None:
        lost = (sharding.replace("the file", "the script"),)
    is_whole = config.quantized_count(record.layers) == record.layers
    read_by_code = READ_BY_CODE.get(str(record.model.config.get("model_type")))
    needs = ""
    if config.kernels_kind.fuses_loss:
        needs += ", liger-kernel"
    if dataset:
        needs += ", trl"
    text = _template("script.py.j2").render(
        header=comment(facts(record) + (trainers.trainers()["script"]["tried"],) + lost),
        record=record,
        config=config,
        dataset=dataset,
        collator_settings={key: getattr(config, key) for key in collator_keys},
        grouped_pairs=config.is_on_pairs and config.packing == "grouped",
        beside=list(files_beside),
        has_packed_experts=has_packed_experts,
        gpus=config.data_parallel,
        lora=lora_options(record),
        dtype=COMPUTE_DTYPES[record.dtype].torch_name,
        adapter_dtype=COMPUTE_DTYPES[config.adapter_dtype].torch_name,
        quantized_whole=is_whole,
        stored=stored_quantization(record.model.config) is not None,
        partly_quantized=config.is_4bit and (not is_whole or read_by_code is not None),
        read_by_code=read_by_code,
        environment=allocator_settings(config.expandable_segments),
        needs=needs,
        training=trainers.spelled(record, "script"),
    )
    return Export(text, lost, files_beside, _with_lost(record, lost))


def _alone(name: str) -> str:
    """Return a module of `sweep.training` as a file that lies beside a script."""
    text = (files("qlora_sweep.sweep.training") / name).read_text(encoding="utf-8")
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
                imported = names.setdefault(str(node.module), set())
                imported.update(alias.name for alias in node.names)
            else:
                break
            end = node.end_lineno
        bodies.append("\n".join(text.splitlines()[end:]).strip())
    future = f"from __future__ import {', '.join(names.pop('__future__'))}"
    imports = sorted(modules)
    for module in sorted(names):
        if not module.startswith("qlora_sweep."):
            imports.append(f"from {module} import {', '.join(sorted(names[module]))}")
    title = f'# {WRITTEN_BY}, for the scripts beside it.\n"""How rows of a dataset are read."""'
    head = "\n".join(imports)
    bodies.insert(0, f"{title}\n\n{future}\n\n{head}")
    return "\n\n\n".join(bodies) + "\n"


def _with_lost(record: Record, lost: tuple[str, ...]) -> str:
    """Return the record that lies beside a file, as JSON."""
    return replaced(record, unsupported=lost).to_json()


def _unsloth(record: Record) -> Export:
    """Return a script that trains by Unsloth, with TRL's options for the rest."""
    options = trainers.options(record, "trl")
    adapters = lora_options(record)
    del adapters["task_type"], adapters["use_dora"]
    own = tuple(trainers.trainers()["unsloth"]["own"])
    lost = trainers.lost(record, "unsloth")
    text = _template("unsloth.py.j2").render(
        header=_header(record, "unsloth", lost),
        record=record,
        data=options["datasets"][0],
        held_out=options.get("test_split_size"),
        dtype=options["dtype"],
        loading=trainers.spelled(record, "unsloth"),
        adapters=adapters,
        options={key: value for key, value in options.items() if not key.startswith(own)},
    )
    return Export(text, lost)


def _options(record: Record, *, trainer: Trainer) -> Export:
    """Return a trainer's file of options."""
    lost = trainers.lost(record, trainer)
    options = trainers.options(record, trainer)
    text = f"{_header(record, trainer, lost)}\n\n{_as_yaml(options)}"
    if trainer != "trl":
        return Export(text, lost)
    files_beside = {}
    if record.texts is not None and "chat_template_path" in options:
        files_beside[TEMPLATE_FILE] = str(record.texts.summary.marked_template)
    return Export(text, lost, files_beside, _with_lost(record, lost))


def _header(record: Record, trainer: Trainer, lost: tuple[str, ...]) -> str:
    """Return the comment over a trainer's file."""
    described = trainers.trainers()[trainer]
    name = described["name"]
    edits = []
    if not record.model.weights:
        edits.append(f"- the model: its architecture alone was {record.basis}")
    if trainer == "llama-factory":
        needed = "a dataset_info.json of what is below"
        if record.texts is None:
            needed = f"your {DATA_FILE} and {needed}"
        edits.append(f"- dataset_dir, a directory with {needed}")
    elif record.texts is None:
        edits.append("- datasets")
    paragraphs = list(facts(record))
    paragraphs += ["", f"For {name}: {trainers.command(record, trainer)}"]
    paragraphs.append(described["tried"].format(**described))
    if edits:
        paragraphs.append("Schedule and epochs were not searched. To fill in:")
        paragraphs += edits
    else:
        paragraphs.append("Schedule and epochs were not searched. Nothing is to be filled in.")
    paragraphs += ["", f"Where {name} cannot do what was {record.basis}:"]
    paragraphs += [f"- {sentence}" for sentence in lost]
    if not lost:
        paragraphs.append("- nothing known: every setting is below")
    text = comment(paragraphs)
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
        wrapper.subsequent_indent = ""
        if text.startswith("- "):
            wrapper.subsequent_indent = "  "
        lines += wrapper.wrap("".join(map(_printable, text))) or [""]
    return "\n".join(f"# {line}".rstrip() for line in lines)


def _printable(character: str) -> str:
    """Return a character, or its escape where it does not print, as a line end does not."""
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


@cache
def _template(name: str) -> Any:
    environment = Environment(
        loader=PackageLoader("qlora_sweep.sweep.export"),
        # It writes Python, not markup; all text that people wrote goes through `python`.
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
    if '"' in text or "\\" in text:
        return text
    return text.replace("'", '"')


_JSON = (".json",)
_YAML = (".yaml", ".yml")
_PYTHON = (".py",)
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
