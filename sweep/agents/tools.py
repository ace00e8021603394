"""The tools: each a command, with what an agent may say of it, and what it returns.

A tool runs its command with ``--json`` in a process of its own and returns that document, as
`docs/reference.md` says it. Of a long one the longest parts are left out unless they are asked for.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, NothingFits
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.sweep.agents.jobs import SWEEP, Job, Jobs
from qlora_sweep.sweep.paths import report_path

Document = dict[str, Any]
GpuName = Annotated[
    str, Field(description="a GPU of the catalogue, as a10 or rtx-4090; see `gpus`")
]
Space = Annotated[str, Field(description="a preset, or a YAML file of a search space")]
Model = Annotated[
    str | None, Field(description="a shipped name (see `models`), a directory, or a hub id")
]
Dataset = Annotated[str, Field(description="a file, a directory of files, or a hub id")]
Study = Annotated[str, Field(description="a study's name, as `run` returns it")]
Settings = Annotated[
    dict[str, Any] | None,
    Field(
        description="settings that are fixed, by name, as {'lora_rank': 16, 'seq_len': 2048}; the "
        "others are searched"
    ),
]
Parts = Annotated[
    list[str] | None,
    Field(description="parts of the document to return whole, of those named in `left_out`"),
]
_LONG = 6_000
"""Characters of a part's JSON from which on it is left out unless it is asked for."""
_SECONDS = 600.0
_WARNING = "warning: "


def words_of(command: str, *named: str, **options: Any) -> list[str]:
    """Return a command as it is typed.

    Args:
        command: its name.
        named: what it takes without an option; however that begins, it is no option.
        options: by name; what is None or False is left out.
    """
    words = [command]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            for key, one in value.items():
                written = one if isinstance(one, str) else json.dumps(one)
                words += ["--set", f"{key}={written}"]
        elif value is True:
            words.append(option)
        elif value is not None and value is not False:
            words += [option, str(value)]
    if named:
        words.append("--")
    return words + list(named)


def done(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command, and return what it printed.

    Raises:
        InputError: it refuses what was asked.
        NothingFits: nothing fits, and there is nothing to print.
        EnvironmentFault: it finds fault with the machine, or takes too long.
    """
    try:
        ended = subprocess.run(
            SWEEP + tuple(words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(f"sweep {words[0]} took more than {_SECONDS:.0f} s") from error
    fits_nothing = ended.returncode == NothingFits.exit_code
    if ended.returncode == 0 or (fits_nothing and ended.stdout):
        return ended
    said = ended.stderr.strip().removeprefix("error: ")
    if ended.returncode == InputError.exit_code:
        raise InputError(said)
    if fits_nothing:
        raise NothingFits(said)
    raise EnvironmentFault(said or f"sweep {words[0]} ended with {ended.returncode}")


def document_of(command: str, *named: str, parts: Parts = None, **options: Any) -> Document:
    """Return the document that a command prints, and what it warns of; without long parts that are
    not asked for."""
    ended = done(words_of(command, *named, json=True, **options))
    found = shortened(json.loads(ended.stdout), parts)
    lines = ended.stderr.splitlines()
    warnings = [line.removeprefix(_WARNING) for line in lines if line.startswith(_WARNING)]
    if warnings:
        found["warnings"] = warnings
    return found


def shortened(document: Mapping[str, Any], parts: Parts = None) -> Document:
    """Return a document without long parts that are not asked for, which it names."""
    found = dict(document)
    left_out = [
        name
        for name, value in found.items()
        if name not in (parts or ()) and len(json.dumps(value)) > _LONG
    ]
    for name in left_out:
        del found[name]
    if left_out:
        found["left_out"] = left_out
    return found


def plan(
    gpu: GpuName,
    model: Model = None,
    data: Annotated[str | None, Field(description="the dataset to plan for")] = None,
    settings: Settings = None,
    trainer: Annotated[
        str | None,
        Field(description="what is to train: sweep, trl, axolotl, llama-factory or unsloth"),
    ] = None,
    is_exact: Annotated[
        bool,
        Field(description="ask about one configuration: what is not set is the standard recipe's"),
    ] = False,
    parts: Parts = None,
) -> Document:
    """Predict the fastest QLoRA configuration that fits a GPU, its memory, speed and price. Needs
    no GPU and takes seconds: begin here. `recommended` has the `config`, its peak memory, its speed
    with a range, its cost; null where nothing fits."""
    options = {"model": model, "data": data, "settings": settings, "exact": is_exact}
    return document_of("plan", gpu, parts=parts, **{"for": trainer}, **options)


def gpus(
    name: Annotated[str | None, Field(description="one GPU, of which everything is said")] = None,
) -> Document:
    """List the GPUs that can be named, with their memory; or say everything of one."""
    every = json.loads(done(["gpus", "--json"]).stdout)["gpus"]
    if name is None:
        kept = ("name", "product", "memory_bytes")
        return {"gpus": [{key: gpu[key] for key in kept} for gpu in every]}
    wanted = find_gpu(name).name
    return next(gpu for gpu in every if gpu["name"] == wanted)


def models() -> Document:
    """List the models that ship with the tool. Others are named by a directory or a hub id."""
    return dict(json.loads(done(["models", "--json"]).stdout))


def data(
    dataset: Dataset, model: Model = None, settings: Settings = None, parts: Parts = None
) -> Document:
    """Say what a dataset is: its kind, broken lines, how long examples are in the model's tokens,
    how much each length cuts off, and what packing saves. Needs no GPU."""
    return document_of("data", dataset, parts=parts, model=model, settings=settings)


def status(
    study: Annotated[str | None, Field(description="one study; None for all")] = None,
    parts: Parts = None,
) -> Document:
    """Say what a study has measured, whether it runs, and the best so far; or list all studies."""
    if study is None:
        return document_of("status", parts=["studies"])
    return document_of("status", study, parts=parts)


def best(study: Study, parts: Parts = None) -> Document:
    """Return a study's winner: its configuration, what was measured, its gain over the standard
    recipe, and whether it was confirmed."""
    return document_of("best", study, parts=parts)


def report(study: Study) -> Document:
    """Write a study's report, one HTML file for a person to look at, and say where it is."""
    done(words_of("report", study))
    return {"report": str(report_path(study).absolute())}


class Started:
    """The tools that start something, which goes on by itself."""

    def __init__(self) -> None:
        self._jobs = Jobs()

    def run(
        self,
        space: Space,
        model: Model = None,
        data: Annotated[str | None, Field(description="the dataset to train on")] = None,
        study: Annotated[
            str | None, Field(description="its name; the space's unless given")
        ] = None,
        settings: Settings = None,
        trials: Annotated[int | None, Field(description="the most trials")] = None,
        time_budget: Annotated[
            str | None, Field(description="how long at most: 10m, 1h30m")
        ] = None,
        max_dollars: Annotated[float | None, Field(description="what it may cost")] = None,
    ) -> Document:
        """Start a study on the GPU of this machine, which measures configurations until the fastest
        is confirmed: some two minutes for a 7B model. Returns within seconds, with the study's name
        for `status` and `best`, and the job's for `job` and `stop`. The same call resumes it."""
        options: dict[str, Any] = {
            "model": model,
            "data": data,
            "study": study,
            "settings": settings,
            "trials": trials,
            "time_budget": time_budget,
            "max_dollars": max_dollars,
        }
        would = document_of("run", space, dry_run=True, **options)
        return {"study": would["study"]} | self._started("run", space, **options)

    def verify(
        self,
        what: Annotated[str, Field(description="a study, or an exported file")],
        steps: Annotated[int, Field(description="how many are measured", ge=1)] = 40,
    ) -> Document:
        """Start to run a winner, or what was exported, beside what was measured: tokens/s are to be
        within 5 % and memory within 2 %. Returns within seconds: `job` has the result."""
        return self._started("verify", what, steps=steps)

    def train(
        self,
        what: Annotated[
            str, Field(description="a study, whose winner is trained, or a file of a configuration")
        ],
        data: Dataset,
        output: Annotated[str, Field(description="a new directory for the adapter")],
        max_steps: Annotated[int | None, Field(description="how many steps at most", ge=1)] = None,
        epochs: Annotated[float | None, Field(description="how often the dataset is seen")] = None,
        seq_len: Annotated[
            int | None, Field(description="another length than the measured")
        ] = None,
        model: Model = None,
        is_resumed: Annotated[bool, Field(description="go on where it was stopped")] = False,
        is_cut: Annotated[
            bool, Field(description="agree that more than 5 % of the tokens are cut off")
        ] = False,
    ) -> Document:
        """Start to train an adapter on a dataset with the measured settings. Returns within
        seconds: `job` has the result, and `output` holds the adapter, its card and
        `training.json`."""
        options = {
            "data": data,
            "output": output,
            "max_steps": max_steps,
            "epochs": epochs,
            "seq_len": seq_len,
            "model": model,
            "resume": is_resumed,
            "yes": is_cut,
        }
        begun = self._started("train", what, **options)
        return {"output": str(Path(output).absolute())} | begun

    def job(
        self, name: Annotated[str, Field(description="as `run`, `verify` or `train` returned it")]
    ) -> Document:
        """Say whether something that was started still runs, its last words, and once it has ended
        its result. Exit codes: 0 done, 1 nothing fits (of `verify`: not as measured), 2 bad input,
        3 the machine is at fault, 130 stopped and resumable."""
        return self._about(self._jobs.find(name))

    def stop(self, name: Annotated[str, Field(description="a job's name")]) -> Document:
        """Ask something that was started to end. What it has measured or trained is kept, and the
        same call resumes it."""
        job = self._jobs.find(name)
        self._jobs.stop(job)
        return self._about(job)

    def _started(self, command: str, what: str, **options: Any) -> Document:
        words = words_of(command, what, json=True, **options)
        return self._about(self._jobs.start(words))

    def _about(self, job: Job) -> Document:
        found: Document = {
            "job": job.name,
            "is_running": job.is_running,
            "exit_code": job.exit_code,
            "said": job.said,
            "log": str(job.directory / "log.txt"),
        }
        document = job.document
        if document is not None:
            found["document"] = shortened(document)
        return found
