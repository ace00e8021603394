from __future__ import annotations

from typing import Any

import pytest

from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.gpus import GIB, find_gpu
from search_spaces.models import ModelSpec, load_model_spec
from storage.definition import Target
from sweep.running.device_info import Card
from sweep.study.targets import check_budget, least_weight_bytes, resolve_target
from tests.sweep.simulated_device import a_space


def a_card(name: str = "h200", **changes: Any) -> Card:
    spec = find_gpu(name)
    values: dict[str, Any] = {
        "product": spec.product,
        "memory_bytes": spec.memory_bytes + GIB // 2,
        "free_bytes": spec.memory_bytes,
        "compute_capability": spec.compute_capability,
        "driver": "570.1",
        "cuda": "12.8",
    }
    return Card(**(values | changes))


def test_the_card_that_is_here_is_the_target_unless_another_is_named() -> None:
    resolved = resolve_target(a_space(gpu="auto"), a_card("h200"))
    assert resolved.target == Target(
        gpu="h200", device="cuda", budget_bytes=find_gpu("h200").budget_bytes
    )


def test_the_named_card_itself_is_not_emulated() -> None:
    assert resolve_target(a_space(gpu="a10"), a_card("a10")).target.emulated_on is None


def test_a_bigger_card_stands_in_under_the_targets_budget() -> None:
    resolved = resolve_target(a_space(gpu="a10"), a_card("h200"))
    assert resolved.target.budget_bytes == find_gpu("a10").budget_bytes
    assert resolved.target.emulated_on == find_gpu("h200").product


def test_a_configuration_must_be_valid_on_the_target_and_on_its_host() -> None:
    resolved = resolve_target(a_space(gpu="t4"), a_card("h200"))
    assert resolved.compute_capability == find_gpu("t4").compute_capability
    assert resolved.host_capability == find_gpu("h200").compute_capability


def test_a_card_that_the_catalogue_does_not_have_is_its_own_target() -> None:
    card = a_card("h200", product="NVIDIA Z1", memory_bytes=40 * GIB)
    target = resolve_target(a_space(gpu="auto"), card).target
    assert target.gpu == "NVIDIA Z1"
    assert target.budget_bytes == 39 * GIB


def test_a_card_that_shares_the_hosts_memory_leaves_the_host_some() -> None:
    card = a_card("h200", product="NVIDIA GB10", memory_bytes=120 * GIB, shares_host_memory=True)
    target = resolve_target(a_space(gpu="auto"), card).target
    assert target.budget_bytes == pytest.approx(0.85 * 120 * GIB)


def test_a_card_that_tells_no_capability_is_taken_at_the_catalogues_word() -> None:
    known = resolve_target(a_space(gpu="t4"), a_card("h200", compute_capability=None))
    assert known.host_capability == find_gpu("h200").compute_capability
    other = a_card("h200", product="NVIDIA Z1", compute_capability=None)
    unknown = resolve_target(a_space(gpu="t4"), other)
    assert unknown.compute_capability == find_gpu("t4").compute_capability
    assert unknown.host_capability is None
    assert resolve_target(a_space(gpu="auto"), other).compute_capability is None


def test_a_slice_of_a_card_has_less_than_the_catalogue_says() -> None:
    spec = find_gpu("a10")
    card = a_card("a10", memory_bytes=spec.memory_bytes - 4 * GIB)
    target = resolve_target(a_space(gpu="a10"), card).target
    assert target.budget_bytes == spec.budget_bytes - 4 * GIB


def test_a_tighter_budget_than_the_cards_is_kept() -> None:
    target = resolve_target(a_space(gpu="a10", budget_gib=8), a_card("a10")).target
    assert target.budget_bytes == 8 * GIB


def test_a_cpu_needs_to_be_told_its_budget() -> None:
    target = resolve_target(a_space(gpu="cpu", budget_gib=0.5), None).target
    assert target == Target(gpu="cpu", device="cpu", budget_bytes=GIB // 2)


@pytest.mark.parametrize(
    ("changes", "card", "error", "message"),
    [
        ({"gpu": "auto"}, None, EnvironmentFault, "no NVIDIA GPU.*sweep doctor"),
        ({"gpu": "a10"}, None, EnvironmentFault, "is for the a10.*no NVIDIA GPU"),
        ({"gpu": "h200"}, a_card("a10"), EnvironmentFault, "cannot stand in for the h200"),
        ({"gpu": "cpu"}, None, InputError, "budget_gib is missing"),
        ({"gpu": "a10", "budget_gib": 30}, a_card("a10"), InputError, "30 is more than the 21"),
        ({"gpu": "a11"}, a_card("a10"), InputError, "unknown GPU 'a11'"),
    ],
)
def test_what_does_not_go_together_is_refused(
    changes: dict[str, Any], card: Card | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve_target(a_space(**changes), card)


def test_a_budget_smaller_than_the_model_is_refused_before_anything_is_loaded() -> None:
    model = load_model_spec("llama-2-13b")
    small = Target(gpu="a10", device="cuda", budget_bytes=4 * GIB)
    with pytest.raises(InputError, match=r"'llama-2-13b' needs at least 6\.\d+ GiB.*4\.00 GiB"):
        check_budget(a_space(), model, small)
    check_budget(a_space(), model, small.model_copy(update={"budget_bytes": 7 * GIB}))


def test_a_budget_of_a_few_bytes_is_told_apart_from_what_the_model_needs() -> None:
    tiny = Target(gpu="cpu", device="cpu", budget_bytes=GIB // 1000)
    with pytest.raises(InputError, match=r"needs at least 1\.38 MiB.* is 1\.02 MiB"):
        check_budget(a_space(), load_model_spec("demo"), tiny)


def test_the_least_that_weights_take_depends_on_how_they_may_be_stored() -> None:
    model = load_model_spec("mistral-7b-v0.3")
    quantized = least_weight_bytes(a_space(), model)
    plain = least_weight_bytes(a_space(fixed={"quantization": "none"}), model)
    either = a_space(dimensions={"quantization": {"choices": ["none", "nf4"]}}, fixed={})
    assert quantized is not None
    assert plain is not None
    assert 3.5 * GIB < quantized < 4 * GIB
    assert 13 * GIB < plain < 14 * GIB
    assert least_weight_bytes(either, model) == quantized


def test_experts_that_are_one_tensor_take_two_bytes_a_weight_whatever_the_quantization() -> None:
    mixtral = ModelSpec(
        "mixtral-8x7b",
        "directory",
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "vocab_size": 32000,
        },
    )
    least = least_weight_bytes(a_space(), mixtral)
    assert least is not None
    assert 84 * GIB < least < 87 * GIB
