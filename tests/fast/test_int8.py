"""8-bit weights and fast linear layers, compared with the plain model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import clearhead as ch
from clearhead import surgery
from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.pooling import with_head
from clearhead.checkpoints.weights.files import load_tensors, save_tensors
from clearhead.core import Transformer
from clearhead.fast import probe, runner
from clearhead.fast.cache import IndexedCache
from clearhead.fast.linear import ServedLinear, int8_linear
from clearhead.fast.native import load
from clearhead.fast.probe import has_exact_int_mm
from clearhead.fast.runner import Runner, multiplies_in_bf16
from clearhead.fast.stored import INT8, is_quantized, quantize, store, widen_weights
from tests import hf_models
from tests.laws.tiny import FAMILIES, STYLES, tiny

NAMES = [
    f"{family}/{style}/{position}"
    for family in FAMILIES
    for style, position in zip(STYLES, ("learned", "rotary"), strict=True)
]


def build_seeded(name: str) -> Transformer:
    torch.manual_seed(3)
    return tiny(name)


def outputs(module: Transformer) -> Tensor:
    ids = torch.randint(1, 20, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        outputs_of_model = module(ids, ids if module.encoder is not None and module.decoder is not None else None)
    return outputs_of_model.hidden if outputs_of_model.logits is None else outputs_of_model.logits


@pytest.mark.parametrize("name", NAMES)
def test_stacks_in_8_bits_go_on_without_their_head(name: str) -> None:
    module = store(build_seeded(name), INT8)
    bare, ids = with_head(module, None, {}), torch.randint(1, 20, (2, 7))
    target = ids if module.encoder is not None and module.decoder is not None else None
    with torch.inference_mode():
        assert torch.equal(bare(ids, target).hidden, module(ids, target).hidden)


def test_a_weight_moves_by_at_most_half_a_step_of_its_row() -> None:
    weight = torch.randn(30, 50) * torch.rand(30, 1)
    weight[4] = 0.0
    matrix, scale = quantize(weight)
    assert matrix.dtype == torch.int8
    assert ((matrix * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all()
    assert torch.equal(matrix[4], torch.zeros(50, dtype=torch.int8))
    assert (matrix.abs().amax(1)[torch.arange(30) != 4] == 127).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_model_computes_with_the_dequantized_weights(name: str) -> None:
    module = build_seeded(name)
    reference = ch.build(module.spec)
    rounded = store(build_seeded(name), INT8)
    reference.load_state_dict(dict(widen_weights(rounded.state_dict())))
    assert torch.allclose(outputs(rounded), outputs(reference.eval()), atol=1e-6)
    assert not torch.equal(outputs(rounded), outputs(module))


@pytest.mark.parametrize("name", NAMES)
def test_kernels_compute_what_the_plain_layers_do_and_leave_the_plain_tree_alone(name: str) -> None:
    module = build_seeded(name)
    plain, before = outputs(module), [dict(vars(submodule)) for submodule in module.modules()]
    fast = Runner(module)
    assert {entry.backend for entry in fast.report()} == {"kernels"}
    assert torch.allclose(outputs(fast.tree()), plain, atol=1e-5)
    assert all(vars(submodule) == old for submodule, old in zip(module.modules(), before, strict=True))
    half = build_seeded(name).to(torch.bfloat16)
    plain = outputs(half)
    assert (outputs(Runner(half).tree()) - plain).abs().max() <= 0.05 * plain.abs().max()
    rounded = store(module, INT8)
    plain = outputs(rounded)
    error = (outputs(Runner(rounded).tree()) - plain).abs()
    assert 0.0 < error.max() <= 0.1 * plain.abs().max()


def test_products_in_bf16_are_close_and_neither_scores_nor_weights_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "has_fast_bf16", lambda device: True)
    monkeypatch.setattr(runner, "LEAST_WEIGHTS", 1)
    exact, quick = (ch.load(folder, device="cpu", precision=precision) for precision in ("fp32", "auto"))
    first, second = outputs(exact.tree), outputs(quick.tree)
    assert 0.0 < (first - second).abs().max() <= 0.05 * first.abs().max()
    assert torch.equal(outputs(exact.module), outputs(quick.module))
    assert exact.score(["the cat"]) == quick.score(["the cat"])
    weight = next(submodule.weight for submodule in quick.module.modules() if isinstance(submodule, nn.Linear))
    with torch.no_grad():
        weight.mul_(2.0)
    assert not torch.equal(outputs(quick.tree), second), "the rounded copy is computed again"


def test_small_models_and_slow_processors_multiply_as_their_weights_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not multiplies_in_bf16(ch.load(folder, device="cpu", precision="fp32").module)
    monkeypatch.setattr(runner, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(runner, "has_fast_bf16", lambda device: False)
    assert not multiplies_in_bf16(ch.load(folder, device="cpu", precision="fp32").module)


def test_the_matrix_of_a_head_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "has_fast_bf16", lambda device: True)
    module = build_seeded("decoder/post/learned")
    layers = sum(submodule.weight.numel() for submodule in module.modules() if isinstance(submodule, nn.Linear))
    monkeypatch.setattr(runner, "LEAST_WEIGHTS", layers + 1)
    assert multiplies_in_bf16(module)


def test_a_watched_model_computes_by_its_plain_layers() -> None:
    module = build_seeded("decoder/post/learned")
    fast = Runner(module)
    with ch.capture(module, "**.weights") as seen:
        watched = outputs(fast.tree())
        assert torch.equal(watched, outputs(module))
    assert {len(records) for records in seen.values()} == {2}
    assert any(type(submodule).forward is ServedLinear.forward for submodule in fast.tree().modules())


def test_a_served_tree_lets_gradients_through() -> None:
    module = build_seeded("decoder/post/rotary").train()
    Runner(module).tree()(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(submodule.weight.grad is not None for submodule in module.modules() if isinstance(submodule, nn.Linear))


def test_probabilities_of_a_trained_model_stay(data_dir: Path) -> None:
    """The model's author published the text; its perplexity changes by less than 1 %."""
    text = (data_dir / "stories260K" / "expected.txt").read_text("utf-8")
    exact, rounded = (
        ch.load(data_dir / "stories260K", device="cpu", precision=precision).score([text])[0].score
        for precision in ("fp32", "int8")
    )
    assert np.exp(exact - rounded) == pytest.approx(1.0, abs=0.01)


def test_they_stay_where_keys_and_values_have_8_bits_as_well(data_dir: Path) -> None:
    text = (data_dir / "stories260K" / "expected.txt").read_text("utf-8")
    losses = []
    for precision in ("fp32", "int8"):
        model, cache = ch.load(data_dir / "stories260K", device="cpu", precision=precision), IndexedCache()
        ids = torch.tensor([model.tokenizers.target.encode_with_special(text)])
        tree = model.tree
        with torch.inference_mode():
            parts = [
                tree.decode(submodule, cache=cache).logits for submodule in (ids[:, :64], *ids[:, 64:].split(1, 1))
            ]
        losses.append(float(functional.cross_entropy(torch.cat(parts, 1)[0, :-1], ids[0, 1:])))
    assert losses[0] != losses[1]
    assert np.exp(losses[1] - losses[0]) == pytest.approx(1.0, abs=0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.language_model(tmp_path_factory.mktemp("lm") / "model")


def test_a_converted_model_is_small_and_generates_the_same(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "int8"
    assert main(["convert", str(folder), str(out), "--precision", "int8"]) == 0
    model = ch.load(folder, device="cpu", precision="int8")
    again = ch.load(out)
    assert is_quantized(again.module)
    prompt = ["the cat"]
    assert again.generate(prompt, max_new_tokens=8, temperature=0) == model.generate(
        prompt, max_new_tokens=8, temperature=0
    )
    stored = load_tensors(out / "weights.safetensors")
    matrices = [name for name, tensor in stored.items() if tensor.dim() == 2 and tensor.dtype != torch.int8]
    assert all("position" in name for name in matrices)


def test_a_model_in_8_bits_loads_as_fp32_with_the_weights_that_it_has(folder: Path, tmp_path: Path) -> None:
    model = ch.load(folder, device="cpu", precision="int8")
    model.save(tmp_path / "int8")
    wide = ch.load(tmp_path / "int8", device="cpu", precision="fp32")
    assert not is_quantized(wide.module)
    assert torch.equal(outputs(wide.module), outputs(model.module))
    maps, again = (each.attention("the cat").to_json() for each in (wide, model))
    assert maps == again


def test_what_needs_all_digits_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ch.load(folder, device="cpu", precision="int8")
    with pytest.raises(InputError, match="surgery needs full-precision weights"):
        surgery.keep_layers(model, [0])
    with pytest.raises(InputError, match="layout of the hub needs full-precision weights"):
        model.save(tmp_path / "out", format="hf")
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="int8 needs a CPU"):
        ch.load(folder, device="meta", precision="int8")
    assert main(["convert", str(folder), str(tmp_path / "out"), "--precision", "fp16"]) == 2
    assert "expected bf16 or int8" in capsys.readouterr().err
    assert main(["convert", str(folder), str(tmp_path / "out"), "--precision", "int8", "--to", "hf"]) == 2
    assert "choose one output" in capsys.readouterr().err


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler."""
    for module in (load, runner):
        monkeypatch.setattr(module, "library", lambda kernels="": None)


def large_linear() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, an 8-bit matrix that is large enough for 8-bit products, its scales, and a bias."""
    x = torch.randn(9, 520) * torch.logspace(-3, 3, 9)[:, None]
    x[3] = 0.0
    return x, *quantize(torch.randn(512, 520)), torch.randn(512)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_pytorch_rounds_rows_and_sums_as_the_kernels_do(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_exact_int_mm():
        pytest.skip("this processor has no AVX-512 VNNI")
    x, *layer = large_linear()
    x[0, 0] = torch.nan if rows == 9 else 1.0
    expected = int8_linear(*layer)(x[:rows])
    with monkeypatch.context() as patch:
        patch.setattr(load, "library", lambda kernels="": None)
        actual = int8_linear(*layer)(x[None, :rows])[0]
    assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert not torch.equal(actual, functional.linear(x[:rows], dequantized_matrix(layer), layer[2]))


def dequantized_matrix(layer: list[Tensor]) -> Tensor:
    return layer[0] * layer[1][:, None]


@pytest.mark.parametrize("hidden", ["HIDE_ISA", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_matrices_are_dequantized_once_where_products_in_8_bits_would_be_wrong(
    hidden: str, no_kernels: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    if hidden == "HIDE_ISA":
        without = replace(probe.processor(), isa=probe.processor().isa - {"avx512_vnni"})
        monkeypatch.setattr(probe, "processor", lambda: without)
    else:
        monkeypatch.setenv(hidden, "avx2")
    monkeypatch.setattr(torch, "_int_mm", None)
    has_exact_int_mm.cache_clear()
    try:
        x, *layer = large_linear()
        run, wide = int8_linear(*layer), dequantized_matrix(layer)
        layer[0].zero_()  # It is no longer read.
        assert torch.equal(run(x), functional.linear(x, wide, layer[2]))
        with caplog.at_level(logging.WARNING, logger="clearhead"):
            ch.load(folder, device="cpu", precision="int8")
        (record,) = caplog.records
        assert record.message.startswith("there are no compiled kernels and no AVX-512 VNNI")
    finally:
        has_exact_int_mm.cache_clear()


def test_a_weight_of_minus_128_in_a_file_is_one_of_minus_127(folder: Path, tmp_path: Path) -> None:
    model = ch.load(folder, device="cpu", precision="int8")
    model.save(tmp_path / "int8")
    (tmp_path / "int8" / "manifest.json").unlink()
    file = tmp_path / "int8" / "weights.safetensors"
    tensors = load_tensors(file)
    names = [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]
    for name in names:
        tensors[name][0, 0] = -128
    save_tensors(file, tensors)
    for precision in ("int8", "fp32"):
        state = ch.load(tmp_path / "int8", device="cpu", precision=precision).module.state_dict()
        state = state if precision == "int8" else {f"{name}_int8": tensor for name, tensor in state.items()}
        for name in names:
            scale = 1.0 if precision == "int8" else tensors[name.replace("_int8", "_scale")][0]
            assert state[name][0, 0] == -127 * scale
