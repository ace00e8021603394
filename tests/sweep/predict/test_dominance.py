from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.sweep.predict.dominance import Footprint, base_alone, dominates, footprint
from tests.sweep.simulated_device import MODEL
from tests.tables import cases

configs = st.builds(
    TrialConfig,
    lora_rank=st.sampled_from([8, 16, 64]),
    lora_alpha=st.sampled_from([None, 8.0]),
    lora_dropout=st.sampled_from([0.0, 0.05, 0.5]),
    target_modules=st.sampled_from(["qv", "attention", "all-linear", ("q_proj",)]),
    micro_batch_size=st.sampled_from([1, 2, 4]),
    effective_batch_size=st.sampled_from([None, 4, 8]),
    seq_len=st.sampled_from([256, 512]),
    checkpoint_fraction=st.sampled_from([0.0, 0.03, 0.06, 0.5, 1.0]),
    upcast_fp32=st.booleans(),
    adapter_dtype=st.sampled_from(["fp32", "bf16"]),
    kernels=st.sampled_from(["hf", "liger"]),
    compile=st.booleans(),
)
footprints = configs.map(lambda config: footprint(config, model=MODEL))


@given(footprints, footprints)
def test_two_that_dominate_each_other_are_equal(one: Footprint, other: Footprint) -> None:
    assert (dominates(one, other) and dominates(other, one)) == (one == other)


@given(footprints)
def test_whatever_trains_needs_its_base(one: Footprint) -> None:
    assert dominates(one, base_alone(one))


BASE: dict[str, Any] = {"lora_rank": 16, "micro_batch_size": 4, "checkpoint_fraction": 0.5}


@pytest.mark.parametrize(
    ("change", "is_larger"),
    cases(
        """
        {} | true
        {lora_rank: 32} | true
        {lora_rank: 8} | false
        {target_modules: all-linear} | true
        {target_modules: qv} | false
        {micro_batch_size: 8} | true
        {micro_batch_size: 2} | false
        {seq_len: 1024} | true
        {checkpoint_fraction: 0.46875} | false
        {checkpoint_fraction: 0.4375} | true
        {lora_dropout: 0.1} | true
        {effective_batch_size: 8} | true
        {kernels: liger} | false
        {compute_dtype: fp32} | false
        {upcast_fp32: false} | false
        {compile: true} | false
        """
    ),
)
def test_what_counts_as_larger(change: dict[str, Any], is_larger: bool) -> None:
    smaller = footprint(TrialConfig(**BASE), model=MODEL)
    changed = footprint(TrialConfig(**(BASE | change)), model=MODEL)
    assert dominates(changed, smaller) is is_larger


@pytest.mark.parametrize(
    ("larger_one", "smaller_one", "holds"),
    cases(
        """
        # A compiled graph is compared with itself only.
        {compile: true, micro_batch_size: 8} | {compile: true} | true
        {compile: true, lora_rank: 32} | {compile: true} | false
        # Accumulation that ends frees the gradients between steps.
        {micro_batch_size: 8, effective_batch_size: 8} | {effective_batch_size: 8} | false
        # More GPUs need less of what is shared, and as much of what is not.
        {data_parallel: 2} | {} | true
        {data_parallel: 2} | {data_parallel: 4} | true
        {data_parallel: 2, sharding: fsdp} | {data_parallel: 4, sharding: fsdp} | true
        {data_parallel: 2} | {data_parallel: 2, sharding: fsdp} | false
        """
    ),
)
def test_no_less(larger_one: dict[str, Any], smaller_one: dict[str, Any], holds: bool) -> None:
    larger, smaller = (
        footprint(TrialConfig(**(BASE | keys)), model=MODEL) for keys in (larger_one, smaller_one)
    )
    assert dominates(larger, smaller) is holds


@pytest.mark.parametrize(
    ("keys", "other", "holds"),
    cases(
        """
        {} | {lora_rank: 1, seq_len: 1, optimizer: adamw_torch_fused, compile: true} | true
        {} | {upcast_fp32: false} | false
        {} | {quantization: fp4} | false
        # What two GPUs cannot hold says nothing of four.
        {data_parallel: 2, sharding: fsdp} | {} | true
        {data_parallel: 2, sharding: fsdp} | {data_parallel: 4, sharding: fsdp} | false
        """
    ),
)
def test_a_base_is_too_large(keys: dict[str, Any], other: dict[str, Any], holds: bool) -> None:
    base, changed = (
        footprint(TrialConfig(**(BASE | changes)), model=MODEL) for changes in (keys, keys | other)
    )
    assert dominates(changed, base_alone(base)) is holds
