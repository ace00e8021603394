"""Owns what renting a card costs: offers with provider, date and source, shipped and the user's.

Values in, values out: nothing is ever fetched, and what a training costs under an offer is worked
out elsewhere.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from search_spaces.config import explain_validation
from search_spaces.documents import Document, parse_yaml, read_text
from search_spaces.errors import InputError, did_you_mean, shown
from search_spaces.gpus import find_gpu
from search_spaces.knobs import Number

USD_PER_HOUR_MAX = 1000.0
"""No single card is rented at such a price; a figure above it is a slip of the unit."""

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
    """One card at one price, and everything about its billing that shows on the bill."""

    gpu: Text
    """Catalogue name of the card."""
    provider: Text
    usd_per_hour: Annotated[Number, Field(gt=0, le=USD_PER_HOUR_MAX)]
    """Dollars per card and hour, taxes and storage excluded."""
    billing_seconds: Annotated[Number, Field(gt=0)] = 1.0
    """Granularity: the billed time is rounded up to a multiple of this."""
    minimum_seconds: Seconds = 0.0
    """Least time that is billed."""
    is_spot: StrictBool = False
    """Whether the provider may take the card back."""
    preemptions_per_hour: Seconds = 0.0
    """Expected interruptions per hour of training."""
    restart_seconds: Seconds = 0.0
    """Billed time that one interruption costs: starting again and repeating the steps lost."""
    queue_seconds: Seconds = 0.0
    """Expected wait for the card."""
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
        """Name in tables: card, provider and, where it is one, ``spot``."""
        return f"{self.gpu} {self.provider}{' spot' if self.is_spot else ''}"


def load_prices(user_file: Path | None = None) -> dict[str, tuple[Offer, ...]]:
    """Return the offers by catalogue name, the cheapest hour first.

    Args:
        user_file: a file of the user's in the shipped one's format. An offer with the same card,
            provider and spot flag as a shipped one takes its place, any other is added; its
            ``assumptions`` hold for every offer that does not say otherwise.

    Raises:
        InputError: the file is missing or a value in it is not right; names file and key.
        EnvironmentFault: the file is there and cannot be read.
    """
    documents = [_shipped()]
    if user_file is not None:
        label = str(user_file)
        documents.append(parse_yaml(read_text(user_file, label=label), label=label))
    return merge_prices(documents)


def merge_prices(documents: Iterable[Document]) -> dict[str, tuple[Offer, ...]]:
    """Return the offers of several price files by catalogue name; a later file's come first."""
    documents = tuple(documents)
    assumptions: dict[str, Any] = {}
    for document in documents:
        assumptions |= _assumptions(document)
    offers: dict[tuple[str, str, bool], Offer] = {}
    for document in documents:
        for offer in _offers(document, assumptions):
            offers[offer.gpu, offer.provider.lower(), offer.is_spot] = offer
    grouped: dict[str, list[Offer]] = {}
    for offer in sorted(offers.values(), key=lambda offer: offer.usd_per_hour):
        grouped.setdefault(offer.gpu, []).append(offer)
    return {gpu: tuple(grouped[gpu]) for gpu in sorted(grouped)}


@cache
def _shipped() -> Document:
    text = (files("search_spaces") / "prices.yaml").read_text(encoding="utf-8")
    return parse_yaml(text, label="prices.yaml")


def _assumptions(document: Document) -> dict[str, Any]:
    _known(document, document.values, ("assumptions", "offers"))
    values = document.values.get("assumptions") or {}
    given = _known(document, values, tuple(Assumptions.model_fields), "assumptions")
    try:
        Assumptions.model_validate(given)
    except ValidationError as error:
        raise _refusal(document, error, "assumptions") from error
    return dict(given)


def _offers(document: Document, assumptions: Mapping[str, Any]) -> list[Offer]:
    """Return an offer for each card of each price list of the file."""
    lists = document.values.get("offers") or []
    if not isinstance(lists, list):
        raise InputError(f"{document.where('offers')}: offers must be a list, got {shown(lists)}")
    keys = tuple(key for key in Offer.model_fields if key != "gpu")
    offers = []
    for index, entry in enumerate(lists):
        path = ("offers", index)
        terms = dict(_known(document, entry, keys, *path))
        prices = terms.pop("usd_per_hour", None)
        if not isinstance(prices, Mapping) or not prices:
            raise InputError(
                f"{document.where(*path, 'usd_per_hour')}: "
                f"usd_per_hour must map cards to prices, got {shown(prices)}"
            )
        for card, price in prices.items():
            values = {**assumptions, **terms, "gpu": card, "usd_per_hour": price}
            offers.append(_offer(document, values, path))
    return offers


def _offer(document: Document, values: dict[str, Any], path: tuple[str | int, ...]) -> Offer:
    card = values["gpu"]
    at_price = (*path, "usd_per_hour", card)
    try:
        return Offer.model_validate({**values, "gpu": find_gpu(str(card)).name})
    except InputError as error:
        raise InputError(f"{document.where(*at_price)}: usd_per_hour: {error}") from error
    except ValidationError as error:
        is_price = error.errors()[0]["loc"][0] == "usd_per_hour"
        raise _refusal(
            document, error, *(at_price[:-1] if is_price else path), card=card
        ) from error


def _refusal(
    document: Document, error: ValidationError, *path: str | int, card: object = None
) -> InputError:
    """Return the input error for the first fault: line of the key, card it is about, rule."""
    key = str(error.errors()[0]["loc"][0])
    where = (
        document.where(*path, key)
        if path[-1] != "usd_per_hour"
        else document.where(*path, str(card))
    )
    about = "" if card is None else f"{card}: "
    return InputError(f"{where}: {about}{explain_validation(error)}")


def _known(
    document: Document, value: object, keys: Iterable[str], *path: str | int
) -> Mapping[str, Any]:
    """Return ``value`` if it maps known keys."""
    where = document.where(*path)
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: must map keys to values, got {shown(value)}")
    for key in value:
        if key not in keys:
            at = document.where(*path, str(key))
            raise InputError(f"{at}: unknown key '{key}'{did_you_mean(str(key), keys)}")
    return value
