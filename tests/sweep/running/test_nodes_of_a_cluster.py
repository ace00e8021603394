"""Which nodes of a cluster a study runs on, and what is refused in one message."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from search_spaces.errors import EnvironmentFault, InputError
from sweep.running.device_info import Card
from sweep.running.ray_nodes import Node, chosen, refuse_differences

A10, H200 = "NVIDIA A10", "NVIDIA H200"
HERE = {"qlora-sweep": "0.1.0", "torch": "2.13.0"}


def a_node(number: int, *products: str | None, processors: int = 4, **versions: str) -> Node:
    cards = (Card(one, 2**34, 2**34, (9, 0), "580.1", "13.0") for one in products if one)
    return Node(
        id=str(number),
        address=f"10.0.0.{number}",
        processors=processors,
        versions=HERE | versions,
        gpus=len(products),
        cards=tuple(cards),
    )


HEAD, NO_CARD = a_node(0, processors=0), a_node(1)
ONE_A10, TWO_H200, ONE_H200 = a_node(1, A10), a_node(2, H200, H200), a_node(3, H200)
MIXED, UNTOLD = a_node(1, A10, H200), a_node(2, H200, None)


@pytest.mark.parametrize(
    ("nodes", "gpu", "taken"),
    [
        ([NO_CARD, TWO_H200, ONE_H200], "auto", [TWO_H200, ONE_H200]),
        ([NO_CARD, TWO_H200, ONE_H200], "a10", [TWO_H200, ONE_H200]),
        ([ONE_A10, TWO_H200], "a10", [ONE_A10]),
        ([MIXED, TWO_H200], "h200", [TWO_H200]),
        ([HEAD, NO_CARD, TWO_H200], "cpu", [NO_CARD, TWO_H200]),
    ],
)
def test_nodes_of_one_product_are_taken_or_those_of_the_one_that_is_named(
    nodes: Sequence[Node], gpu: str, taken: list[Node]
) -> None:
    assert chosen(nodes, gpu=gpu) == tuple(taken)


@pytest.mark.parametrize(
    ("nodes", "gpu", "error", "words"),
    [
        ([HEAD], "cpu", EnvironmentFault, "no processor"),
        ([ONE_A10, TWO_H200], "auto", InputError, "--gpu a10 or --gpu h200"),
        ([ONE_A10, TWO_H200], "a100-40gb", InputError, f"1 x {A10} .* and 2 x {H200}"),
        ([MIXED], "h200", InputError, r"on 10\.0\.0\.1 .*CUDA_VISIBLE_DEVICES"),
        ([NO_CARD, HEAD], "a10", EnvironmentFault, "no GPU among its 2 nodes"),
        ([ONE_H200, UNTOLD], "auto", EnvironmentFault, r"node 10\.0\.0\.2: .* 2 GPUs"),
    ],
)
def test_where_no_nodes_can_be_chosen_the_reason_is_said(
    nodes: Sequence[Node], gpu: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        chosen(nodes, gpu=gpu)


@pytest.mark.parametrize("name", ["qlora-sweep", "torch"])
def test_nodes_with_another_version_are_refused_in_one_message(name: str) -> None:
    others = [a_node(number, H200, **{name: "9.9"}) for number in range(5, 14)]
    with pytest.raises(EnvironmentFault, match="; and 6 more") as refused:
        refuse_differences([ONE_H200, *others], here=HERE)
    assert f"node 10.0.0.5 has {name} 9.9, the driver {HERE[name]}" in str(refused.value)
    assert "10.0.0.3" not in str(refused.value)
    refuse_differences([ONE_H200], here=HERE)
