"""Models in int4: which matrices have 4 bits, files, bad files, and calibration."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError
from clearhead.checkpoints.runs.manifest import MANIFEST
from clearhead.fast.nibbles import quantize_groups, widen_groups
from clearhead.fast.runner import Runner
from clearhead.fast.stored import INT4, INT8, choose_int4, count_int4, store, stored_matrices
from clearhead.model import calibration as calibration_module
from clearhead.model.calibration import calibrate
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer

SIZES = Hyperparameters(
    family="decoder", layers=2, width=64, heads=2, feedforward=96, norm="rms", norm_place="pre", positions="rotary",
    tie="none",
)  # fmt: skip
TEXT = "a b c d e\n" * 40
OUT = "decoder.layers.0.steps.0.branches.0.function.out"


def model(feedforward: int = 96) -> ch.Model:
    torch.manual_seed(0)
    tokenizer = train_tokenizer("word", ["a b c d", "b c d e"], vocab_size=50)
    rows = tokenizer.vocab_size
    module = ch.build(build_spec(replace(SIZES, feedforward=feedforward), source_vocab=rows, target_vocab=rows)).eval()
    pair = TokenizerPair(tokenizer, tokenizer, joint=True)
    return ch.Model(module.requires_grad_(False), pair, TaskRecord(kind="generate", max_length=32))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model in fp32."""
    folder = tmp_path_factory.mktemp("fp32") / "model"
    model().save(folder)
    return folder


def test_layers_have_4_bits_and_tables_and_heads_8() -> None:
    module = model().module
    formats = choose_int4(module)
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.Linear) and ".layers." in name and name.startswith("decoder"):
            assert formats[name] == INT4, name
    assert formats["decoder.embedding.table"] == formats["head.layers.0"] == INT8
    in_4_bits, total = count_int4(module, formats)
    assert in_4_bits == total == sum(w.numel() for w in module.decoder.layers.parameters() if w.dim() > 1)


def test_rows_of_no_whole_groups_have_8_bits_and_too_many_of_them_are_refused(tmp_path: Path) -> None:
    module = model(feedforward=48).module  # 48 numbers in the rows of one matrix of each layer
    formats = choose_int4(module)
    down = {
        name
        for name, submodule in module.named_modules()
        if isinstance(submodule, nn.Linear) and submodule.in_features == 48
    }
    assert len(down) == 2 and {formats[name] for name in down} == {INT8}
    runner = Runner(store(module, formats))
    assert {(entry.backend, entry.detail) for entry in runner.report()} == {("kernels", "int4"), ("kernels", "int8")}
    model(feedforward=400).save(tmp_path / "wide")
    with pytest.raises(InputError, match=r"needs 75% of the layers' weights in 4 bits, and 6[0-9]% of this model's"):
        ch.load(tmp_path / "wide", device="cpu", precision="int4")


def test_the_plain_model_computes_with_the_widened_weights_and_kernels_beside_it() -> None:
    whole = model()
    module = store(copy.deepcopy(whole.module), choose_int4(whole.module))
    reference = ch.build(whole.spec).eval()
    state = {name: weight.clone() for name, weight in whole.module.state_dict().items()}
    for name, kind in stored_matrices(module).items():
        state[f"{name}.weight"] = kind.widen(*kind.encode(state[f"{name}.weight"]))
    reference.load_state_dict(state)
    ids = torch.arange(12).view(2, 6) % 5
    with torch.inference_mode():
        plain, expected, fast = (tree(ids).hidden for tree in (module, reference, Runner(module).tree()))
    assert torch.allclose(plain, expected, atol=1e-5)
    assert 0.0 < (fast - plain).abs().max() <= 0.1 * plain.abs().max()


def test_a_saved_model_loads_again_bitwise_and_at_every_precision(saved: Path, tmp_path: Path) -> None:
    loaded = ch.load(saved, device="cpu", precision="int4")
    loaded.save(tmp_path / "int4")
    for precision in ("auto", "int4"):
        again = ch.load(tmp_path / "int4", device="cpu", precision=precision)
        assert stored_matrices(again.module) == stored_matrices(loaded.module)
        for name, entry in loaded.module.state_dict().items():
            assert torch.equal(again.module.state_dict()[name], entry), name
    wide = ch.load(tmp_path / "int4", device="cpu", precision="fp32").module
    assert not stored_matrices(wide)
    matrix = loaded.module.get_submodule(OUT)
    assert torch.equal(wide.get_submodule(OUT).weight, matrix.weight)
    in_8_bits = ch.load(tmp_path / "int4", device="cpu", precision="int8")
    assert set(stored_matrices(in_8_bits.module).values()) == {INT8}
    in_8_bits.save(tmp_path / "int8")
    assert INT4 in stored_matrices(ch.load(tmp_path / "int8", device="cpu", precision="int4").module).values()
    with pytest.raises(InputError, match="int4 and int8"):
        loaded.save(tmp_path / "hf", format="hf")
    assert not (tmp_path / "hf").exists()


FAULTS = {
    "dtype": lambda entries: {f"{OUT}.weight_int4": entries[f"{OUT}.weight_int4"].to(torch.int8)},
    "scales of fp32": lambda entries: {f"{OUT}.group_scale": entries[f"{OUT}.group_scale"].float()},
    "fewer scales": lambda entries: {f"{OUT}.group_scale": entries[f"{OUT}.group_scale"][:, :1].contiguous()},
    "fewer rows": lambda entries: {f"{OUT}.group_scale": entries[f"{OUT}.group_scale"][:-1].contiguous()},
    "no scales": lambda entries: {f"{OUT}.group_scale": None},
    "no matrix": lambda entries: {f"{OUT}.weight_int4": None},
    "not a number": lambda entries: {f"{OUT}.group_scale": entries[f"{OUT}.group_scale"] * torch.nan},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_would_be_misread_is_refused_by_name(fault: str, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "int4"
    ch.load(saved, device="cpu", precision="int4").save(folder)
    (folder / MANIFEST).unlink()
    entries = load_file(folder / "weights.safetensors")
    changed: dict[str, Tensor | None] = {**entries, **FAULTS[fault](entries)}
    save_file({name: entry for name, entry in changed.items() if entry is not None}, folder / "weights.safetensors")
    for precision in ("auto", "int4", "fp32"):
        with pytest.raises(InputError, match=r"function\.out"):
            ch.load(folder, device="cpu", precision=precision)


def test_matrices_of_other_sizes_are_not_taken_for_those_of_4_bits(tmp_path: Path) -> None:
    """Also where the entries have the shapes that a matrix of whole groups would have."""
    folder, module = tmp_path / "model", model(feedforward=48).module
    whole = model(feedforward=48)
    store(whole.module, choose_int4(module))
    whole.save(folder)
    (folder / MANIFEST).unlink()
    entries = load_file(folder / "weights.safetensors")
    down = next(name.rpartition(".")[0] for name, entry in entries.items() if entry.shape == (64, 48))
    del entries[f"{down}.weight_int8"], entries[f"{down}.weight_scale"]
    nibbles, scales = quantize_groups(torch.randn(64, 32))
    save_file(
        {**entries, f"{down}.weight_int4": nibbles, f"{down}.group_scale": scales}, folder / "weights.safetensors"
    )
    with pytest.raises(InputError, match=r"\[64, 48\], and int4 is not for such rows"):
        ch.load(folder, device="cpu")


def test_calibration_keeps_in_8_bits_what_loses_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix has large weights with inputs of zero in every group; beside them 4 bits round all others to zero."""
    monkeypatch.setattr(calibration_module, "MOST_LOSS", 1e-5)
    whole = model()
    layer = whole.module.get_submodule(OUT)
    layer.weight.view(-1, 32)[:, 0] = 40.0
    whole.module.get_submodule(OUT.replace(".out", ".value")).weight[::32] = 0.0
    before = {name: weight.clone() for name, weight in whole.module.state_dict().items()}
    (tmp_path / "text.txt").write_text(TEXT)
    calibration = calibrate(whole, tmp_path / "text.txt")
    formats = stored_matrices(calibration.model.module)
    assert calibration.num_matrices == 12
    assert calibration.loss < calibration.first_loss
    assert calibration.num_in_8_bits > 0 and formats[OUT] == INT8
    in_8_bits = [name for name, kind in formats.items() if kind == INT8 and ".layers." in name and name[0] == "d"]
    assert len(in_8_bits) == calibration.num_in_8_bits
    assert all(torch.equal(weight, before[name]) for name, weight in whole.module.state_dict().items())
    assert calibration.loss == calibration.model.evaluate({"text": str(tmp_path / "text.txt")})["loss"]


def test_convert_writes_int4_and_says_what_a_calibration_did(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    for name, options in {"plain": [], "calibrated": ["--text", str(text)]}.items():
        out = tmp_path / name
        assert main(["convert", str(saved), str(out), "--precision", "int4", "--json", *options]) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out.splitlines()[-1]) == {"path": str(out), "format": "int4"}
        assert ("loss on the text: " in shown.err) is bool(options)
        assert INT4 in stored_matrices(ch.load(out, device="cpu").module).values()
    assert main(["convert", str(saved), str(tmp_path / "no"), "--precision", "int8", "--text", str(text)]) == 2
    assert "--text has an effect with --precision int4 only" in capsys.readouterr().err
    assert main(["convert", str(saved), str(tmp_path / "no"), "--precision", "int4", "--text", "absent.txt"]) == 2
    assert not (tmp_path / "no").exists()


def test_widened_rows_are_those_of_the_matrix() -> None:
    nibbles, scales = quantize_groups(torch.randn(7, 64))
    rows = torch.tensor([3, 0, 3])
    assert torch.equal(widen_groups(nibbles[rows], scales[rows]), widen_groups(nibbles, scales)[rows])
