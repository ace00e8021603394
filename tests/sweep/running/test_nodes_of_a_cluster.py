"""Which nodes of a cluster a study runs on, and what is refused in one message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search_spaces.errors import EnvironmentFault, InputError
from sweep.running.device_info import Card
from sweep.running.ray_nodes import (
    Node,
    chosen,
    refuse_differences,
    versions,
)

A10, H200 = "NVIDIA A10", "NVIDIA H200"
HERE = {"qlora-sweep": "0.1.0", "torch": "2.13.0"}


def a_card(product: str) -> Card:
    return Card(product, 2**34, 2**34, (9, 0), "580.1", "13.0")


def a_node(number: int, *products: str | None, **versions: str) -> Node:
    return Node(
        id=str(number),
        address=f"10.0.0.{number}",
        processors=4,
        versions=HERE | versions,
        gpus=len(products),
        cards=tuple(a_card(product) for product in products if product is not None),
    )


def test_the_nodes_with_cards_are_taken_where_all_are_one_product() -> None:
    nodes = [a_node(1), a_node(2, H200, H200), a_node(3, H200)]
    for gpu in ("auto", "h200", "a10"):
        assert chosen(nodes, gpu=gpu) == (nodes[1], nodes[2])


def test_a_study_for_the_cpu_takes_every_node_that_has_one_to_give() -> None:
    head = replace(a_node(0), processors=0)
    nodes = [head, a_node(1), a_node(2, H200)]
    assert chosen(nodes, gpu="cpu") == tuple(nodes[1:])
    with pytest.raises(EnvironmentFault, match="no processor"):
        chosen([head], gpu="cpu")


def test_of_two_products_the_one_that_is_named_is_taken() -> None:
    nodes = [a_node(1, A10), a_node(2, H200), a_node(3, A10)]
    assert chosen(nodes, gpu="a10") == (nodes[0], nodes[2])
    assert chosen(nodes, gpu="h200") == (nodes[1],)


@pytest.mark.parametrize("gpu", ["auto", "a100-40gb"])
def test_two_products_of_which_none_is_named_are_refused_with_both(gpu: str) -> None:
    nodes = [a_node(1, A10, A10), a_node(2, H200)]
    with pytest.raises(InputError) as refused:
        chosen(nodes, gpu=gpu)
    words = str(refused.value)
    assert f"2 x {A10} (node 10.0.0.1) and 1 x {H200} (node 10.0.0.2)" in words
    assert "--gpu a10 or --gpu h200" in words


def test_a_node_with_two_products_is_left_out_or_refused() -> None:
    mixed, plain = a_node(1, A10, H200), a_node(2, H200)
    assert chosen([mixed, plain], gpu="h200") == (plain,)
    with pytest.raises(InputError, match=r"on 10\.0\.0\.1 start Ray with CUDA_VISIBLE_DEVICES"):
        chosen([mixed], gpu="h200")


def test_a_cluster_without_a_card_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match="no GPU among its 2 nodes"):
        chosen([a_node(1), a_node(2)], gpu="a10")


def test_a_card_that_no_driver_tells_of_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match=r"node 10\.0\.0\.2: Ray hands out 2 GPUs"):
        chosen([a_node(1, H200), a_node(2, H200, None)], gpu="auto")


@pytest.mark.parametrize("name", ["qlora-sweep", "torch"])
def test_a_node_with_another_version_is_refused_with_both(name: str) -> None:
    nodes = [a_node(1, H200), a_node(2, H200, **{name: "9.9"})]
    with pytest.raises(EnvironmentFault) as refused:
        refuse_differences(nodes, here=HERE)
    assert f"node 10.0.0.2 has {name} 9.9, the driver {HERE[name]}" in str(refused.value)
    assert "10.0.0.1" not in str(refused.value)
    refuse_differences(nodes[:1], here=HERE)


def test_what_a_build_is_for_is_no_part_of_a_version() -> None:
    assert not any("+" in version for version in versions().values() if version)


def test_many_differences_are_one_message() -> None:
    nodes = [a_node(number, H200, torch="2.12.0") for number in range(9)]
    with pytest.raises(EnvironmentFault, match="; and 6 more"):
        refuse_differences(nodes, here=HERE)
