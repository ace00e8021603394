"""What is mistyped is refused at once, in one line, by the name that was typed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.config import TrialConfig, as_options
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.storage.records import Measured
from qlora_sweep.sweep.terminal.options import settings
from tests.sweep.simulated_device import a_measurement
from tests.sweep.simulated_drive import driving_on
from tests.sweep.typed import Sweep

HEAVY = ["torch", "datasets", "transformers", "optuna", "pyarrow", "pandas", "plotly"]
PROGRAM = f"""
import shlex, subprocess, sys

def started(*_, **__):
    raise AssertionError("a process was started")

subprocess.Popen.__init__ = started
from qlora_sweep.sweep.cli import main

for line in sys.argv[1:]:
    code = main(shlex.split(line))
    print(code, *[name for name in {HEAVY!r} if name in sys.modules])
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"text": "a text of some words"}\n' * 200)
    (tmp_path / "broken.jsonl").write_text("a\nb\n")
    large = "gpu: a10\nbudget_gib: 9999\ndimensions: {seq_len: [64]}\n"
    (tmp_path / "large.yaml").write_text(large)
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    return tmp_path


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial fits at once, on no device."""

    def measured(config: TrialConfig) -> Measured:
        return Measured(measurement=a_measurement(config, peak_allocated_bytes=1000))

    monkeypatch.setattr("qlora_sweep.sweep.terminal.driving.drive", driving_on(measured))


LIGHT = """
run a101                                                          | did you mean 'a10'?
run cpu-demo --model demoo                                        | did you mean 'demo'?
run cpu-demo --gpu a101                                           | did you mean 'a10'?
run cpu-demo --rank 0                                             | must be at least 1, got 0
run cpu-demo --method grpo                                        | grpo is planned, and neither
run cpu-demo --sampler tpi                                        | --sampler must be one of
run cpu-demo --data broken.jsonl                                  | line 1: not JSON
run cpu-demo --storage sqlite:///no/such/x.db                     | there is no directory
data texts.jsonl --model demo --set data.format=messages          | no column 'messages'
train demo --data broken.jsonl --output adapter                   | line 1: not JSON
"""


def test_nothing_large_is_imported_and_no_process_started_to_refuse() -> None:
    lines = [line.split(" | ") for line in LIGHT.strip().splitlines()]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(words.strip() for words, _ in lines)],
        capture_output=True,
        text=True,
        check=True,
    )
    *codes, trained = done.stdout.splitlines()
    assert codes == ["2"] * (len(lines) - 1)
    assert trained.split()[0] == "2"
    assert not {"torch", "datasets"} & set(trained.split())
    said = done.stderr.replace("Loading libraries ...\n", "").splitlines()
    for line, (_, words) in zip(said, lines, strict=True):
        assert words.strip() in line


@pytest.mark.usefixtures("simulated")
def test_a_study_goes_on_without_the_file_of_its_texts(home: Path, sweep: Sweep) -> None:
    # What was prepared of it is enough, and is not looked for among what was mistyped.
    words = ["run", "cpu-demo", "--data", "texts.jsonl", "--trials", "1", "--no-confirm"]
    assert sweep(*words).code in (0, 1)
    (home / "texts.jsonl").unlink()
    assert sweep(*words).code in (0, 1)
    assert sweep(*words, "--study", "another").code == 2


REFUSED = """
run                                       | SPACE
run cpu-dmo                               | did you mean 'cpu-demo'
run missing.yaml                          | missing.yaml: no such file
run cpu-demo --tirals 3                   | No such option: --tirals (Possible options: --trials)
run cpu-demo --trials many                | --trials must be a whole number, got 'many'
run cpu-demo --time-budget soon           | --time-budget: a duration is written like
run cpu-demo --max-dollars nan            | --max-dollars must be a finite number, got nan
run cpu-demo --storage mysql://u:pw@h/db  | known are sqlite
run cpu-demo --storage ''                 | --storage: an empty text names nothing
run cpu-demo --study ../etc               | study name must be
run ''                                    | an argument is an empty text
run -- ''                                 | an argument is an empty text
data --model demo ''                      | an argument is an empty text
data texts.jsonl --model demo --method sgd | unknown method
train '' --data d.jsonl --output adapter  | an argument is an empty text
run cpu-demo --from nope                  | no studies yet
run cpu-demo --study x --from x --dry-run | --from x is the study itself
run cpu-demo --rank=8 --rank 16           | --rank 8 and --rank 16 are both given
run cpu-demo --model a --model b          | --model a and --model b are both given
run cpu-demo --rank 8 --set lora-rank=8   | lora_rank is given twice: keep one
run cpu-demo --set compil=true            | unknown setting 'compil'; did you mean 'compile'?
run cpu-demo --set kernels=fast           | --set kernels must be one of 'hf', 'fused-loss'
run cpu-demo --set lora_dropout=nan       | lora_dropout must be a finite number, got
run cpu-demo --target-modules q_proj,,v_proj | --target-modules must list
run night.run.json --trials 3             | night.run.json is a whole request: no option goes
run cpu-demo --devices 2 --on ray:auto    | --devices and --on ray:auto
run cpu-demo --on slrum                   | unknown place; did you mean 'slurm'?
run cpu-demo --on slurm:x                 | --on must be slurm, got 'slurm:x'
run cpu-demo --on local --with time=4h    | local has no such setting; it has none
run a10 --on modal --with cloud=aws       | it has volume, price, prices
run a10 --on slurm --with mem=1 --with mem=2 | mem is given twice
run a10 --on slurm --with gpus=a100:x     | --with gpus must be a count, or type and count
run a10 --on recorded:nowhere.jsonl       | nowhere.jsonl
plan a10 --from-file ''                   | --from-file: an empty text names nothing
plan a10 --set quantized_fraction=2       | --set quantized_fraction must be at most 1
plan a10 --work epochs=many               | --work epochs must be a number, got 'many'
plan a10 --model zzz                      | unknown model 'zzz'; `sweep models` lists them
plan a11                                  | no preset, no YAML file and no GPU; did you mean 'a10'
plan a10 --from x                         | no studies yet
plan a10 --from-file x --seq-len 1        | seq_len and --from-file
plan a10 --longest --seq-len 9            | --longest asks for the length
plan a10 --within 9h                      | --within needs --cheapest
plan a10 --longest --exact                | --longest and --exact are different questions
plan a10 --cheapest --exact               | --cheapest and --exact are different questions
plan a10 --data nofile.jsonl              | nofile.jsonl
plan texts.jsonl                          | --data texts.jsonl
plan large.yaml                           | budget_gib
plan loop.yaml                            | loop.yaml
plan --cheapest --within -1h              | --within: a duration is written like
plan a10 --price a10=x                    | --price: a10 must cost dollars an hour
plan a10 --price a11=1                    | --price: unknown GPU 'a11'; did you mean 'a10'
train demo --output o --set learning_rate=7 | learning_rate must be at most 1.0, got 7
train demo --output o --set lora_rank=7   | unknown setting 'lora_rank'
run cpu-demo --data texts.jsonl --set data.text_column=b | no column 'b'; known are text
data texts.jsonl --model demo --set data.completions_only=true | no completions of their own
train demo --output o --epochs inf        | --epochs must be above 0 and at most 1,000,000, got inf
train demo --output o --epochs 1e300      | --epochs must be above 0 and at most 1,000,000, got
train demo --output o --epochs nan        | --epochs must be above 0 and at most 1,000,000, got nan
report                                    | name a study for its report
report x x                                | x is named twice
report x --work samples=-1                | samples
report x --work dataset-samples=1 --work dataset_samples=7 | dataset-samples is given twice
report x -o front.pdf                     | a report goes into a file that ends in .html
report x -o no/such/x.html                | no/such: make it first
init -o x.json                            | --output: x.json:
merge adapter --output no/such/merged     | no/such: make it first
confirm                                   | STUDY
confirm nope --soak long                  | --soak: a duration is written like
status --watch                            | --watch follows one study
stauts                                    | No such command 'stauts'. Did you mean 'status'?
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [[part.strip() for part in line.split(" | ")] for line in REFUSED.strip().splitlines()],
)
def test_bad_input_ends_with_2_one_message_that_names_it_and_nothing_written(
    words: str, said: str, home: Path, sweep: Sweep
) -> None:
    before = set(home.iterdir())
    refused = sweep(*shlex.split(words))
    # A busy machine takes so long to import what a study takes that it is announced.
    error = refused.err.removeprefix("Loading libraries ...\n")
    assert (refused.code, refused.out, error.startswith("error: ")) == (2, "", True)
    assert said in error
    assert not {"Traceback", "pw@"} & set(error.split())
    assert len(error) < 400
    assert set(home.iterdir()) == before


def test_a_setting_that_is_unknown_is_not_answered_with_all_of_them(
    home: Path, sweep: Sweep
) -> None:
    space = "gpu: cpu\nbudget_gib: 1\nfixed: {zzz: 1}\ndimensions: {seq_len: [64, 128]}\n"
    (home / "x.yaml").write_text(space)
    refused = sweep("run", "x.yaml")
    assert refused.code == 2
    assert "unknown key 'zzz'" in refused.err
    assert "`sweep schema` lists them" in refused.err


def test_a_directory_that_was_removed_is_said(home: Path) -> None:
    gone = home / "gone"
    gone.mkdir()
    command = "from qlora_sweep.sweep.cli import main; sys.exit(main())"
    program = f"import os, sys; os.rmdir(os.getcwd()); {command}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "run", "cpu-demo"],
        cwd=gone,
        env={key: value for key, value in os.environ.items() if key != "SWEEP_HOME"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "the working directory was removed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.usefixtures("simulated")
def test_the_default_directory_of_studies_is_made_and_no_other(home: Path, sweep: Sweep) -> None:
    words = ["run", "cpu-demo", "--trials", "1", "--no-confirm", "--study", "one", "--storage"]
    assert sweep(*words, "sqlite:///runs/other.db").code == 0
    shutil.rmtree(home / "runs")
    for command in (words, ["status", "--storage"], ["best", "one", "--storage"]):
        assert sweep(*command, "sqlite:///elsewhere/x.db").code == 2
    assert not (home / "elsewhere").exists()


def test_a_setting_means_what_its_option_and_its_key_in_a_space_mean() -> None:
    typed = ["compile=true", "double-quant=false", "effective_batch_size=null", "lora_alpha=8"]
    assert settings({"lora_rank": 4, "seq_len": None}, [*typed, "kernels=hf"])[0] == {
        "lora_rank": 4,
        "compile": True,
        "double_quant": False,
        "effective_batch_size": None,
        "lora_alpha": 8.0,
        "kernels": "hf",
    }
    names = ["data.text_column=1", 'target_modules=["W_pack"]']
    assert settings({}, names) == ({"target_modules": ["W_pack"]}, {"data.text_column": "1"})
    with pytest.raises(InputError, match="lora_rank must be a whole number"):
        settings({}, [f"lora_rank={'[' * 100_000}"])
    values = TrialConfig(compile=True, effective_batch_size=64, checkpoint_fraction=0.0)
    words = as_options(values.model_dump(mode="json"))
    given = [word for flag, word in pairwise(words) if flag == "--set"]
    assert settings({}, given)[0].items() <= values.model_dump(mode="json").items()
