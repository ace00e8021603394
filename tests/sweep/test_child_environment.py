"""What a child process gets of the variables in a person's shell."""

from __future__ import annotations

import pytest

from qlora_sweep.sweep.child_environment import child_environment

SECRETS = """
    PGPASSWORD SWEEP_STORAGE DATABASE_URL AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN
    AZURE_CLIENT_SECRET
    GOOGLE_APPLICATION_CREDENTIALS GITHUB_TOKEN OPENAI_API_KEY ANTHROPIC_API_KEY WANDB_API_KEY
    NVIDIA_API_KEY NGC_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN LD_SDK_KEY CONDA_TOKEN
    PYTHON_KEYRING_PASSWORD TORCH_HUB_AUTH SSH_AUTH_SOCK KUBECONFIG MLFLOW_TRACKING_PASSWORD
    PYPI_PASSWORD SSL_KEY_PASSPHRASE VAULT_TOKEN SLURM_JWT
"""
NEEDED = """
    PATH HOME USER LANG LC_ALL TMPDIR TZ LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH PYTHONHASHSEED
    VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV LOADEDMODULES XDG_CACHE_HOME
    CUDA_VISIBLE_DEVICES CUDA_HOME CUDA_MODULE_LOADING
    NVIDIA_VISIBLE_DEVICES NCCL_DEBUG TORCHINDUCTOR_CACHE_DIR TORCH_LOGS
    PYTORCH_NVML_BASED_CUDA_CHECK TRITON_CACHE_DIR HF_HOME HF_HUB_OFFLINE HF_ENDPOINT
    HF_HUB_DISABLE_IMPLICIT_TOKEN TRANSFORMERS_CACHE TOKENIZERS_PARALLELISM BNB_CUDA_VERSION
    OMP_NUM_THREADS MKL_NUM_THREADS MALLOC_ARENA_MAX SSL_CERT_FILE REQUESTS_CA_BUNDLE https_proxy
    HTTPS_PROXY no_proxy CC CPATH LIBRARY_PATH
"""
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that spin at a barrier slow down whatever shares their cores."""
ALLOWED = {"SWEEP_WORKER_ENV": "AWS_PROFILE, MY_*", "AWS_PROFILE": "a", "MY_ONE": "1"}


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (dict.fromkeys((NEEDED + SECRETS).split(), "x"), dict.fromkeys(NEEDED.split(), "x")),
        # A person says how threads wait, and lets further variables through by name.
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({**ALLOWED, "NOT": "2"}, {"AWS_PROFILE": "a", "MY_ONE": "1"}),
        # How memory is cut is the configuration's to say, and nobody else's.
        ({"SWEEP_WORKER_ENV": "PYTORCH_*", "PYTORCH_CUDA_ALLOC_CONF": "x"}, {}),
    ],
)
def test_a_child_gets_what_its_libraries_read_and_no_secret(
    given: dict[str, str], got: dict[str, str]
) -> None:
    assert child_environment(given) == PATIENT | got


def test_the_hubs_token_is_for_a_child_that_fetches_a_model() -> None:
    both = {"HF_TOKEN": "hf_x", "HF_HOME": "/models"}
    assert child_environment(both, with_hub_token=True) == both | PATIENT
    assert child_environment(both) == {"HF_HOME": "/models"} | PATIENT
