"""What renting a GPU costs: offers with provider, date and source, shipped and the user's."""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StrictBool, StrictInt, StrictStr

from qlora_sweep.search_spaces.config import Number
from qlora_sweep.search_spaces.documents import Strict, parse_yaml, read_text, validate
from qlora_sweep.search_spaces.errors import InputError, quote
from qlora_sweep.search_spaces.gpus import find_gpu

USD_PER_HOUR_MAX = 1000.0
"""No single GPU is rented at such a price; a figure above it is a slip of the unit."""

PRICE_OPTION = "--price"
TYPED_PROVIDER = "at your price"
"""Stands for the provider of a price that was typed."""

Seconds = Annotated[Number, Field(ge=0)]
Text = Annotated[StrictStr, Field(min_length=1)]
Dollars = Annotated[Number, Field(gt=0, le=USD_PER_HOUR_MAX)]


def _catalogue_name(name: str) -> str:
    try:
        return find_gpu(name).name
    except InputError as error:
        raise ValueError(f"is an {error}") from error


class Assumptions(Strict):
    """What an offer seldom says and a bill needs all the same."""

    boot_seconds: Seconds = 0.0
    """From the start of billing to the first line of the training script."""
    download_bytes_per_second: Annotated[Number, Field(gt=0)] | None = None
    """Rate at which the model arrives; null where it is there already."""


class _Terms(Assumptions):
    """Everything about the billing of a provider's GPUs that shows on the bill."""

    provider: Text
    gpus: Annotated[StrictInt, Field(ge=1)] = 1
    """GPUs of the machine that is rented: all of them are paid for, at this price each."""
    billing_seconds: Annotated[Number, Field(gt=0)] = 1.0
    """Granularity: the billed time is rounded up to a multiple of this."""
    minimum_seconds: Seconds = 0.0
    """Least time that is billed."""
    is_spot: StrictBool = False
    """Whether the provider may take the GPU back."""
    preemptions_per_hour: Seconds = 0.0
    """Expected interruptions per hour of training."""
    restart_seconds: Seconds = 0.0
    """Billed time that one interruption costs: starting again and repeating the steps lost."""
    queue_seconds: Seconds = 0.0
    """Expected wait for the GPU."""
    is_queue_billed: StrictBool = False
    """Whether that wait is paid for."""
    download_seconds: Seconds | None = None
    """Time to fetch the model where it is known as such; null derives it from the model's size."""
    date: datetime.date
    """Day on which the price was read."""
    source: Text
    """Where the price was read."""


class Offer(_Terms):
    """One GPU at one price."""

    gpu: Text
    """Catalogue name of the GPU."""
    usd_per_hour: Dollars
    """Dollars per GPU and hour, taxes and storage excluded."""

    @property
    def label(self) -> str:
        """Name in tables: GPU, provider and, where they hold, ``spot`` and ``x8``.

        The last says how many GPUs are rented at once.
        """
        label = f"{self.gpu} {self.provider}"
        if self.is_spot:
            label += " spot"
        if self.gpus > 1:
            label += f" x{self.gpus}"
        return label


class _PriceList(_Terms):
    """What a provider takes for each of its GPUs."""

    usd_per_hour: Annotated[
        dict[Annotated[str, AfterValidator(_catalogue_name)], Dollars], Field(min_length=1)
    ]


class _PriceFile(Strict):
    assumptions: Assumptions = Assumptions()
    offers: list[_PriceList] = Field(default=[])


def load_prices(
    user_file: Path | None = None, *, typed: Iterable[str] = ()
) -> dict[str, tuple[Offer, ...]]:
    """Return the offers by catalogue name, the cheapest hour of a whole machine first.

    Args:
        user_file: a file of the user's in the shipped one's format. An offer with the same GPU,
            provider and spot flag as a shipped one takes its place, any other is added; its
            ``assumptions`` hold for every offer that does not say otherwise.
        typed: prices that were typed, ``a10=0.75`` each: the only offer of that GPU.

    Raises:
        InputError: the file is missing or a value in it is not right; names file and key. A price
            that was typed is none, or of no GPU of the catalogue.
        EnvironmentFault: the file is there and cannot be read.
    """
    typed_prices = _typed_prices(typed)
    read = [_shipped()]
    if user_file is not None:
        read.append(_read(read_text(user_file, label=str(user_file)), label=str(user_file)))
    assumptions: dict[str, Any] = {}
    for file in read:
        assumptions |= file.assumptions.model_dump(exclude_unset=True)
    offers: dict[tuple[str, str, bool], Offer] = {}
    for terms in itertools.chain.from_iterable(file.offers for file in read):
        values = assumptions | terms.model_dump(exclude_unset=True)
        for gpu, price in terms.usd_per_hour.items():
            offer = Offer.model_validate({**values, "gpu": gpu, "usd_per_hour": price})
            offers[gpu, offer.provider.lower(), offer.is_spot] = offer
    grouped: dict[str, list[Offer]] = {}
    for offer in sorted(offers.values(), key=lambda of: (of.usd_per_hour * of.gpus, of.gpus)):
        grouped.setdefault(offer.gpu, []).append(offer)
    for gpu, price in typed_prices.items():
        mine = {"provider": TYPED_PROVIDER, "source": PRICE_OPTION, "date": datetime.date.today()}
        values = {**assumptions, **mine, "gpu": gpu, "usd_per_hour": price}
        grouped[gpu] = [Offer.model_validate(values)]
    return {gpu: tuple(grouped[gpu]) for gpu in sorted(grouped)}


@cache
def _shipped() -> _PriceFile:
    text = (files("qlora_sweep.search_spaces") / "prices.yaml").read_text(encoding="utf-8")
    return _read(text, label="prices.yaml")


def _read(text: str, *, label: str) -> _PriceFile:
    document = parse_yaml(text, label=label)
    # A section with nothing under it is one that is not there.
    values = {key: value for key, value in document.values.items() if value is not None}
    return validate(_PriceFile, values, document)


def _typed_prices(typed: Iterable[str]) -> dict[str, float]:
    """Return dollars an hour by catalogue name, of prices as they were typed."""
    prices: dict[str, float] = {}
    for text in typed:
        name, is_price, written = text.partition("=")
        if not is_price:
            raise InputError(f"{PRICE_OPTION} is written like a10=0.75, got {quote(text)}")
        try:
            gpu = find_gpu(name).name
        except InputError as error:
            raise InputError(f"{PRICE_OPTION}: {error}") from error
        if gpu in prices:
            raise InputError(f"{PRICE_OPTION}: {gpu} is given twice: keep one")
        try:
            prices[gpu] = float(written.strip().removeprefix("$"))
        except ValueError:
            prices[gpu] = math.nan
        if not 0 < prices[gpu] <= USD_PER_HOUR_MAX:
            raise InputError(
                f"{PRICE_OPTION}: {gpu} must cost dollars an hour, more than 0 and at most "
                f"{USD_PER_HOUR_MAX:g}, got {quote(written)}"
            )
    return prices
