from __future__ import annotations

from dataclasses import replace

import pytest

from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.gpus import GIB
from sweep.running.device_info import (
    Card,
    CardProcess,
    cards_for,
    choose_cards,
    read_cards,
    teams_of,
)
from tests.sweep.pretend_nvml import REFUSED, PretendNvml, memory

A10 = Card(
    product="NVIDIA A10",
    memory_bytes=24 * GIB,
    free_bytes=int(23.6 * GIB),
    compute_capability=(8, 6),
    driver="570",
    cuda="12.8",
    uuid="GPU-a",
)
L4 = replace(A10, product="NVIDIA L4", uuid="GPU-l")
LAST = replace(A10, uuid="GPU-z")
BUSY = replace(A10, uuid="GPU-b")
FOUR = [replace(A10, uuid=f"GPU-{at}") for at in range(4)]


@pytest.mark.parametrize(
    ("typed", "indices"),
    [("all", [0, 1, 2, 3]), ("2", [0, 1]), ("0,2", [0, 2]), ("2,", [2]), ("3,0", [3, 0])],
)
def test_cards_are_all_so_many_or_those_that_are_named(typed: str, indices: list[int]) -> None:
    chosen = choose_cards(typed, FOUR)
    assert [card.index for card in chosen] == indices
    assert [card.cuda_name for card in chosen] == [f"GPU-{at}" for at in indices]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("8", "this machine has 4 GPUs, 0 to 3"),
        ("0,7", "there is no GPU 7"),
        ("1,1", "GPU 1 is named twice"),
        ("0", "GPU 0 alone is --devices 0,"),
        ("every", "name all, how many"),
        ("-1", "name all, how many"),
        ("0;1", "name all, how many"),
        ("１", "name all, how many"),
    ],
)
def test_what_names_no_cards_of_this_machine_is_bad_input(typed: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        choose_cards(typed, FOUR)
    assert f"--devices {typed}" in str(raised.value)


def test_a_machine_without_a_card_is_at_fault() -> None:
    for typed in ("all", "2", "0,1"):
        with pytest.raises(EnvironmentFault, match="shows no NVIDIA GPU"):
            choose_cards(typed, [])


def test_cards_that_differ_are_refused_with_both_products_and_what_would_do() -> None:
    with pytest.raises(InputError) as raised:
        choose_cards("all", [A10, L4, LAST])
    words = str(raised.value)
    assert "GPU 0 is a NVIDIA A10" in words
    assert "GPU 1 a NVIDIA L4" in words
    assert "--devices 0,2" in words
    assert [card.index for card in choose_cards("0,2", [A10, L4, LAST])] == [0, 2]


@pytest.mark.parametrize(
    ("busy", "words"),
    [
        (
            replace(BUSY, processes=(CardProcess(4711, 3 * GIB),)),
            r"process 4711 has 3.00 GiB",
        ),
        (replace(BUSY, processes=(CardProcess(4711, None),)), "process 4711"),
        (replace(BUSY, free_bytes=20 * GIB), r"another process has 4.00 GiB"),
    ],
)
def test_a_card_that_somebody_uses_is_refused_and_the_others_are_named(
    busy: Card, words: str
) -> None:
    with pytest.raises(EnvironmentFault, match=words) as raised:
        choose_cards("all", [A10, busy, LAST])
    assert "GPU 1 is in use" in str(raised.value)
    assert "--devices 0,2" in str(raised.value)
    assert len(choose_cards("0,2", [A10, busy, LAST])) == 2


def test_one_card_that_the_environment_names_twice_is_not_two() -> None:
    with pytest.raises(InputError, match="GPU 0 and GPU 1 are one and the same"):
        choose_cards("all", [A10, A10])


def test_a_driver_that_tells_no_free_memory_says_nothing_of_who_uses_a_card() -> None:
    assert choose_cards("1", [replace(A10, free_bytes=None)])


def test_cards_train_together_in_whole_teams() -> None:
    chosen = choose_cards("all", FOUR)
    teams = [[card.index for card in team] for team in teams_of(chosen, size=2)]
    assert teams == [[0, 1], [2, 3]]
    assert len(teams_of(chosen[:3], size=2)) == 1
    assert teams_of((), size=2) == []


def test_a_trial_of_several_cards_takes_the_first_of_a_machine_or_says_how_many_are_missing() -> (
    None
):
    assert [card.index for card in cards_for(2, FOUR)] == [0, 1]
    with pytest.raises(InputError, match=r"data_parallel 4 needs 4 GPUs for a trial: .*2 GPUs"):
        cards_for(4, FOUR[:2])
    with pytest.raises(EnvironmentFault, match="data_parallel 4 needs 4 GPUs for a trial"):
        cards_for(4, [])


def many(count: int) -> PretendNvml:
    return PretendNvml(
        nvmlDeviceGetCount=count,
        nvmlDeviceGetHandleByIndex=lambda at: at if at < count else _refuse(),
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid.removeprefix("GPU-")),
        nvmlDeviceGetUUID=lambda at: f"GPU-{at}",
        nvmlDeviceGetName="NVIDIA A10",
        nvmlDeviceGetMemoryInfo=memory(24 * GIB, 23 * GIB),
    )


def _refuse() -> int:
    raise REFUSED


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-0", "GPU-1", "GPU-2"]),
        ("2,0", ["GPU-2", "GPU-0"]),
        ("GPU-1", ["GPU-1"]),
        ("0,9,1", ["GPU-0"]),
        ("0,,1", ["GPU-0"]),
        ("", []),
        ("-1", []),
    ],
)
def test_a_machines_cards_are_those_that_cuda_would_see_in_its_order(
    visible: str | None, uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [card.uuid for card in read_cards(nvml=many(3))] == uuids


def test_a_card_whose_memory_is_the_hosts_is_told_by_cuda_and_counts() -> None:
    nvml = many(1)
    nvml.answers["nvmlDeviceGetMemoryInfo"] = REFUSED
    shared = replace(A10, product="NVIDIA GB10", shares_host_memory=True)
    (card,) = read_cards(nvml=nvml, ask_cuda=lambda: shared)
    assert card.memory_bytes == shared.memory_bytes
    assert read_cards(nvml=nvml, ask_cuda=lambda: None) == ()
