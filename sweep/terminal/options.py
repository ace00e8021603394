"""Owns the commands' options and arguments: how each is spelled, and what its help says.

Imports nothing heavy: the terminal's help is built from it. Knows nothing of what a command does.
"""

from __future__ import annotations

from typing import Annotated

import typer

from search_spaces.errors import InputError, did_you_mean
from sweep.terminal import completion
from sweep.terminal.knob_options import reads


def _known_format(typed: str | None) -> str | None:
    """Return the format of texts that was typed, where there is such a one."""
    from search_spaces.texts import FORMATS

    if typed is not None and typed not in FORMATS:
        raise InputError(f"--data-format: unknown format '{typed}'{did_you_mean(typed, FORMATS)}")
    return typed


def examples(*commands: str) -> str:
    """Return what ends a command's help: command lines that a test runs."""
    # The first line keeps the help from being filled as a paragraph.
    return "\n".join(["\b", "Examples:", *(f"  $ {command}" for command in commands)])


SpaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SPACE", help="A preset or a YAML file.", autocompletion=completion.presets
    ),
]
SpaceOrCardArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="SPACE",
        help="A preset, a YAML file or a GPU.",
        autocompletion=completion.presets_and_gpus,
    ),
]
StudyArgument = Annotated[
    str,
    typer.Argument(metavar="STUDY", help="Name of a study.", autocompletion=completion.studies),
]
StudiesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="STUDY...",
        help="One study for its report; several to compare.",
        autocompletion=completion.studies,
    ),
]
AnyStudyArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[STUDY]",
        help="One study; all of them without.",
        autocompletion=completion.studies,
    ),
]

VersionOption = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage", help="Database URL; $SWEEP_STORAGE, else sqlite:///runs/sweep.db by default."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")
]
WatchOption = Annotated[
    bool, typer.Option("--watch", help="Follow the study until nobody drives it any more.")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Shipped architecture, directory or hub id.",
        autocompletion=completion.models,
    ),
]

ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Shipped architecture, directory or hub id; repeatable: a study for each.",
        autocompletion=completion.models,
    ),
]

# Of the texts that are trained on

TextsArgument = Annotated[
    str,
    typer.Argument(metavar="TEXTS", help="A file, a directory of files, or a hub id."),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="TEXTS",
        help="Your texts: a file, a directory of files, or a hub id.",
    ),
]
TextColumnOption = Annotated[
    str | None,
    typer.Option("--text-column", help="Column that holds the texts."),
]
TextsFormatOption = Annotated[
    str | None,
    typer.Option(
        "--data-format",
        help="What the rows are: text, instruction, prompt-completion, messages or conversations; "
        "recognised by their columns.",
        callback=_known_format,
    ),
]
CompletionsOnlyOption = Annotated[
    bool | None,
    typer.Option(
        "--completions-only/--all-tokens",
        help="Loss on what the model is to answer alone, or on all; all by default.",
        show_default=False,
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="Directory, hub id or demo; the model's own by default.",
    ),
]

WasteBatchOption = Annotated[
    int | None,
    typer.Option("--batch-size", help="Rows of the micro-batches that waste is said for; 4."),
]

# Of a configuration

RankOption = Annotated[
    int | None,
    typer.Option(
        "--rank", "--lora-rank", help="Rank of the adapters.", callback=reads("lora_rank")
    ),
]
TargetModulesOption = Annotated[
    str | None,
    typer.Option(
        "--target-modules",
        help="qv, attention, all-linear, or names with commas.",
        callback=reads("target_modules"),
    ),
]
MicroBatchOption = Annotated[
    int | None,
    typer.Option(
        "--micro-batch-size",
        "--batch-size",
        help="Sequences in one pass of one GPU.",
        callback=reads("micro_batch_size"),
    ),
]
SeqLenOption = Annotated[
    int | None,
    typer.Option("--seq-len", help="Tokens in a sequence.", callback=reads("seq_len")),
]
ComputeDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--compute-dtype",
        help="bf16, fp16, fp32, fp8 or int8.",
        callback=reads("compute_dtype"),
    ),
]
QuantizationOption = Annotated[
    str | None,
    typer.Option(
        "--quantization", help="nf4, fp4, fp8, int8 or none.", callback=reads("quantization")
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting of a configuration, compile=true say; repeatable (docs/settings.md).",
    ),
]

# Of a study that is started or resumed

GpuOption = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        help="GPU whose budget counts; auto is the one that is here.",
        autocompletion=completion.run_gpus,
    ),
]
StudyNameOption = Annotated[
    str | None, typer.Option("--study", help="Name; the space's by default.")
]
TrialsOption = Annotated[
    int | None, typer.Option("--trials", help="Trials of the study at most, earlier runs included.")
]
TimeBudgetOption = Annotated[
    str | None, typer.Option("--time-budget", help="Stop this run after 10m, 1h30m, 90s.")
]
MaxDollarsOption = Annotated[
    float | None,
    typer.Option("--max-dollars", help="What the study may cost, at the price of what runs it."),
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Of sampling, weights and tokens.")]
SamplerOption = Annotated[
    str | None, typer.Option("--sampler", help="guided, tpe, gp, random or grid.")
]
DevicesOption = Annotated[
    str | None,
    typer.Option("--devices", help="GPUs to run trials on: all, how many (2), or which (0,2); 1."),
]
NumericsOption = Annotated[
    str | None,
    typer.Option("--numerics", help="16-bit leaves compute in 8 bits out; any does not."),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="PLACE",
        help="Where it runs: local, ray:ADDRESS, ssh:USER@HOST, slurm, modal, skypilot, or "
        "recorded:SURFACE, whose trials answer as they did.",
    ),
]
PlaceSettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="KEY=VALUE",
        help="A setting of that place, time=4h of slurm say; repeatable (docs/guide/machines.md).",
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what would run or be submitted, and start nothing.")
]
CarriedOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="STUDY|SPOOL",
        help="Carry over what holds of a study's trials, or of a spool's: it is not run again.",
        autocompletion=completion.studies,
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
NoConfirmOption = Annotated[
    bool, typer.Option("--no-confirm", help="Do not measure the winner again after the search.")
]
SoakOption = Annotated[
    str | None, typer.Option("--soak", help="Train the winner for 10m in one go; 15s by default.")
]

# Of a plan

GpusOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu",
        help="GPU; name several to compare them.",
        autocompletion=completion.gpus,
    ),
]
DetailsOption = Annotated[
    bool, typer.Option("--details", help="Print all of the answer, and not one screen.")
]
ExactOption = Annotated[
    bool,
    typer.Option("--exact", help="Ask about one configuration: the recipe, but for what is typed."),
]
FromFileOption = Annotated[
    str | None,
    typer.Option(
        "--from-file",
        help="Configurations, one JSON object a line; - is stdin.",
    ),
]
PricesOption = Annotated[
    str | None,
    typer.Option(
        "--prices",
        help="Your prices; runs/prices.yaml where that is there.",
    ),
]
PriceOption = Annotated[
    list[str] | None,
    typer.Option("--price", help="Dollars an hour of a GPU, a10=0.75; may be repeated."),
]
LongestOption = Annotated[
    bool, typer.Option("--longest", help="Ask for the longest rows that fit, by micro-batch.")
]
CheapestOption = Annotated[
    bool,
    typer.Option(
        "--cheapest", help="Ask which GPU does the job for least, of all where none is named."
    ),
]
WithinOption = Annotated[
    str | None, typer.Option("--within", help="Deadline of --cheapest: 6h, 90m.")
]
CalibrateOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="STUDY",
        help="Take what this study's trials measured, and calibrate by it.",
        autocompletion=completion.studies,
    ),
]
StepsOption = Annotated[
    int | None, typer.Option("--train-steps", help="Cost of so many steps; 1000.")
]
SamplesOption = Annotated[int | None, typer.Option("--samples", help="Cost of so many samples.")]
TokensOption = Annotated[int | None, typer.Option("--tokens", help="Cost of so many tokens.")]
DatasetOption = Annotated[
    int | None, typer.Option("--dataset-samples", help="Samples of an epoch.")
]
EpochsOption = Annotated[float | None, typer.Option("--epochs", help="Epochs of that dataset; 1.")]

# Of recorded trials that samplers are tried on

SurfaceArgument = Annotated[
    str, typer.Argument(metavar="SURFACE", help="Recorded trials, a file of JSON lines.")
]
SamplersOption = Annotated[
    str | None,
    typer.Option(
        "--samplers",
        help="Names with commas; guided,tpe,gp,random.",
    ),
]
SeedsOption = Annotated[int, typer.Option("--seeds", help="Searches of each sampler.")]
BudgetOption = Annotated[
    float | None,
    typer.Option("--budget-gib", help="Memory to fit; the budget of the surface's GPU."),
]

# Of a training

SubjectArgument = Annotated[
    str,
    typer.Argument(
        metavar="STUDY|CONFIG",
        help="A study, a file with a configuration, or a shipped model.",
        autocompletion=completion.studies,
    ),
]
AdapterOption = Annotated[
    str,
    typer.Option("-o", "--output", help="New directory for the adapter."),
]
WeightsOption = Annotated[
    str | None,
    typer.Option("--weights", help="pretrained or random; pretrained wherever the model has any."),
]
MaxStepsOption = Annotated[
    int | None, typer.Option("--max-steps", help="Optimizer steps, however many epochs.")
]
TrainEpochsOption = Annotated[
    float | None, typer.Option("--epochs", help="Passes over the texts; 1.")
]
EvalFractionOption = Annotated[
    float | None,
    typer.Option("--eval-fraction", help="Share of the rows that is held out; 0.05."),
]
LearningRateOption = Annotated[
    float | None,
    typer.Option(
        "--learning-rate",
        "--lr",
        help="At the first step; the configuration's, 2e-4.",
        callback=reads("learning_rate"),
    ),
]
CheckpointEveryOption = Annotated[
    int | None,
    typer.Option("--checkpoint-every", help="Steps between checkpoints; about ten minutes."),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest checkpoint of the output.")
]

# Of what is written

FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        help="script, trl, axolotl, llama-factory, unsloth, peft, json, yaml or surface.",
    ),
]
FigureOption = Annotated[
    str | None,
    typer.Option("--figure", help="Which figure, where -o ends in .png or .svg; the front."),
]
PlanFilesOption = Annotated[
    list[str] | None,
    typer.Option("--plan", help="A file of `sweep plan --json` to compare with; repeatable."),
]
TrialOption = Annotated[
    int | None, typer.Option("--trial", help="Number of another trial than the winner.")
]
ReportOption = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        help="runs/STUDY/report.html, or comparison.html; - is stdout.",
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace a file that sweep did not write.")
]
PortOption = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="To listen on; 0 is any that is free.")
]
NoBrowserOption = Annotated[
    bool, typer.Option("--no-browser", help="Print the address, and open nothing.")
]
SpaceFileOption = Annotated[
    str | None,
    typer.Option("-o", "--output", help="A new file; - or nothing is stdout."),
]
ExportOption = Annotated[
    str | None,
    typer.Option("-o", "--output", help="A file; - or nothing is stdout."),
]

# Of a merge

AdapterArgument = Annotated[
    str, typer.Argument(metavar="ADAPTER", help="Directory with a LoRA adapter, as PEFT saves it.")
]
DirectoryOption = Annotated[
    str,
    typer.Option("-o", "--output", help="A new directory."),
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The 16-bit base, directory or hub id; the adapter's own by default.",
    ),
]
MergedDtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="bf16 or fp16; what the base is stored in.")
]
RowsOption = Annotated[
    int, typer.Option("--rows", help="Rows to compare logits on; 0 for no comparison.")
]

# Of a verification

VerifiedArgument = Annotated[
    str,
    typer.Argument(
        metavar="STUDY|EXPORT",
        help="Name of a study, or a file that sweep export wrote.",
        autocompletion=completion.studies,
    ),
]
VerifyStepsOption = Annotated[
    int, typer.Option("--steps", help="Optimizer steps to run, at least 8.")
]
VerifyModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Weights to load, directory or hub id; random ones of an architecture.",
    ),
]
