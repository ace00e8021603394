"""What comes of every model type of transformers that has a text decoder, tiny.

    nice python -m tests.bench.families [--types gemma4_text,glm4] [--device cuda] [--missing]

Each type is planned, trained with each target set, compared, merged and exported
(`family_trials`). What comes of it goes to `results/families_DEVICE.json`, type by type, and the
tables into docs/models.md. `--types` tries some, `--missing` those that are not in the file yet or
were tried with other versions.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.harness import ROOT, Row, stamp, with_part

PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "tests" / "bench" / "results"
BEGIN = "<!-- Made by `python -m tests.bench.families` from tests/bench/results. -->"
END = "<!-- End of what is made. -->"
DEVICES = ("cpu", "cuda")
YES = "yes"
FAR_OFF = 0.02
"""A relative error from which on a type is named."""


def results_of(device: str) -> Path:
    """Return the file of what came of types on a device."""
    return RESULTS / f"families_{device}.json"


def read(device: str) -> Row:
    """Return what is known of a device; nothing where no type was tried."""
    path = results_of(device)
    if not path.exists():
        return {"stamp": {}, "types": {}}
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Try what was asked for, and write the tables."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", help="separated by commas")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--missing", action="store_true")
    asked = parser.parse_args()
    known = read(asked.device)
    kinds: Sequence[str] = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if asked.types:
        kinds = asked.types.split(",")
    now = stamp()
    if asked.missing and known["stamp"].get("versions") == now["versions"]:
        kinds = [kind for kind in kinds if kind not in known["types"]]
    types: dict[str, Any] = dict(known["types"])
    for kind, found in _tries(kinds, asked.device):
        types[kind] = found
        text = json.dumps({"stamp": now, "types": dict(sorted(types.items()))}, indent=1)
        results_of(asked.device).write_text(f"{text}\n", encoding="utf-8")
    PAGE.write_text(
        page(PAGE.read_text(encoding="utf-8"), made(map(read, DEVICES))), encoding="utf-8"
    )


def _tries(kinds: Sequence[str], device: str) -> Iterator[tuple[str, Row]]:
    """Yield what comes of each type."""
    import torch
    import transformers

    from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
    from tests.bench.family_trials import Workplace, tried

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    # Of a training most of the time would go into looking at what libraries leave.
    gc.collect()
    gc.freeze()
    tracer = TracingChildren(1, outlive=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        place = Workplace(tracer, device, Path(home))
        for kind in kinds:
            found = asdict(tried(kind, place))
            yield kind, found
            print(
                f"{kind}: {found['seconds']} s, {time.perf_counter() - began:.0f} s in all",
                flush=True,
            )
    tracer.close()


# The page.


def made(results: Iterable[Row]) -> str:
    """Return what the page says of what was tried, on each device."""
    parts: list[str] = []
    for known in results:
        if known["types"]:
            parts += ["\n".join(part) for part in _parts(known)]
    return "\n\n".join(parts)


def _parts(known: Row) -> Iterator[Iterator[str]]:
    types = known["types"]
    trained = {kind: found for kind, found in types.items() if found["targets"]}
    yield _about(known["stamp"], types)
    yield _of_targets(trained)
    yield _of_whole(trained)
    yield _not_tried(types)


def _about(stamp: Row, types: Mapping[str, Row]) -> Iterator[str]:
    versions = ", ".join(f"{name} {v}" for name, v in stamp["versions"].items() if v)
    where = stamp["measured_on"] or "CPU"
    tried = {kind: found for kind, found in types.items() if found["targets"]}
    yield f"{where}, {versions}, {stamp['date']}."
    yield ""
    yield (
        f"Of {len(types)} types {len(tried)} are tried; the others are none that is trained, or "
        "hold the decoder of another type. With some target set "
        f"{_count(tried, 'trained')} train and {_count(tried, 'planned')} have their memory "
        f"predicted; {_whole(tried, 'speed')} have their speed predicted, "
        f"{_whole(tried, 'faithful')} are faithful, {_whole(tried, 'merged')} are merged and "
        f"{_whole(tried, 'exported')} exported."
    )
    yield ""
    far = ", ".join(f"{kind} {worst:+.1%}" for kind, worst in _far_off(tried))
    yield f"Predictions that are more than {FAR_OFF:.0%} off, measured over predicted: {far}."


def _count(types: Mapping[str, Row], what: str) -> int:
    """Return how many types have a target set of which something is so."""
    return sum(any(of[what] == YES for of in found["targets"].values()) for found in types.values())


def _whole(types: Mapping[str, Row], what: str) -> int:
    return sum(found[what] == YES for found in types.values())


def _far_off(types: Mapping[str, Row]) -> Iterator[tuple[str, float]]:
    for kind, found in types.items():
        errors = [of["error"] for of in found["targets"].values() if of["error"] is not None]
        worst = max(errors, key=abs, default=0.0)
        if abs(worst) > FAR_OFF:
            yield kind, worst


def _of_targets(types: Mapping[str, Row]) -> Iterator[str]:
    """Yield a row for each outcome, of the types and target sets that have it."""
    by_outcome: dict[tuple[str, ...], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for kind, found in types.items():
        for name, of in found["targets"].items():
            by_outcome[found["quantization"], *_cells(of, kind)][kind].append(name)
    yield "| model type | base | targets | memory predicted | worst error | trained |"
    yield "|---|---|---|---|---|---|"
    for (quantization, planned, trained), names in by_outcome.items():
        sets: dict[str, list[str]] = defaultdict(list)
        for kind, targets in names.items():
            sets[", ".join(targets)].append(kind)
        for targets_of, kinds in sets.items():
            worst = _worst_error(types, kinds, targets_of.split(", "))
            cells = (", ".join(kinds), quantization, targets_of, planned, worst, trained)
            yield f"| {' | '.join(cells)} |"


def _worst_error(types: Mapping[str, Row], kinds: Sequence[str], targets: Sequence[str]) -> str:
    """Return the largest error of some types with some targets; empty where none was measured."""
    errors: list[float] = []
    for kind in kinds:
        tried = types[kind]["targets"]
        errors += [
            abs(tried[name]["error"]) for name in targets if tried[name]["error"] is not None
        ]
    return f"{max(errors):.1%}" if errors else ""


def _cells(of: Row, kind: str) -> tuple[str, str]:
    if of["refused"]:
        rule = of["refused"].partition(":")[0]
        return f"refused: `{rule}`", ""
    return _brief(of["planned"], kind), _brief(of["trained"], kind)


def _of_whole(types: Mapping[str, Row]) -> Iterator[str]:
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for kind, found in types.items():
        if found["merged"]:
            cells = (found[key] for key in ("speed", "faithful", "merged", "exported"))
            rows[tuple(_brief(cell, kind) for cell in cells)].append(kind)
    yield "| model type | speed predicted | faithful | merged | exported |"
    yield "|---|---|---|---|---|"
    for cells, kinds in rows.items():
        yield f"| {', '.join(kinds)} | {' | '.join(cells)} |"


def _not_tried(types: Mapping[str, Row]) -> Iterator[str]:
    rows: dict[str, list[str]] = defaultdict(list)
    for kind, found in types.items():
        if found["decoder"]:
            rows["its text decoder is trained, which has a type of its own"].append(
                f"{kind} ({found['decoder']})"
            )
        elif found["refused"]:
            rows[_brief(found["refused"], kind)].append(kind)
    yield "| model type | why it is not trained |"
    yield "|---|---|"
    for reason, kinds in rows.items():
        yield f"| {', '.join(kinds)} | {reason} |"


def _brief(text: str, kind: str) -> str:
    """Return an outcome without the type's name, so that types with the same one share a row."""
    for sign in ("chunks of the sequence", "loops over the tokens"):
        if sign in text:
            return f"no: {sign}"
    text = text.replace(f"; model_type '{kind}'", "")
    for name in (f"model type '{kind}'", f"model_type '{kind}'"):
        text = text.replace(name, "this type")
    return text.replace("|", "\\|")


def page(text: str, part: str) -> str:
    """Return the page with other tables."""
    return with_part(text, f"\n\n{part}\n\n", begin=BEGIN, end=END)


if __name__ == "__main__":
    main()
