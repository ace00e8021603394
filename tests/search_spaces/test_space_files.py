"""Spaces from YAML: the short forms, and a helpful refusal of everything that is not one."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.config import CONFIG_KEYS
from search_spaces.dimensions import Choices, FloatRange, IntRange
from search_spaces.documents import BYTES_MAX
from search_spaces.errors import EnvironmentFault, InputError, SweepError
from search_spaces.gpus import find_gpu
from search_spaces.loading import load_space, parse_space, shipped_presets
from search_spaces.models import load_model_spec
from search_spaces.rules import violation
from search_spaces.space import SearchSpace, parse_duration

SMALL = """\
gpu: a10
dimensions:
  micro_batch_size: [1, 2, 4]
"""


def space_error(text: str, *, label: str = "a10.yaml") -> str:
    with pytest.raises(InputError) as caught:
        parse_space(text, label=label)
    return str(caught.value)


@pytest.mark.parametrize("name", ["a10", "A10", " A100-40GB", "CPU-Demo"])
def test_a_preset_is_found_whatever_the_case_of_its_name(name: str) -> None:
    assert load_space(name).name == name.strip().lower()


def test_a_file_that_is_there_comes_before_a_preset_written_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("A10").write_text(SMALL)
    assert load_space("A10").size() == 3
    assert load_space("a10").size() == 22_464


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


def test_a_space_survives_its_own_json() -> None:
    space = load_space("a10")
    assert type(space).model_validate(space.model_dump(mode="json")) == space


ADDED = [
    ("data: {text: x}", "line 4: unknown key 'text' under data; did you mean"),
    ("data: {format: jsonl, texts: x}", "line 4: data.format must be one of"),
    ("data: {texts: 3}", "line 4: data.texts must be text, got 3"),
    ("data: 7", "line 4: data must map keys to values, got 7"),
    ("data: {texts: x, eval_fraction: 1}", "line 4: data.eval_fraction must be less than 1"),
    ("data: ''", "line 4: data.texts must not be empty"),
    (
        "  micro_batch: [1]",
        "line 4: unknown key 'micro_batch' under dimensions; did you mean 'micro_batch_size'?",
    ),
    ("dimension: {}", "line 4: unknown key 'dimension'; did you mean 'dimensions'?"),
    (
        "fixed:\n  double_quant: true\n  lora_ranks: 3",
        "line 6: unknown key 'lora_ranks' under fixed; did you mean 'lora_rank'?",
    ),
    ("steps:\n  warm_up: 3", "line 5: unknown key 'warm_up' under steps; did you mean 'warmup_"),
    (
        "  lora_rank: {low: 1, high: 8, steps: 2}",
        "line 4: unknown key 'steps' under lora_rank; did you mean 'step'?",
    ),
    ("  lora_rank: [8, 0]", "line 4: lora_rank must be at least 1, got 0"),
    (
        "  seq_len:\n    - 512\n    - 10000001",
        "line 6: seq_len must be at most 10000000, got 10000001",
    ),
    (
        "  quantization: [nf4, no]",
        "line 4: quantization must be one of 'nf4', 'fp4', 'fp8', 'int8' or 'none', got false;",
    ),
    (
        "  kernels: [hf, ]\n  quantization: [nf4, ~]",
        "got null; YAML reads null, ~ and nothing as no value",
    ),
    (
        "  seq_len: [1e3]",
        "line 4: seq_len must be a whole number, got '1e3'; YAML reads it as text",
    ),
    ("  lora_dropout: [.nan]", "got nan"),
    ("  target_modules: [all]", "must be one of qv, attention, all-linear or a list"),
    (
        "  lora_rank: 8",
        "line 4: lora_rank must list its values, got 8; a single value goes under fixed",
    ),
    ("  lora_rank: []", "line 4: lora_rank: choices must not be empty, got []"),
    ("  lora_rank: [8, 16, 8]", "line 4: lora_rank lists 8 twice"),
    ("  lora_dropout: [1, 1.0]", "lora_dropout lists 1.0 twice"),
    ("  lora_rank: {choices: 8}", "choices must be a list"),
    ("  lora_rank: {choices: [8], step: 2}", "unknown key 'step' under lora_rank"),
    ("  lora_rank: {low: 8}", "line 4: lora_rank: high is missing"),
    ("  lora_rank: {low: 8, high: 4}", "low must be at most high, got 8 and 4"),
    ("  lora_rank:\n    low: 0\n    high: 4", "line 5: lora_rank must be at least 1, got 0"),
    ("  lora_rank: {low: 1, high: 8, step: 0}", "step must be at least 1"),
    ("  seq_len: {low: 1, high: 9000000}", "use a larger step"),
    (
        "  lora_dropout: {low: 0.0, high: 0.1, log: true}",
        "line 4: lora_dropout: log needs no step and low above 0, got low 0",
    ),
    (
        "  lora_dropout: {low: 0.1, high: 0.2, step: 0.1, log: true}",
        "log needs no step and low above 0, got step 0.1",
    ),
    (
        "  learning_rate: {low: 1e-5, high: 1e-3, log: true}",
        "line 4: neither speed nor memory depends on learning_rate, so nothing that is searched",
    ),
    ("  kernels: {low: 1, high: 2}", "unknown key 'low' under kernels; known are choices"),
    (
        "fixed:\n  micro_batch_size: 4",
        "line 5: 'micro_batch_size' is fixed and also a dimension: keep one",
    ),
    ("fixed: [1]", "fixed must map keys to values, got [1]"),
    (
        "baseline: {micro_batch_size: 4, effective_batch_size: 6}",
        "line 4: baseline: effective_batch_size must be a multiple",
    ),
    (
        "fixed: {effective_batch_size: 8}\nbaseline: {micro_batch_size: 3}",
        "line 5: space 'a10': baseline: micro_batch_size 3 does not go into effective_batch_size",
    ),
    (
        "name: my space",
        "line 4: name must be letters, digits, '.', '_' and '-', at most 64, got 'my space';",
    ),
    (
        "objectives:\n  - tokens_per_second\n  - speed",
        "line 6: objectives.1 must be one of 'tokens_per_second'",
    ),
    ("sampler: off", "got false; YAML reads an unquoted no or off"),
    ("gpu: t4", "line 4: key 'gpu' is given twice, first on line 1"),
    ("  micro_batch_size: [8]", "line 4: key 'micro_batch_size' is given twice, first on line 3"),
    ("model: 7", "line 4: model must be text, got 7"),
    ("sampler: cma", "line 4: sampler must be one of 'guided'"),
    ("budget_gib: 0", "budget_gib must be greater than 0"),
    ("objectives: []", "objectives must not be empty"),
    (
        "objectives: [tokens_per_second, cost]",
        "line 4: objectives cannot hold cost: on one GPU at one price it is 1 / speed. Ask for",
    ),
    ("objectives: [peak_memory, peak_memory]", "objectives lists one twice"),
    (
        "steps: {measured_min: 9, measured_max: 3}",
        "measured_min must be at most measured_max, got 9 and 3",
    ),
    ("steps:\n  warmup_min: 0", "line 5: steps.warmup_min must be at least 1, got 0"),
    (
        "  lora_dropout: {low: 0, high: 1}\nsampler: grid",
        "sampler grid needs a step in every range",
    ),
    (
        "time_budget: soon",
        "line 4: time_budget: a duration is written like 10m, 90s, 1h30m or 600, got 'soon'",
    ),
    ("time_budget: 10m\ntime_budget_seconds: 600", "keep one"),
]
WHOLE = [
    (
        SMALL.replace("1, ", "") + "fixed: {effective_batch_size: 7}\n",
        "line 4: effective_batch_size must be a multiple of micro_batch_size, got 7 and 2 or 4",
    ),
    ("gpu: a10\n", "dimensions must name at least one key"),
    ("dimensions:\n", "line 1: dimensions must name"),
    ("dimensions: 3\n", "dimensions must map keys to values"),
    (SMALL.replace("a10", "a11"), "line 1: gpu: unknown GPU 'a11'; did you mean 'a10'?"),
    ("", "the file is empty"),
    ("# nothing\n", "the file is empty"),
    ("- 1\n", "line 1: expected 'key: value' lines"),
    ("hello\n", "expected 'key: value' lines"),
    ("a: [1\n", "line 2: not valid YAML"),
    ("a: 1\n b: 2\n", "line 2: not valid YAML"),
    ("a: \x00\n", "not valid YAML"),
    ("a: 1\n---\nb: 2\n", "not valid YAML"),
    ("1: 2\n", "line 1: a key must be text, got '1'"),
    ("? [a]\n: 2\n", "line 1: a key must be text"),
    ("a: &x [1]\nb: *x\n", "aliases are not supported"),
    ("a: &x [*x]\n", "aliases are not supported"),
    ("[" * 5000, "nested too deeply"),
    ("a: 2024-13-45\n", "not valid YAML"),
    (
        "a: !!python/object/apply:os.system ['touch pwned']\n",
        "line 1: not valid YAML: could not determine a constructor",
    ),
    (SMALL + f"  lora_rank: [0x{'f' * 5000}]\n", "a number too long to show"),
]


@pytest.mark.parametrize(
    ("text", "message"), [*((f"{SMALL}{text}\n", words) for text, words in ADDED), *WHOLE]
)
def test_a_bad_space_is_refused_naming_file_line_key_and_value(text: str, message: str) -> None:
    error = space_error(text)
    assert message in error
    assert error.startswith("a10.yaml: ")
    assert "\n" not in error


def test_a_time_budget_may_be_written_as_a_duration() -> None:
    assert parse_space(SMALL + "time_budget: 1h30m\n", label="x.yaml").time_budget_seconds == 5400
    assert parse_space(SMALL + "time_budget: 600\n", label="x.yaml").time_budget_seconds == 600


def test_sections_with_nothing_under_them_are_not_there() -> None:
    space = parse_space(SMALL + "fixed:\nbaseline:\nsteps:\n", label="x.yaml")
    assert (space.fixed, space.baseline) == ({}, {})


def test_a_file_is_found_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("\ufeff" + SMALL, encoding="utf-8")
    assert load_space(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("label", "name"), [("runs/my space (2).yml", "my-space-2"), ("./--.yaml", "space")]
)
def test_a_space_without_a_name_is_called_like_its_file(label: str, name: str) -> None:
    assert parse_space(SMALL, label=label).name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a1O", "unknown preset 'a1O'; did you mean 'a10'?"),
        ("", "unknown preset ''; known are a10"),
        ("nope.yaml", "nope.yaml: no such file"),
        ("a/b", "a/b: no such file"),
        (".", "directory"),
        ("bad\0name.yaml", "not a file name"),
    ],
)
def test_what_is_neither_preset_nor_file_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_space(name)
    assert message in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"gpu: \xff\xfe\n")
    with pytest.raises(InputError, match="not UTF-8 text, byte 5"):
        load_space(str(path))


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "text",
    [
        "leave_out:\n" + "  - {seq_len: [512]}\n" * 450_000,
        SMALL + f"  seq_len: [{', '.join(map(str, range(1, 150_000)))}]\n",
        SMALL.replace("[1, 2, 4]", "{low: 1, high: 9999}")
        + "  effective_batch_size: {low: 1, high: 9999}\n",
        SMALL
        + "  lora_rank: {low: 1, high: 9999}\nleave_out:\n"
        + "  - {lora_rank: [8]}\n" * 9_000,
        "".join(f"key{number}: 1\n" for number in range(20_000)),
    ],
    ids=["10 MB", "100,000 values", "100,000,000 batches", "9,000 left out", "20,000 keys"],
)
def test_what_would_take_minutes_to_read_is_refused_at_once(text: str) -> None:
    assert re.search("larger than|more than|too many|And 19996 more", space_error(text))


def test_a_file_that_is_far_too_large_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(BYTES_MAX + 1)
    with pytest.raises(InputError, match="larger than"):
        load_space(str(tmp_path / "large.yaml"))


def test_a_models_directory_is_looked_up_beside_the_file_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces, elsewhere = tmp_path / "spaces", tmp_path / "elsewhere"
    for directory in (
        spaces / "mine",
        elsewhere / "mine",
        elsewhere / "only-here",
        spaces / "demo",
    ):
        directory.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)

    def model(name: str) -> str:
        text = f"model: {name}\n" + SMALL
        (spaces / "space.yaml").write_text(text)
        return load_space("../spaces/space.yaml").model

    assert model("mine") == "../spaces/mine"
    assert model("./mine") == "../spaces/mine"
    assert model(str(elsewhere / "mine")) == str(elsewhere / "mine")
    # Nothing beside the file: the directory where the command runs, a hub id, a shipped name.
    assert model("only-here") == "only-here"
    assert model("org/name") == "org/name"
    assert model("demo") == "demo"


def test_a_file_that_cannot_be_read_is_the_machines_fault(tmp_path: Path) -> None:
    path = tmp_path / "loop.yaml"
    path.symlink_to(path)
    with pytest.raises(EnvironmentFault, match=r"loop.yaml: cannot be read"):
        load_space(str(path))


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
    [("10m", 600), ("90s", 90), ("1h30m", 5400), ("600", 600), ("0.5h", 1800), (" 2 M ", 120)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-5", "10x", "m", "1m1h", "nan", "inf", "1e3"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="a duration is written like"):
        parse_duration(text)


def test_the_shipped_presets_are_listed_with_what_they_are_for() -> None:
    presets = {preset.name: preset for preset in shipped_presets()}
    assert sorted(presets) == ["a10", "a100-40gb", "a100-80gb", "cpu-demo", "h100-80gb", "h200"]
    assert all(preset.description for preset in presets.values())
    assert presets["cpu-demo"].gpu == "cpu"
    assert presets["a10"].model == "mistral-7b-v0.3"


@pytest.mark.parametrize("name", ["a10", "a100-40gb", "a100-80gb", "h100-80gb", "h200"])
def test_no_combination_of_a_gpu_preset_breaks_a_rule(name: str) -> None:
    space = load_space(name)
    model, capability = load_model_spec(space.model), find_gpu(space.gpu).compute_capability
    one_by_one = [{key: v} for key, d in space.dimensions.items() for v in d.values() or ()]
    # A compiled Liger, and one 8-bit type on the other, are listed and refused.
    for params in (*itertools.filterfalse(space.leaves_out, one_by_one), *space.together):
        config = space.config(params)
        found = violation(config, model=model, compute_capability=capability, device="cuda")
        assert found is None or found.rule in ("compile-breaks-on-liger", "eight-bit")


def test_no_combination_of_the_demo_breaks_a_rule() -> None:
    space = load_space("cpu-demo")
    model = load_model_spec(space.model)
    for params in space.combinations():
        config = space.config(params)
        assert violation(config, model=model, compute_capability=None, device="cpu") is None


def test_the_a10_preset_compares_with_the_published_recipe() -> None:
    baseline = load_space("a10").baseline_config()
    assert (baseline.micro_batch_size, baseline.seq_len) == (8, 512)
    assert baseline.changes_from(type(baseline)()) == {"micro_batch_size": 8}


def test_every_fault_of_a_file_is_told_at_once_with_its_line() -> None:
    text = """\
model: demo
trials: none
data:
  formt: text
  eval_fraction: 2
  completions_only: maybe
dimensions: {micro_batch_size: [1, 2]}
"""
    with pytest.raises(InputError) as refusal:
        parse_space(text, label="mine.yaml")
    assert str(refusal.value) == (
        "mine.yaml: line 2: trials must be a whole number, got 'none'. "
        "Line 3: data.texts is missing. "
        "Line 4: unknown key 'formt' under data; did you mean 'format'? "
        "Line 5: data.eval_fraction must be less than 1.0, got 2. "
        "Line 6: data.completions_only must be true or false, got 'maybe'"
    )


def test_of_many_faults_some_are_told_and_the_others_counted() -> None:
    text = "model: demo\n" + "".join(f"wrong{number}: 1\n" for number in range(7))
    with pytest.raises(InputError, match=r"line 2: unknown key 'wrong0'.*And 3 more$"):
        parse_space(text, label="mine.yaml")


@pytest.mark.parametrize("entry", ["{}", "{compute_dtype: []}"])
def test_an_entry_that_leaves_nothing_out_is_refused(entry: str) -> None:
    text = f"dimensions:\n  micro_batch_size: [1, 2]\nleave_out: [{entry}]\n"
    with pytest.raises(InputError, match="line 3: leave_out"):
        parse_space(text, label="mine.yaml")


def test_a_baseline_in_8_bits_is_no_reference_for_16() -> None:
    text = "dimensions:\n  micro_batch_size: [1, 2]\nnumerics: 16-bit\n"
    with pytest.raises(InputError, match="the baseline's compute_dtype"):
        parse_space(f"{text}baseline: {{compute_dtype: int8}}\n", label="mine.yaml")


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
