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


A10 = find_gpu("a10")
UNKNOWN = a_card("h200", product="NVIDIA Z1", memory_bytes=40 * GIB)
SLICE = a_card("a10", memory_bytes=A10.memory_bytes - 4 * GIB)
SHARED = a_card("h200", product="NVIDIA GB10", memory_bytes=120 * GIB, shares_host_memory=True)


@pytest.mark.parametrize(
    ("changes", "card", "gpu", "budget_bytes", "emulated_on"),
    [
        ({"gpu": "auto"}, a_card("h200"), "h200", find_gpu("h200").budget_bytes, None),
        ({"gpu": "a10"}, a_card("a10"), "a10", A10.budget_bytes, None),
        ({"gpu": "a10"}, a_card("h200"), "a10", A10.budget_bytes, find_gpu("h200").product),
        ({"gpu": "a10", "budget_gib": 8}, a_card("a10"), "a10", 8 * GIB, None),
        # A slice of a GPU has less than the catalogue says, and one that it does not have is its
        # own target; what shares the host's memory leaves the host some.
        ({"gpu": "a10"}, SLICE, "a10", A10.budget_bytes - 4 * GIB, None),
        ({"gpu": "auto"}, UNKNOWN, "NVIDIA Z1", 39 * GIB, None),
        ({"gpu": "auto"}, SHARED, "NVIDIA GB10", 0.85 * 120 * GIB, None),
        ({"gpu": "cpu", "budget_gib": 0.5}, None, "cpu", GIB // 2, None),
    ],
)
def test_a_target_is_what_is_here_unless_another_is_named(
    changes: dict[str, Any],
    card: Card | None,
    gpu: str,
    budget_bytes: float,
    emulated_on: str | None,
) -> None:
    target = resolve_target(a_space(**changes), card).target
    assert (target.gpu, target.emulated_on) == (gpu, emulated_on)
    assert target.budget_bytes == pytest.approx(budget_bytes, abs=1)
    assert target.device == ("cpu" if card is None else "cuda")


def test_a_configuration_must_be_valid_on_the_target_and_on_its_host() -> None:
    resolved = resolve_target(a_space(gpu="t4"), a_card("h200"))
    assert resolved.compute_capability == find_gpu("t4").compute_capability
    assert resolved.host_capability == find_gpu("h200").compute_capability


def test_a_card_that_tells_no_capability_is_taken_at_the_catalogues_word() -> None:
    known = resolve_target(a_space(gpu="t4"), a_card("h200", compute_capability=None))
    assert known.host_capability == find_gpu("h200").compute_capability
    other = a_card("h200", product="NVIDIA Z1", compute_capability=None)
    unknown = resolve_target(a_space(gpu="t4"), other)
    assert unknown.compute_capability == find_gpu("t4").compute_capability
    assert unknown.host_capability is None
    assert resolve_target(a_space(gpu="auto"), other).compute_capability is None


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


def test_the_least_that_weights_take_depends_on_how_they_may_be_stored() -> None:
    model = load_model_spec("mistral-7b-v0.3")
    quantized = least_weight_bytes(a_space(), model)
    plain = least_weight_bytes(a_space(fixed={"quantization": "none"}), model)
    either = a_space(dimensions={"quantization": {"choices": ["none", "nf4"]}}, fixed={})
    assert 3.5 * GIB < quantized < 4 * GIB
    assert 13 * GIB < plain < 14 * GIB
    assert least_weight_bytes(either, model) == quantized


def test_experts_that_are_one_tensor_take_two_bytes_a_weight() -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = {"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32000}
    mixtral = ModelSpec("mixtral-8x7b", "directory", {**config, **sizes, **heads})
    assert 84 * GIB < least_weight_bytes(a_space(), mixtral) < 87 * GIB
