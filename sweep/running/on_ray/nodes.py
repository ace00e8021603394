"""Owns which nodes of a cluster a study runs on: those with its card, with the same libraries as
here, and with the files that it needs; or the one message that says why not.

Pure: what the nodes said of themselves goes in. Knows nothing of Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from search_spaces.errors import NAMED_MAX, EnvironmentFault, InputError
from search_spaces.gpus import find_gpu, match_product
from sweep.running.device_info import Card
from sweep.running.on_ray.node import SelfPortrait

AUTO = "auto"
CPU = "cpu"


@dataclass(frozen=True)
class Node:
    """A node of a cluster."""

    id: str
    address: str
    processors: int
    """That Ray hands out; none on a head that is to run nothing."""
    portrait: SelfPortrait

    @property
    def card(self) -> Card | None:
        """The first of its cards; all of a chosen node's are alike."""
        return self.portrait.cards[0] if self.portrait.cards else None

    @property
    def products(self) -> tuple[str, ...]:
        """Each of its cards' products once."""
        return tuple(dict.fromkeys(card.product for card in self.portrait.cards if card))


def chosen(nodes: Sequence[Node], *, gpu: str) -> tuple[Node, ...]:
    """Return the nodes that a study of a card runs on, all of whose cards are one product.

    Args:
        nodes: every node of the cluster.
        gpu: the card as the space or the person names it, ``auto`` or ``cpu``. Of a cluster with
            several products those that it names are taken; where all are one product, that one may
            stand in for it.

    Raises:
        InputError: there are several products, and which one is not said.
        EnvironmentFault: there is no card, or a driver does not tell of one.
    """
    if gpu == CPU:
        return _with_processors(nodes)
    with_cards = tuple(node for node in nodes if node.portrait.cards)
    if not with_cards:
        raise EnvironmentFault(
            f"the Ray cluster has no GPU among its {_count(len(nodes), 'node')}: `ray status` "
            "shows what it has, and `ray start --num-gpus N` says it where Ray finds none by itself"
        )
    for node in with_cards:
        if None in node.portrait.cards:
            raise EnvironmentFault(
                f"node {node.address}: Ray hands out {len(node.portrait.cards)} GPUs, and the "
                "driver there does not tell of each: see `sweep doctor` on it"
            )
    products = list(dict.fromkeys(product for node in with_cards for product in node.products))
    if len(products) == 1:
        return with_cards
    meant = [product for product in products if gpu != AUTO and is_named(product, gpu)]
    only = tuple(node for node in with_cards if node.products == tuple(meant))
    if only:
        return only
    raise _several(with_cards, products)


def _with_processors(nodes: Sequence[Node]) -> tuple[Node, ...]:
    found = tuple(node for node in nodes if node.processors)
    if not found:
        raise EnvironmentFault(
            "the Ray cluster has no processor to run trials on: see `ray status`"
        )
    return found


def is_named(product: str, gpu: str) -> bool:
    """Return whether a card is the one that a person named."""
    spec = match_product(product)
    return spec is not None and spec == find_gpu(gpu)


def refuse_differences(nodes: Sequence[Node], *, here: Mapping[str, Any]) -> None:
    """Refuse nodes whose libraries are not the driver's, or not each other's.

    What the driver lacks it may lack, as it runs no trial; what a build is for, as in
    ``2.11.0+cu129``, is its machine's.

    Args:
        nodes: those that are to run trials.
        here: the driver's `storage.environment.fingerprint`.

    Raises:
        EnvironmentFault: names the first nodes with what differs.
    """
    first = nodes[0]
    told = []
    for node in nodes:
        told += [
            f"node {node.address} has {name} {there or 'none'}, the driver {known}"
            for name, there, known in _differences(node, here)
            if known is not None
        ] or [
            f"node {node.address} has {name} {there or 'none'}, "
            f"node {first.address} {known or 'none'}"
            for name, there, known in _differences(node, first.portrait.environment)
        ]
    if told:
        more = f"; and {len(told) - NAMED_MAX} more" if len(told) > NAMED_MAX else ""
        raise EnvironmentFault(
            f"a study's trials compare only under the same versions: {'; '.join(told[:NAMED_MAX])}"
            f"{more}. Install the same on each, as in `pip install 'transformers==VERSION'`"
        )


def refuse_missing(nodes: Iterable[Node]) -> None:
    """Refuse nodes without the files that a study needs.

    Raises:
        EnvironmentFault: names the nodes and what they lack.
    """
    lacking = [node for node in nodes if node.portrait.missing]
    if lacking:
        names = ", ".join(dict.fromkeys(node.address for node in lacking))
        paths = ", ".join(dict.fromkeys(p for node in lacking for p in node.portrait.missing))
        raise EnvironmentFault(
            f"{paths} is not on {names}: each node reads it under the same path, so put it "
            "there, or on a disk that all of them share (XDG_CACHE_HOME moves what sweep prepares)"
        )


def _differences(
    node: Node, known: Mapping[str, Any]
) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield what differs on a node: name, version there, version known."""
    environment = node.portrait.environment
    there = _versions(environment)
    for name, version in _versions(known).items():
        if there.get(name) != version:
            yield name, there.get(name), version
    commit, known_commit = environment.get("commit"), known.get("commit")
    # An installation that is no checkout has none to compare.
    if commit and known_commit and commit != known_commit:
        yield "sweep's commit", _short(commit), _short(known_commit)


def _short(commit: str) -> str:
    return commit[:10] + ("-dirty" if commit.endswith("-dirty") else "")


def _versions(environment: Mapping[str, Any]) -> dict[str, str | None]:
    versions = environment.get("versions") or {}
    found = {name: _public(version) for name, version in versions.items()}
    return {"Python": environment.get("python"), **found}


def _public(version: str | None) -> str | None:
    """Return a version without what its build is for."""
    return None if version is None else version.partition("+")[0]


def _several(nodes: Sequence[Node], products: Sequence[str]) -> InputError:
    found = []
    for product in products:
        on = [n for n in nodes if product in n.products]
        count = sum(
            card is not None and card.product == product for n in on for card in n.portrait.cards
        )
        found.append(f"{count} x {product} (node {on[0].address})")
    names = [spec.name for product in products if (spec := match_product(product)) is not None]
    choice = " or ".join(f"--gpu {name}" for name in names)
    mixed = [node.address for node in nodes if len(node.products) > 1]
    cure = f"name one with {choice}" if choice else "start a cluster of one of them"
    if mixed:
        cure += f"; on {mixed[0]} start Ray with CUDA_VISIBLE_DEVICES of one product alone"
    return InputError(
        f"a study's cards must be one product, and the Ray cluster has {' and '.join(found)}: "
        f"{cure}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
