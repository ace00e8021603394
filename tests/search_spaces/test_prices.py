"""Behaviour of the price list: what ships is sound, what a user writes is merged or refused."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import gpu_catalogue
from qlora_sweep.search_spaces.prices import load_prices
from tests.tables import cases

OWNED = {"p100-16gb", "a4000", "a5000", "gb10"}
"""What stands on desks rather than in price lists, GeForce and RTX GPUs apart."""
HEAD = "provider: Mine, date: 2026-11-20, source: my invoice"


def write(path: Path, text: str) -> Path:
    file = path / "prices.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_every_shipped_offer_names_a_gpu_a_day_and_a_place() -> None:
    prices = load_prices()
    unpriced = set(gpu_catalogue()) - set(prices)
    assert {name for name in unpriced if not name.startswith("rtx-")} == OWNED | {"v100-32gb"}
    assert set(prices) <= set(gpu_catalogue())
    for gpu, offers in prices.items():
        assert list(offers) == sorted(offers, key=lambda offer: offer.usd_per_hour * offer.gpus)
        for offer in offers:
            assert offer.gpu == gpu
            assert offer.source.startswith("https://")
            assert offer.date >= datetime.date(2026, 1, 1)
            assert 0.05 < offer.usd_per_hour < 20.0
    # What is cheapest is not one list's word alone.
    for gpu in ("a10", "a100-40gb", "a100-80gb", "h100-80gb", "h200", "l40s"):
        assert len({offer.provider for offer in prices[gpu]}) >= 3
        assert len({offer.source for offer in prices[gpu]}) >= 2


def test_a_users_price_takes_the_shipped_ones_place_and_adds_others(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "offers:\n"
        "  - {provider: lambda, date: 2026-11-20, source: my invoice, usd_per_hour: {a10: 0.6}}\n"
        f"  - {{{HEAD}, is_spot: true, usd_per_hour: {{H100: 2.29, a10: 0.3}}}}\n",
    )
    mine, shipped = load_prices(file), load_prices()
    lambdas = [o for o in mine["a10"] if o.provider.lower() == "lambda" and not o.is_spot]
    assert [offer.usd_per_hour for offer in lambdas] == [0.6]
    assert len(mine["a10"]) == len(shipped["a10"]) + 1
    assert [o.usd_per_hour for o in mine["h100-80gb"] if o.provider == "Mine"] == [2.29]
    assert mine["h200"] == shipped["h200"]


def test_a_users_assumptions_hold_for_every_offer_that_says_nothing(tmp_path: Path) -> None:
    offer = f"{{{HEAD}, boot_seconds: 1, usd_per_hour: {{a10: 0.5}}}}"
    file = write(tmp_path, f"assumptions: {{boot_seconds: 7}}\noffers: [{offer}]\n")
    prices = load_prices(file)
    assert {o.boot_seconds for o in prices["h200"]} == {7.0}
    assert [o.boot_seconds for o in prices["a10"] if o.provider == "Mine"] == [1.0]
    (typed,) = load_prices(file, typed=["a10=0.75"])["a10"]
    assert (typed.boot_seconds, typed.download_bytes_per_second) == (7, 200e6)


@pytest.mark.parametrize(
    ("offer", "message"),
    cases(
        """
        "usd_per_hour: {a10: 2500}" | usd_per_hour.a10 must be at most 1000
        "usd_per_hour: {a10: .nan}" | usd_per_hour.a10 must be a finite number
        "usd_per_hour: {a11: 1}" | is an unknown GPU 'a11'; did you mean 'a10
        "usd_per_hour: 1.0" | usd_per_hour must map keys to values, got 1.0
        "provider: Mine, date: 2026-11-20, usd_per_hour: {a10: 1}" | source is missing
        "provider: Mine, date: soon, source: x, usd_per_hour: {a10: 1}" | a date like 2026-11-21
        "provider: Mine, date: 2026-13-41" | month must be in 1..12, got '2026-13-41'
        "usd_per_hr: {a10: 1}" | key 'usd_per_hr'; did you mean 'usd_per_hour'
        "queue_seconds: -5, usd_per_hour: {a10: 1}" | queue_seconds must be at least
        "gpus: 0, usd_per_hour: {a10: 1}" | gpus must be at least 1, got 0
        """
    ),
)
def test_a_price_that_is_not_right_is_refused_by_line_and_key(
    tmp_path: Path, offer: str, message: str
) -> None:
    if "provider" not in offer:
        offer = f"{HEAD}, {offer}"
    file = write(tmp_path, f"offers:\n  - {{{offer}}}\n")
    with pytest.raises(InputError) as caught:
        load_prices(file)
    text = str(caught.value)
    assert text.startswith(f"{file}: line 2: ")
    assert message in text


@pytest.mark.parametrize(
    ("text", "message"),
    cases(
        """
        "offer: []" | unknown key 'offer'; did you mean 'offers'
        "offers: {a10: 1}" | offers must be a list
        "assumptions: {boot_seconds: -1}" | boot_seconds must be at least 0
        "assumptions: {boot: 1}" | "'boot' under assumptions; did you mean 'boot_seconds'"
        "" | empty
        null | no such file
        """
    ),
)
def test_a_file_that_is_not_a_price_list_is_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "prices.yaml" if text is None else write(tmp_path, text)
    with pytest.raises(InputError, match=r"prices\.yaml") as caught:
        load_prices(file)
    assert message in str(caught.value)


# Prices that are typed


def test_a_price_that_is_typed_is_the_only_one_of_its_gpu(tmp_path: Path) -> None:
    file = write(tmp_path, f"offers: [{{{HEAD}, usd_per_hour: {{a10: 0.5}}}}]\n")
    prices = load_prices(file, typed=["A10 = 0.75", "rtx-5090=$1"])
    (mine,) = prices["a10"]
    assert (mine.usd_per_hour, mine.source, mine.date) == (0.75, "--price", datetime.date.today())
    assert [offer.usd_per_hour for offer in prices["rtx-5090"]] == [1.0]
    assert prices["h200"] == load_prices()["h200"]


@pytest.mark.parametrize(
    ("typed", "message"),
    cases(
        """
        [a10] | --price is written like a10=0.75, got 'a10'
        [a10=x] | "--price: a10 must cost dollars an hour, .* got 'x'"
        [a10=0] | "--price: a10 must cost dollars an hour, more than 0"
        [a10=1001] | at most 1000, got '1001'
        [a11=1] | "--price: unknown GPU 'a11'; did you mean 'a10'"
        [a10=1, A10=2] | "--price: a10 is given twice"
        """
    ),
)
def test_a_price_that_is_none_is_refused_by_its_option(typed: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_prices(typed=typed)
