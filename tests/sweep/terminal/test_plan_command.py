"""Behaviour of `sweep plan`, from what is typed to what is printed."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import CONFIG_KEYS, TrialConfig
from search_spaces.costs import AskedWork
from search_spaces.errors import InputError
from search_spaces.gpus import GIB, gpu_catalogue
from storage.definition import StudySnapshot
from storage.environment import fingerprint
from storage.reading import read_study
from storage.study import open_study
from sweep.cli import main
from sweep.paths import runs_directory, storage_url
from sweep.planning.question import PlanRequest, read_configurations
from sweep.planning.survey import SURVEYED_BY
from sweep.predict.memory.profile_store import source_files
from sweep.predict.memory.profiles import Untraceable
from sweep.running.device_info import Card
from sweep.sampling.samplers import make_sampler
from sweep.terminal import options
from sweep.terminal.plan import plan
from tests.sweep.imagined_memory import ImaginedMemory, ImaginedPredictor
from tests.sweep.imagined_study import INTERFACE_KEYS, TRIALS, a_snapshot

Plan = Callable[..., int]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody's studies, prices and caches, on a machine that shows no GPU."""
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.fixture
def memory() -> ImaginedPredictor:
    return ImaginedPredictor()


def stored_study(name: str, storage: str | None) -> StudySnapshot:
    return read_study(name, url=storage_url(storage), home=runs_directory())


@pytest.fixture
def answer(memory: ImaginedPredictor) -> Plan:
    """Make a plan with imagined memory, on a machine without a GPU."""

    def made(*, card: Card | None = None, **typed: Any) -> int:
        return plan(
            PlanRequest(**typed),
            read_study=stored_study,
            predictor=lambda *_: memory,
            card=lambda: card,
        )

    return made


def a_card(product: str) -> Card:
    return Card(product, 24 * GIB, 23 * GIB, (8, 6), "1", "13.0")


def a_space_file(home: Path, text: str) -> str:
    path = home / "mine.yaml"
    path.write_text(text)
    return str(path)


HELD = {"compute_dtype": "bf16", "kernels": "hf", "target_modules": "attention"}

SMALL = "gpu: a10\ndimensions:\n  micro_batch_size: [1, 8, 64]\n  lora_rank: [8, 16]\n"


def a_file(home: Path, *lines: str) -> str:
    path = home / "configs.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


# What is asked about


@pytest.mark.parametrize(
    ("typed", "card", "gpu", "model"),
    [
        ({"space": "a10"}, None, "a10", "mistral-7b-v0.3"),
        ({"space": "t4"}, None, "t4", "mistral-7b-v0.3"),
        ({"space": "A10"}, None, "a10", "mistral-7b-v0.3"),
        ({"gpus": ("l4",), "model": "qwen3-8b"}, None, "l4", "qwen3-8b"),
        ({"gpus": ("h200", "H200")}, None, "h200", "mistral-7b-v0.3"),
        ({}, "NVIDIA A10", "a10", "mistral-7b-v0.3"),
        ({"gpus": ("auto",)}, "NVIDIA A10", "a10", "mistral-7b-v0.3"),
    ],
)
def test_card_and_model_come_from_what_is_named(
    answer: Plan,
    capsys: pytest.CaptureFixture[str],
    typed: Mapping[str, Any],
    card: str | None,
    gpu: str,
    model: str,
) -> None:
    here = None if card is None else a_card(card)
    assert answer(card=here, configuration={"compute_dtype": "fp16"}, as_json=True, **typed) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["gpu"]["name"], document["model"]) == (gpu, model)


def test_where_no_gpu_is_named_the_one_that_is_here_must_be_known(
    answer: Plan, memory: ImaginedPredictor
) -> None:
    with pytest.raises(InputError, match="no GPU is named and none is here"):
        answer()
    with pytest.raises(InputError, match="does not have the NVIDIA Nonesuch"):
        answer(card=a_card("NVIDIA Nonesuch"))
    assert memory.asked == []


def test_the_budget_of_a_space_counts_where_it_is_the_tighter_one(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = []
    for line in ("budget_gib: 7\n", "budget_gib: 700\n"):
        answer(space=a_space_file(home, SMALL + line), as_json=True)
        budgets.append(json.loads(capsys.readouterr().out)["gpu"]["budget_bytes"])
    assert budgets == [7 * GIB, 23_604_690_944 - 536_870_912]


@pytest.mark.parametrize("gpu", ["A10", "L4"])
def test_a_gpus_name_is_the_same_question_however_it_is_asked(
    answer: Plan, capsys: pytest.CaptureFixture[str], gpu: str
) -> None:
    for more in ({}, {"is_longest": True}, {"is_cheapest": True}, {"is_exact": True}):
        asked = {**more, "configuration": {"lora_rank": 16, **HELD}}
        documents, screens = [], []
        for named in ({"space": gpu}, {"gpus": (gpu,)}, {"space": gpu, "gpus": (gpu,)}):
            answer(**named, **asked, as_json=True)
            documents.append(json.loads(capsys.readouterr().out))
            answer(**named, **asked)
            screens.append(capsys.readouterr().out)
        assert documents[0] == documents[1] == documents[2]
        assert screens[0] == screens[1] == screens[2]


def test_a_gpu_without_a_preset_has_the_space_that_init_writes_for_it(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = {"compile": False, "kernels": "hf"}
    answer(space="L4", configuration=typed)
    out = capsys.readouterr().out
    assert "the space that `sweep init --gpu l4` writes, 3,456 configurations" in out
    assert "`sweep init --gpu l4 -o l4.yaml && sweep run l4.yaml --set compile=false" in out
    answer(gpus=("l4",), configuration=typed, as_json=True)
    own = json.loads(capsys.readouterr().out)
    assert main(["init", "--gpu", "l4", "-o", str(home / "l4.yaml")]) == 0
    capsys.readouterr()
    answer(space=str(home / "l4.yaml"), configuration=typed, as_json=True)
    written = json.loads(capsys.readouterr().out)
    assert own == {**written, "space_kind": "standard"}


def test_a_gpu_named_over_another_devices_space_has_its_own_budget(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = {}
    for space, gpu in (("cpu-demo", "a10"), (a_space_file(home, SMALL + "budget_gib: 7\n"), "l4")):
        assert answer(space=space, gpus=(gpu,), as_json=True) == 0
        budgets[gpu] = json.loads(capsys.readouterr().out)["gpu"]["budget_bytes"]
    assert budgets == {gpu: gpu_catalogue()[gpu].budget_bytes for gpu in budgets}
    answer(space=str(home / "mine.yaml"), gpus=("A10",), as_json=True)
    assert json.loads(capsys.readouterr().out)["gpu"]["budget_bytes"] == 7 * GIB


class Terminal(io.StringIO):
    """A screen to write on."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "typed",
    [
        {"space": "a10"},
        {"gpus": ("a10", "l4"), "work": AskedWork(samples=100_000)},
        {"space": "a100-80gb", "gpus": ("a100-80gb-pcie",), "configuration": {"seq_len": 1024}},
        {"space": "cpu-demo", "gpus": ("a10",)},
        {"space": "a10", "is_exact": True},
        {"gpus": ("a10", "t4"), "is_exact": True},
        {"space": "a10", "is_longest": True},
        {"gpus": ("a10", "l4"), "is_longest": True},
        {"is_cheapest": True, "within_seconds": 3600.0},
        {"gpus": ("a10", "l4"), "is_cheapest": True},
        {"space": "mine.yaml"},
        {"space": "mine.yaml", "is_longest": True},
        {"space": "mine.yaml", "gpus": ("a10", "a10g")},
    ],
    ids=str,
)
def test_an_answer_is_one_screen_that_names_what_comes_next(
    answer: Plan, home: Path, monkeypatch: pytest.MonkeyPatch, typed: dict[str, Any], columns: int
) -> None:
    """Nothing of the file's space fits its own GPU."""
    monkeypatch.chdir(home)
    (home / "mine.yaml").write_text(SMALL.replace("a10", "a10g") + "budget_gib: 4\n")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", Terminal())
    answer(**typed)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", sys.stdout.getvalue()).rstrip().splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= columns
    assert any("--details" in line for line in lines)
    fits = {"Recommended for", "The longest sequences", "micro-batch 4"}
    assert lines[0].startswith(tuple(fits | {"Nothing fits for", "No sequence of 64 tokens"}))
    asked = (
        "asked" if typed.get("is_exact") else "the job" if "is_cheapest" in typed else "searched"
    )
    assert any(line.startswith(asked) for line in lines)
    monkeypatch.setattr(sys, "stdout", Terminal())
    answer(**typed, is_detailed=True)
    whole = re.sub(r"\x1b\[[0-9;]*m", "", sys.stdout.getvalue())
    assert max(map(len, whole.splitlines())) <= columns
    assert "…" not in whole


# Settings that are typed


def test_what_is_typed_is_held_and_the_rest_of_the_space_is_searched(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = a_space_file(home, SMALL)
    answer(space=space, configuration={"micro_batch_size": 2}, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["configurations"]["total"] == 2
    assert document["held"] == {"micro_batch_size": 2}
    assert document["recommended"]["config"]["micro_batch_size"] == 2
    assert document["table"]["micro_batch_sizes"] == [2]
    assert document["table"]["scope"] == "space"
    answer(space=space, configuration={"micro_batch_size": 2})
    out = " ".join(capsys.readouterr().out.split())
    assert "free lora_rank; all else is fixed you fixed micro-batch 2 next" in out


def test_a_space_of_which_everything_is_typed_is_one_configuration(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = {"micro_batch_size": 2, "lora_rank": 4}
    answer(
        space=a_space_file(home, SMALL + "fixed: {seq_len: 64}\n"),
        configuration=typed,
        as_json=True,
    )
    document = json.loads(capsys.readouterr().out)
    asked = {**typed, "seq_len": 64}
    assert asked.items() <= document["config"].items()


def test_batches_that_do_not_go_into_an_effective_batch_are_left_out(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = a_space_file(home, "gpu: a10\ndimensions:\n  micro_batch_size: [1, 3, 4, 8]\n")
    answer(space=space, configuration={"effective_batch_size": 12}, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["table"]["micro_batch_sizes"] == [1, 3, 4]
    assert document["recommended"]["config"]["effective_batch_size"] == 12


# A file of configurations


def test_a_file_is_answered_line_by_line_in_its_order(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ('{"micro_batch_size": 8}', "", '{"seq_len": 64}', '{"micro_batch_size": 8}')
    assert answer(space="a10", from_file=a_file(home, *lines), as_json=True) == 0
    out, err = capsys.readouterr()
    documents = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert [d["config"]["micro_batch_size"] for d in documents] == [8, 4, 8]
    assert [d["config"]["seq_len"] for d in documents] == [512, 64, 512]
    assert all(d.keys() >= INTERFACE_KEYS for d in documents)
    assert all(d["config"].keys() == set(CONFIG_KEYS) for d in documents)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"micro_batch": 3}', "unknown key 'micro_batch'; did you mean 'micro_batch_size'?"),
        ('{"seq_len": "a"}', "seq_len must be a whole number, got 'a'"),
        ("[1]", "must be a JSON object, got [1]"),
        ('{"seq_len": 5, "seq_len": 6}', "key 'seq_len' is given twice"),
        ("[" * 100_000, "not valid JSON"),
        ('{"effective_batch_size": 6}', "must be a multiple of micro_batch_size, got 6 and 4"),
    ],
)
def test_a_line_that_is_no_configuration_is_refused_with_its_number(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    name = a_file(home, "{}", line)
    with pytest.raises(InputError) as refused:
        answer(space="a10", from_file=name, as_json=True)
    assert str(refused.value).startswith(f"{name}: line 2: ")
    assert message in str(refused.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "no configuration in it"), (b"\n \n", "no configuration"), (b"\xff", "not UTF-8")],
)
def test_standard_input_is_read_as_strictly(content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_configurations("-", stdin=io.BytesIO(content))


class Picky(ImaginedPredictor):
    """Cannot trace Liger's kernels, and has no module 'zz'."""

    def predict(self, config: TrialConfig) -> ImaginedMemory:
        if config.kernels == "liger":
            raise Untraceable("cannot be traced: data decides")
        if "zz" in config.target_modules:
            raise InputError("target_modules: the model has no linear layer 'zz'")
        return super().predict(config)


def test_a_line_that_cannot_be_predicted_silences_no_other(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forbidden = '{"seq_len": 100000}'
    name = a_file(home, "{}", '{"kernels": "liger"}', forbidden, "{}")
    request = PlanRequest(space="a10", from_file=name)
    predictor = Picky()
    handed = {"read_study": stored_study, "predictor": lambda *_: predictor}
    assert plan(replace(request, as_json=True), **handed) == 0
    good, untraceable, invalid, again = map(json.loads, capsys.readouterr().out.splitlines())
    assert good == again
    assert good["fits"] is True
    assert (untraceable["fits"], untraceable["invalid"]) == (None, None)
    assert "data decides" in untraceable["notes"][0]
    assert invalid["fits"] is False
    assert "100000" in invalid["invalid"]["reason"]
    assert plan(request, **handed) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit()]
    assert [row[1] for row in rows] == ["yes", "–", "invalid", "yes"]
    words = " ".join(out.split())
    assert "data decides" in words
    assert "seq_len 100000 is beyond" in words


@pytest.mark.parametrize("modules", ['["q_prj"]', '["q_proj", "zz"]'])
def test_a_line_that_names_no_module_of_the_model_is_an_error_of_that_line(
    home: Path, modules: str
) -> None:
    name = a_file(home, "{}", f'{{"target_modules": {modules}}}')
    request = PlanRequest(space="a10", from_file=name)
    wrong = "q_prj" if "prj" in modules else "zz"
    with pytest.raises(InputError, match=rf"configs.jsonl: line 2: target_modules: .*'{wrong}'"):
        plan(request, read_study=stored_study, predictor=lambda *_: Picky())


def test_a_module_that_only_the_models_code_knows_to_be_missing_is_an_error_of_its_line(
    home: Path,
) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 99}
    config = {"model_type": "falcon", **sizes}
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(config))
    name = a_file(home, '{"target_modules": ["zz"], "quantization": "none"}')
    request = PlanRequest(space="a10", model=str(home / "model"), from_file=name)
    with pytest.raises(InputError, match=r"configs.jsonl: line 1: target_modules: .*'zz'"):
        plan(request, read_study=stored_study, predictor=lambda *_: Picky())


# What comes out


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        ({"configuration": {"micro_batch_size": 8}}, 0),
        ({"configuration": {"micro_batch_size": 64}, "is_exact": True}, 1),
        ({"configuration": {"seq_len": 100_000}, "is_exact": True}, 1),
        ({"gpus": ("t4", "h200"), "configuration": {"micro_batch_size": 64}}, 0),
    ],
)
def test_the_exit_code_says_whether_anything_fits(
    answer: Plan, typed: Mapping[str, Any], code: int
) -> None:
    assert answer(**{"space": None if "gpus" in typed else "a10", **typed}) == code


def test_a_knob_that_leaves_nothing_valid_of_a_space_is_bad_input(answer: Plan) -> None:
    with pytest.raises(InputError, match="no configuration is valid: seq-len-beyond-positions"):
        answer(space="a10", configuration={"seq_len": 100_000})


def test_one_configuration_is_answered_under_the_files_keys(
    answer: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(space="a10", configuration={"micro_batch_size": 8}, is_exact=True, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["config"] == TrialConfig(micro_batch_size=8).model_dump(mode="json")
    assert document["table"]["scope"] == "structure"
    assert document.keys() >= INTERFACE_KEYS | {"table", "bills", "gpu", "model"}
    # 21.48 GiB less 2 % hold the base's 5 GiB, the adapters' 16 MiB and 32 rows of half a GiB.
    assert document["table"]["largest_micro_batch"]["512"] == {"sure": 32, "possible": 33}


def test_a_space_is_answered_with_counts_and_a_recommendation(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(space=a_space_file(home, SMALL), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["configurations"]["total"] == 6
    assert document["configurations"]["fit"] == 4
    assert document["configurations"]["cannot_fit"] == 2
    assert document["recommended"]["config"]["micro_batch_size"] == 8
    assert document["recommended"]["config"]["lora_rank"] == 16
    assert document["capacity_class"] == {
        "lora_rank": 16,
        "target_modules": "attention",
        "is_standard": True,
    }
    assert len(document["fastest_by_class"]) == 2
    assert document["study_seconds"][0] < document["study_seconds"][1]


def test_people_see_table_breakdown_bottleneck_cost_and_grounds_in_details(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = a_space_file(home, SMALL)
    answer(space=space)
    first = capsys.readouterr().out.rstrip()
    answer(space=space, is_detailed=True)
    out = capsys.readouterr().out
    assert out.startswith(first)
    for words in (
        "a10 (NVIDIA A10): 21.98 GiB usable",
        "What fits, in tokens/s",
        "activations 4.00 GiB",
        "bound by ",
        "Fastest of each capacity class",
        "Cost of 1,000 steps (8,000 samples, 4.1 M tokens)",
        "a10 Modal, item by item",
        "boot 1 min 0 s",
        "memory: predicted from the model's own code, within 2 %",
        "speed: predicted from the a10's measured matrix products and measured copies, within 50 %",
        "price: Modal, read on ",
    ):
        assert words in " ".join(out.removeprefix(first).split())
    largest = next(line for line in out.splitlines() if line.strip().startswith("largest"))
    assert largest.split() == ["largest", "8"]


def test_a_doubtful_cell_has_a_question_mark_and_one_that_does_not_fit_a_dash(
    answer: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    exact: dict[str, Any] = {"configuration": {"micro_batch_size": 33}, "is_exact": True}
    assert answer(space="a10", **exact, is_detailed=True) == 1
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.split()[:1] == ["33"] and "x" not in line)
    assert row.split()[1].endswith("?")
    assert row.split()[2:] == ["-", "-", "-"]
    assert out.startswith("micro-batch 33, length 512, rank 16 on q,k,v,o may not fit for mistral")


def test_several_cards_are_compared(answer: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"gpus": ("a10", "h100-80gb"), "configuration": {"micro_batch_size": 8}}
    answer(**asked)
    first = capsys.readouterr().out.rstrip()
    assert first.startswith("Recommended for mistral-7b-v0.3: the h100-80gb at ")
    assert "cheapest   h100-80gb" in first
    assert "fastest    h100-80gb\n" in first
    answer(**asked, is_detailed=True)
    out = capsys.readouterr().out
    assert out.startswith(first)
    assert "break-even" in out
    order = [out.index(f"Recommended for mistral-7b-v0.3 on the {gpu}") for gpu in asked["gpus"]]
    assert order == sorted(order)


def test_a_card_that_is_named_as_a_space_is_asked_about_beside_the_others(
    answer: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with its own preset, and with what `sweep init` writes for it where it has none."""
    held = {**HELD, "lora_rank": 64, "seq_len": 1024, "effective_batch_size": 64}
    answer(space="a10", gpus=("a100-40gb", "l40s"), configuration=held, as_json=True)
    document = json.loads(capsys.readouterr().out)
    plans = {plan["gpu"]["name"]: plan for plan in document["plans"]}
    assert list(plans) == ["a10", "a100-40gb", "l40s"]
    assert [plan["space_kind"] for plan in plans.values()] == ["preset", "preset", "standard"]
    assert all(plan["held"] == held for plan in plans.values())
    assert plans["l40s"]["table"]["micro_batch_sizes"][-1] == 32
    assert plans["a10"]["table"]["micro_batch_sizes"][-1] == 16
    for plan_ in plans.values():
        assert held.items() <= plan_["recommended"]["config"].items()
    assert document["comparison"]["effective_batch_size"] == 64
    assert document["speeds"]["fastest"] in plans


def test_the_recommendation_comes_first_in_one_sentence(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(space=a_space_file(home, SMALL))
    sentence, _, rest = capsys.readouterr().out.partition("\n\n")
    sentence, rest = (" ".join(text.split()) for text in (sentence, rest))
    where = "Recommended for mistral-7b-v0.3 on the a10: "
    assert sentence.startswith(f"{where}micro-batch 8, length 512, rank 16 on q,k,v,o: ")
    assert re.search(r": [\d,]+ tokens/s \(predicted, [\d,]+ to [\d,]+\), ", sentence)
    assert "9.02 GiB (within 2 %) of the 21.48 GiB budget, $" in sentence
    assert sentence.endswith(" per million tokens")
    for words in (
        "settings the standard QLoRA recipe cost ",
        "cost 1,000 steps (8,000 samples, 4.1 M tokens): $",
        "capacity the standard recipe's; rank 8 on q,k,v,o: ",
        "searched file mine, 6 configurations; 4 surely fit, 0 may fit, 2 cannot",
        "free micro_batch_size, lora_rank; all else is fixed",
        f"next `sweep run {home / 'mine.yaml'}` measures it (",
    ):
        assert words in rest


def test_cards_that_overlap_are_not_told_apart(
    answer: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are known within half, and predicted a few percent apart."""
    asked: dict[str, Any] = {"gpus": ("a10", "l4"), "configuration": {"micro_batch_size": 8}}
    answer(**asked, typed_prices=("a10=1", "l4=1.01"), is_detailed=True)
    out = " ".join(capsys.readouterr().out.split())
    assert "cheapest a10 or l4: $" in out
    assert "fastest a10 or l4 settings" in out
    assert "no break-even is claimed" in out
    answer(**asked, typed_prices=("a10=1", "l4=1.01"), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["comparison"]["break_evens"] == []
    assert [bill["gpu"] for bill in document["comparison"]["perhaps_cheapest"]] == ["l4"]
    assert document["speeds"]["perhaps_fastest"] == ["l4"]


def test_what_if_lines_are_the_useful_few_of_the_changes_that_json_lists(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = a_space_file(home, SMALL)
    for asked in ({"space": space}, {"space": "a10", "is_exact": True}):
        answer(**asked, is_detailed=True)
        out = capsys.readouterr().out
        answer(**asked, as_json=True)
        changes = json.loads(capsys.readouterr().out)["what_ifs"]
        begin = out.splitlines().index("What if: one change each, against that configuration")
        shown = out.splitlines()[begin + 1 : out.splitlines().index("", begin)]
        assert shown[-1].strip() == f"all {len(changes)} changes of a setting: --json"
        assert 2 < len(shown) < 11
        assert any("no fp32 upcast" in line and "+" in line for line in shown)
        keys = {"key", "value", "fits", "use", "speed_change", "peak_change_bytes", "config"}
        assert all(change.keys() >= keys for change in changes)


def test_numerics_16_bit_leaves_compute_in_8_bits_out(
    answer: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(space="a10", numerics="16-bit", as_json=True) == 0
    (wide,) = json.loads(capsys.readouterr().out)["fastest_by_numerics"]
    assert wide["numerics"] == "16-bit"
    answer(space="a10", numerics="16-bit")
    assert "`sweep run a10 --set numerics=16-bit`" in capsys.readouterr().out
    with pytest.raises(InputError, match="numerics must be one of 'any' or '16-bit'"):
        answer(space="a10", numerics="8-bit")


# The questions backwards


def test_the_longest_rows_are_asked_for(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = a_space_file(home, SMALL)
    assert answer(space=space, is_longest=True) == 0
    out = capsys.readouterr().out
    assert out.startswith("The longest sequences that surely fit for mistral-7b-v0.3 on the a10: ")
    assert "lengths in steps of 64 tokens" in out
    answer(space=space, is_longest=True, configuration={"micro_batch_size": 2}, as_json=True)
    document = json.loads(capsys.readouterr().out)
    (row,) = document["rows"]
    assert (row["micro_batch_size"], document["held"]) == (2, {"micro_batch_size": 2})
    # 21.48 GiB less 2 % hold 5 GiB, 16 MiB and two rows of a MiB a token.
    assert row["seq_len"] == 8192
    assert answer(gpus=("a10", "l4"), is_longest=True, is_exact=True, as_json=True) == 0
    assert len(json.loads(capsys.readouterr().out)["plans"]) == 2


def test_the_whole_catalogue_is_asked_for_the_cheapest_card(
    answer: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {
        "is_cheapest": True,
        "work": AskedWork(samples=10_000),
        "within_seconds": 7200.0,
    }
    assert answer(**asked) == 0
    out = capsys.readouterr().out
    assert out.startswith("Recommended for mistral-7b-v0.3: the ")
    words = " ".join(out.split())
    assert "the job 625 steps (10,000 samples, 5.1 M tokens) within 2 h 0 min; on every" in words
    assert "no price: v100-32gb" in words
    answer(**asked, as_json=True)
    document = json.loads(capsys.readouterr().out)
    cards = {card["gpu"]: card for card in document["gpus"]}
    assert set(cards) == set(gpu_catalogue())
    able = [c for c in document["gpus"] if c["outcome"] in ("in_time", "perhaps_late")]
    assert able[0]["gpu"] == document["cheapest"]
    costs = [card["bills"][0]["usd"] for card in able]
    assert costs == sorted(costs)
    assert cards[document["smallest"]]["memory_bytes"] == min(c["memory_bytes"] for c in able)
    assert {c["answer"]["config"]["effective_batch_size"] for c in able} == {16}
    assert all(card["bills"][0]["wall_hours"] <= 2 for card in able)


def test_only_the_cards_that_are_named_are_asked_for_the_cheapest(
    answer: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {"is_cheapest": True, "gpus": ("a10", "l4"), "as_json": True}
    answer(**asked, typed_prices=("a10=0.01",))
    document = json.loads(capsys.readouterr().out)
    assert [card["gpu"] for card in document["gpus"]] == ["a10", "l4"]
    assert document["gpus"][0]["bills"][0]["provider"] == "at your price"
    assert answer(**asked, within_seconds=1.0) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["cheapest"], document["too_slow"]) == (None, ["a10", "l4"])


def test_prices_of_the_users_are_taken_from_where_they_are_kept(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "offers:\n- {provider: Mine, date: 2026-11-21, source: me, usd_per_hour: {a10: 0.01}}\n"
    (home / "runs").mkdir()
    (home / "runs" / "prices.yaml").write_text(text)
    (home / "other.yaml").write_text(text.replace("Mine", "Theirs"))
    providers = []
    for prices in (None, home / "other.yaml"):
        answer(space="a10", is_exact=True, prices=prices, as_json=True)
        providers.append(json.loads(capsys.readouterr().out)["cost"]["provider"])
    assert providers == ["Mine", "Theirs"]


def test_several_cards_are_compared_by_one_effective_batch(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = a_space_file(home, "gpu: a10\ndimensions:\n  micro_batch_size: [1, 8, 24, 48]\n")
    asked: dict[str, Any] = {
        "space": space,
        "gpus": ("a10", "h200"),
        "work": AskedWork(samples=480),
    }
    answer(**asked)
    out = capsys.readouterr().out
    assert "10 steps (480 samples, 0.2 M tokens), 48 x 512 a step" in out
    assert "a10: also effective batch 48" in out
    answer(**asked, as_json=True)
    comparison = json.loads(capsys.readouterr().out)["comparison"]
    assert {bill["steps"] for bill in comparison["bills"]} == {10}
    assert (comparison["effective_batch_size"], comparison["samples"]) == (48, 480)


def test_a_study_calibrates_the_plan(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    definition = a_snapshot().definition
    url = f"sqlite:///{home}/sweep.db"
    with open_study(
        "mine",
        url=url,
        definition=definition,
        sampler=make_sampler("random", definition.space, seed=0),
        environment=fingerprint(device="cpu"),
        home=home / "runs",
    ) as study:
        for record in TRIALS:
            trial = study.ask({}, params=None)
            begun = study.begin(trial, record.config, "2026-11-21T00:00:00+00:00")
            told = {"number": trial.number, "attempt_id": begun.id}
            study.tell(trial, record.model_copy(update=told))
    asked: dict[str, Any] = {"space": "a10", "study": "mine", "storage": url, "is_exact": True}
    asked["is_detailed"] = True
    answer(**asked, configuration={"micro_batch_size": 2})
    assert f"calibrated by {len(TRIALS)} trials of study mine" in capsys.readouterr().out
    answer(**asked, configuration={"micro_batch_size": 8})
    assert "measured by trial 4 of study mine" in capsys.readouterr().out


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_length_that_a_rule_forbids_is_not_said_to_need_too_much_memory(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str], is_exact: bool
) -> None:
    """The model knows 2,048 positions; at 4,096 nothing is about memory."""
    typed: dict[str, Any] = {"model": "tinyllama-1.1b"}
    if is_exact:
        asked = {"space": "a10", "is_exact": True, "configuration": {"seq_len": 4096}, **typed}
    else:
        dimensions = "  micro_batch_size: [1, 2, 64]\n  seq_len: [1024, 4096]\n"
        asked = {"space": a_space_file(home, f"gpu: a10\ndimensions:\n{dimensions}"), **typed}
    answer(**asked, is_detailed=True)
    lines = capsys.readouterr().out.splitlines()
    begin = next(number for number, line in enumerate(lines) if "micro-batch  " in line)
    end = next(number for number, line in enumerate(lines) if line.startswith("  largest"))
    assert {line.split()[-1] for line in lines[begin + 1 : end + 1]} == {"invalid"}
    rule = "seq-len-beyond-positions"
    assert f"  'invalid' is forbidden on this model and GPU: {rule}" in lines


# What is kept


def test_a_space_is_looked_over_once(
    answer: Plan, home: Path, memory: ImaginedPredictor, capsys: pytest.CaptureFixture[str]
) -> None:
    space = a_space_file(home, SMALL + "  checkpoint_fraction: {low: 0, high: 1, step: 0.02}\n")
    answer(space=space, as_json=True)
    first = len(memory.asked)
    found = json.loads(capsys.readouterr().out)
    answer(space=space, as_json=True)
    assert len(memory.asked) - first < first / 2
    assert json.loads(capsys.readouterr().out) == found
    answer(space=space, gpus=("l4",), as_json=True)
    assert len(memory.asked) - first > first


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"fit": 1}', "\0"])
def test_a_kept_answer_that_cannot_be_read_is_worked_out_anew(
    answer: Plan, home: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    space = a_space_file(home, SMALL)
    answer(space=space)
    first = capsys.readouterr().out
    (kept,) = (home / "cache" / "qlora-sweep" / "surveys").iterdir()
    kept.write_text(content)
    answer(space=space)
    assert capsys.readouterr().out == first


def test_a_kept_answer_is_of_no_use_once_any_code_that_predicts_changes() -> None:
    """All of ours that is imported, but for `storage`, which only a study's evidence needs.

    What looks at names before anything is imported decides no number, nor what starts processes
    or says where things are kept.
    """
    program = (
        "import json, sys, sweep.planning.survey as _; "
        "print(json.dumps({name: getattr(m, '__file__', '') for name, m in sys.modules.items()}))"
    )
    done = subprocess.run(
        (sys.executable, "-P", "-c", program), capture_output=True, text=True, check=True
    )
    files = json.loads(done.stdout)
    ours = [name for name in files if name.startswith(("search_spaces", "sweep.", "reports"))]
    assert len(ours) > 30
    decides_nothing = {
        "namesakes",
        "processes",
        "paths",
        "child_environment",
        "subprocess_jobs",
    }
    ours = [name for name in ours if name.removeprefix("sweep.") not in decides_nothing]
    assert {Path(files[name]) for name in ours} <= set(source_files(*SURVEYED_BY))


def test_a_cache_that_cannot_be_written_costs_time_only(
    answer: Plan, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "file"))
    assert answer(space=a_space_file(home, SMALL)) == 0


# Options


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], {}),
        (["target_modules=qv"], {"target_modules": "qv"}),
        (["target_modules=q_proj"], {"target_modules": ["q_proj"]}),
        (["target_modules=q_proj, v_proj,"], {"target_modules": ["q_proj", "v_proj"]}),
        (["lora_rank=8", "compile=false"], {"lora_rank": 8, "compile": False}),
        (
            ["adapter-dtype=bf16", "lora_dropout=0.1"],
            {"adapter_dtype": "bf16", "lora_dropout": 0.1},
        ),
    ],
)
def test_what_is_typed_of_the_settings_arrives_by_key(
    settings: list[str], expected: dict[str, Any]
) -> None:
    assert options.settings({}, settings)[0] == expected


# The command itself, tracing a real model in its child


def test_the_command_answers_with_json_alone_and_never_imports_torch() -> None:
    program = (
        "import sys; from sweep.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'peft', 'bitsandbytes', 'optuna'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    typed = "plan --gpu a10 --model demo --exact --micro-batch-size 2 --seq-len 64 --rank 8"
    command = [sys.executable, "-c", program, *typed.split(), "--set", "upcast_fp32=false"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    # Nothing but how far it is, and that it goes on.
    progress = re.compile(r"\d+ of \d+ structures traced.*|predicting \(\d+ s\)")
    assert all(progress.fullmatch(line) for line in done.stderr.splitlines())
    document = json.loads(done.stdout)
    asked = {"micro_batch_size": 2, "seq_len": 64, "lora_rank": 8, "upcast_fp32": False}
    assert asked.items() <= document["config"].items()
    assert sum(document["breakdown"].values()) == document["peak_allocated_bytes"]


def test_a_model_that_cannot_be_traced_is_bad_input(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "nonesuch",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--gpu", "a10", "--model", str(home / "model"), "--rank", "8"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nonesuch" in err


def test_a_space_that_a_gpu_cannot_run_says_why(
    answer: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(gpus=("a10",), configuration={"compute_dtype": "fp8"})
    told = " ".join(capsys.readouterr().out.split())
    assert "every configuration is forbidden for this model and GPU: compute_dtype fp8" in told
