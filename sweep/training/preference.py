"""Preference tuning (DPO and what shares its step): the loss of pairs of completions.

A micro-batch holds the chosen rows of its pairs, then the rejected ones in the same order; labels
are tokens of the completions, as in TRL's `DPOTrainer`, whose losses these are (trl 1.16). Logits
are never there as a whole: log-probabilities are worked out in chunks of tokens, and again in the
backward pass. The reference's pass comes first, when nothing is kept of the policy's yet, so that
it needs no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch.utils.data import Dataset
from transformers.modeling_outputs import CausalLMOutput

from qlora_sweep.search_spaces.config import LOGITS_AT_ONCE
from qlora_sweep.sweep.data.collation import IGNORED, by_member

REFERENCE = "reference"
"""Of a micro-batch, the reference's log-probability of each row's completion."""

Settings = Any
"""A configuration: loss_type, dpo_beta."""
Collate = Callable[[list[Any]], dict[str, torch.Tensor]]
Scores = torch.Tensor
"""One number for each pair."""


class Pairs(NamedTuple):
    """What is known of a micro-batch of pairs; tensors of shape (rows,)."""

    policy: torch.Tensor
    """Log-probability of each row's completion."""
    reference: torch.Tensor
    """The same of the reference."""
    tokens: torch.Tensor
    """Of each completion."""

    def losses(self, config: Settings) -> Scores:
        """Return the loss of each pair."""
        chosen, rejected = (self.policy - self.reference).chunk(2)
        of_chosen, of_rejected = self.tokens.clamp(min=1).chunk(2)
        loss = PAIR_LOSSES[config.loss_type]
        return loss(chosen, rejected, of_chosen, of_rejected, config.dpo_beta)

    def margins(self, config: Settings) -> Scores:
        """Return beta times how much more the policy prefers each chosen completion to the
        rejected one than the reference does."""
        chosen, rejected = (self.policy - self.reference).chunk(2)
        return config.dpo_beta * (chosen - rejected)


Loss = Callable[[Scores, Scores, Scores, Scores, float], Scores]


def _sigmoid(values: Scores) -> Scores:
    return -functional.logsigmoid(values)


PAIR_LOSSES: Mapping[str, Loss] = {
    "sigmoid": lambda c, r, _m, _n, beta: _sigmoid(beta * (c - r)),
    "sigmoid_norm": lambda c, r, m, n, beta: _sigmoid(beta * (c / m - r / n)),
    "hinge": lambda c, r, _m, _n, beta: torch.relu(1 - beta * (c - r)),
    "ipo": lambda c, r, m, n, beta: (c / m - r / n - 1 / (2 * beta)) ** 2,
    "nca_pair": lambda c, r, _m, _n, beta: (
        _sigmoid(beta * c) + 0.5 * _sigmoid(-beta * c) + 0.5 * _sigmoid(-beta * r)
    ),
    "bco_pair": lambda c, r, _m, _n, beta: _sigmoid(beta * c) + _sigmoid(-beta * r),
    "sppo_hard": lambda c, r, _m, _n, beta: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
    "apo_zero": lambda c, r, _m, _n, beta: torch.sigmoid(-beta * c) + torch.sigmoid(beta * r),
    "apo_down": lambda c, r, _m, _n, beta: torch.sigmoid(beta * c) + torch.sigmoid(-beta * (c - r)),
}
"""By TRL's names, of how much more probable the chosen and the rejected completion are to the
policy than to the reference (logarithms), the tokens of each, and beta."""


class Preference(torch.nn.Module):
    """A model with adapters whose forward pass is the loss of a micro-batch of pairs.

    Args:
        model: the policy; with its adapters off, the reference.
        config: which loss, and where the reference's log-probabilities come from.
    """

    def __init__(self, model: PeftModel, config: Settings) -> None:
        super().__init__()
        # A model's `config` is one of transformers', which Trainer changes.
        self.model = model
        self._settings = config
        self._adapters = [m for m in model.modules() if isinstance(m, LoraLayer)]
        self.newest: Pairs | None = None
        """The newest micro-batch, without gradients."""
        self.loss: torch.Tensor | None = None
        """Its mean."""
        self.references = 0
        """Passes of the reference in steps so far."""
        self.is_likelihood = False
        """Whether the loss is the completions' mean negative log-likelihood of a token instead."""

    def forward(self, **batch: torch.Tensor) -> CausalLMOutput:
        """Return the mean ``loss`` of a micro-batch's pairs."""
        reference = batch.pop(REFERENCE, None)
        tokens = (batch["labels"][:, 1:] != IGNORED).sum(1)
        if self.is_likelihood:
            of_labels = log_probabilities(self.model, batch)
            return CausalLMOutput(loss=-of_labels.sum() / tokens.sum())
        if reference is None:
            self.references += 1
            reference = self.reference(batch)
        pairs = Pairs(log_probabilities(self.model, batch).sum(1), reference, tokens)
        loss = pairs.losses(self._settings).mean()
        self.newest = pairs._replace(policy=pairs.policy.detach())
        self.loss = loss.detach()
        return CausalLMOutput(loss=loss)

    @torch.no_grad()
    def reference(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the reference's log-probability of each row's completion, fp32, shape (rows,)."""
        # PEFT's context also turns requires_grad of each adapter off and on: up to 0.2 s a step.
        self._switch_adapters(is_off=True)
        try:
            return log_probabilities(self.model, batch).sum(1)
        finally:
            self._switch_adapters(is_off=False)

    def _switch_adapters(self, *, is_off: bool) -> None:
        for layer in self._adapters:
            layer._disable_adapters = is_off

    def references_of(self, batches: Iterable[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        """Return the same of all micro-batches in the order of `Paired`'s rows, on the host."""
        of_batches = [self.reference(batch).cpu().reshape(2, -1) for batch in batches]
        return torch.cat(of_batches, dim=1).T.flatten().contiguous()


def log_probabilities(model: PeftModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of each next token, fp32, shape (rows, tokens); 0 where none
    carries loss."""
    base: Any = model.get_base_model()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = base.get_decoder()(**inputs, use_cache=False).last_hidden_state
    labels = functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    of_tokens = _LogProbabilities.apply(
        hidden.flatten(0, 1), labels.flatten(), base.get_output_embeddings()
    )
    return torch.as_tensor(of_tokens.view_as(labels))


class _LogProbabilities(torch.autograd.Function):
    """Log-probabilities of labels, of a chunk of tokens at a time in both passes."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, labels: torch.Tensor, head: Any) -> torch.Tensor:
        ctx.save_for_backward(hidden, labels)
        ctx.head = head
        ctx.dtype = _dtype_of_products(hidden, head)
        of_tokens = _of_tokens(head, ctx.dtype)
        of_labels = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for part in chunks(len(hidden), len(head.weight)):
            of_labels[part] = of_tokens(hidden[part], labels[part])
        return of_labels

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        hidden, labels = ctx.saved_tensors
        given = torch.empty_like(hidden)
        with torch.enable_grad():
            of_tokens = _of_tokens(ctx.head, ctx.dtype)
            for part in chunks(len(hidden), len(ctx.head.weight)):
                rows = hidden[part].detach().requires_grad_()
                of_labels = of_tokens(rows, labels[part])
                (given[part],) = torch.autograd.grad(of_labels, rows, grads[0][part])
        return given, None, None


def _of_tokens(
    head: Any, dtype: torch.dtype
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return what gives the log-probability of each label, fp32; 0 of one that carries no loss."""
    # Autocast would cast the whole head for each chunk.
    weight = head.weight.detach().to(dtype)
    bias = None if head.bias is None else head.bias.detach().to(dtype)

    def of_tokens(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(hidden.to(dtype), weight, bias).float()
        return -functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")

    return of_tokens


def chunks(tokens: int, vocab_size: int) -> Iterator[slice]:
    """Yield which of so many tokens are worked out together."""
    size = max(1, LOGITS_AT_ONCE // vocab_size)
    yield from (slice(begin, begin + size) for begin in range(0, tokens, size))


def _dtype_of_products(tensor: torch.Tensor, head: Any) -> torch.dtype:
    """Return the type that autocast would multiply in; the head's own where autocast is off."""
    kind = "cuda" if tensor.is_meta else tensor.device.type
    is_on = torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else head.weight.dtype


def trained(model: PeftModel, config: Settings) -> torch.nn.Module:
    """Return what a step calls: the model itself, or its loss on pairs."""
    return Preference(model, config) if config.is_on_pairs else model


@dataclass(eq=False)
class Paired(Dataset[Any]):
    """Prepared rows of which two are a pair; an item is both, the chosen one first."""

    rows: Any
    reference: torch.Tensor | None = None
    """The reference's log-probability of each row's completion, fp32; None where it is asked in
    each step."""

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        members = (2 * index, 2 * index + 1)
        rows = tuple(self.rows[row] for row in members)
        if self.reference is None:
            return rows
        references = self.reference[list(members)]
        pairs = zip(rows, references, strict=True)
        return tuple({**row, REFERENCE: reference} for row, reference in pairs)


def of_pairs(collate: Collate) -> Collate:
    """Return what makes a micro-batch of pairs: all chosen rows, then all rejected ones."""

    def collated(pairs: list[Any]) -> dict[str, torch.Tensor]:
        rows = by_member(pairs)
        references = [row[REFERENCE] for row in rows if REFERENCE in row]
        return {**collate(rows), **({REFERENCE: torch.stack(references)} if references else {})}

    return collated
