"""Owns the front door: each command with its options and examples, and nothing of what it does.

Imports nothing heavy, so that ``--help`` answers at once; commands import what they need when they
run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
import typer.core
import typer.main

from search_spaces.errors import InputError
from sweep import stop_signals
from sweep.paths import storage_url
from sweep.stop_signals import INTERRUPTED
from sweep.terminal import options as opt
from sweep.terminal.console import (
    announce_if_slow,
    note,
    prepare_streams,
    say_version,
)
from sweep.terminal.edge import guarded
from sweep.terminal.knob_options import configured
from sweep.terminal.typed import Invocation, refuse_mistyped

STEPS_WITHOUT_END = 1_000_000
"""Where a time was typed, steps do not end it sooner."""
SLOW_TO_LOAD = frozenset(["run", "confirm", "status", "best", "report", "export", "train", "rm"])
"""What they import takes seconds on a cold disk, before anything of theirs can be shown."""


class _Commands(typer.core.TyperGroup):
    """Leaves it to the edge to say that a command was interrupted, where typer only exits, and
    refuses what is mistyped."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that was typed, with the words behind it."""
        name, command, words = super().resolve_command(ctx, args)
        if not ctx.resilient_parsing:
            refuse_mistyped(command, words)
        return name, command, words

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was typed."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise typer.Abort from interrupt


app = typer.Typer(
    name="sweep",
    cls=_Commands,
    help="Name a GPU, get the fastest QLoRA configuration that fits it, and proof.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def front_door(version: opt.VersionOption = False) -> int:
    """Name a GPU, get the fastest QLoRA configuration that fits it, and proof."""
    if version:
        say_version()
        raise typer.Exit
    return 0


@app.command(
    epilog=opt.examples(
        "sweep run a10",
        "sweep run cpu-demo --trials 3 --no-confirm",
        "sweep run a10 --rank 64 --target-modules all-linear --set compile=true",
        "sweep run a10 --data dataset.jsonl",
        "sweep run wider.yaml --from a10",
        "sweep run a10 --devices all --model mistral-7b-v0.3 --model llama-3.1-8b",
        "sweep run a10 --on slurm --with time=4h --with partition=gpu --dry-run",
    )
)
def run(
    context: typer.Context,
    space: opt.SpaceArgument,
    on: opt.OnOption = None,
    place_settings: opt.PlaceSettingsOption = None,
    dry_run: opt.DryRunOption = False,
    yes: opt.YesOption = False,
    gpu: opt.GpuOption = None,
    devices: opt.DevicesOption = None,
    model: opt.ModelsOption = None,
    data: opt.DataOption = None,
    text_column: opt.TextColumnOption = None,
    texts_format: opt.TextsFormatOption = None,
    completions_only: opt.CompletionsOnlyOption = None,
    tokenizer: opt.TokenizerOption = None,
    study: opt.StudyNameOption = None,
    storage: opt.StorageOption = None,
    trials: opt.TrialsOption = None,
    time_budget: opt.TimeBudgetOption = None,
    max_dollars: opt.MaxDollarsOption = None,
    seed: opt.SeedOption = None,
    sampler: opt.SamplerOption = None,
    numerics: opt.NumericsOption = None,
    carried: opt.CarriedOption = None,
    no_confirm: opt.NoConfirmOption = False,
    soak: opt.SoakOption = None,
    lora_rank: opt.RankOption = None,
    target_modules: opt.TargetModulesOption = None,
    micro_batch_size: opt.MicroBatchOption = None,
    seq_len: opt.SeqLenOption = None,
    compute_dtype: opt.ComputeDtypeOption = None,
    quantization: opt.QuantizationOption = None,
    settings: opt.SetOption = None,
    as_json: opt.JsonOption = False,
) -> int:
    """Start or resume a study. Once the search has ended its winner is confirmed.

    Settings that are typed are fixed and the rest of the space is searched.
    """
    from sweep.request import REQUEST, RunRequest, Where, refuse_mistakes

    if no_confirm and soak is not None:
        raise InputError("--no-confirm and --soak are both given: keep one")
    where = Where.parse(on, place_settings or ())
    if space.endswith(REQUEST.removeprefix("request")):
        if len((context.obj or Invocation(())).words) > 1:
            raise InputError(f"{space} is a whole request: no option goes with it")
        request = RunRequest.read(space)
    else:
        options = {
            "lora_rank": lora_rank,
            "target_modules": target_modules,
            "micro_batch_size": micro_batch_size,
            "seq_len": seq_len,
            "compute_dtype": compute_dtype,
            "quantization": quantization,
        }
        overrides = {
            "gpu": gpu,
            "model": model[0] if model else None,
            "data": _texts(data, text_column, texts_format, completions_only, tokenizer),
            "trials": trials,
            "time_budget_seconds": _seconds("--time-budget", time_budget),
            "max_dollars": max_dollars,
            "confirm": False if no_confirm else _soak(soak),
            "seed": seed,
            "sampler": sampler,
            "numerics": numerics,
        }
        request = RunRequest(
            space=space,
            overrides={key: value for key, value in overrides.items() if value is not None},
            held=configured(options, settings or ()),
            study=study,
            storage=storage,
            devices=devices,
            carried=carried,
            as_json=as_json,
        )
    models = model or []
    refuse_mistakes(request, models=models, storage=storage_url(request.storage))
    if len(models) > 1 and where.kind != "local":
        raise InputError("--model: several models are for this machine's GPUs: elsewhere name one")
    if where.kind == "ssh":
        from sweep.terminal import remote

        return remote.run(request, where, is_dry=dry_run)
    if where.kind == "slurm":
        from sweep.terminal import submitting

        return submitting.submit(request, where, is_dry=dry_run)
    if where.kind in ("modal", "skypilot"):
        from sweep.terminal import launching

        return launching.launch(request, where, is_sure=yes, is_dry=dry_run)
    from sweep.terminal import driving

    return driving.run(request, where, models=models, is_dry=dry_run)


def _texts(
    data: str | None,
    text_column: str | None,
    texts_format: str | None,
    completions_only: bool | None,
    tokenizer: str | None,
) -> dict[str, Any]:
    """Return what was typed of a dataset, by the keys of a space's section about it."""
    typed = {
        "texts": data,
        "text_column": text_column,
        "format": texts_format,
        "completions_only": completions_only,
        "tokenizer": tokenizer,
    }
    return {key: value for key, value in typed.items() if value is not None}


def _seconds(option: str, typed: str | None) -> float | None:
    """Return the seconds of a duration that was typed; None where none was."""
    from search_spaces.space import parse_duration

    try:
        return None if typed is None else parse_duration(typed)
    except InputError as error:
        raise InputError(f"{option}: {error}") from error


def _soak(typed: str | None) -> dict[str, float] | None:
    """Return how long to soak, as long as that takes in steps; None where nothing was typed."""
    seconds = _seconds("--soak", typed)
    return None if seconds is None else {"soak_seconds": seconds, "soak_steps": STEPS_WITHOUT_END}


@app.command(
    epilog=opt.examples(
        "sweep plan a10",
        "sweep plan a10 --rank 64 --target-modules all-linear --seq-len 1024 --gpu a100-40gb",
        "sweep plan a10 --exact --micro-batch-size 8 --seq-len 512 --set checkpoint_fraction=0.5",
        "sweep plan a10 --longest",
        "sweep plan a10 --data dataset.jsonl --tokenizer models/mine",
        "sweep plan --gpu a10 --gpu l4 --cheapest --within 6h --samples 10000",
        "sweep plan --gpu a10 --gpu l4 --rank 64 --price a10=0.75",
    )
)
def plan(
    space: opt.SpaceOrCardArgument = None,
    gpu: opt.GpusOption = None,
    model: opt.ModelOption = None,
    numerics: opt.NumericsOption = None,
    exact: opt.ExactOption = False,
    from_file: opt.FromFileOption = None,
    data: opt.DataOption = None,
    text_column: opt.TextColumnOption = None,
    texts_format: opt.TextsFormatOption = None,
    completions_only: opt.CompletionsOnlyOption = None,
    tokenizer: opt.TokenizerOption = None,
    longest: opt.LongestOption = False,
    cheapest: opt.CheapestOption = False,
    within: opt.WithinOption = None,
    prices: opt.PricesOption = None,
    price: opt.PriceOption = None,
    study: opt.CalibrateOption = None,
    storage: opt.StorageOption = None,
    train_steps: opt.StepsOption = None,
    samples: opt.SamplesOption = None,
    tokens: opt.TokensOption = None,
    dataset_samples: opt.DatasetOption = None,
    epochs: opt.EpochsOption = None,
    details: opt.DetailsOption = False,
    lora_rank: opt.RankOption = None,
    target_modules: opt.TargetModulesOption = None,
    micro_batch_size: opt.MicroBatchOption = None,
    seq_len: opt.SeqLenOption = None,
    compute_dtype: opt.ComputeDtypeOption = None,
    quantization: opt.QuantizationOption = None,
    settings: opt.SetOption = None,
    as_json: opt.JsonOption = False,
) -> int:
    """Predict what fits, how fast and at what cost; needs no GPU.

    Settings that are typed are fixed and the rest of the space is searched. With --exact one
    configuration is asked about: what is not typed is the standard recipe's. A GPU that is named
    first and those of --gpu are all asked about, and compared.
    """
    from search_spaces.costs import AskedWork
    from sweep.planning.question import PlanRequest
    from sweep.terminal import plan as command

    options = {
        "lora_rank": lora_rank,
        "target_modules": target_modules,
        "micro_batch_size": micro_batch_size,
        "seq_len": seq_len,
        "compute_dtype": compute_dtype,
        "quantization": quantization,
    }
    request = PlanRequest(
        space=space,
        gpus=tuple(gpu or ()),
        model=model,
        configuration=configured(options, settings or ()),
        numerics=numerics,
        is_exact=exact,
        from_file=from_file,
        work=AskedWork(
            train_steps, samples, tokens, dataset_samples, epochs, has_texts=data is not None
        ),
        data=_texts(data, text_column, texts_format, completions_only, tokenizer),
        prices=None if prices is None else Path(prices),
        typed_prices=tuple(price or ()),
        is_longest=longest,
        is_cheapest=cheapest,
        within_seconds=_seconds("--within", within),
        study=study,
        storage=storage,
        as_json=as_json,
        is_detailed=details,
    )
    return command.plan(request)


@app.command(
    epilog=opt.examples(
        "sweep data dataset.jsonl --model demo",
        "sweep data dataset.jsonl --model demo --completions-only --json",
    )
)
def data(
    texts: opt.TextsArgument,
    model: opt.ModelOption = None,
    text_column: opt.TextColumnOption = None,
    format: opt.TextsFormatOption = None,
    completions_only: opt.CompletionsOnlyOption = None,
    tokenizer: opt.TokenizerOption = None,
    batch_size: opt.WasteBatchOption = None,
    as_json: opt.JsonOption = False,
) -> int:
    """Say how long your texts are, what a length cuts off, and what packing saves; needs no GPU.

    They are counted in tokens of the model, or of a tokenizer that is named.
    """
    from sweep.terminal import dataset as command

    return command.data(
        texts,
        model=model,
        text_column=text_column,
        format=format,
        completions_only=completions_only,
        tokenizer=tokenizer,
        batch_size=batch_size,
        as_json=as_json,
    )


@app.command(
    epilog=opt.examples("sweep status", "sweep status a10 --watch", "sweep status a10 --json")
)
def status(
    study: opt.AnyStudyArgument = None,
    watch: opt.WatchOption = False,
    storage: opt.StorageOption = None,
    as_json: opt.JsonOption = False,
) -> int:
    """Show what ran, what is running, and the best so far."""
    from sweep.terminal import listings

    return listings.status(study, storage=storage, as_json=as_json, watch=watch)


@app.command(epilog=opt.examples("sweep confirm a10 --soak 10m"))
def confirm(
    study: opt.StudyArgument,
    soak: opt.SoakOption = None,
    max_dollars: opt.MaxDollarsOption = None,
    storage: opt.StorageOption = None,
    as_json: opt.JsonOption = False,
) -> int:
    """Measure a study's winner again, beside its rivals.

    Then it trains for a while in one go.
    """
    from sweep.terminal import driving

    typed = {"confirm": _soak(soak) or {}, "max_dollars": max_dollars}
    return driving.confirm(study, typed=typed, storage=storage, as_json=as_json)


@app.command(epilog=opt.examples("sweep best a10", "sweep best a10 --json"))
def best(
    study: opt.StudyArgument, storage: opt.StorageOption = None, as_json: opt.JsonOption = False
) -> int:
    """Show a study's winner."""
    from sweep.terminal import listings

    return listings.best(study, storage=storage, as_json=as_json)


@app.command("rm", epilog=opt.examples("sweep rm a10", "sweep rm a10 --yes"))
def remove(
    study: opt.StudyArgument, yes: opt.YesOption = False, storage: opt.StorageOption = None
) -> int:
    """Remove a study with its trials, report and logs."""
    from sweep.terminal import commands

    return commands.remove(study, storage=storage, is_sure=yes)


@app.command(epilog=opt.examples("sweep report a10", "sweep report a10 -o a10.html"))
def report(
    studies: opt.StudiesArgument = None,
    plans: opt.PlanFilesOption = None,
    tokens: opt.TokensOption = None,
    dataset_samples: opt.DatasetOption = None,
    epochs: opt.EpochsOption = None,
    figure: opt.FigureOption = None,
    output: opt.ReportOption = None,
    force: opt.ForceOption = False,
    storage: opt.StorageOption = None,
) -> int:
    """Write a study's report, or compare GPUs; one HTML file.

    With the size of your dataset it says what your training costs. Several studies, and plans that
    `sweep plan --json` printed, are set beside each other: which GPU is the cheapest, which the
    soonest, and what cannot be told. Example: sweep report a10 a100-40gb --plan l4.json
    --dataset-samples 50000

    A picture for slides, where the extra `images` is installed: sweep report a10 -o front.png
    """
    from reports.decision import Job
    from sweep.terminal import commands

    return commands.report(
        studies or (),
        plans=plans or (),
        job=Job(tokens=tokens, dataset_samples=dataset_samples, epochs=epochs),
        figure=figure,
        storage=storage,
        output=output,
        is_forced=force,
    )


@app.command(
    epilog=opt.examples(
        "sweep export a10 --format script", "sweep export a10 --format json -o winner.json"
    )
)
def export(
    study: opt.StudyArgument,
    format: opt.FormatOption = "script",
    trial: opt.TrialOption = None,
    output: opt.ExportOption = None,
    force: opt.ForceOption = False,
    storage: opt.StorageOption = None,
) -> int:
    """Write a study's winner as a recipe that runs.

    With --trial another trial is written.
    """
    from sweep.terminal import commands

    return commands.export(
        study, format=format, trial=trial, storage=storage, output=output, is_forced=force
    )


@app.command(epilog=opt.examples("sweep merge adapter --output merged --model base --dtype bf16"))
def merge(
    adapter: opt.AdapterArgument,
    output: opt.DirectoryOption,
    model: opt.BaseOption = None,
    dtype: opt.MergedDtypeOption = None,
    rows: opt.RowsOption = 4,
    as_json: opt.JsonOption = False,
) -> int:
    """Merge an adapter into its 16-bit base, shard by shard.

    The merged model's logits are compared with those of base and adapter. Merging into
    quantized weights would make another model, and is not offered.
    """
    from sweep.terminal import finishing

    return finishing.merge(
        adapter, output=output, model=model, dtype=dtype, rows=rows, as_json=as_json
    )


@app.command(epilog=opt.examples("sweep verify a10 --steps 20"))
def verify(
    what: opt.VerifiedArgument,
    steps: opt.VerifyStepsOption = 40,
    trial: opt.TrialOption = None,
    model: opt.VerifyModelOption = None,
    storage: opt.StorageOption = None,
    as_json: opt.JsonOption = False,
) -> int:
    """Run a study's winner, or what was exported, and compare with what was measured.

    Tokens/s of the median step are to be within 5 %, peak allocated memory within 2 %; else the
    exit code is 1, and it says what differs.
    """
    from sweep.terminal import finishing

    return finishing.verify(
        what, steps=steps, trial=trial, model=model, storage=storage, as_json=as_json
    )


@app.command(
    epilog=opt.examples(
        "sweep train a10 --data dataset.jsonl --output adapter --max-steps 200",
        "sweep train demo --data dataset.jsonl --output adapter --max-steps 10",
    )
)
def train(
    subject: opt.SubjectArgument,
    output: opt.AdapterOption,
    data: opt.DataOption = None,
    text_column: opt.TextColumnOption = None,
    format: opt.TextsFormatOption = None,
    completions_only: opt.CompletionsOnlyOption = None,
    tokenizer: opt.TokenizerOption = None,
    trial: opt.TrialOption = None,
    model: opt.ModelOption = None,
    weights: opt.WeightsOption = None,
    max_steps: opt.MaxStepsOption = None,
    epochs: opt.TrainEpochsOption = None,
    eval_fraction: opt.EvalFractionOption = None,
    learning_rate: opt.LearningRateOption = None,
    seed: opt.SeedOption = None,
    checkpoint_every: opt.CheckpointEveryOption = None,
    resume: opt.ResumeOption = False,
    storage: opt.StorageOption = None,
    as_json: opt.JsonOption = False,
) -> int:
    """Train an adapter on your texts, with the settings that were measured.

    The winner of a study, or another trial of it, or a configuration of a file: what
    `sweep export --format json` writes, or its keys alone. At the end: tokens/s and memory beside
    what was promised.
    """
    from sweep.terminal import finishing

    texts = {
        "texts": data,
        "text_column": text_column,
        "format": format,
        "completions_only": completions_only,
        "tokenizer": tokenizer,
        "eval_fraction": eval_fraction,
    }
    return finishing.train(
        subject,
        output=Path(output),
        texts=texts,
        trial=trial,
        model=model,
        weights=weights,
        numbers={
            "max_steps": max_steps,
            "epochs": epochs,
            "learning_rate": learning_rate,
            "seed": seed,
            "checkpoint_every": checkpoint_every,
        },
        is_resumed=resume,
        storage=storage,
        as_json=as_json,
    )


@app.command(epilog=opt.examples("sweep replay surface.jsonl --samplers guided,random --seeds 5"))
def replay(
    surface: opt.SurfaceArgument,
    samplers: opt.SamplersOption = None,
    seeds: opt.SeedsOption = 20,
    budget_gib: opt.BudgetOption = None,
    as_json: opt.JsonOption = False,
) -> int:
    """Let samplers search recorded trials; needs no GPU.

    It says how many trials each needs to come near the best.
    """
    from sweep.terminal import replay as command

    return command.replay(
        surface, samplers=samplers, seeds=seeds, budget_gib=budget_gib, as_json=as_json
    )


@app.command(epilog=opt.examples("sweep presets"))
def presets(as_json: opt.JsonOption = False) -> int:
    """List the shipped search spaces."""
    from sweep.terminal import listings

    return listings.presets(as_json=as_json)


@app.command(epilog=opt.examples("sweep gpus --json"))
def gpus(as_json: opt.JsonOption = False) -> int:
    """List the GPUs of the catalogue."""
    from sweep.terminal import listings

    return listings.gpus(as_json=as_json)


@app.command(epilog=opt.examples("sweep models"))
def models(as_json: opt.JsonOption = False) -> int:
    """List the shipped architectures."""
    from sweep.terminal import listings

    return listings.models(as_json=as_json)


@app.command(epilog=opt.examples("sweep schema"))
def schema() -> int:
    """Print the JSON Schema of a space file, for editors."""
    from sweep.terminal import spaces

    return spaces.schema()


@app.command(epilog=opt.examples("sweep init --gpu l4 --model tinyllama-1.1b -o mine.yaml"))
def init(
    gpu: opt.GpuOption = None,
    model: opt.ModelOption = None,
    output: opt.SpaceFileOption = None,
    force: opt.ForceOption = False,
) -> int:
    """Write a commented search space to start from."""
    from sweep.terminal import spaces

    return spaces.init(gpu=gpu, model=model, output=output, is_forced=force)


@app.command(
    epilog=opt.examples("sweep dashboard a10", "sweep dashboard a10 --port 8090 --no-browser")
)
def dashboard(
    study: opt.StudyArgument,
    port: opt.PortOption = 8080,
    no_browser: opt.NoBrowserOption = False,
    storage: opt.StorageOption = None,
) -> int:
    """Show a study in Optuna's dashboard, on this machine alone."""
    from sweep.terminal import dashboard as command

    return command.dashboard(study, storage=storage, port=port, is_opened=not no_browser)


@app.command(epilog=opt.examples("sweep doctor"))
def doctor() -> int:
    """Check this machine, and say what to do."""
    from sweep.terminal import commands

    return commands.doctor()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that was typed and return the exit code."""
    try:
        with stop_signals.heard():
            return _run(arguments)
    except KeyboardInterrupt:
        # Before the edge, or while it says that the command was interrupted.
        note("Interrupted.")
        return INTERRUPTED
    finally:
        stop_signals.ignore_at_exit()


def _run(arguments: Sequence[str] | None) -> int:
    prepare_streams()
    typed = list(sys.argv[1:] if arguments is None else arguments)
    # A script that reads a list wants no news of it; who follows a study does, in a pipe too.
    is_told = typed[:1] in (["run"], ["confirm"], ["train"]) or sys.stderr.isatty()
    if typed and typed[0] in SLOW_TO_LOAD and is_told:
        announce_if_slow("Loading libraries ...")
    return guarded(
        lambda: app(
            typed or ["--help"],
            prog_name="sweep",
            standalone_mode=False,
            obj=Invocation(tuple(typed[1:])),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
