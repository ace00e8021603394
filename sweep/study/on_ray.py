"""Owns what a study needs of a Ray cluster: its card, the same files on each node, and a lane on
each card.

Knows nothing of actors, or of who drives the study.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from search_spaces.loading import load_space
from sweep.running.device_info import Card
from sweep.running.lanes import Lane, Lanes
from sweep.running.on_ray.cluster import Cluster
from sweep.running.on_ray.host import HostSettings
from sweep.study.session import Prepared, texts_settings


def card_on_ray(cluster: Cluster, space: str, overrides: Mapping[str, Any]) -> Card | None:
    """Return the card that a run of a space has on a cluster, for `session.prepare`.

    Raises:
        InputError: no such space, or the cluster has cards of several products and none is named.
        EnvironmentFault: the cluster has no card, or not the libraries that are here.
    """
    return cluster.card(overrides.get("gpu") or load_space(space).gpu)


def lanes_on_ray(prepared: Prepared, cluster: Cluster, *, warn: Callable[[str], None]) -> Lanes:
    """Open a lane on each card of the study's product; on each node where it is for a CPU.

    Args:
        prepared: what `session.prepare` resolved, with the card of `card_on_ray`.
        cluster: where it runs.
        warn: told of cards that others hold.

    Raises:
        EnvironmentFault: the study's texts or weights are not on every node, or no card is free.
    """
    settings = HostSettings(
        model=prepared.model.to_json(),
        target=prepared.target,
        weights=prepared.space.weights,
        seed=prepared.space.seed,
        texts=texts_settings(prepared),
        # Another database may have a study of this name, and its runners the same nodes.
        study=f"{prepared.name}-{secrets.token_hex(4)}",
    )
    places = cluster.places(
        settings, gpu=prepared.space.gpu, paths=tuple(_paths(prepared)), warn=warn
    )
    return Lanes([Lane(one.runner, name=one.name, fault=one.runner.fault) for one in places])


def _paths(prepared: Prepared) -> Iterator[str]:
    """Yield what every node must find where it is here."""
    texts = texts_settings(prepared)
    if texts is not None:
        yield texts.directory
    model = prepared.model
    # The architecture goes along; weights that are a directory's do not.
    if prepared.space.weights == "pretrained" and model.source == "directory" and model.path:
        yield str(model.path.absolute())
