"""Whether the kernels of linear attention are called, refused and chosen, without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.recurrent import (
    GATED_DELTA_RULE,
    KIMI_DELTA_ATTENTION,
    RecurrentKind,
    plain_loop,
)
from tests.families import config_of, spec_of
from tests.lazy import lazily
from tests.sweep.training.tiny import trial_on

torch = lazily("torch")
models = lazily("qlora_sweep.sweep.training.model")
kernels = lazily("qlora_sweep.sweep.training.recurrent")
proof = lazily("qlora_sweep.sweep.training.proof")
stand_in = lazily("qlora_sweep.sweep.predict.memory.tracing.recurrent")

Install = Callable[[str, str], None]
FAMILIES = ("qwen3_5_text", "qwen3_next", "olmo_hybrid")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lets a distribution of a version look as if it were installed, and no other."""
    monkeypatch.syspath_prepend(str(tmp_path))
    known: dict[str, str] = {}
    version = metadata.version
    for module in ("search_spaces", "sweep.training"):
        monkeypatch.setattr(f"qlora_sweep.{module}.recurrent.is_installed", known.__contains__)
    monkeypatch.setattr(metadata, "version", lambda name: known.get(name) or version(name))
    return known.__setitem__


def without_data(family: str) -> Any:
    """A model that is on no CPU."""
    return models.skeleton(config_of(family, "qv", "none"), spec=spec_of(family))


def modelling_of(model: Any) -> Any:
    return sys.modules[type(model).__module__]


def forget_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the package anew, be it the real one or not."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "fla":
            monkeypatch.delitem(sys.modules, name)


def test_a_loop_is_named_where_the_package_is_missing_or_there_is_no_gpu(install: Install) -> None:
    hybrid = spec_of("qwen3_5_text")
    assert "need a GPU" in (plain_loop(hybrid, is_on_gpu=False) or "")
    assert "pip install 'qlora-sweep[hybrid]'" in (plain_loop(hybrid, is_on_gpu=True) or "")
    install("flash-linear-attention", "0.6.0")
    assert plain_loop(hybrid, is_on_gpu=True) is None
    assert plain_loop(spec_of("lfm2"), is_on_gpu=False) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_that_are_installed_and_not_called_are_found(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model = without_data(family)
    assert kernels.not_called(model) is None
    install("flash-linear-attention", "0.6.0")
    assert "could not import it" in kernels.not_called(model)
    # As transformers binds it where the package can be imported.
    package = tmp_path / "fla" / "ops" / "gated_delta_rule"
    package.mkdir(parents=True)
    for parent in (package.parent.parent, package.parent):
        (parent / "__init__.py").touch()
    (package / "__init__.py").write_text("def chunk_gated_delta_rule(q):\n    return q\n")
    from transformers.integrations import use_kernel_func_from_hub_with_fallback

    forget_package(monkeypatch)
    bound = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")
    monkeypatch.setattr(modelling_of(model), GATED_DELTA_RULE.function, bound(lambda q: -q))
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        del sys.modules[name]
    assert kernels.not_called(model) is None
    assert "plain PyTorch" in kernels.not_called(model, has_solved=True)


def test_a_trial_without_the_package_solves_triangular_systems_and_is_no_fault() -> None:
    """So the watch would see the loop where the package is there."""
    config = config_of("qwen3_5_text", "qv", "none").changed(compute_dtype="fp32")
    spec = spec_of("qwen3_5_text")
    base = models.build_base(
        config, spec=spec, weights="random", device=torch.device("cpu"), seed=0
    )
    with proof.KernelWatch() as watch:
        base.model(input_ids=torch.ones(1, 16, dtype=torch.int64))
    assert watch.has_solved
    assert hasattr(trial_on(base, config).run(), "measurement")
    base.close()


@pytest.mark.parametrize(
    ("triton", "capability", "is_refused"),
    [("3.6.0", (9, 0), True), ("3.7.1", (9, 0), False), ("3.3.1", (9, 0), False)]
    + [("3.6.0", (8, 0), False), ("3.6.0", (10, 0), False)],
)
def test_a_triton_that_compiles_the_kernels_wrongly_is_refused(
    install: Install, *, triton: str, capability: tuple[int, int], is_refused: bool
) -> None:
    model = without_data("qwen3_5_text")
    install("triton", triton)
    assert kernels.refused(model, capability) is None
    install("flash-linear-attention", "0.6.0")
    assert bool(kernels.refused(model, capability)) == is_refused


@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, GATED_DELTA_RULE) for family in FAMILIES] + [("kimi_linear", KIMI_DELTA_ATTENTION)],
)
def test_kernels_are_chosen_by_a_layer_of_the_micro_batchs_shape(
    install: Install, *, family: str, kind: RecurrentKind
) -> None:
    install("flash-linear-attention", "0.6.0")
    model = without_data(family)
    called: list[tuple[int, ...]] = []

    def on_call(k: Any, _: Any) -> Any:
        called.append(tuple(k.shape[:2]))
        return stand_in._unwatched()

    with stand_in.kernels(model, kind, chunks=2, on_call=on_call):
        kernels.tune(model, rows=3, length=65)
    assert called == [(3, 65)]
    assert all(parameter.grad is None for parameter in model.parameters())
