"""A healthy checkpoint agrees with transformers; for a tampered one, the report names submodule and cause."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clearhead.apps.check import trace
from clearhead.apps.check.parity import ParityReport, compare_tokenizers, compare_with_transformers
from clearhead.apps.cli.main import main
from clearhead.base.commands import make_install_command
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.tokenizers import load_tokenizers
from tests import hf_models
from tests.parity.architectures.harness import Case, all_cases, theirs_of

# Small models whose class names another end token, which their vocabulary lacks.
pytestmark = pytest.mark.filterwarnings("ignore:.* beyond the vocabulary of:UserWarning")

CASES = {case.name: case for case in all_cases()}
HEALTHY = ["gptj", "gpt_neox", "t5", "mixtral", "albert", "bart/BartForSequenceClassification"]
TENSORS = "model.safetensors"


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_checkpoint_agrees(name: str, tmp_path: Path) -> None:
    theirs_of(CASES[name]).save_pretrained(tmp_path)
    card = compare_with_transformers(tmp_path, tolerance=1e-5)
    assert card.is_same and card.divergence is None and card.causes == ()
    assert len(card.layers) >= 2 and card.logits is not None and card.padded is not None
    assert card.real is None and card.text is None, "there is no tokenizer"
    reasons = [line.partition("not compared")[2] for line in card.lines() if "not compared" in line]
    assert reasons == [": there is no tokenizer, or no text that it can read"]


def test_what_is_not_compared_has_a_reason(tmp_path: Path) -> None:
    theirs_of(CASES["gptj"]).save_pretrained(tmp_path)
    config_of(tmp_path, pad_token_id=None)
    (line,) = [line for line in compare_with_transformers(tmp_path).lines() if "outputs, padded" in line]
    assert line.endswith("not compared: config.json names no padding token")


def pair(case: Case, root: Path) -> tuple[Path, Path]:
    theirs_of(case).save_pretrained(root / "original")
    return shutil.copytree(root / "original", root / "tampered"), root / "original"


def config_of(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors_of(folder: Path, suffixes: tuple[str, ...], change: Callable[[Tensor], Tensor]) -> None:
    tensors = load_file(folder / TENSORS)
    names = [name for name in tensors if name.endswith(suffixes)]
    assert names
    save_file(tensors | {name: change(tensors[name]).contiguous() for name in names}, folder / TENSORS)


def neighbours(size: int) -> Callable[[Tensor], Tensor]:
    """Reorder rows from pairs half a head apart to neighbouring pairs."""
    order = torch.arange(size).view(2, -1).T.flatten()
    return lambda tensor: tensor.unflatten(0, (-1, size))[:, order].flatten(0, 1)


def check(case: str, root: Path, tamper: Callable[[Path], None]) -> ParityReport:
    tampered, original = pair(CASES[case], root)
    tamper(tampered)
    card = compare_with_transformers(tampered, reference=original)
    assert not card.is_same
    return card


def test_another_epsilon_is_named(tmp_path: Path) -> None:
    card = check("bert", tmp_path, lambda folder: config_of(folder, layer_norm_eps=0.03125))
    assert card.divergence is not None and card.divergence.startswith("encoder.embedding.norm (bert.embeddings.LayerN")
    (cause,) = card.causes
    assert cause.startswith("the epsilon of norms: 0.03125 in clearhead, ")


def test_another_activation_is_named(tmp_path: Path) -> None:
    activation = json.loads(json.dumps(dict(CASES["gpt2"].config))).get("activation_function", "gelu_new")
    other = "gelu" if activation != "gelu" else "gelu_new"
    card = check("gpt2", tmp_path, lambda folder: config_of(folder, activation_function=other))
    assert card.divergence is not None and "function.down (transformer.h.0.mlp.c_proj)" in card.divergence
    (cause,) = card.causes
    assert cause.startswith("the activation variant: ")


def test_another_order_of_heads_is_named(tmp_path: Path) -> None:
    heads = CASES["bert"].config["num_attention_heads"]

    def swap(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (heads, -1)).roll(1, 0).flatten(0, 1)

    def tamper(folder: Path) -> None:
        tensors_of(folder, tuple(f"self.query.{leaf}" for leaf in ("weight", "bias")), swap)

    card = check("bert", tmp_path, tamper)
    assert card.divergence is not None and "function.query" in card.divergence
    (cause,) = card.causes
    assert cause.startswith("the order of heads: the query heads of transformers are heads [") and cause.endswith(
        "in every layer"
    )


def test_another_layout_of_the_rotation_is_named(tmp_path: Path) -> None:
    case = CASES["llama"]
    size = case.config.get("head_dim") or case.config["hidden_size"] // case.config["num_attention_heads"]
    names = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
    card = check("llama", tmp_path, lambda folder: tensors_of(folder, names, neighbours(size)))
    (cause,) = card.causes
    assert cause == "the layout of rotated pairs: the tensors were read as neighbours, and they are halves" or (
        cause == "the layout of rotated pairs: the tensors were read as halves, and they are neighbours"
    )


def test_another_offset_of_positions_is_named(tmp_path: Path) -> None:
    pad = CASES["roberta"].config["pad_token_id"]
    card = check("roberta", tmp_path, lambda folder: config_of(folder, pad_token_id=pad - 1))
    assert card.divergence is not None and "embedding.position" in card.divergence
    assert card.causes == (f"the offset of positions: {pad} in clearhead, {pad + 1} in transformers",)


def test_another_scale_is_named(tmp_path: Path) -> None:
    card = check("gpt2", tmp_path, lambda folder: config_of(folder, scale_attn_weights=False))
    assert len(card.causes) == 1 and card.causes[0].startswith("the scale of attention scores: 1 in clearhead, ")


def test_two_causes_are_both_named(tmp_path: Path) -> None:
    tampering = {"layer_norm_epsilon": 0.03125, "scale_attn_weights": False}
    card = check("gpt2", tmp_path, lambda folder: config_of(folder, **tampering))
    assert sorted(cause.partition(":")[0] for cause in card.causes) == [
        "the epsilon of norms", "the scale of attention scores",
    ]  # fmt: skip


def test_weights_that_differ_are_named(tmp_path: Path) -> None:
    card = check(
        "gpt2", tmp_path, lambda folder: tensors_of(folder, ("h.1.mlp.c_fc.weight",), lambda tensor: tensor * 1.5)
    )
    assert card.divergence is not None and "(transformer.h.1.mlp.c_fc)" in card.divergence
    assert card.causes == ("the weights: 'transformer.h.1.mlp.c_fc.weight' have other values in transformers",)


def test_the_tokenizer_is_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    original = hf_models.language_model(tmp_path / "original")
    assert main(["check", str(original), "--against", "transformers", "--json"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert record["same"] and record["text"]["count"] > 10 and record["real"] < 1e-5 and record["tolerance"] == 1e-4
    tampered = shutil.copytree(original, tmp_path / "tampered")
    path = tampered / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_prefix_space": True}))
    code = main(["check", str(tampered), "--against", "transformers", "--reference", str(original)])
    out = capfd.readouterr().out
    assert code == 1
    assert "likely cause      the tokenizer: clearhead reads a text with a space in front" in out
    assert "verdict           not the same" in out


def test_no_code_of_the_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, folder, marker = hf_models.language_model(tmp_path / "original"), tmp_path / "llama", tmp_path / "ran"
    theirs_of(CASES["llama"]).save_pretrained(folder)
    for file in original.glob("*tok*"):
        shutil.copy(file, folder)
    (folder / "own_code.py").write_text(
        f"open({str(marker)!r}, 'w')\nfrom transformers import GPT2TokenizerFast as OwnTokenizer\n"
    )
    path = folder / "tokenizer_config.json"
    custom = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own_code.OwnTokenizer", None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | custom))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    report = compare_tokenizers(load_tokenizers(original), folder)
    assert not marker.exists()
    assert report.cause is not None and "transformers cannot load it" in report.cause


def test_what_cannot_be_compared_is_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hf_models.language_model(tmp_path / "model")
    for arguments, words in (
        (["--tolerance", "0.1"], "add --against transformers"),
        (["--against", "jax"], "--against expects transformers, got 'jax'"),
        (["--against", "transformers", "--reference", str(tmp_path)], "it has no config.json"),
    ):
        assert main(["check", str(folder), *arguments]) == 2
        assert words in capfd.readouterr().err

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(trace.importlib, "import_module", missing)
    with pytest.raises(InputError, match=re.escape(make_install_command("transformers"))):
        compare_with_transformers(folder)


def test_a_model_trained_here_is_written_and_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import clearhead as ch

    saved = tmp_path / "own"
    ch.load(hf_models.language_model(tmp_path / "model"), device="cpu", precision="fp32").save(saved)
    assert main(["check", str(saved), "--against", "transformers"]) == 0
    captured = capfd.readouterr()
    assert captured.out.startswith(f"{saved} here, {saved} in transformers ")
    assert tempfile.gettempdir() not in captured.out.replace(str(saved), "")
    assert "verdict           the same" in captured.out and "was saved as a Hugging Face checkpoint" in captured.err
