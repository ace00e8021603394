"""Which nodes of a cluster a study runs on, and what is refused in one message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from search_spaces.errors import EnvironmentFault, InputError
from sweep.running.device_info import Card
from sweep.running.ray_nodes import (
    Node,
    chosen,
    refuse_differences,
)

A10, H200 = "NVIDIA A10", "NVIDIA H200"
VERSIONS = {"qlora-sweep": "0.1.0", "torch": "2.13.0", "transformers": "5.17.0", "triton": None}
HERE = {"python": "3.11.9", "commit": None, "versions": VERSIONS}


def a_card(product: str) -> Card:
    return Card(product, 2**34, 2**34, (9, 0), "580.1", "13.0")


def a_node(number: int, *products: str | None, **environment: Any) -> Node:
    versions = {**VERSIONS, **environment.pop("versions", {})}
    return Node(
        id=str(number),
        address=f"10.0.0.{number}",
        processors=4,
        python="/usr/bin/python3",
        missing=environment.pop("missing", ()),
        environment={**HERE, **environment, "versions": versions},
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


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"versions": {"transformers": "5.16.0"}}, "transformers 5.16.0, the driver 5.17.0"),
        ({"versions": {"torch": None}}, "torch none, the driver 2.13.0"),
        ({"python": "3.12.1"}, "Python 3.12.1, the driver 3.11.9"),
        ({"commit": f"{'b' * 40}-dirty"}, "sweep's commit bbbbbbbbbb-dirty, the driver aaaaaaaaaa"),
    ],
)
def test_a_node_with_other_versions_is_refused_with_both(there: dict[str, Any], words: str) -> None:
    nodes = [a_node(1, H200, commit="a" * 40), a_node(2, H200, **{"commit": "a" * 40, **there})]
    with pytest.raises(EnvironmentFault) as refused:
        refuse_differences(nodes, here={**HERE, "commit": "a" * 40})
    assert f"node 10.0.0.2 has {words}" in str(refused.value)
    assert "10.0.0.1" not in str(refused.value)


def test_what_the_driver_lacks_is_only_to_be_the_same_on_each_node() -> None:
    first = a_node(1, H200, versions={"triton": "3.4"})
    refuse_differences([first, a_node(2, H200, versions={"triton": "3.4"})], here=HERE)
    with pytest.raises(EnvironmentFault, match=r"10\.0\.0\.2 has triton 3\.5, node 10\.0\.0\.1 3"):
        refuse_differences([first, a_node(2, H200, versions={"triton": "3.5"})], here=HERE)


def test_what_a_build_is_for_is_no_difference() -> None:
    nodes = [a_node(1, H200, versions={"torch": "2.13.0+cu129"}, commit="a" * 40)]
    refuse_differences(nodes, here={**HERE, "versions": {**VERSIONS, "torch": "2.13.0+cpu"}})


def test_many_differences_are_one_message() -> None:
    nodes = [a_node(number, H200, python="3.12.1") for number in range(9)]
    with pytest.raises(EnvironmentFault, match="; and 6 more"):
        refuse_differences(nodes, here=HERE)
