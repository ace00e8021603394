"""What a space leaves out is nowhere: not held, not counted, not drawn, not planned, not traced."""

from __future__ import annotations

import random

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.loading import parse_space, with_fixed
from search_spaces.space import SearchSpace
from sweep.planning.candidates import rows
from sweep.predict.memory.predictor import one_of_each_kind
from sweep.request import RunRequest
from sweep.sampling.encoding import Encoding

TEXT = """
dimensions:
  micro_batch_size: [1, 2]
  compute_dtype: [bf16, int8]
  quantization: [nf4, int8]
  kernels: [hf, fused-loss]
baseline: {micro_batch_size: 1}
"""
LEFT_OUT = """
leave_out:
  - {compute_dtype: [int8], kernels: [hf]}
  - {compute_dtype: [bf16], quantization: [int8]}
"""


def a_space(text: str = "") -> SearchSpace:
    return parse_space(TEXT + text, label="mine.yaml")


def everywhere(space: SearchSpace) -> list[set[TrialConfig]]:
    """Return the configurations of a space as each of its readers sees them."""
    encoding, draw = Encoding(space), random.Random(0)
    by_hand = {
        "micro_batch_size": [1, 2],
        "compute_dtype": ["bf16", "int8"],
        "quantization": ["nf4", "int8"],
        "kernels": ["hf", "fused-loss"],
    }
    drawn = [{key: draw.choice(values) for key, values in by_hand.items()} for _ in range(500)]
    whole = (encoding.with_whole_batches(params, draw=draw) for params in drawn)
    every = [a_space().config(params) for params in a_space().combinations()]
    return [
        {config for config in every if space.holds(config)},
        {config for config in every if space.params_of(config) is not None},
        {config for _, config in encoding.every()},
        {config for row in rows(space) for config in row},
        {encoding.config(params) for params in whole},
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", 16),
        # Of bf16 both kernels, and of INT8 both bases.
        (LEFT_OUT, 2 * (2 + 2)),
        # A base that is stored in 8 bits computes in 16.
        ("numerics: 16-bit\n", 8),
        (f"numerics: 16-bit\n{LEFT_OUT}", 4),
    ],
)
def test_what_is_left_out_is_nowhere(text: str, size: int) -> None:
    space = a_space(text)
    first, *others = everywhere(space)
    assert space.size() == len(first) == size
    assert all(other == first for other in others)
    traced = {config for config in one_of_each_kind(space) if config.micro_batch_size == 1}
    assert all(space.holds(config) for config in traced)


def test_what_is_typed_is_asked_for_whatever_the_file_leaves_out() -> None:
    held = {"compute_dtype": "int8", "kernels": "hf"}
    space = with_fixed(a_space(LEFT_OUT), held)
    assert isinstance(space, SearchSpace)
    assert space.size() == 4


ONE = "dimensions: {micro_batch_size: [1, 2]}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{ONE}numerics: 16-bit\nfixed: {{compute_dtype: fp8}}", "numerics leaves nothing to"),
        (f"{ONE}numerics: 8-bit", "numerics must be one of 'any' or '16-bit', got '8-bit'"),
        (f"{ONE}leave_out: [{{lora_rank: [16]}}]", "leave_out leaves nothing to search"),
        (f"{ONE}leave_out: [{{micro_batch_size: [1]}}]", "cannot name micro_batch_size"),
        (f"{ONE}leave_out: [{{kernels: [liger, hff]}}]", "kernels must be one of"),
    ],
)
def test_what_leaves_nothing_or_names_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_space(text, label="mine.yaml")


def test_a_run_that_is_held_to_16_bits_is_a_study_of_its_own() -> None:
    name, space = RunRequest(space="a10", overrides={"numerics": "16-bit"}).named()
    own, whole = RunRequest(space="a10").named()
    assert name != own == "a10"
    # Just what the preset searched before there was compute in 8 bits.
    assert (space.size(), whole.size()) == (20_736, 22_464)
