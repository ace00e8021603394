"""What a child process gets of the variables in a person's shell."""

from __future__ import annotations

import pytest

from sweep.child_environment import child_environment

SECRET_NAMES = """
    PGPASSWORD SWEEP_STORAGE DATABASE_URL AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN
    AZURE_CLIENT_SECRET
    GOOGLE_APPLICATION_CREDENTIALS GITHUB_TOKEN OPENAI_API_KEY ANTHROPIC_API_KEY WANDB_API_KEY
    NVIDIA_API_KEY NGC_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN LD_SDK_KEY CONDA_TOKEN
    PYTHON_KEYRING_PASSWORD TORCH_HUB_AUTH SSH_AUTH_SOCK KUBECONFIG MLFLOW_TRACKING_PASSWORD
    PYPI_PASSWORD SSL_KEY_PASSPHRASE VAULT_TOKEN SLURM_JWT
"""
NEEDED_NAMES = """
    PATH HOME USER LANG LC_ALL TMPDIR TZ LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH PYTHONHASHSEED
    VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV LOADEDMODULES XDG_CACHE_HOME
    CUDA_VISIBLE_DEVICES CUDA_HOME CUDA_MODULE_LOADING
    NVIDIA_VISIBLE_DEVICES NCCL_DEBUG TORCHINDUCTOR_CACHE_DIR TORCH_LOGS
    PYTORCH_NVML_BASED_CUDA_CHECK TRITON_CACHE_DIR HF_HOME HF_HUB_OFFLINE HF_ENDPOINT
    HF_HUB_DISABLE_IMPLICIT_TOKEN TRANSFORMERS_CACHE TOKENIZERS_PARALLELISM BNB_CUDA_VERSION
    OMP_NUM_THREADS MKL_NUM_THREADS MALLOC_ARENA_MAX SSL_CERT_FILE REQUESTS_CA_BUNDLE https_proxy
    HTTPS_PROXY no_proxy CC CPATH LIBRARY_PATH
"""
SECRETS = dict.fromkeys(SECRET_NAMES.split(), "hunter2")
NEEDED = dict.fromkeys(NEEDED_NAMES.split(), "/there")
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that spin at a barrier slow down whatever shares their cores."""


def test_a_child_gets_what_its_libraries_read() -> None:
    assert child_environment(NEEDED | SECRETS) == NEEDED | PATIENT


@pytest.mark.parametrize("name", SECRETS)
def test_a_child_never_gets_what_is_none_of_its_business(name: str) -> None:
    assert child_environment({name: "hunter2"}) == PATIENT


def test_the_hubs_token_is_for_a_child_that_fetches_a_model() -> None:
    both = {"HF_TOKEN": "hf_x", "HF_HOME": "/models"}
    assert child_environment(both, with_hub_token=True) == both | PATIENT
    assert child_environment(both) == {"HF_HOME": "/models"} | PATIENT


def test_a_person_says_how_threads_wait() -> None:
    asked = {"OMP_WAIT_POLICY": "ACTIVE"}
    assert child_environment(asked) == asked


def test_how_memory_is_cut_is_the_configurations_to_say_and_nobody_elses() -> None:
    asked = {"SWEEP_WORKER_ENV": "*", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert "PYTORCH_CUDA_ALLOC_CONF" not in child_environment(asked)


def test_further_variables_are_let_through_by_name() -> None:
    asked = {"SWEEP_WORKER_ENV": "AWS_PROFILE, MY_*", "AWS_PROFILE": "a", "MY_ONE": "1", "NOT": "2"}
    assert child_environment(asked) == {"AWS_PROFILE": "a", "MY_ONE": "1"} | PATIENT
