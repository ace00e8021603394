"""The variables that a child process gets: what Python, torch, CUDA and the hub's library read.

Passwords and keys in a person's shell are not among them: libraries print their variables, and
models may bring code of their own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

ALSO = "SWEEP_WORKER_ENV"
"""Variable that names further ones, with commas between them; ``*`` stands for any characters."""

_NAMES = """
    PATH HOME USER LOGNAME HOSTNAME LANG LANGUAGE LOCPATH TZ TZDIR TMPDIR TEMP TMP VIRTUAL_ENV
    CC CXX CPP AR LD CFLAGS CXXFLAGS CPPFLAGS LDFLAGS CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH
    LIBRARY_PATH GCC_EXEC_PREFIX COMPILER_PATH MAX_JOBS GLIBC_TUNABLES MODULEPATH MODULESHOME
    LOADEDMODULES REQUESTS_CA_BUNDLE CURL_CA_BUNDLE OPENSSL_CONF OPENSSL_MODULES
    HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY NO_PROXY
    HF_HUB_DISABLE_IMPLICIT_TOKEN
"""
"""In any case: the names of proxies are written in lower case too."""
_BEGINNINGS = """
    LC_ LD_ DYLD_ PYTHON XDG_ CONDA_ MAMBA_ NIX_ LMOD_ SSL_ GPU_ FLA_
    CUDA CUDNN_ CUBLAS NVCC_ NCCL_ NVIDIA_ NVML_ NVRTC_ HIP_ HSA_ ROCR_ ROCM_
    TORCH PYTORCH_ TRITON_ BNB_ BITSANDBYTES_ LIGER_ FLASH_ XFORMERS_ AO_
    HF_ HUGGINGFACE_ TRANSFORMERS_ TOKENIZERS_ SAFETENSORS_ DATASETS_
    OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ GOTO_ BLIS_ NUMEXPR_ VECLIB_ ATEN_ DNNL_ ONEDNN_
    MALLOC_ JEMALLOC_ MIMALLOC_ TCMALLOC_
"""
_HUB_TOKENS = frozenset({"HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN"})
_SECRET = re.compile(
    r"(?:^|_)(?:TOKENS?|KEYS?|APIKEY|SECRETS?|PASS|PASSWD|PASSWORD|PASSPHRASE|PWD|CREDENTIALS?|AUTH)"
    r"(?:_|$)"
)
"""NVIDIA_API_KEY begins as what CUDA reads, and so may others."""
_ALLOCATOR = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})
"""How torch's allocator cuts memory is part of the configuration."""

_PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that spin at a barrier make a step up to sixty times slower where cores are shared."""


def child_environment(
    environment: Mapping[str, str] | None = None, *, with_hub_token: bool = False
) -> dict[str, str]:
    """Return the variables of this process that a child may have.

    Args:
        environment: the variables there are; None for this process's own.
        with_hub_token: whether the child fetches a model, perhaps one that asks who fetches it.
    """
    known = os.environ if environment is None else environment
    also = re.split(r"\s*,\s*", known.get(ALSO, "").strip())
    variables = dict(_PATIENT)
    for name, value in known.items():
        is_named = any(fnmatchcase(name, pattern) for pattern in also)
        is_token = with_hub_token and name in _HUB_TOKENS
        if name not in _ALLOCATOR and (is_named or is_token or _is_needed(name)):
            variables[name] = value
    return variables


def _is_needed(name: str) -> bool:
    if name.upper() in _NAMES.split():
        return True
    return name.startswith(tuple(_BEGINNINGS.split())) and _SECRET.search(name.upper()) is None
