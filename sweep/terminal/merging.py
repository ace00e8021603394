"""Owns `sweep merge` on the terminal: progress, what was merged, and how near it is.

Knows nothing of how weights are merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from reports import units
from search_spaces.errors import InputError, did_you_mean, quote
from sweep.merging.job import MergeRequest, merge
from sweep.merging.plan import MergedDtype
from sweep.merging.report import Comparison, MergeReport, Trained
from sweep.terminal.console import note, say, say_json
from sweep.terminal.working import working

_DTYPES = ("bf16", "fp16")


def run(
    adapter: str, *, output: str, model: str | None, dtype: str | None, rows: int, as_json: bool
) -> int:
    """Merge, print what came of it, and return the exit code: 1 where it is not near enough."""
    if dtype is not None and dtype not in _DTYPES:
        raise InputError(f"--dtype: unknown type {quote(dtype)}{did_you_mean(dtype, _DTYPES)}")
    request = MergeRequest(adapter, output, model, cast("MergedDtype | None", dtype), rows)
    with working("reading the adapter and its base") as part:

        def tell(news: Mapping[str, Any]) -> None:
            if "merged" in news:
                part("MiB merged")(news["merged"] // 2**20, news["of"] // 2**20)
            else:
                part("models compared")(news["compared"], news["of"])

        report = merge(request, on_news=tell)
    if as_json:
        say_json(report.model_dump(mode="json"))
    else:
        for line in lines(report):
            say(line)
    compared = report.comparison
    if compared is None or compared.is_near:
        return 0
    note(
        "error: the merged model's logits are further from base and adapter than rounding explains:"
        " is this the base that the adapter was trained on?"
    )
    return 1


def lines(report: MergeReport) -> list[str]:
    """Return what is said of a merge, for a person."""
    whole = report.weights_replaced
    replaced = f", {units.plural(whole, 'tensor')} replaced" if whole else ""
    return [
        f"Merged {report.adapter} into {report.base}: {report.output}",
        f"{units.plural(report.weights_merged, 'weight')} merged{replaced}; "
        f"{units.gib(report.weights_bytes)} of {report.dtype} in "
        f"{units.plural(report.shards, 'file')}, {report.merge_seconds:.0f} s, "
        f"host memory up to {units.gib(report.peak_host_bytes)}.",
        "Tokenizer: "
        + (f"the {report.tokenizer}'s." if report.tokenizer else "none; neither has one."),
        *_comparison_lines(report.comparison, report.not_compared),
    ]


def _comparison_lines(compared: Comparison | None, reason: str | None) -> list[str]:
    if compared is None:
        return [f"Not compared with base and adapter: {reason}."]
    return [
        f"Logits beside base and adapter, {compared.rows} rows of {compared.tokens_per_row} random "
        f"tokens ({compared.device}): {_difference(compared)}; the adapter itself moves them by "
        f"{compared.adapter_mean_abs:.2g} on average.",
        _trained_line(compared),
    ]


def _trained_line(compared: Comparison) -> str:
    trained, failed = compared.trained, compared.trained_failed
    words = "An adapter trained on a quantized base knows that base: this is near it, not the same"
    if trained is None:
        why = f" The quantized base could not be looked at: {failed}." if failed else ""
        return f"{words}, and merging into the quantized weights would round once more.{why}"
    kind = f"{trained.quantization}{', double-quantized' if trained.double_quant else ''}"
    return f"{words}. Beside the quantized base ({kind}) and adapter: {_difference(trained)}."


def _difference(found: Comparison | Trained) -> str:
    return (
        f"{found.mean_abs:.2g} apart on average, {found.max_abs:.2g} at most, the likeliest token "
        f"is the same at {units.share(found.argmax_agreement)}"
    )
