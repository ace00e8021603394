"""The commands: each with its options and examples, and the function that does it.

Imports nothing heavy, so that ``--help`` answers at once; commands import what they need when they
run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any

import typer
import typer.core

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.sweep import stop_signals
from qlora_sweep.sweep.paths import storage_url
from qlora_sweep.sweep.running import starting
from qlora_sweep.sweep.stop_signals import INTERRUPTED
from qlora_sweep.sweep.terminal import options as opt
from qlora_sweep.sweep.terminal.console import announce_if_slow, note, prepare_streams, say_version
from qlora_sweep.sweep.terminal.edge import guarded

SLOW_TO_LOAD = frozenset(["run", "confirm", "status", "best", "report", "export", "train", "rm"])
"""What they import takes seconds on a cold disk, before anything of theirs can be shown."""


CALLED: dict[str, str] = {}
"""The function of `sweep.terminal` that does a command, by the command's name."""


class _Commands(typer.core.TyperGroup):
    """Refuses what is mistyped, and leaves it to the edge to say that a command was interrupted,
    where typer only exits."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that was typed, with the words behind it."""
        name, command, words = super().resolve_command(ctx, args)
        if not ctx.resilient_parsing:
            opt.refuse_mistyped(command, words)
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


def command(
    function: str, *examples: str, name: str | None = None
) -> Callable[[Callable[..., None]], None]:
    """Declare a command by the signature and docstring of a function without a body.

    Args:
        function: what does it, ``module.function`` of `sweep.terminal`: imported when the command
            runs, and called with its options by name.
        examples: how it is typed; a test runs them.
        name: the command's, where that is not the function's.
    """
    module, _, called = function.rpartition(".")

    def declare(declared: Callable[..., None]) -> None:
        @wraps(declared)
        def run(**typed: Any) -> Any:
            return getattr(import_module(f"qlora_sweep.sweep.terminal.{module}"), called)(**typed)

        app.command(name, epilog=_shown(*examples))(run)
        CALLED[name or declared.__name__] = function

    return declare


def _shown(*examples: str) -> str:
    # The first line keeps the help from being filled as a paragraph.
    return "\b\nExamples:" + "".join(f"\n  $ {example}" for example in examples)


@app.callback(invoke_without_command=True)
def front_door(version: opt.Version = False) -> None:
    """Name a GPU, get the fastest QLoRA configuration that fits it, and proof."""
    if version:
        say_version()
        raise typer.Exit


@app.command(
    epilog=_shown(
        "sweep run a10 --data dataset.jsonl",
        "sweep run cpu-demo --trials 3 --no-confirm",
        "sweep run cpu-demo --for trl --trials 3 --no-confirm",
        "sweep run a10 --rank 64 --target-modules all-linear --set compile=true",
        "sweep run wider.yaml --from a10",
        "sweep run a10 --on slurm --with time=4h --with partition=gpu --dry-run",
    )
)
def run(
    context: typer.Context,
    space: opt.Space,
    on: opt.On = None,
    place_settings: opt.With = None,
    dry_run: opt.DryRun = False,
    yes: opt.Yes = False,
    gpu: opt.Gpu = None,
    devices: opt.Devices = None,
    model: opt.Model = None,
    data: opt.Data = None,
    study: opt.StudyName = None,
    storage: opt.Storage = None,
    trials: opt.Trials = None,
    time_budget: opt.TimeBudget = None,
    max_dollars: opt.MaxDollars = None,
    seed: opt.Seed = None,
    sampler: opt.Sampler = None,
    carried: opt.From = None,
    no_confirm: opt.NoConfirm = False,
    method: opt.Method = None,
    lora_rank: opt.Rank = None,
    target_modules: opt.TargetModules = None,
    micro_batch_size: opt.MicroBatch = None,
    seq_len: opt.SeqLen = None,
    image_size: opt.ImageSize = None,
    compute_dtype: opt.ComputeDtype = None,
    quantization: opt.Quantization = None,
    trainer: opt.Trainer = None,
    settings: opt.Set = None,
    as_json: opt.Json = False,
) -> int:
    """Start or resume a study. Once the search has ended its winner is confirmed.

    Settings that are typed are fixed and the rest of the space is searched.
    """
    if not (on or dry_run or devices) and starting.is_worthwhile():
        # It imports for seconds what a trial takes, while all else here is read and planned.
        starting.compile_libraries()
        starting.begin(starting.worker_environment("cuda"))
    from qlora_sweep.sweep.request import REQUEST, RunRequest, Where, refuse_mistakes

    typed = context.params
    where = Where.parse(on, opt.pairs("--with", place_settings, bare=on == "slurm"))
    if space.endswith(REQUEST.removeprefix("request")):
        sources = (context.get_parameter_source(key) for key in typed if key != "space")
        if any(source is not None and source.name == "COMMANDLINE" for source in sources):
            raise InputError(f"{space} is a whole request: no option goes with it")
        request = RunRequest.read(space)
    else:
        fixed_settings, of_space = opt.settings(typed, settings)
        keys = ("gpu", "model", "trials", "max_dollars", "seed", "sampler")
        overrides = {key: typed[key] for key in keys}
        overrides |= {
            "numerics": of_space.get("numerics"),
            "weights": of_space.get("weights"),
            "data": opt.dataset(data, of_space),
            "time_budget_seconds": opt.seconds("--time-budget", time_budget),
        }
        if no_confirm:
            overrides["confirm"] = False
        request = RunRequest(
            overrides={key: value for key, value in overrides.items() if value is not None},
            fixed_settings=fixed_settings,
            **{key: typed[key] for key in RunRequest.model_fields.keys() & typed.keys()},
        )
    refuse_mistakes(request, storage=storage_url(request.storage))
    if where.kind in ("local", "ray", "recorded"):
        from qlora_sweep.sweep.terminal import driving

        return driving.run(request, where, is_dry=dry_run)
    from qlora_sweep.sweep.terminal import elsewhere

    if where.kind == "ssh":
        return elsewhere.on_ssh(request, where, is_dry=dry_run)
    if where.kind == "slurm":
        return elsewhere.on_slurm(request, where, is_dry=dry_run)
    return elsewhere.on_rented(request, where, is_sure=yes, is_dry=dry_run)


@app.command(
    epilog=_shown(
        "sweep plan a10",
        "sweep plan a10 --rank 64 --target-modules all-linear --seq-len 1024 --gpu a100-40gb",
        "sweep plan a10 --exact --micro-batch-size 8 --seq-len 512 --set checkpoint_fraction=0.5",
        "sweep plan a10 --for trl",
        "sweep plan a10 --data dataset.jsonl --set data.tokenizer=models/mine",
        "sweep plan --gpu a10 --gpu l4 --cheapest --within 6h --work samples=10000",
        "sweep plan --gpu a10 --gpu l4 --rank 64 --price a10=0.75",
        "sweep plan a10 --calibrate",
        "sweep plan --gpu rtx-3090 --devices 2",
    )
)
def plan(
    context: typer.Context,
    space: opt.SpaceOrGpu = None,
    gpu: opt.Gpus = None,
    model: opt.Model = None,
    exact: opt.Exact = False,
    from_file: opt.FromFile = None,
    data: opt.Data = None,
    longest: opt.Longest = False,
    cheapest: opt.Cheapest = False,
    within: opt.Within = None,
    calibrate: opt.Calibrate = False,
    devices: opt.Together = None,
    price: opt.Price = None,
    study: opt.From = None,
    storage: opt.Storage = None,
    work: opt.Work = None,
    details: opt.Details = False,
    method: opt.Method = None,
    lora_rank: opt.Rank = None,
    target_modules: opt.TargetModules = None,
    micro_batch_size: opt.MicroBatch = None,
    seq_len: opt.SeqLen = None,
    image_size: opt.ImageSize = None,
    compute_dtype: opt.ComputeDtype = None,
    quantization: opt.Quantization = None,
    trainer: opt.Trainer = None,
    settings: opt.Set = None,
    as_json: opt.Json = False,
) -> int:
    """Predict what fits, how fast and at what cost; needs no GPU.

    Settings that are typed are fixed and the rest of the space is searched. With --exact one
    configuration is asked about: what is not typed is the baseline's. A GPU that is named
    first and those of --gpu are all asked about, and compared.
    """
    from qlora_sweep.search_spaces.costs import AskedWork
    from qlora_sweep.sweep.planning.question import Grpo, PlanRequest
    from qlora_sweep.sweep.terminal import plan as command

    known = ("train_steps", "samples", "tokens", "dataset_samples", "epochs")
    also = opt.DATA_SETTINGS + ("numerics",) + tuple(Grpo.model_fields)
    configuration, of_space = opt.settings(context.params, settings, also=also)
    price_file, typed_prices = opt.prices(price)
    request = PlanRequest(
        space=space,
        gpus=tuple(gpu or ()),
        model=model,
        configuration=configuration,
        numerics=of_space.get("numerics"),
        is_exact=exact,
        from_file=from_file,
        work=AskedWork(**opt.amounts(work, known), has_dataset=data is not None),
        data=opt.dataset(data, of_space),
        prices=price_file,
        typed_prices=typed_prices,
        is_longest=longest,
        is_cheapest=cheapest,
        is_calibrating=calibrate,
        within_seconds=opt.seconds("--within", within),
        devices=devices,
        grpo={key: of_space[key] for key in Grpo.model_fields if key in of_space},
        study=study,
        storage=storage,
        as_json=as_json,
        is_detailed=details,
    )
    return command.plan(request)


@command(
    "dataset.data",
    "sweep data dataset.jsonl --model demo",
    "sweep data dataset.jsonl --model demo --set data.completions_only=true --json",
)
def data(
    source: opt.Dataset,
    model: opt.Model = None,
    method: opt.Method = None,
    settings: opt.Set = None,
    as_json: opt.Json = False,
) -> None:
    """Say how long examples are, what is cut off, what packing saves.

    Needs no GPU. They are counted in tokens of the model, or of --set data.tokenizer.
    """


@command("listings.status", "sweep status", "sweep status a10 --watch")
def status(
    study: opt.AnyStudy = None,
    watch: opt.Watch = False,
    storage: opt.Storage = None,
    as_json: opt.Json = False,
) -> None:
    """Show what ran, what is running, and the best so far."""


@command("driving.confirm", "sweep confirm a10 --soak 10m")
def confirm(
    study: opt.Study,
    soak: opt.Soak = None,
    max_dollars: opt.MaxDollars = None,
    storage: opt.Storage = None,
    as_json: opt.Json = False,
) -> None:
    """Measure a study's winner again, beside its rivals.

    Then it trains for a while in one go.
    """


@command("listings.best", "sweep best a10", "sweep best a10 --json")
def best(study: opt.Study, storage: opt.Storage = None, as_json: opt.Json = False) -> None:
    """Show a study's winner."""


@command("commands.remove", "sweep rm a10", "sweep rm a10 --yes", name="rm")
def remove(study: opt.Study, is_sure: opt.Yes = False, storage: opt.Storage = None) -> None:
    """Remove a study with its trials, report and logs."""


@command(
    "commands.report",
    "sweep report a10",
    "sweep report a10 -o a10.html --work dataset-samples=50000",
)
def report(
    named: opt.Reported = None,
    work: opt.Work = None,
    figure: opt.Figure = None,
    output: opt.Output = None,
    is_forced: opt.Force = False,
    storage: opt.Storage = None,
) -> None:
    """Write a study's report, or compare GPUs, in one HTML file.

    By default it is runs/STUDY/report.html. With --work it says what your training costs. Several
    studies are set beside each other: which GPU is the cheapest and which the soonest. Where the
    extra `images` is installed, -o front.png draws a figure.
    """


@command(
    "exporting.export",
    "sweep export a10 --format script",
    "sweep export a10 --for trl",
    "sweep export a10 --format json -o winner.json",
)
def export(
    study: opt.Study,
    format: opt.Format = None,
    trainer: opt.Trainer = None,
    trial: opt.Trial = None,
    output: opt.Output = None,
    is_forced: opt.ForceExport = False,
    storage: opt.Storage = None,
) -> None:
    """Write a study's winner as a script, or for another trainer.

    A file that would run out of memory in its trainer is not written. With --for it is of the best
    that the trainer can do.
    """


@command("sharing.contribute", "sweep contribute a10 -o a10.jsonl")
def contribute(
    study: opt.Study,
    output: opt.Output = None,
    storage: opt.Storage = None,
    as_json: opt.Json = False,
) -> None:
    """Write a file of what a GPU measured, for others' predictions.

    The file says what ran, how fast and in how much memory, on which GPU and with which versions:
    no name, path, host or dataset.
    """


@command("sharing.calibrate", "sweep calibrate a10.jsonl")
def calibrate(named: opt.Contributions, as_json: opt.Json = False) -> None:
    """Predict speed by what others measured on a GPU.

    Files of `sweep contribute` are checked and kept on this machine, and plan, run and best predict
    by them from then on.
    """


@command("finishing.merge", "sweep merge adapter --output merged --model base --dtype bf16")
def merge(
    adapter: opt.Adapter,
    output: opt.NewDirectory,
    model: opt.Base = None,
    dtype: opt.MergedDtype = None,
    rows: opt.Rows = 4,
    as_json: opt.Json = False,
) -> None:
    """Merge an adapter into its 16-bit base, shard by shard.

    The merged model's logits are compared with those of base and adapter. Merging into
    quantized weights would make another model, and is not offered.
    """


@command("finishing.verify", "sweep verify a10 --steps 20")
def verify(
    what: opt.Verified,
    steps: opt.Steps = 40,
    trial: opt.Trial = None,
    model: opt.Weights = None,
    storage: opt.Storage = None,
    as_json: opt.Json = False,
) -> None:
    """Run a winner, or what was exported, beside what was measured.

    Tokens/s of the median step are to be within 5 %, peak allocated memory within 2 %; else the
    exit code is 1, and it says what differs.
    """


@command(
    "finishing.train",
    "sweep train a10 --data dataset.jsonl --output adapter --max-steps 200",
    "sweep train demo --data dataset.jsonl --output adapter --max-steps 10",
)
def train(
    name: opt.Trained,
    output: opt.NewDirectory,
    data: opt.Data = None,
    trial: opt.Trial = None,
    model: opt.Model = None,
    max_steps: opt.MaxSteps = None,
    epochs: opt.Epochs = None,
    seed: opt.Seed = None,
    checkpoint_every: opt.CheckpointEvery = None,
    is_resumed: opt.Resume = False,
    devices: opt.Devices = None,
    seq_len: opt.SeqLen = None,
    settings: opt.TrainSet = None,
    storage: opt.Storage = None,
    is_sure: opt.YesCut = False,
    as_json: opt.Json = False,
) -> None:
    """Train an adapter on a dataset with the measured settings.

    The winner of a study, or another trial of it, or a configuration of a file: what
    `sweep export --format json` writes, or its keys alone. At the end: tokens/s and memory beside
    what was measured; at another length than the measured one beside what is predicted. A length
    that cuts more than 5 % of the supervised tokens needs --yes.
    """


@command("listings.presets", "sweep presets")
def presets(as_json: opt.Json = False) -> None:
    """List the shipped search spaces."""


@command("listings.gpus", "sweep gpus --json")
def gpus(as_json: opt.Json = False) -> None:
    """List the GPUs of the catalogue."""


@command("listings.models", "sweep models")
def models(as_json: opt.Json = False) -> None:
    """List the shipped architectures."""


@command("spaces.schema", "sweep schema")
def schema() -> None:
    """Print the JSON Schema of a space file, for editors."""


@command("spaces.init", "sweep init --gpu l4 --model tinyllama-1.1b -o mine.yaml")
def init(
    gpu: opt.Gpu = None,
    model: opt.Model = None,
    output: opt.Output = None,
    is_forced: opt.Force = False,
) -> None:
    """Write a commented search space to start from."""


@command("dashboard.dashboard", "sweep dashboard a10", "sweep dashboard a10 --no-browser")
def dashboard(
    study: opt.Study,
    port: opt.Port = 8080,
    is_opened: opt.Browser = True,
    storage: opt.Storage = None,
) -> None:
    """Show a study in Optuna's dashboard, on this machine alone."""


@command("agents.serve", "sweep mcp", name="mcp")
def serve() -> None:
    """Serve an agent: plan, run, train and more as tools of the Model Context Protocol.

    An agent starts it and speaks to it by standard input and output.
    """


@command("commands.doctor", "sweep doctor")
def doctor() -> None:
    """Check this machine, and say what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that was typed and return the exit code."""
    try:
        with stop_signals.heard():
            prepare_streams()
            typed = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
            # A script that reads a list wants no news; who follows a study does, in a pipe too.
            is_told = typed[0] in ("run", "confirm", "train") or sys.stderr.isatty()
            if typed[0] in SLOW_TO_LOAD and is_told:
                announce_if_slow("Loading libraries ...")
            return guarded(lambda: app(typed, prog_name="sweep", standalone_mode=False))
    except KeyboardInterrupt:
        # Before the edge, or while it says that the command was interrupted.
        note("Interrupted.")
        return INTERRUPTED
