"""`sweep train`, `verify` and `merge`: progress on stderr, then what came of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from qlora_sweep.reports import format as units
from qlora_sweep.reports.words import reward_accuracy
from qlora_sweep.search_spaces.dataset_choice import CUT_MAX
from qlora_sweep.search_spaces.documents import exists, read_json
from qlora_sweep.search_spaces.errors import InputError, NothingFits, did_you_mean, quote
from qlora_sweep.storage.records import Lost, OutOfMemory
from qlora_sweep.sweep.data.collation import percent
from qlora_sweep.sweep.export.record import read_record, record_of
from qlora_sweep.sweep.finetuning import checkpoints, protocol
from qlora_sweep.sweep.finetuning import output as directories
from qlora_sweep.sweep.finetuning.results import TOGETHER, TrainedAdapter, words_of_8_bits
from qlora_sweep.sweep.finetuning.subject import next_smaller
from qlora_sweep.sweep.finetuning.training import (
    PreparedTraining,
    TrainingRequest,
    fault_of,
    prepare_training,
)
from qlora_sweep.sweep.finetuning.training import train as run_training
from qlora_sweep.sweep.merging.job import merge as run_merge
from qlora_sweep.sweep.paths import storage_url
from qlora_sweep.sweep.running.device_info import choose_gpus, environment_with, read_gpus
from qlora_sweep.sweep.stop_signals import INTERRUPTED
from qlora_sweep.sweep.terminal import console, drawing, options
from qlora_sweep.sweep.terminal.dataset import prepared as read_dataset
from qlora_sweep.sweep.terminal.listings import read, warn
from qlora_sweep.sweep.verifying.runs import Verification
from qlora_sweep.sweep.verifying.runs import verify as run_verify

NOT_AS_RECORDED = 1
NOT_NEAR = 1
_RUNS = {
    "training": "our training",
    "script": "the exported script (transformers' Trainer)",
    "trl": "TRL's trainer on the exported file",
}
_MERGED = ("bf16", "fp16")
_CHANGED = (
    "learning_rate",
    "micro_batch_size",
    "effective_batch_size",
    "checkpoint_fraction",
    "checkpoint_offload",
    "packing",
)
"""Settings that a training may have another value of than was measured."""
_EPOCHS_MAX = 1_000_000


def train(
    name: str,
    *,
    output: str,
    data: str | None,
    trial: int | None,
    model: str | None,
    max_steps: int | None,
    epochs: float | None,
    seed: int | None,
    checkpoint_every: int | None,
    is_resumed: bool,
    devices: str | None,
    seq_len: int | None,
    settings: Sequence[str] | None,
    storage: str | None,
    is_sure: bool,
    as_json: bool,
) -> int:
    """Train, and print what came of it beside what was promised."""
    also = options.DATA_SETTINGS + ("data.eval_fraction", "weights")
    changed, of_space = options.settings({"seq_len": seq_len}, settings, only=_CHANGED, also=also)
    dataset = options.dataset(data, of_space)
    weights = of_space.get("weights")
    if epochs is not None and not 0 < epochs <= _EPOCHS_MAX:
        raise InputError(f"--epochs must be above 0 and at most {_EPOCHS_MAX:,}, got {epochs:g}")
    if weights not in (None, "pretrained", "random"):
        raise InputError(f"--set weights must be pretrained or random, got {quote(weights)}")
    count = None
    if devices is not None:
        chosen = choose_gpus(devices, read_gpus())
        # This process and its children see no other.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.cuda_name for gpu in chosen)
        count = len(chosen)
    request = TrainingRequest(
        name=name,
        output=Path(output),
        dataset=dataset,
        trial=trial,
        devices=count,
        model=model,
        weights=weights,
        max_steps=max_steps,
        epochs=epochs,
        settings=changed,
        seed=seed,
        checkpoint_every=checkpoint_every,
        is_resumed=is_resumed,
    )
    is_begun = directories.known_run(request.output) is not None
    # A directory that is refused is not made, and one that is held is not again.
    with directories.held(request.output) if is_begun else nullcontext():
        return _train(request, is_held=is_begun, storage=storage, is_sure=is_sure, as_json=as_json)


def _train(
    request: TrainingRequest, *, is_held: bool, storage: str | None, is_sure: bool, as_json: bool
) -> int:
    prepared = prepare_training(
        request,
        read_study=lambda name: read(name, url=storage_url(storage)),
        read_dataset=read_dataset,
        read_gpus=read_gpus,
        warn=warn,
    )
    output = request.output
    summary = prepared.dataset.summary
    if request.is_resumed and directories.is_done(output):
        checkpoints.remove(output)
        console.note(f"{output} holds a training that is done: there is nothing left to do.")
        if as_json:
            console.say_json(read_json(output / directories.TRAINING, label=directories.TRAINING))
        return 0
    examples = units.plural(summary.rows, "example")
    dataset = f"{summary.source} ({examples}, {summary.tokens:,} tokens)"
    size = units.size(prepared.job.config)
    console.note_folded(f"Training {prepared.subject.words} on {dataset}, {size}.")
    for note in prepared.notes:
        console.note_folded(note)
    for words in (prepared.plan_words, prepared.cut_words):
        if words is not None:
            console.note_folded(words)
    # A training that was begun was agreed to.
    if prepared.truncation.is_much and not request.is_resumed and not is_sure:
        _agree_to_cut(prepared)
    resume_from = None
    if request.is_resumed:
        resume_from = checkpoints.newest(output, warn=warn)
        if resume_from is None:
            console.note("No checkpoint had been written yet: it begins at the first step.")
    with nullcontext() if is_held else directories.held(output):
        if not is_held and not request.is_resumed:
            # Somebody may have begun there meanwhile.
            directories.refuse_taken(output)
        with _shown() as observe:
            end = run_training(prepared, resume_from=resume_from, observe=observe)
        return _conclude(prepared, end, as_json=as_json)


def _agree_to_cut(prepared: PreparedTraining) -> None:
    """Have a person agree to train on what the length leaves.

    Raises:
        InputError: they do not, or stdin is not a terminal; says what to do instead.
    """
    share = percent(prepared.truncation.whole.supervised_share)
    length = f"length {prepared.job.config.seq_len:,}"
    ways = prepared.ways_out()
    words = f"{length} cuts {share} of the supervised tokens, which is more than {percent(CUT_MAX)}"
    if not sys.stdin.isatty():
        raise InputError(f"{words}. {ways}. --yes trains all the same")
    console.note_folded(f"warning: {words}. {ways}.", indent=2)
    if not console.confirmed(f"Train at {length} all the same?"):
        raise InputError("nothing was trained")


def _conclude(prepared: PreparedTraining, end: protocol.TrainingOutcome, *, as_json: bool) -> int:
    """Finish what came to its end, and say of anything else what it was and what to do."""
    if isinstance(end, protocol.TrainingResult):
        trained = TrainedAdapter(
            prepared.job,
            end,
            prepared.subject,
            prepared.dataset.summary,
            environment_with(prepared.gpu),
            prepared.truncation,
            prepared.prediction,
        )
        document = directories.finish(trained, prepared.tokenizer)
        console.say_result(document, _result_text(trained), as_json=as_json)
        return 0
    step = next(iter(checkpoints.steps_of(Path(prepared.job.output))), None)
    kept = "; there is no checkpoint yet"
    if step is not None:
        kept = f"; the checkpoint of step {step:,} is kept, --resume goes on from it"
    if isinstance(end, Lost):
        console.note(f"Interrupted{kept}.")
        return INTERRUPTED
    if isinstance(end, OutOfMemory) and (
        smaller := next_smaller(prepared.job.config, prepared.forecaster, has_run_out=True)
    ):
        kept += f". The next smaller one: {smaller}"
    raise fault_of(end, kept=kept)


def _result_text(trained: TrainedAdapter) -> str:
    result = trained.result
    found = trained.comparison
    width = console.width_of(sys.stdout)
    loss = f"loss {result.final_train_loss:.4f} at the end, {result.train_loss:.4f} on average"
    if result.eval_loss is not None:
        loss += f"; held out {result.eval_loss:.4f}"
    loss += reward_accuracy(result.eval_wins, result.eval_pairs)
    rows = (found.speed.row(), found.memory.row())
    lines = [
        f"{units.plural(result.steps, 'step')}, {result.tokens:,} supervised tokens, in "
        f"{units.duration(result.seconds)}",
        loss,
        drawing.table(("", "promised", "reached", "ratio"), rows, width=width),
    ]
    words = found.words()
    if words is not None:
        lines.append(console.folded(words, width))
    lines.append(f"Adapter: {trained.job.output}")
    return "\n".join(lines)


@contextmanager
def _shown() -> Iterator[Callable[[protocol.Event], None]]:
    """Show a training on stderr: how far it is, and a line for what happens once."""
    steps = 0
    with console.working("training") as part:

        def observe(event: protocol.Event) -> None:
            nonlocal steps
            match event:
                case protocol.TrainingStarted():
                    steps = event.steps
                    console.note(_started(event))
                    if event.documents_apart is False:
                        console.note(f"warning: {TOGETHER}")
                    if event.eight_bit is not None:
                        console.note(words_of_8_bits(event.eight_bit))
                case protocol.TrainingProgress(step=step, loss=float(loss)):
                    words = f"loss {loss:.4f}, {units.rate(event.tokens_per_second)} tokens/s"
                    left = units.duration(event.seconds_left or 0.0)
                    part(f"steps: {words}, {left} left")(step, steps)
                case protocol.Saved(step=step, eval_loss=loss, refusal=None):
                    words = f"step {step:,}: checkpoint written"
                    if loss is not None:
                        words += f", held-out loss {loss:.4f}"
                    console.note(words)
                case protocol.Saved(step=step, refusal=reason):
                    why = f"as the disk does not take it ({reason}): the one before is kept"
                    console.note(f"warning: step {step:,}: no checkpoint, {why}")

        yield observe


def _started(started: protocol.TrainingStarted) -> str:
    steps = units.plural(started.steps, "step")
    if started.steps_done:
        steps += f" from step {started.steps_done:,}"
    examples = units.plural(started.rows, "example")
    if started.dataset_rows not in (None, started.rows):
        examples = f"{units.plural(started.dataset_rows, 'example')} packed into {started.rows:,}"
    return (
        f"{started.device_name}: {steps} over {examples}, "
        f"{units.plural(started.rows_held_out, 'example')} held out; "
        f"{units.count(started.trainable_parameters)} trainable parameters"
    )


def verify(
    what: str,
    *,
    steps: int,
    trial: int | None,
    model: str | None,
    storage: str | None,
    as_json: bool,
) -> int:
    """Run a study's winner or an export, and print how it compares with what was recorded."""
    try:
        found = _verified(what, steps=steps, trial=trial, model=model, storage=storage)
    except NothingFits as nothing:
        if as_json:
            reached = {"tokens_per_second": None, "peak_allocated_bytes": None}
            console.say_json({"ok": False, **reached, "differences": [str(nothing)]})
        raise
    console.say_result(found.to_json(), verification_text(found), as_json=as_json)
    return 0 if found.comparison.is_within else NOT_AS_RECORDED


def _verified(
    what: str, *, steps: int, trial: int | None, model: str | None, storage: str | None
) -> Verification:
    path: Path | None = None
    if exists(Path(what), label=what):
        if trial is not None:
            raise InputError("--trial: an export is of one trial; leave it out")
        record, path = read_record(what)
    elif what.endswith((".py", ".yaml", ".yml", ".json")) or "/" in what:
        raise InputError(f"{what}: no such file")
    else:
        record = record_of(read(what, url=storage_url(storage)), number=trial)
    with console.working(f"running {record.label} for {steps} steps") as part:
        return run_verify(
            record,
            path=path,
            steps=steps,
            model=model,
            tell=lambda name, done, of: part(name)(done, of),
        )


def verification_text(found: Verification) -> str:
    """Return both figures beside each other, and what differs."""
    verdict = "As recorded" if found.comparison.is_within else "Not as recorded"
    record = found.record
    lines = [f"{verdict}: {record.label}, {found.steps} steps of {_RUNS[record.kind]}."]
    for figure in (found.comparison.speed, found.comparison.memory):
        beside = "not compared"
        if figure.ratio is not None:
            within = units.percent(figure.tolerance)
            beside = f"{100 * (figure.ratio - 1.0):+.1f} % (within {within} is as recorded)"
        _, promised, reached, _ = figure.row()
        lines.append(f"{figure.name:<14}  {promised} recorded, {reached} reached: {beside}")
    lines += [f"- {difference}" for difference in found.differences]
    return "\n".join(lines)


def merge(
    adapter: str, *, output: str, model: str | None, dtype: str | None, rows: int, as_json: bool
) -> int:
    """Merge an adapter into its base, and print what came of it and how near it is."""
    if dtype is not None and dtype not in _MERGED:
        raise InputError(f"--dtype: unknown type {quote(dtype)}{did_you_mean(dtype, _MERGED)}")
    with console.working("reading the adapter and its base") as part:

        def tell(news: Mapping[str, Any]) -> None:
            if "merged" in news:
                part("MiB merged")(news["merged"] // 2**20, news["of"] // 2**20)
            else:
                part("models compared")(news["compared"], news["of"])

        report = run_merge(
            adapter, output=output, model=model, dtype=dtype, rows=rows, on_news=tell
        )
    lines = [f"Merged {report['adapter']} into {report['base']}: {report['output']}"]
    compared = report["comparison"]
    merged = f"{units.plural(report['weights_merged'], 'module')} merged"
    if report["weights_replaced"]:
        merged += f", {units.plural(report['weights_replaced'], 'tensor')} replaced"
    tokenizer = "none"
    if report["tokenizer"]:
        tokenizer = f"that of the {report['tokenizer']}"
    if report["trained_on"] is not None:
        console.note_folded(f"warning: the adapter names another base: {report['trained_on']}.")
    for note in report["notes"]:
        console.note_folded(f"warning: {note}.")
    lines += [
        f"{merged}; {units.gib(report['weights_bytes'])} of {report['dtype']} in "
        f"{units.plural(report['shards'], 'file')}, {report['merge_seconds']:.0f} s, "
        f"host memory up to {units.gib(report['peak_host_bytes'])}.",
        f"Tokenizer: {tokenizer}.",
    ]
    if compared is None:
        lines.append(f"Not compared with base and adapter: {report['not_compared']}.")
    else:
        lines += comparison_lines(compared)
    console.say_result(report, "\n".join(lines), as_json=as_json)
    if compared is None:
        if rows == 0:
            return 0
        console.note_folded(
            "The merged model is whole and kept; whether it computes what base and adapter do was "
            "not seen."
        )
        return NOT_NEAR
    if compared["is_near"]:
        return 0
    share = compared["mean_abs"] / compared["logits_spread"]
    console.note_folded(
        f"error: the merged model is kept, but its logits are {units.percent(share)} of their "
        "spread from those of base and adapter, which is more than rounding explains."
    )
    return NOT_NEAR


def comparison_lines(compared: Mapping[str, Any]) -> Iterator[str]:
    """Yield how far a merged model's logits are from those of base and adapter."""

    def difference(found: Mapping[str, Any]) -> str:
        return (
            f"{found['mean_abs']:.2g} apart on average, {found['max_abs']:.2g} at most, the "
            f"likeliest token is the same at {units.share(found['argmax_agreement'])}"
        )

    yield (
        f"Logits beside base and adapter, {compared['rows']} sequences of "
        f"{compared['tokens_per_row']} random tokens ({compared['device']}): "
        f"{difference(compared)}; the adapter itself moves them by "
        f"{compared['adapter_mean_abs']:.2g} on average."
    )
    yield "An adapter trained on a quantized base knows that base: this is near it, not the same."
    if (trained := compared["trained"]) is not None:
        kind = trained["quantization"]
        if trained["double_quant"]:
            kind += ", double-quantized"
        yield f"Beside the quantized base ({kind}) and adapter: {difference(trained)}."
    elif failed := compared["trained_failed"]:
        yield f"The quantized base could not be looked at: {failed}."
