"""Saving and loading: weights are the same bit for bit, and specs of any hyperparameters survive JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead import spec
from clearhead.checkpoints.weights.files import fill, load_tensors, save_tensors
from clearhead.core import build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from tests.laws.tiny import MODELS, Reader, tiny


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_loaded_weights_are_bitwise_equal(name: str, tmp_path: Path) -> None:
    """The loaded module is built on the meta device, without weights."""
    module = tiny(name)
    save_tensors(tmp_path / "weights.safetensors", module.state_dict())
    twin = build(spec.Model.from_json(module.spec.to_json()), device="meta").eval()
    fill(twin, load_tensors(tmp_path / "weights.safetensors"), source="here")
    assert list(twin.state_dict()) == list(module.state_dict())
    for path, tensor in module.state_dict().items():
        assert torch.equal(twin.state_dict()[path], tensor), path
    reader = Reader.of(module, 3)
    ids = torch.randint(reader.vocab, (3, 7))
    again = Reader(twin, reader.memory, reader.memory_mask)
    assert torch.equal(again(ids).logits, reader(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("joint", [True, False])
def test_a_loaded_model_is_bitwise_equal(joint: bool, tmp_path: Path) -> None:
    source = train_tokenizer("word", ["a b c d e f g h"], vocab_size=50)
    target = source if joint else train_tokenizer("word", ["u v w x y z"], vocab_size=50)
    hparams = Hyperparameters(
        layers=2, width=14, heads=2, positions="learned", max_positions=23, tie="all" if joint else "none"
    )
    module = build(build_spec(hparams, source_vocab=source.vocab_size, target_vocab=target.vocab_size)).eval()
    model = ch.Model(module, TokenizerPair(source, target, joint), TaskRecord(kind="translate"))
    model.save(tmp_path / "saved")
    again = ch.load(tmp_path / "saved")
    assert again.spec == model.spec
    assert again.tokenizers.fingerprint == model.tokenizers.fingerprint
    assert list(again.module.state_dict()) == list(module.state_dict())
    assert all(torch.equal(again.module.state_dict()[k], v) for k, v in module.state_dict().items())
    assert not again.module.training
    assert again.translate(["a b c", "h"]) == model.translate(["a b c", "h"])
    again.save(tmp_path / "again")
    for file in (tmp_path / "saved").iterdir():
        if file.name == "manifest.json" or file.suffix in (".md", ".svg"):  # they carry the name of the folder
            continue
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


@st.composite
def hparams_strategy(draw: st.DrawFn) -> Hyperparameters:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 5]))
    rate = st.floats(0.0, 0.99)
    return Hyperparameters(
        family=draw(st.sampled_from(["encoder", "decoder", "encoder-decoder"])),
        encoder_layers=draw(st.sampled_from([None, 1, 3])),
        layers=draw(st.integers(1, 4)),
        width=2 * draw(st.integers(1, 9)),
        heads=heads,
        kv_heads=kv_heads,
        head_size=2 * draw(st.integers(1, 5)),
        feedforward=draw(st.sampled_from([None, 7])),
        activation=draw(st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"])),
        gated=draw(st.booleans()),
        norm=draw(st.sampled_from(["layer", "rms"])),
        norm_place=draw(st.sampled_from(["post", "pre"])),
        norm_eps=draw(st.sampled_from([None, 1e-12])),
        final_norm=draw(st.sampled_from([None, True, False])),
        embedding_norm=draw(st.booleans()),
        positions=draw(st.sampled_from(["sinusoidal", "learned", "rotary", "alibi", "buckets"])),
        segments=draw(st.sampled_from([0, 2])),
        dropout=draw(rate),
        attention_dropout=draw(rate),
        qk_norm=draw(st.booleans()),
        bias=draw(st.booleans()),
        attention_scale=draw(st.sampled_from([None, 1.0])),
        output_bias=draw(st.booleans()),
        output_transform=draw(st.booleans()),
        tie=draw(st.sampled_from(["all", "decoder", "none"])),
        initialization=draw(st.sampled_from(["xavier", "normal"])),
    )


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(hparams_strategy())
def test_any_spec_survives_json_and_names_its_weights(hparams: Hyperparameters) -> None:
    """Equal specs have equal JSON; each path of the spec is a module, and each weight belongs to a path."""
    model = build_spec(hparams, source_vocab=11, target_vocab=11 if hparams.tie == "all" else 13)
    again = spec.Model.from_json(model.to_json())
    assert again == model
    assert again.to_json() == model.to_json()
    module = build(again, device="meta")
    paths = dict(module.named_modules())
    named = {
        path for path, node in spec.walk(model) if hasattr(node, "num_heads") or isinstance(node, spec.FeedForward)
    }
    assert named <= set(paths)
    for name, _ in module.named_parameters():
        owner = paths[name.rpartition(".")[0]]
        assert owner is not module


def test_specs_differ_where_a_hyperparameter_differs() -> None:
    model = build_spec(Hyperparameters(), source_vocab=11, target_vocab=11)
    assert build_spec(replace(Hyperparameters(), norm_place="pre"), source_vocab=11, target_vocab=11) != model
