"""Behaviour of `sweep plan`, from what is typed to what is printed."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import CONFIG_KEYS, TrialConfig, parse_config
from qlora_sweep.search_spaces.costs import AskedWork
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import GIB, gpu_catalogue
from qlora_sweep.search_spaces.learning_rates import in_words, learning_rate_of
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage.reading import read_study
from qlora_sweep.sweep.cli import main
from qlora_sweep.sweep.paths import runs_directory, storage_url
from qlora_sweep.sweep.planning.question import PlanRequest, read_configurations
from qlora_sweep.sweep.planning.survey import SURVEYED_BY
from qlora_sweep.sweep.predict.memory.profile_store import source_files
from qlora_sweep.sweep.predict.memory.profiles import Untraceable
from qlora_sweep.sweep.running.device_info import GpuInfo
from qlora_sweep.sweep.terminal.plan import plan
from tests.families import spec_of
from tests.sweep.imagined_memory import ImaginedMemory, ImaginedPredictor
from tests.sweep.imagined_study import INTERFACE_KEYS, TRIALS, a_snapshot
from tests.sweep.terminal.kept_study import keep_study
from tests.sweep.terminal.screen import Screen

pytestmark = pytest.mark.usefixtures("home")
HELD = {"compute_dtype": "bf16", "kernels": "hf", "target_modules": "attention"}
NARROW = {"quantization": "nf4", "checkpoint_fraction": 1.0, "optimizer": "adamw_8bit"}
TWO: dict[str, Any] = {"gpus": ("a10", "l4"), "configuration": HELD | NARROW}
SMALL = "gpu: a10\ndimensions:\n  micro_batch_size: [1, 8, 64]\n  lora_rank: [8, 16]\n"
BATCH_8: dict[str, Any] = {"configuration": {"micro_batch_size": 8}}
FORBIDDEN = "seq-len-beyond-positions"


class Picky(ImaginedPredictor):
    """Cannot trace Liger's kernels, and has no module 'zz'."""

    def predict(self, config: TrialConfig) -> ImaginedMemory:
        if config.kernels == "liger":
            raise Untraceable("cannot be traced: data decides")
        if "zz" in config.target_modules:
            raise InputError("target_modules: the model has no linear layer 'zz'")
        return super().predict(config)


class Asked:
    """Asks for plans with imagined memory, on a machine without a GPU, as they are typed."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.home = home
        self._capsys = capsys
        self.memory: ImaginedPredictor = Picky()
        self.code = 0

    def space(self, text: str) -> str:
        (self.home / "mine.yaml").write_text(text)
        return str(self.home / "mine.yaml")

    def lines(self, *lines: str) -> str:
        (self.home / "configs.jsonl").write_text("\n".join(lines) + "\n")
        return str(self.home / "configs.jsonl")

    def shown(self, *, gpu: GpuInfo | None = None, **typed: Any) -> str:
        """Return what is printed, in the first line's words and all others'."""
        self.code = plan(
            PlanRequest(**typed),
            read_study=lambda name, storage: read_study(
                name, url=storage_url(storage), home=runs_directory()
            ),
            predictor=lambda *_: self.memory,
            read_gpu=lambda: gpu,
        )
        return self._capsys.readouterr().out

    def words(self, **typed: Any) -> str:
        """Return the same without the ends of its lines."""
        return " ".join(self.shown(**typed).split())

    def document(self, **typed: Any) -> dict[str, Any]:
        return dict(json.loads(self.shown(**typed, as_json=True).splitlines()[-1]))


@pytest.fixture
def ask(home: Path, capsys: pytest.CaptureFixture[str]) -> Asked:
    return Asked(home, capsys)


def a_gpu(product: str) -> GpuInfo:
    return GpuInfo(product, 24 * GIB, 23 * GIB, (8, 6), "1", "13.0")


# What is asked about


@pytest.mark.parametrize(
    ("typed", "gpu_here", "gpu", "model"),
    [
        ({"space": "A10"}, None, "a10", "mistral-7b-v0.3"),
        ({"gpus": ("l4",), "model": "qwen3-8b"}, None, "l4", "qwen3-8b"),
        ({"gpus": ("h200", "H200")}, None, "h200", "mistral-7b-v0.3"),
        ({}, "NVIDIA A10", "a10", "mistral-7b-v0.3"),
        ({"gpus": ("auto",)}, "NVIDIA A10", "a10", "mistral-7b-v0.3"),
    ],
)
def test_gpu_and_model_come_from_what_is_named(
    ask: Asked, typed: dict[str, Any], gpu_here: str | None, gpu: str, model: str
) -> None:
    here = a_gpu(gpu_here) if gpu_here else None
    document = ask.document(gpu=here, configuration=HELD, **typed)
    assert (ask.code, document["gpu"]["name"], document["model"]) == (0, gpu, model)


def test_where_no_gpu_is_named_the_one_that_is_here_must_be_known(ask: Asked) -> None:
    with pytest.raises(InputError, match="no GPU is named and none is here"):
        ask.shown()
    with pytest.raises(InputError, match="does not have the NVIDIA Nonesuch"):
        ask.shown(gpu=a_gpu("NVIDIA Nonesuch"))
    assert ask.memory.asked == []


def test_the_budget_of_a_space_counts_on_its_own_gpu_where_it_is_the_tighter_one(
    ask: Asked,
) -> None:
    def budget(*gpus: str) -> int:
        return int(ask.document(space=space, gpus=gpus)["gpu"]["budget_bytes"])

    space = ask.space(f"{SMALL}budget_gib: 7\n")
    assert budget() == budget("A10") == 7 * GIB
    # Of another GPU the space says nothing.
    assert budget("l4") == gpu_catalogue()["l4"].budget_bytes
    with pytest.raises(InputError, match="budget_gib 700 is more than the 21"):
        ask.document(space=ask.space(f"{SMALL}budget_gib: 700\n"))


@pytest.mark.parametrize("mode", ["is_longest", "is_cheapest", "is_exact", "is_detailed"])
def test_a_gpus_name_is_the_same_question_however_it_is_asked(ask: Asked, mode: str) -> None:
    asked: dict[str, Any] = {mode: True, "configuration": {"lora_rank": 16, **HELD}}
    first = ask.shown(space="L4", **asked)
    assert ask.shown(gpus=("L4",), **asked) == first
    assert ask.shown(space="L4", gpus=("L4",), **asked) == first


def test_a_gpu_without_a_preset_has_the_space_that_init_writes_for_it(ask: Asked) -> None:
    typed = {"compile": False, "kernels": "hf"}
    shown = ask.words(space="L4", configuration=typed)
    assert "`sweep init --gpu l4 -o l4.yaml && sweep run l4.yaml --set compile=false" in shown
    file = str(ask.home / "l4.yaml")
    assert main(["init", "--gpu", "l4", "-o", file]) == 0
    own = ask.document(gpus=("l4",), configuration=typed)
    assert own == {**ask.document(space=file, configuration=typed), "space_kind": "standard"}


@pytest.mark.parametrize(
    ("typed", "columns"),
    [
        ({"space": "a10"}, 80),
        ({"work": AskedWork(samples=100_000), **TWO}, 80),
        ({"is_longest": True, **TWO}, 80),
        ({"is_cheapest": True, "within_seconds": 3600.0, **TWO}, 120),
        # Nothing of it fits.
        ({"space": "mine.yaml"}, 80),
    ],
    ids=str,
)
def test_an_answer_is_one_screen_that_names_what_comes_next(
    ask: Asked, monkeypatch: pytest.MonkeyPatch, typed: dict[str, Any], columns: int
) -> None:
    monkeypatch.chdir(ask.home)
    ask.space(SMALL.replace("a10", "a10g") + "budget_gib: 4\n")
    ask.memory = ImaginedPredictor()
    monkeypatch.setenv("COLUMNS", str(columns))

    def screen_of(**details: bool) -> str:
        # It refuses lines that are too long.
        screen = Screen(columns)
        monkeypatch.setattr(sys, "stdout", screen)
        ask.shown(**typed, **details)
        return screen.seen

    first = screen_of()
    assert len(first.splitlines()) <= 28
    assert "--details" in first
    assert "…" not in screen_of(is_detailed=True)


# Settings that are typed


def test_what_is_typed_is_held_and_the_rest_of_the_space_is_searched(ask: Asked) -> None:
    asked = {"space": ask.space(SMALL), "configuration": {"micro_batch_size": 2}}
    document = ask.document(**asked)
    assert document["configurations"]["total"] == 2
    assert document["held"] == {"micro_batch_size": 2}
    assert document["recommended"]["config"]["micro_batch_size"] == 2
    assert document["table"]["micro_batch_sizes"] == [2]


def test_numerics_16_bit_leaves_compute_in_8_bits_out(ask: Asked) -> None:
    asked = {"space": "a10", "numerics": "16-bit", "configuration": {"kernels": "hf"}}
    (wide,) = ask.document(**asked)["fastest_by_numerics"]
    assert wide["numerics"] == "16-bit"
    assert "--set numerics=16-bit" in ask.shown(**asked)


def test_a_plan_on_pairs_says_how_many_a_second_as_trials_do(ask: Asked) -> None:
    asked = {"space": ask.space(SMALL), "configuration": {"method": "dpo"}}
    found = ask.document(**asked)["recommended"]
    rate = found["config"]["micro_batch_size"] / found["step_seconds"]
    assert found["samples_per_second"] == pytest.approx(rate)
    assert f"{rate:.3g} pairs/s" in ask.words(**asked)


# A file of configurations


def test_a_file_is_answered_line_by_line_in_its_order_and_none_silences_another(
    ask: Asked,
) -> None:
    odd = ('{"kernels": "liger"}', '{"seq_len": 100000}')
    file = ask.lines('{"micro_batch_size": 8}', "", *odd, '{"micro_batch_size": 8}')
    asked: dict[str, Any] = {"space": "a10", "from_file": file}
    good, untraceable, invalid, again = map(
        json.loads, ask.shown(**asked, as_json=True).splitlines()
    )
    assert (ask.code, good, good["fits"]) == (0, again, True)
    assert good["config"]["micro_batch_size"] == 8
    for document in (good, untraceable, invalid):
        assert document.keys() >= INTERFACE_KEYS
        assert document["config"].keys() == set(CONFIG_KEYS)
    assert (untraceable["fits"], untraceable["invalid"]) == (None, None)
    assert "data decides" in untraceable["notes"][0]
    assert untraceable["tokens_per_second"] > 0
    assert (invalid["fits"], invalid["cost"], invalid["step_seconds"]) == (False, None, None)
    assert untraceable["peak_allocated_bytes"] is None
    assert "100000" in invalid["invalid"]["reason"]
    rows = [line.split() for line in ask.shown(**asked).splitlines() if line[:1].isdigit()]
    assert [row[1] for row in rows] == ["yes", "–", "invalid", "yes"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"micro_batch": 3}', "unknown key 'micro_batch'; did you mean"),
        ("[1]", "must be a JSON object, got [1]"),
        ('{"seq_len": 5, "seq_len": 6}', "key 'seq_len' is given twice"),
        ("[" * 100_000, "not valid JSON"),
        ('{"target_modules": ["q_proj", "zz"]}', "'zz'"),
    ],
)
def test_a_line_that_is_no_configuration_is_refused_with_its_number(
    ask: Asked, line: str, message: str
) -> None:
    file = ask.lines("{}", line)
    with pytest.raises(InputError) as refused:
        ask.shown(space="a10", from_file=file, as_json=True)
    assert str(refused.value).startswith(f"{file}: line 2: ")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"), [(b"\n \n", "no configuration in it"), (b"\xff", "not UTF-8")]
)
def test_standard_input_is_read_as_strictly(content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_configurations("-", stdin=io.BytesIO(content))


# What comes out


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        ({"space": "a10", "configuration": {"micro_batch_size": 33}, "is_exact": True}, 1),
        ({"space": "a10", "configuration": {"seq_len": 100_000}, "is_exact": True}, 1),
        ({"gpus": ("t4", "h200"), "configuration": {"micro_batch_size": 64, **HELD}}, 0),
    ],
)
def test_the_exit_code_says_whether_anything_fits(
    ask: Asked, typed: dict[str, Any], code: int
) -> None:
    ask.shown(**typed)
    assert ask.code == code


def test_one_configuration_is_answered_under_the_files_keys(ask: Asked) -> None:
    document = ask.document(space="a10", is_exact=True, **BATCH_8)
    assert document["config"] == TrialConfig(micro_batch_size=8).model_dump(mode="json")
    assert document["table"]["scope"] == "structure"
    assert document.keys() >= INTERFACE_KEYS | {"table", "bills", "gpu", "model"}
    # 21.48 GiB less 2 % hold the base's 5 GiB, the adapters' 16 MiB and 32 rows of half a GiB.
    assert document["table"]["largest_micro_batch"]["512"] == {"sure": 32, "possible": 33}


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ({"micro_batch_size": 34}, "micro-batch 32 surely fits"),
        ({"micro_batch_size": 1, "seq_len": 32_768}, "fits at this length; at"),
        ({"micro_batch_size": 32}, None),
    ],
)
def test_of_what_does_not_fit_it_is_said_what_would(
    ask: Asked, typed: dict[str, Any], words: str | None
) -> None:
    shown = ask.words(space="a10", is_exact=True, configuration=typed)
    assert ("smaller" in shown) == (words is not None)
    assert words is None or words in shown


def test_a_plan_says_the_learning_rate_and_its_range(ask: Asked) -> None:
    asked: dict[str, Any] = {"space": "a10", "is_exact": True, "configuration": {"lora_rank": 64}}
    document = ask.document(**asked)
    model = load_model_spec("mistral-7b-v0.3")
    rule = learning_rate_of(parse_config(document["config"]), model.config)
    assert document["learning_rate"] == rule.model_dump(mode="json")
    shown = ask.words(**asked)
    for rate in (rule.value, rule.low, rule.high):
        assert in_words(rate) in shown


def test_a_space_is_answered_with_counts_a_recommendation_and_its_grounds(ask: Asked) -> None:
    space = ask.space(SMALL)
    document = ask.document(space=space)
    counts = document["configurations"]
    assert (counts["total"], counts["fit"], counts["cannot_fit"]) == (6, 4, 2)
    config = document["recommended"]["config"]
    assert (config["micro_batch_size"], config["lora_rank"]) == (8, 16)
    standard = {"lora_rank": 16, "target_modules": "attention", "is_standard": True}
    assert document["capacity_class"] == standard
    assert len(document["fastest_by_class"]) == 2
    assert document["study_seconds"][0] < document["study_seconds"][1]
    change = document["what_ifs"][0]
    assert change.keys() >= {"key", "value", "fits", "speed_change", "peak_change_bytes"}
    first = ask.shown(space=space).rstrip()
    assert f"`sweep run {space}`" in " ".join(first.split())
    whole = ask.shown(space=space, is_detailed=True)
    assert whole.startswith(first)


@pytest.mark.parametrize(("gpus", "effective", "micro"), [(3, 6, 2), (1, 6, 3)])
def test_a_typed_effective_batch_is_not_refused_over_a_micro_batch_that_nobody_typed(
    ask: Asked, gpus: int, effective: int, micro: int
) -> None:
    typed = {**HELD, "data_parallel": gpus, "effective_batch_size": effective}
    document = ask.document(space="a10", configuration=typed, is_exact=True)
    assert document["config"]["micro_batch_size"] == micro
    with pytest.raises(InputError, match="multiple of micro_batch_size"):
        ask.shown(space="a10", configuration={**typed, "micro_batch_size": 5}, is_exact=True)


# Several GPUs of one host

SHARDABLE = {"optimizer": "adamw_torch_fused", "upcast_fp32": False, "compute_dtype": "bf16"}


def test_one_gpu_all_of_a_host_and_shards_are_beside_each_other_at_one_batch(ask: Asked) -> None:
    asked = {"space": ask.space(SMALL), "devices": 2, "configuration": SHARDABLE}
    document = ask.document(**asked)
    ways = {plan["way"]: plan["recommended"]["config"] for plan in document["plans"]}
    assert list(ways) == ["one GPU", "2 x DDP", "2 x FSDP"]
    speeds = document["speeds"]
    assert speeds["effective_batch_size"] == 16
    for one in speeds["configurations"].values():
        assert one["config"]["effective_batch_size"] in (None, 16)
    assert speeds["perhaps_fastest"] == ["2 x DDP", "2 x FSDP"]
    assert document["recommended"]["way"] == "2 x DDP"
    link = {"kind": "pcie", "bytes_per_second": 3.151e10, "share": 0.5}
    assert document["interconnect"] == link
    assert "--set data_parallel=2`" in ask.words(**asked)


def test_a_way_that_is_not_possible_says_why_and_hides_no_other(ask: Asked) -> None:
    asked = {"space": ask.space(SMALL), "devices": 2, "configuration": {"method": "dpo"}}
    document = ask.document(**asked)
    assert [plan["way"] for plan in document["plans"]] == ["one GPU", "2 x DDP"]
    assert "use sharding none" in document["not_possible"]["2 x FSDP"]
    assert "use sharding none" in ask.words(**asked)
    odd = {"space": "a10", "devices": 3, "configuration": {"effective_batch_size": 16}}
    assert "on 3 x a10: one GPU" in ask.words(**odd, is_exact=True)
    with pytest.raises(InputError, match="--devices compares values of data_parallel"):
        ask.shown(space="a10", devices=2, configuration={"data_parallel": 2})
    with pytest.raises(InputError, match="name one"):
        ask.shown(gpus=("a10", "l4"), devices=2)


# GRPO

GRPO = {"method": "grpo", "upcast_fp32": False}


def test_grpos_training_step_is_planned_alone_and_says_what_is_missing(ask: Asked) -> None:
    asked: dict[str, Any] = {
        "space": ask.space(SMALL + "fixed: {checkpoint_fraction: 0.0}\n"),
        "configuration": {"method": "grpo"},
        "grpo": {"num_generations": 4, "beta": 0.04},
    }
    document = ask.document(**asked)
    known = {"num_generations": 4, "beta": 0.04, "max_completion_length": 256}
    assert document["grpo_config"].items() >= known.items()
    exact = ask.document(space="a10", configuration={"method": "grpo"}, is_exact=True)
    assert exact["config"]["upcast_fp32"] is False
    recommended = document["recommended"]
    assert recommended["config"]["upcast_fp32"] is False
    assert recommended["config"]["effective_batch_size"] == 16
    assert (document["bills"], recommended["cost"]) == ([], None)
    shown = ask.words(**asked)
    assert "generation is not in these numbers" in shown
    assert "GRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=2, " in shown
    assert "sweep run" not in shown


def test_sequences_that_a_completion_does_not_go_into_are_no_part_of_the_answer(ask: Asked) -> None:
    lengths = "gpu: a10\ndimensions: {seq_len: [512, 1024], micro_batch_size: [4]}\n"
    lengths += "fixed: {checkpoint_fraction: 0.0}\n"
    asked: dict[str, Any] = {"configuration": {"method": "grpo"}, "space": ask.space(lengths)}
    assert ask.document(**asked)["configurations"]["total"] == 2
    long = ask.document(**asked, grpo={"max_completion_length": 600})
    assert long["configurations"]["total"] == 1
    assert long["recommended"]["config"]["seq_len"] == 1024


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"grpo": {"num_generations": 1}}, "num_generations must be at least 2, got 1"),
        ({"grpo": {"max_completion_length": 512}}, "got 512 and 512"),
        ({"is_cheapest": True, "is_exact": False}, "no cost and no trial"),
        ({"work": AskedWork(samples=1000)}, "no cost and no trial"),
        ({"typed_prices": ("a10=0.5",)}, "without --work and --price"),
        (
            {
                "is_exact": False,
                "configuration": {
                    "method": "grpo",
                    "quantization": "none",
                    "adapter_dtype": "bf16",
                },
            },
            "adapter_dtype bf16: use fp32",
        ),
        ({"configuration": {}, "grpo": {"beta": 0.1}}, "--set beta is of GRPO"),
        (
            {"configuration": {**GRPO, "effective_batch_size": 12}},
            "num_generations, got 12 and 8",
        ),
    ],
)
def test_what_grpo_cannot_be_asked_is_refused(
    ask: Asked, typed: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ask.shown(**{"space": "a10", "configuration": GRPO, "is_exact": True, **typed})


# The questions backwards


def test_the_longest_rows_are_asked_for(ask: Asked) -> None:
    asked = {"space": ask.space(SMALL), "is_longest": True}
    (row,) = ask.document(**asked, configuration={"micro_batch_size": 2})["rows"]
    # 21.48 GiB less 2 % hold 5 GiB, 16 MiB and two rows of a MiB a token.
    assert (row["micro_batch_size"], row["seq_len"]) == (2, 8192)
    both = ask.document(gpus=("a10", "l4"), is_longest=True, configuration=HELD)
    assert len(both["plans"]) == 2


def test_the_whole_catalogue_is_asked_for_the_cheapest_gpu(ask: Asked) -> None:
    work = {"work": AskedWork(samples=10_000), "within_seconds": 7200.0}
    document = ask.document(is_cheapest=True, configuration=HELD | NARROW, **work)
    assert {gpu["gpu"] for gpu in document["gpus"]} == set(gpu_catalogue())
    able = [gpu for gpu in document["gpus"] if gpu["outcome"] in ("in_time", "perhaps_late")]
    assert able[0]["gpu"] == document["recommended"]
    bills = [gpu["bills"][0] for gpu in able]
    assert bills == sorted(bills, key=lambda bill: bill["usd"])
    assert max(bill["wall_hours"] for bill in bills) <= 2
    assert {gpu["answer"]["config"]["effective_batch_size"] for gpu in able} == {16}
    smallest = min(able, key=lambda gpu: gpu["memory_bytes"])
    assert smallest["gpu"] == document["smallest"]


# What is known besides, and what is kept


def test_prices_of_the_users_are_taken_from_where_they_are_kept(ask: Asked) -> None:
    text = "offers:\n- {provider: Mine, date: 2026-11-21, source: me, usd_per_hour: {a10: 0.01}}\n"
    (ask.home / "runs").mkdir()
    (ask.home / "runs" / "prices.yaml").write_text(text)
    (ask.home / "other.yaml").write_text(text.replace("Mine", "Theirs"))
    for prices, provider in ((None, "Mine"), (ask.home / "other.yaml", "Theirs")):
        document = ask.document(space="a10", is_exact=True, prices=prices)
        assert document["cost"]["provider"] == provider


def test_a_study_calibrates_the_plan(ask: Asked) -> None:
    keep_study(ask.home, a_snapshot().definition, TRIALS)
    asked: dict[str, Any] = {"space": "a10", "study": "mine", "is_exact": True, "is_detailed": True}
    for batch, words in ((2, f"calibrated by {len(TRIALS)} trials"), (8, "measured by trial 4")):
        shown = ask.words(**asked, configuration={"micro_batch_size": batch})
        assert f"{words} of study mine" in shown


def test_a_space_is_looked_over_once(ask: Asked) -> None:
    space = ask.space(SMALL + "  checkpoint_fraction: {low: 0, high: 1, step: 0.02}\n")
    found, first = ask.document(space=space), len(ask.memory.asked)
    assert ask.document(space=space) == found
    assert len(ask.memory.asked) - first < first / 2
    ask.document(space=space, gpus=("l4",))
    assert len(ask.memory.asked) - first > first


def test_a_kept_answer_that_cannot_be_read_or_written_is_worked_out_anew(
    ask: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = ask.space(SMALL)
    first = ask.shown(space=space)
    (kept,) = (ask.home / "cache" / "qlora-sweep" / "surveys").iterdir()
    for content in ("", '{"fit": 1}', "\0"):
        kept.write_text(content)
        assert ask.shown(space=space) == first
    (ask.home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(ask.home / "file"))
    assert ask.shown(space=space) == first


# The command itself, in a process of its own and tracing a real model in its child

PROGRAM = """
import json, sys
from qlora_sweep.sweep.cli import main
code = main(sys.argv[1:])
heavy = {'torch', 'transformers', 'peft', 'bitsandbytes', 'optuna'} & set(sys.modules)
files = {name: getattr(m, '__file__', '') for name, m in sys.modules.items()}
print(json.dumps([code, sorted(heavy), files]))
"""
DECIDES_NOTHING = (
    "installation",
    "processes",
    "paths",
    "child_environment",
    "json_child",
    "subprocess_jobs",
)
"""What says what is missing, starts processes or says where things are."""


def test_the_command_answers_with_json_alone_and_never_imports_torch() -> None:
    typed = "plan --gpu a10 --exact --model demo --micro-batch-size 2 --seq-len 64 --rank 8 --json"
    command = [sys.executable, "-c", PROGRAM, *typed.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # Nothing but how far it is, and that it goes on.
    progress = re.compile(r"\d+ of \d+ structures traced.*|predicting \(\d+ s\)")
    assert all(progress.fullmatch(line) for line in done.stderr.splitlines())
    document, (code, heavy, _) = map(json.loads, done.stdout.splitlines())
    assert (code, heavy) == (0, [])
    asked = {"micro_batch_size": 2, "seq_len": 64, "lora_rank": 8}
    assert asked.items() <= document["config"].items()
    assert sum(document["breakdown"].values()) == document["peak_allocated_bytes"]


def test_a_kept_answer_is_of_no_use_once_any_code_that_predicts_changes() -> None:
    """All of ours that is imported, but for `storage`, which only a study's evidence needs."""
    program = PROGRAM.replace(
        "from qlora_sweep.sweep.cli import main", "import qlora_sweep.sweep.planning.survey as _"
    )
    program = program.replace("main(sys.argv[1:])", "0")
    done = subprocess.run(
        (sys.executable, "-P", "-c", program), capture_output=True, text=True, check=True
    )
    _, _, files = json.loads(done.stdout)
    rooms = ("search_spaces.", "sweep.", "reports.")
    ours = {name.removeprefix("qlora_sweep.") for name in files if name.startswith("qlora_sweep.")}
    ours = {name for name in ours if name.startswith(rooms)}
    assert len(ours) > 30
    ours -= {f"sweep.{name}" for name in DECIDES_NOTHING}
    places = {Path(files[f"qlora_sweep.{name}"]).resolve() for name in ours}
    assert places <= set(source_files(*SURVEYED_BY))


def test_a_speed_that_is_not_known_says_so_in_the_first_line(ask: Asked) -> None:
    typed = {"gpus": ("a10g",), "is_exact": True, "configuration": {"compute_dtype": "int8"}}
    document = ask.document(**typed)
    assert document["tokens_per_second"] is document["bottleneck"] is document["cost"] is None
    assert "no matrix rate for int8" in document["notes"][0]
    assert ask.shown(**typed).startswith("speed unknown")


def test_a_tower_that_is_left_out_is_said(ask: Asked) -> None:
    config = load_model_spec("gemma-3-1b").config
    whole = {"model_type": "gemma3", "text_config": config, "vision_config": {}}
    (ask.home / "config.json").write_text(json.dumps(whole))
    assert "vision tower" in ask.words(gpus=("a10",), model=str(ask.home), is_exact=True)


def test_a_model_without_sdpa_takes_eager_attention_by_itself(ask: Asked) -> None:
    asked: dict[str, Any] = {"gpus": ("h200",), "model": "gpt-oss-20b"}
    held = {"configuration": {"quantization": "none"}}
    for answer in (
        ask.document(**asked, **held, is_exact=True),
        ask.document(**asked, from_file=ask.lines('{"quantization": "none"}')),
    ):
        assert answer["config"]["attention"] == "eager"
        assert answer["invalid"] is None


@pytest.mark.parametrize(
    ("model", "compute", "is_told"),
    [("gemma-3-1b", "fp16", True), ("gemma-3-1b", "fp32", False), ("qwen3-0.6b", "fp16", False)],
)
def test_what_may_overflow_fp16_is_not_given_it_without_a_word(
    ask: Asked, model: str, compute: str, is_told: bool
) -> None:
    typed = {"compute_dtype": compute}
    shown = ask.words(gpus=("t4",), model=model, is_exact=True, configuration=typed)
    assert ("the largest number of fp16" in shown) is is_told


def test_a_space_that_names_sdpa_is_kept_as_written(ask: Asked) -> None:
    named = "gpu: h200\nmodel: gpt-oss-20b\nfixed: {attention: sdpa, quantization: none}\n"
    free = "dimensions: {micro_batch_size: [1, 2]}\n"
    with pytest.raises(InputError, match="attention-not-in-model"):
        ask.shown(space=ask.space(named + free))
    unnamed = named.replace("attention: sdpa, ", "")
    found = ask.document(space=ask.space(unnamed + free))
    assert found["recommended"]["config"]["attention"] == "eager"


@pytest.mark.parametrize(
    ("family", "is_first"), [("qwen3_5_text", True), ("lfm2", False), ("llama", False)]
)
def test_a_plan_says_first_whose_kernels_it_goes_by(
    ask: Asked, tmp_path: Path, *, family: str, is_first: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(spec_of(family).config))
    typed: dict[str, Any] = {"gpus": ("a10",), "model": str(tmp_path), "is_exact": True}
    said = ask.words(**typed, configuration={"seq_len": 64})
    assert said.startswith("Linear attention of ") == is_first
    assert ("pip install 'qlora-sweep[hybrid]'" in said) == is_first
    noted = ask.document(**typed, configuration={"seq_len": 64})["notes"]
    assert any("flash-linear-attention" in note for note in noted) == is_first


def test_a_model_that_cannot_be_walked_says_first_that_its_speed_is_unknown(
    ask: Asked, tmp_path: Path
) -> None:
    model = spec_of("jamba")
    (tmp_path / "config.json").write_text(json.dumps(model.config))

    class Refusing(ImaginedPredictor):
        def predict(self, config: TrialConfig) -> ImaginedMemory:
            raise Untraceable("model 'x': memory is not predicted: module 'y' loops")

    ask.memory = Refusing()
    typed = {"gpus": ("h200",), "model": str(tmp_path)}
    for more in ({}, {"is_exact": True, "configuration": {"quantization": "none"}}):
        with pytest.raises(InputError, match=r"^speed unknown for .* module 'y' loops"):
            ask.shown(**typed, **more)


# Images

SEEING: dict[str, Any] = {"space": "a10", "model": "qwen3-vl-8b", "is_exact": True}
OF_1200 = {"image_size": 1200, "micro_batch_size": 4, "seq_len": 2048}


def test_which_size_of_image_fits_is_said(ask: Asked) -> None:
    """Imagined memory grows with the row alone, which keeps its text beside any image."""
    images = ask.document(**SEEING, configuration=OF_1200)["images"]
    assert (images["side"], images["patches"], images["tokens"]) == (1216, 5776, 1444)
    text = 2048 - 1444
    for other in images["by_size"]:
        assert other["seq_len"] == text + (other["image_size"] // 32) ** 2
        if other["image_size"] <= images["largest"]["sure"]:
            assert other["fits"]
        if other["image_size"] > images["largest"]["possible"]:
            assert not other["fits"]
    largest = images["largest"]["sure"]
    for side, is_sure in ((largest, True), (largest + 32, False)):
        sized = {**OF_1200, "image_size": side, "seq_len": text + (side // 32) ** 2}
        found = ask.document(**SEEING, configuration=sized)
        assert (found["fits"] and found["fits_certainty"] == "sure") is is_sure
    words = ask.words(**SEEING, configuration=OF_1200)
    assert "one of 1,216 px is 1,444 tokens of its row; its 5,776 patches go through" in words
    assert f"on a row with as much text: {largest:,} px fits" in words


def test_where_every_image_is_resized_there_is_one_size(ask: Asked) -> None:
    typed = {**SEEING, "model": "gemma-3-4b", "configuration": {**OF_1200, "seq_len": 512}}
    images = ask.document(**typed)["images"]
    assert (images["is_fixed"], images["by_size"], images["largest"]) == (True, [], None)
    assert "each is resized to 896 px, 256 tokens of its row" in ask.words(**typed)


def test_a_plan_of_texts_says_nothing_of_images(ask: Asked) -> None:
    typed = {**SEEING, "configuration": {"seq_len": 2048}}
    assert "images" not in ask.document(**typed)
    assert "its other parts, as a vision tower, are not loaded" in ask.words(**typed)


def test_a_row_whose_length_nobody_named_is_as_long_as_its_image_needs(ask: Asked) -> None:
    config = ask.document(**SEEING, configuration={"image_size": 1024})["config"]
    assert config["seq_len"] == 1088


def test_images_that_do_not_go_into_a_row_are_refused_in_a_sentence(ask: Asked) -> None:
    typed = {**SEEING, "configuration": {**OF_1200, "seq_len": 1024}}
    assert "1,444 tokens of qwen3-vl-8b, which do not go into seq_len 1,024" in ask.words(**typed)
    typed["model"] = "mistral-7b-v0.3"
    assert "has no vision tower that is known here" in ask.words(**typed)


def test_the_cheapest_gpu_for_images_that_no_row_has_room_for_says_so(ask: Asked) -> None:
    typed = {**SEEING, "is_exact": False, "is_cheapest": True, "gpus": ("a10", "l4")}
    del typed["space"]
    words = ask.words(**typed, configuration={"image_size": 1200, "seq_len": 512})
    assert "not possible: a10, l4" in words
    assert "which do not go into seq_len 512: use 1,448 or more" in words


def test_what_follows_the_cheapest_gpu_asks_the_same(ask: Asked) -> None:
    typed = {"lora_rank": 8, "target_modules": "qv", "seq_len": 1024}
    words = ask.words(gpus=("a10", "l4"), is_cheapest=True, configuration=typed)
    (command,) = re.findall(r"`sweep plan ([^`]*)` plans it there", words)
    for option in ("--rank 8", "--target-modules qv", "--seq-len 1024"):
        assert option in command
