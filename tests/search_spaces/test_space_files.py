"""Spaces from YAML: the short forms, and a helpful refusal of everything that is not one."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from qlora_sweep.search_spaces.config import CONFIG_KEYS, TrialConfig
from qlora_sweep.search_spaces.dimensions import Choices, FloatRange, IntRange
from qlora_sweep.search_spaces.documents import BYTES_MAX
from qlora_sweep.search_spaces.errors import InputError, SweepError
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.loading import load_space, parse_space, shipped_presets
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.space import SearchSpace, parse_duration
from tests.search_spaces.small import broken
from tests.tables import cases

SMALL = """\
gpu: a10
dimensions:
  micro_batch_size: [1, 2, 4]
"""


def test_a_preset_is_found_in_any_case_and_a_file_of_the_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a10", " A100-40GB", "CPU-Demo"):
        assert load_space(name).name == name.strip().lower()
    monkeypatch.chdir(tmp_path)
    Path("A10").write_text("\ufeff" + SMALL, encoding="utf-8")
    assert load_space("A10").size() == 3
    assert load_space("a10").gpu == "a10"
    assert load_space("a10").baseline_config() == TrialConfig(micro_batch_size=8)


def test_the_short_forms_of_a_dimension_are_choices_and_ranges() -> None:
    space = parse_space(
        """
dimensions:
  kernels: [hf, liger]
  seq_len: {choices: [512, 1024]}
  lora_rank: {low: 8, high: 64, step: 8}
  micro_batch_size: {low: 1, high: 32, log: true}
  lora_dropout: {low: 0, high: 0.3, step: 0.1}
  checkpoint_fraction: {low: 0.0, high: 1.0}
""",
        label="mine.yaml",
    )

    assert space.name == "mine"
    assert space.dimensions == {
        "kernels": Choices(choices=("hf", "liger")),
        "seq_len": Choices(choices=(512, 1024)),
        "lora_rank": IntRange(low=8, high=64, step=8),
        "micro_batch_size": IntRange(low=1, high=32, log=True),
        "lora_dropout": FloatRange(low=0.0, high=0.3, step=0.1),
        "checkpoint_fraction": FloatRange(low=0.0, high=1.0),
    }


def test_declared_values_are_kept_as_a_configuration_reads_them() -> None:
    space = parse_space(
        """
dimensions:
  lora_alpha: [1e-4, 16, null]
  target_modules: [qv, [v_proj, q_proj, q_proj]]
fixed: {checkpoint_fraction: 1}
""",
        label="s.yaml",
    )

    assert space.dimensions["lora_alpha"].values() == (0.0001, 16.0, None)
    assert space.dimensions["target_modules"].values() == ("qv", ["q_proj", "v_proj"])
    assert space.fixed == {"checkpoint_fraction": 1.0}
    for params in space.combinations():
        assert space.params_of(space.config(params)) == params


PYTHON = re.compile(r"\b(None|True|False|datetime|Error|Exception)\b|Errno|<.* object|\bfunction\b")
"""Nothing of it is in a message."""
ADDED = cases(
    r"""
"trials: null" | ""
"fixed: {kernels: !!binary aGk=}" | ""
"  seq_len: {low: null, high: true}" | ""
"  kernels: {low: 1, high: 2026-01-01}" | ""
"data: {format: jsonl, texts: x}" | "line 4: data.format must be one of"
"data: 7" | "line 4: data must map keys to values, got 7"
"data: ''" | "line 4: data.texts must not be empty"
"  micro_batch: [1]" | unknown key 'micro_batch' under dimensions; did you mean 'micro_ba
"method: dpo" | "line 4: method is a setting: write it under fixed, or under dimensions with"
"dimension: {}" | "line 4: unknown key 'dimension'; did you mean 'dimensions'?"
"fixed:\n  double_quant: true\n  lora_ranks: 3" | "line 6: unknown key 'lora_ranks' under fi"
"steps:\n  warm_up: 3" | "line 5: unknown key 'warm_up' under steps; did you mean 'warmup_"
"  lora_rank: [8, 0]" | "line 4: lora_rank must be at least 1, got 0"
"  seq_len:\n    - 512\n    - 10000001" | "line 6: seq_len must be at most 10000000, got 1"
"  quantization: [nf4, no]" | "'fp4', 'fp8', 'int8' or 'none', got false;"
"  quantization: [nf4, ~]" | got null; YAML reads null, ~ and nothing as no value
"  seq_len: [1e3]" | "line 4: seq_len must be a whole number, got '1e3'; YAML reads it as"
"  lora_rank: 8" | lora_rank must list its values, got 8; a single value goes under fixed
"  lora_rank: []" | "line 4: lora_rank: choices must not be empty, got []"
"  lora_dropout: [1, 1.0]" | lora_dropout lists 1.0 twice
"  lora_rank: {low: 8}" | "line 4: lora_rank: high is missing"
"  lora_rank: {low: 1, high: 8, step: 0}" | step must be at least 1
"  learning_rate: {low: 1e-5, high: 1e-3, log: true}" | neither speed nor memory depends
"  kernels: {low: 1, high: 2}" | unknown key 'low' under kernels; known are choices
"objectives:\n  - tokens_per_second\n  - speed" | "line 6: objectives.1 must be one of"
"objectives: [tokens_per_second, cost]" | "line 4: objectives cannot hold cost: on one GPU"
"leave_out: [{}]" | "line 4: leave_out"
"leave_out: [{compute_dtype: []}]" | "line 4: leave_out"
"a: 1\nb: 1\nc: 1\nd: 1\ne: 1\nf: 1" | And 1 more
"""
)
BETWEEN = cases(
    r"""
"  lora_dropout: [.nan]" | got nan
"  lora_rank: {low: 8, high: 4}" | low must be at most high, got 8 and 4
"  seq_len: {low: 1, high: 9000000}" | use a larger step
"  lora_dropout: {low: 0.0, high: 0.1, log: true}" | log needs no step and low above 0, got
"  lora_dropout: {low: 0.1, high: 0.2, step: 0.1, log: true}" | above 0, got step 0.1
"steps: {measured_min: 9, measured_max: 3}" | at most measured_max, got 9 and 3
"  method: [sft, dpo]" | "line 4: speeds of one method say nothing of another's"
"  image_size: [512, 1024]" | "line 4: speeds with one size of image say nothing of another's"
"fixed:\n  method: dpo\nbaseline:\n  method: sft" | baseline has the space's method
"  dpo_beta: [0.1, 0.3]\nfixed:\n  method: dpo\nobjectives: [eval_loss]"
    | "line 4: losses of another dpo_beta do not compare"
"fixed:\n  method: dpo\nbaseline:\n  loss_type: ipo\nobjectives: [eval_loss]"
    | losses of another loss_type do not compare
"fixed:\n  micro_batch_size: 4" | "line 5: 'micro_batch_size' is fixed and also a dimension"
"baseline: {micro_batch_size: 4, effective_batch_size: 6}" | "line 4: baseline: effective_ba"
"fixed: {effective_batch_size: 8}\nbaseline: {micro_batch_size: 3}"
    | "line 5: space 'x': baseline: micro_batch_size 3 does not go into effective_batch_size"
"name: my space" | "line 4: name must be letters, digits, '.', '_' and '-', at most 64, got"
"objectives: [peak_memory, peak_memory]" | objectives lists one twice
"gpu: t4" | "line 4: key 'gpu' is given twice, first on line 1"
"  micro_batch_size: [8]" | "line 4: key 'micro_batch_size' is given twice, first on line 3"
"  lora_dropout: {low: 0, high: 1}\nsampler: grid" | sampler grid needs a step in every rang
"time_budget: soon" | "line 4: time_budget: a duration is written like 10m, 90s, 1h30m or 600"
"time_budget: 10m\ntime_budget_seconds: 600" | keep one
"numerics: 16-bit\nbaseline: {compute_dtype: int8}" | the baseline's compute_dtype
"""
)
"""What no schema says: one value against another, a key twice, a word's form."""
WHOLE = [
    (SMALL.replace("1, ", "") + "fixed: {effective_batch_size: 7}\n", "size, got 7 and 2 or 4"),
    ("gpu: a10\n", "dimensions must name at least one key"),
    ("dimensions: 3\n", "dimensions must map keys to values"),
    (SMALL.replace("a10", "a11"), "line 1: gpu: unknown GPU 'a11'; did you mean 'a10'?"),
    ("# nothing\n", "the file is empty"),
    ("- 1\n", "line 1: expected 'key: value' lines"),
    ("a: 1\n b: 2\n", "line 2: not valid YAML"),
    ("1: 2\n", "line 1: a key must be text, got '1'"),
    ("a: &x [*x]\n", "aliases are not supported"),
    ("[" * 5000, "nested too deeply"),
    ("a: 2024-13-45\n", "not valid YAML"),
    ("a: !!python/object/apply:os.system ['touch pwned']\n", "could not determine a constructor"),
    (SMALL + f"  lora_rank: [0x{'f' * 5000}]\n", "a number too long to show"),
]


@pytest.mark.parametrize(
    ("text", "message"),
    [*((f"{SMALL}{text}\n", words) for text, words in (*ADDED, *BETWEEN)), *WHOLE],
)
def test_a_bad_space_is_refused_naming_file_line_key_and_value(text: str, message: str) -> None:
    error = space_or_message(text)
    assert isinstance(error, str)
    assert message in error
    assert error.startswith("x.yaml: ")
    assert "\n" not in error
    assert not PYTHON.search(error)


def test_a_space_without_a_name_is_called_like_its_file() -> None:
    for label, name in (("runs/my space (2).yml", "my-space-2"), ("./--.yaml", "space")):
        assert parse_space(SMALL, label=label).name == name


@pytest.mark.parametrize(
    ("name", "message"),
    cases(
        r"""
        a1O | unknown preset 'a1O'; did you mean 'a10'?
        RTX 3060 12GB | "the rtx-3060 has no preset: `sweep init --gpu rtx-3060 -o rtx-3060.yaml`"
        "" | unknown preset ''; known are a10
        a/b | "a/b: no such file"
        . | directory
        "bad\u0000name.yaml" | not a file name
        """
    ),
)
def test_what_is_neither_preset_nor_file_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_space(name)
    assert message in str(caught.value)


def test_a_file_that_is_not_text_too_large_or_no_file_at_all_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"gpu: \xff\xfe\n")
    with pytest.raises(InputError, match="not UTF-8 text, byte 5"):
        load_space(str(path))
    os.truncate(path, BYTES_MAX + 1)
    with pytest.raises(InputError, match="larger than"):
        load_space(str(path))
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(InputError, match=r"x.yaml: a link that leads to itself"):
        load_space(str(path))


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "text",
    [
        "leave_out:\n" + "  - {seq_len: [512]}\n" * 450_000,
        SMALL + f"  seq_len: [{', '.join(map(str, range(1, 150_000)))}]\n",
        SMALL.replace("[1, 2, 4]", "{low: 1, high: 9999}")
        + "  effective_batch_size: {low: 1, high: 9999}\n",
        "".join(f"key{number}: 1\n" for number in range(20_000)),
    ],
    ids=["10 MB", "100,000 values", "100,000,000 batches", "20,000 keys"],
)
def test_what_would_take_minutes_to_read_is_refused_at_once(text: str) -> None:
    error = space_or_message(text)
    assert isinstance(error, str)
    assert re.search("larger than|more than|too many|And 19996 more", error)


def test_a_models_directory_is_looked_up_beside_the_file_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces, elsewhere = tmp_path / "spaces", tmp_path / "elsewhere"
    for name in ("spaces/mine", "spaces/demo", "elsewhere/mine", "elsewhere/only-here"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(elsewhere)

    def model(name: str) -> str:
        (spaces / "space.yaml").write_text(f"model: {name}\n" + SMALL)
        return load_space("../spaces/space.yaml").model

    assert model("mine") == model("./mine") == "../spaces/mine"
    # Nothing beside the file: a whole path, the directory where the command runs, a hub id, and
    # a shipped name, which comes first.
    for name in (str(elsewhere / "mine"), "only-here", "org/name", "demo"):
        assert model(name) == name


def space_or_message(text: str) -> SearchSpace | str:
    try:
        return parse_space(text, label="x.yaml")
    except SweepError as error:
        return str(error)


@given(st.text(max_size=200))
def test_any_text_is_a_space_or_one_clear_error(text: str) -> None:
    read = space_or_message(text)
    assert isinstance(read, SearchSpace) or read.startswith("x.yaml: ")


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["low", "high", "step", "log", "choices"]), inner)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(CONFIG_KEYS), JSONISH, min_size=1, max_size=3))
def test_any_dimensions_make_configurations_or_one_clear_error(
    dimensions: dict[str, object],
) -> None:
    text = yaml.safe_dump({"dimensions": dimensions})
    read = space_or_message(text)
    if isinstance(read, str):
        assert read.startswith("x.yaml: ")
    elif read.size() is not None:
        for params in itertools.islice(read.combinations(), 20):
            assert read.params_of(read.config(params)) == params


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10m", 600), ("1h30m", 5400), ("600", 600), ("0.5h", 1800), (" 2 M ", 120)],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    space = parse_space(f"{SMALL}time_budget: {text}\nfixed:\nsteps:\n", label="x.yaml")
    assert space.time_budget_seconds == seconds
    assert space.fixed == {}


@pytest.mark.parametrize("text", ["", "0", "-5", "10x", "1m1h", "nan"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="a duration is written like"):
        parse_duration(text)


@pytest.mark.parametrize("preset", shipped_presets(), ids=lambda preset: preset.name)
def test_no_combination_of_a_preset_breaks_a_rule(preset: SearchSpace) -> None:
    space = load_space(preset.name)
    assert space.description
    assert type(space).model_validate(space.model_dump(mode="json")) == space
    model = load_model_spec(space.model)
    gpu = None if space.gpu == "cpu" else find_gpu(space.gpu).compute_capability
    one_by_one = [{key: v} for key, d in space.dimensions.items() for v in d.values() or ()]
    # A compiled Liger, and one 8-bit type on the other, are listed and refused.
    for params in (*itertools.filterfalse(space.leaves_out, one_by_one), *space.together):
        found = broken(space.config(params).model_dump(), model, gpu)
        assert found is None or found.rule in ("compile-breaks-on-liger", "eight-bit")


def test_every_fault_of_a_file_is_told_at_once_with_its_line() -> None:
    section = "{formt: text, eval_fraction: 2, completions_only: maybe}"
    error = space_or_message(f"model: demo\ntrials: none\ndata: {section}\n{SMALL}")
    assert isinstance(error, str)
    for said in (
        "line 2: trials must be a whole number, got 'none'. Line 3: ",
        "unknown key 'formt' under data; did you mean 'format'?",
        "data.eval_fraction must be less than 1.0, got 2",
        "data.completions_only must be true or false, got 'maybe'",
    ):
        assert said in error


def test_a_list_of_modules_is_left_out_however_it_is_written() -> None:
    text = """\
dimensions:
  target_modules: [attention, [v_proj, q_proj]]
  compute_dtype: [bf16, int8]
leave_out: [{target_modules: [[q_proj, v_proj]], compute_dtype: [int8]}]
"""
    space = parse_space(text, label="a")
    made = [space.config(params) for params in space.combinations()]
    assert space.size() == len(made) == 3
    assert all(map(space.holds, made))
    left = space.config({"target_modules": ["q_proj", "v_proj"], "compute_dtype": "int8"})
    assert not space.holds(left)
