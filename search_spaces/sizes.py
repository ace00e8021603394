"""The sizes that a space offers: no larger than can fit a GPU at all, by the model's shapes alone.

Where every layer is recomputed, the input of each layer stays. With the weights in 4 bits that is
the least that a training keeps, whatever its other settings: what does not fit even so cannot fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from qlora_sweep.search_spaces.config import SEQ_LEN_MAX
from qlora_sweep.search_spaces.dimensions import VALUES_MAX, IntRange
from qlora_sweep.search_spaces.linears import expert_weights, has_experts, parameters
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import SearchSpace

SHORTEST = 512
"""The shortest length that is offered where none is named; longer ones are its doublings."""
_BYTES_EACH = 2
"""Of what a layer gets, in 16 bits."""
_LEAST_WEIGHT_BYTES = 0.5
"""Of a parameter in 4 bits."""


def most_tokens(model: ModelSpec, budget_bytes: int) -> int:
    """Return the tokens of a micro-batch that surely do not fit a budget with one more, be the
    experts on the host or not."""
    weights = _LEAST_WEIGHT_BYTES * ((parameters(model) or 0) - _in_experts(model))
    each = model.hidden_layers * model.hidden_size * _BYTES_EACH
    return max(0, int((budget_bytes - weights) // each))


def _in_experts(model: ModelSpec) -> int:
    """Return the weights of a model's experts; of types whose experts are not counted, all that it
    has."""
    if not has_experts(model):
        return 0
    return expert_weights(model) or parameters(model) or 0


def offered_lengths(model: ModelSpec, budget_bytes: int) -> tuple[int, ...]:
    """Return sequence lengths: doublings up to what the model takes and the budget may hold."""
    positions = model.max_positions or most_tokens(model, budget_bytes)
    longest = min(positions, max(SHORTEST, most_tokens(model, budget_bytes)), SEQ_LEN_MAX)
    lengths = [min(SHORTEST, longest)]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return tuple(lengths)


def offered_batches(model: ModelSpec, budget_bytes: int, lengths: Sequence[int]) -> IntRange:
    """Return the micro-batches: every one, up to the largest that may fit at the shortest length.

    They are spread by their logarithm where a sampler draws them.
    """
    most = most_tokens(model, budget_bytes) // min(lengths)
    largest = min(max(1, most), VALUES_MAX - 1)
    return IntRange(low=1, high=largest, log=True)


def with_offered_batches(space: SearchSpace, model: ModelSpec, budget_bytes: int) -> SearchSpace:
    """Return a shipped space whose micro-batches are those of its lengths; one in which they are
    listed, or fixed, as it is.

    Raises:
        InputError: what is left makes no space.
    """
    lengths = space.values_of("seq_len")
    known = space.dimensions.get("micro_batch_size")
    if not isinstance(known, IntRange) or not lengths:
        return space
    batches = offered_batches(model, budget_bytes, lengths)
    if batches == known:
        return space
    return space.changed({"dimensions": {**space.dimensions, "micro_batch_size": batches}})
