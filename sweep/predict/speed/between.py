"""Owns what cards that train together send each other in a step, and how long a step waits for it.

Two H200 joined by NVLink made 1.88 to 1.96 times the tokens of one (Mistral-7B, 8 x 512, Liger, no
recomputation), and 1.62 times once; eight trials of models that they shared took 0.87 to 1.19 times
what is predicted. Of no other card was anything measured, nor of PCIe, so what is stated of such
steps is wide. Knows nothing of a card's own work, nor of what its host does to gather layers.
"""

from __future__ import annotations

import numpy as np

from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec, Interconnect
from sweep.predict.speed.layout import Layout, Sizes

LINK_SHARES = {"nvlink": 0.75, "pcie": 0.5}
"""Of a link's rate, what a collective of large tensors reaches. A share of NVLink as collectives
commonly report it; through PCIe most hosts copy by way of their own memory, so half."""
UNKNOWN_LINK = Interconnect(kind="pcie", bytes_per_second=15.75e9)
"""PCIe of the third generation, for a card whose link is not known."""
BUCKET_BYTES = 25 * 2**20
"""Of gradients that are sent together (DistributedDataParallel's ``bucket_cap_mb``)."""
COLLECTIVE_SECONDS = 50e-6
"""For which a collective takes its time however little it sends."""
SHARDED_DOUBT = 0.4
"""The same where they share the model, and gather every layer twice in each micro-batch: 0.19 at
most where NVLink joins them; nobody has seen it through PCIe."""
PARALLEL_DOUBT = 0.15
"""How far a step of several cards may be off beside what one of one card may: seen was one kind of
card."""


def waiting_seconds(layout: Layout, gpu: GpuSpec, *, backward: Sizes) -> Sizes:
    """Return how long each configuration's step waits for what cards send each other.

    Gradients are sent in buckets while the last micro-batch's backward pass goes on; the last
    bucket has nothing to hide behind.

    Args:
        layout: the configurations.
        gpu: of which there are as many as each of them says.
        backward: seconds of a micro-batch's backward pass.
    """
    cards = layout.cards
    rate = link_rate(gpu)
    sent = 2.0 * (cards - 1.0) / cards * layout.adapter_parameters * layout.trained
    buckets = np.ceil(np.maximum(sent, 1.0) / BUCKET_BYTES)
    whole = sent / rate + buckets * COLLECTIVE_SECONDS
    last = whole / buckets
    waited = last + np.maximum(0.0, whole - last - backward)
    gathered = _gathering_seconds(layout, gpu, backward=backward)
    return np.where(layout.is_sharded, gathered, np.where(cards > 1, waited, 0.0))


def _gathering_seconds(layout: Layout, gpu: GpuSpec, *, backward: Sizes) -> Sizes:
    """Return how long steps wait for layers to be gathered, in both passes of each micro-batch.

    While a layer computes the next one is on its way, so that a pass takes as long as the slower of
    the two; the first layer's way, and the head's and the embedding's, hide behind nothing.
    """
    cards, layers = layout.cards, layout.model.hidden_layers
    missing = (cards - 1.0) / cards / link_rate(gpu)
    weights = sum(rows * columns for rows, columns in layout.linears.values())
    layer = weights * np.where(layout.is_4bit, 0.5, layout.compute) * missing
    layer = layer + COLLECTIVE_SECONDS
    ends = layout.hidden * layout.model.vocab_size * layout.compute * missing
    waited = layer + np.maximum(0.0, layers * layer - backward)
    return np.asarray(layout.micro_batches * (2.0 * waited + 2.0 * (ends + COLLECTIVE_SECONDS)))


def link_rate(gpu: GpuSpec) -> float:
    """Return the bytes per second, each way, that a card's collectives reach."""
    link = gpu.interconnect or UNKNOWN_LINK
    return link.bytes_per_second * LINK_SHARES[link.kind]


def parallel_doubt(config: TrialConfig) -> float:
    """Return how far a step may be off because several cards take it."""
    if config.is_sharded:
        return SHARDED_DOUBT
    return PARALLEL_DOUBT if config.data_parallel > 1 else 0.0
