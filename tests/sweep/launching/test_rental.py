"""What is rented, what it costs, and what it may cost at most."""

from __future__ import annotations

import math

import pytest

from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.gpus import find_gpu, gpu_catalogue
from search_spaces.prices import TYPED_PROVIDER, load_prices
from sweep.launching.modal import CARDS as MODAL_CARDS
from sweep.launching.modal import Modal
from sweep.launching.providers import PROVIDERS, require
from sweep.launching.rental import HOURS_MAX, Machine, cost_of, machine_offer, shared
from sweep.launching.skypilot import CARDS, CARDS_OF, CLOUDS, SkyPilot, enabled
from tests.sweep.launching.rentals import an_offer

A10 = find_gpu("a10")


def cost(**changes: object) -> object:
    terms = {
        "offer": an_offer(usd_per_hour=1.2, boot_seconds=60.0),
        "usd_per_hour_most": 1.5,
        "download_bytes": 0.0,
        "max_dollars": None,
        "least_seconds": 100.0,
    }
    return cost_of(changes.pop("seconds", (540.0, 1140.0)), **(terms | changes))  # type: ignore[arg-type]


def test_the_bill_is_of_the_study_and_the_start() -> None:
    found = cost()
    assert found.usd == pytest.approx((0.20, 0.40))  # type: ignore[attr-defined]
    assert found.hours == pytest.approx((1 / 6, 1 / 3))  # type: ignore[attr-defined]


def test_a_limit_in_dollars_is_time_at_the_dearest_price() -> None:
    found = cost(max_dollars=3.0)
    assert found.limit_seconds == 2 * 3600  # type: ignore[attr-defined]
    assert found.usd_max == pytest.approx(3.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("seconds", "hours"), [((540.0, 1140.0), 1.0), ((540.0, 7140.0), 4.0), (None, HOURS_MAX)]
)
def test_without_a_limit_time_is_limited_all_the_same(
    seconds: tuple[float, float] | None, hours: float
) -> None:
    assert cost(seconds=seconds).limit_seconds == hours * 3600  # type: ignore[attr-defined]


def test_no_limit_is_longer_than_a_provider_allows() -> None:
    assert cost(max_dollars=1000.0).limit_seconds == HOURS_MAX * 3600  # type: ignore[attr-defined]


def test_a_limit_too_small_for_one_trial_says_what_would_do() -> None:
    with pytest.raises(InputError, match=r"--max-dollars 0.02 pays for 48 s .* at least 0.05"):
        cost(max_dollars=0.02)
    cost(max_dollars=0.05)


def test_weights_that_are_fetched_are_paid_for() -> None:
    offer = an_offer(download_bytes_per_second=1e8)
    with_weights = cost(offer=offer, download_bytes=6e10)
    assert with_weights.hours[0] == pytest.approx(1200 / 3600)  # type: ignore[attr-defined]


def test_all_cards_of_a_machine_are_paid_for_and_no_fewer_rented_than_there_are() -> None:
    offers = [an_offer(gpus=8, usd_per_hour=1.0), an_offer(usd_per_hour=3.0)]
    four = machine_offer(Machine(A10, cards=4), offers)
    one = machine_offer(Machine(A10), offers)
    assert four is not None
    assert one is not None
    assert (four.usd_per_hour, one.usd_per_hour) == (12.0, 3.0)
    eight = machine_offer(Machine(A10, cards=8), offers)
    assert eight is not None
    assert eight.usd_per_hour == 8.0
    with pytest.raises(InputError, match="--devices must be at least 8: Modal rents a10 by 8"):
        machine_offer(Machine(A10), offers[:1])
    assert machine_offer(Machine(A10), []) is None


def test_time_until_the_machine_is_gone_is_paid_for() -> None:
    offer = machine_offer(Machine(A10), [an_offer(boot_seconds=60)], idle_seconds=300)
    assert offer is not None
    assert offer.boot_seconds == 360


def test_trials_are_spread_over_cards_and_the_start_is_not() -> None:
    assert shared((125.0, 225.0), cards=4, start=25.0) == (50.0, 75.0)


def test_names_of_cards_are_those_of_the_catalogue() -> None:
    of_clouds = [name for names in CARDS_OF.values() for name in names]
    assert {*MODAL_CARDS, *CARDS, *of_clouds} <= set(gpu_catalogue())
    assert CARDS_OF.keys() == CLOUDS.keys()


def test_every_cloud_is_one_of_the_price_list() -> None:
    providers = {offer.provider for offers in load_prices().values() for offer in offers}
    assert {*CLOUDS.values(), "Modal"} <= providers


@pytest.mark.parametrize(
    ("provider", "machine", "message"),
    [
        ("modal", Machine(find_gpu("rtx-4090")), "Modal has no rtx-4090; it has t4, l4, a10"),
        ("modal", Machine(A10, cards=5), "--devices must be at most 4"),
        ("skypilot", Machine(A10, cloud="azur"), "unknown cloud 'azur'"),
        ("skypilot", Machine(A10, cloud="aws"), "AWS has no a10; it has t4, v100-16gb"),
        ("skypilot", Machine(A10, cloud="lambda", is_spot=True), "Lambda has no spot machines"),
    ],
)
def test_what_a_provider_has_not_is_refused(provider: str, machine: Machine, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PROVIDERS[provider].check(machine)


def test_an_offer_is_the_provider_s_own_or_typed() -> None:
    mine = an_offer(provider=TYPED_PROVIDER)
    spot, aws, modal = an_offer(provider="AWS", is_spot=True), an_offer(provider="AWS"), an_offer()
    offers = [mine, spot, aws, modal]
    assert Modal().offers(Machine(A10), offers) == [mine, modal]
    assert SkyPilot().offers(Machine(A10), offers) == [mine, aws]
    assert SkyPilot().offers(Machine(A10, is_spot=True), offers) == [mine, spot]
    assert SkyPilot().offers(Machine(A10, cloud="gcp"), offers) == [mine]


def test_a_provider_may_cost_more_than_the_card_and_says_so() -> None:
    assert 1.2 < Modal().dearest(Machine(A10), 1.2) < 1.8
    assert SkyPilot().dearest(Machine(A10), 1.29) == pytest.approx(1.62)
    assert math.isclose(SkyPilot().dearest(Machine(A10), 2.0), 2.5)


@pytest.mark.parametrize(
    ("said", "cloud", "is_enabled"),
    [
        ('{"default": {}}', None, False),
        ('{"default": {"AWS": ["compute", "storage"]}}', None, True),
        ('starting a server\n{"default": {"AWS": ["compute"]}}', "aws", True),
        ('{"default": {"AWS": ["storage"]}}', "aws", False),
        ('{"default": {"AWS": ["compute"]}}', "gcp", False),
        ('{"one": {}, "two": {"RunPod": ["compute"]}}', "runpod", True),
        ("", None, False),
        ("[]", None, False),
        ("{}", "aws", False),
    ],
)
def test_a_cloud_is_enabled_where_skypilot_says_so(
    said: str, cloud: str | None, is_enabled: bool
) -> None:
    assert enabled(said, cloud) is is_enabled


def test_a_tool_that_is_not_installed_is_named_with_what_installs_it() -> None:
    with pytest.raises(EnvironmentFault, match=r"pip install modal .* --dry-run"):
        require(Modal(), Machine(A10), find=lambda _: None)


def test_a_provider_without_login_is_found_before_anything_is_started() -> None:
    asked: list[list[str]] = []

    def ask(command: object) -> tuple[int, str]:
        asked.append(list(command))  # type: ignore[call-overload]
        return 1, ""

    with pytest.raises(EnvironmentFault, match="Modal knows no account: modal token new"):
        require(Modal(), Machine(A10), find=str, ask=ask)
    with pytest.raises(EnvironmentFault, match="SkyPilot knows no account for aws: sky check aws"):
        require(SkyPilot(), Machine(A10, cloud="aws"), find=str, ask=ask)
    assert asked == [["modal", "token", "info"], ["sky", "check", "aws", "-o", "json"]]
    require(Modal(), Machine(A10), find=str, ask=lambda _: (0, ""))


def test_a_tool_that_does_not_answer_is_a_fault_of_the_environment() -> None:
    def ask(_command: object) -> tuple[int, str]:
        raise OSError("exec format error")

    with pytest.raises(EnvironmentFault, match="modal does not answer"):
        require(Modal(), Machine(A10), find=str, ask=ask)
