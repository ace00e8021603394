"""Owns what renting a GPU costs: offers with provider, date and source, shipped and the user's.

Values in, values out: nothing is ever fetched. Knows nothing of what a training costs.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from search_spaces.documents import Document, KeyPath, parse_yaml, read_text
from search_spaces.errors import InputError, quote
from search_spaces.gpus import find_gpu
from search_spaces.knobs import Number
from search_spaces.validation import known_key, validate

USD_PER_HOUR_MAX = 1000.0
"""No single GPU is rented at such a price; a figure above it is a slip of the unit."""

PRICE_OPTION = "--price"
TYPED_PROVIDER = "at your price"
"""Stands for the provider of a price that was typed."""

Seconds = Annotated[Number, Field(ge=0)]
Text = Annotated[StrictStr, Field(min_length=1)]


class Assumptions(BaseModel):
    """What an offer seldom says and a bill needs all the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    boot_seconds: Seconds = 0.0
    """From the start of billing to the first line of the training script."""
    download_bytes_per_second: Annotated[Number, Field(gt=0)] | None = None
    """Rate at which the model arrives; null where it is there already."""


class Offer(Assumptions):
    """One GPU at one price, and everything about its billing that shows on the bill."""

    gpu: Text
    """Catalogue name of the GPU."""
    provider: Text
    usd_per_hour: Annotated[Number, Field(gt=0, le=USD_PER_HOUR_MAX)]
    """Dollars per GPU and hour, taxes and storage excluded."""
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

    @property
    def label(self) -> str:
        """Name in tables: GPU, provider and, where they hold, ``spot`` and ``x8``.

        The last says how many GPUs are rented at once.
        """
        spot, many = " spot" if self.is_spot else "", f" x{self.gpus}" if self.gpus > 1 else ""
        return f"{self.gpu} {self.provider}{spot}{many}"


_LIST_KEYS = tuple(key for key in Offer.model_fields if key != "gpu")
_ListKey = Annotated[str, AfterValidator(partial(known_key, known=_LIST_KEYS))]


class _PriceFile(BaseModel):
    """A file of prices, whose lists are read GPU by GPU."""

    model_config = ConfigDict(extra="forbid")

    assumptions: Assumptions | None = None
    offers: list[dict[_ListKey, Any]] | None = None


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
    documents = [_shipped()]
    if user_file is not None:
        label = str(user_file)
        documents.append(parse_yaml(read_text(user_file, label=label), label=label))
    own = _typed_prices(typed)
    read = [(document, validate(_PriceFile, document.values, document)) for document in documents]
    assumptions: dict[str, Any] = {}
    for _, file in read:
        if file.assumptions is not None:
            assumptions |= file.assumptions.model_dump(exclude_unset=True)
    return _merged(read, assumptions) | {
        gpu: (
            Offer(
                gpu=gpu,
                provider=TYPED_PROVIDER,
                usd_per_hour=price,
                date=datetime.date.today(),
                source=PRICE_OPTION,
                **assumptions,
            ),
        )
        for gpu, price in own.items()
    }


def _typed_prices(typed: Iterable[str]) -> dict[str, float]:
    """Return dollars an hour by catalogue name, of prices as they were typed."""
    prices: dict[str, float] = {}
    for text in typed:
        card, is_price, written = text.partition("=")
        if not is_price:
            raise InputError(f"{PRICE_OPTION} is written like a10=0.75, got {quote(text)}")
        try:
            gpu = find_gpu(card).name
        except InputError as error:
            raise InputError(f"{PRICE_OPTION}: {error}") from error
        if gpu in prices:
            raise InputError(f"{PRICE_OPTION}: {gpu} is given twice: keep one")
        prices[gpu] = _dollars(gpu, written)
    return prices


def _dollars(gpu: str, written: str) -> float:
    try:
        price = float(written.strip().removeprefix("$"))
    except ValueError:
        price = math.nan
    if not 0 < price <= USD_PER_HOUR_MAX:
        raise InputError(
            f"{PRICE_OPTION}: {gpu} must cost dollars an hour, more than 0 and at most "
            f"{USD_PER_HOUR_MAX:g}, got {quote(written)}"
        )
    return price


def _merged(
    read: Iterable[tuple[Document, _PriceFile]], assumptions: Mapping[str, Any]
) -> dict[str, tuple[Offer, ...]]:
    """Return the offers of several price files by catalogue name; a later file's come first."""
    offers: dict[tuple[str, str, bool], Offer] = {}
    for document, file in read:
        for index, terms in enumerate(file.offers or ()):
            for offer in _offers(document, ("offers", index), {**assumptions, **terms}):
                offers[offer.gpu, offer.provider.lower(), offer.is_spot] = offer
    grouped: dict[str, list[Offer]] = {}
    for offer in sorted(
        offers.values(), key=lambda offer: (offer.usd_per_hour * offer.gpus, offer.gpus)
    ):
        grouped.setdefault(offer.gpu, []).append(offer)
    return {gpu: tuple(grouped[gpu]) for gpu in sorted(grouped)}


@cache
def _shipped() -> Document:
    text = (files("search_spaces") / "prices.yaml").read_text(encoding="utf-8")
    return parse_yaml(text, label="prices.yaml")


def _offers(document: Document, path: KeyPath, terms: Mapping[str, Any]) -> Iterator[Offer]:
    """Yield an offer for each GPU of a price list, which stands at ``path`` of the file."""
    prices = terms.get("usd_per_hour")
    if not isinstance(prices, Mapping) or not prices:
        raise InputError(
            f"{document.where(*path, 'usd_per_hour')}: "
            f"usd_per_hour must map GPUs to prices, got {quote(prices)}"
        )
    for card, price in prices.items():
        at_price = (*path, "usd_per_hour", card)
        try:
            gpu = find_gpu(card).name
        except InputError as error:
            raise InputError(f"{document.where(*at_price)}: usd_per_hour: {error}") from error
        values = {**terms, "gpu": gpu, "usd_per_hour": price}
        moved = {"usd_per_hour": at_price}
        yield validate(Offer, values, document, at=path, moved=moved, about=f"{card}: ")
