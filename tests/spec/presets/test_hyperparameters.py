"""Hyperparameters: each field reaches its places in the spec, and sizes that do not fit are all named."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from clearhead import presets, spec
from clearhead.base.errors import InputError
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.presets.named import PRESETS
from clearhead.spec.presets.names import FUNCTIONS

BASE = Hyperparameters(
    layers=2, width=14, heads=2, head_size=6, feedforward=17, embedding_norm=True, output_transform=True
)
CHANGES = {
    "family": "encoder", "layers": 3, "encoder_layers": 5, "decoder_layers": 5, "width": 22, "heads": 4, "kv_heads": 1,
    "head_size": 10, "feedforward": 19, "activation": "silu", "gated": True, "norm": "rms", "norm_place": "pre",
    "norm_eps": 0.01, "final_norm": True, "embedding_norm": False, "positions": "rotary", "segments": 3,
    "window": 5, "dropout": 0.7, "attention_dropout": 0.7, "activation_dropout": 0.7, "qk_norm": True, "bias": False,
    "attention_scale": 2.0, "embedding_scale": 3.0, "output_scale": 0.3, "output_bias": True,
    "output_transform": False, "tie": "none", "initialization": "normal",
}  # fmt: skip


def build_model(hparams: Hyperparameters) -> spec.Model:
    return build_spec(hparams, source_vocab=29, target_vocab=29)


def test_every_preset_has_a_function() -> None:
    assert list(FUNCTIONS) == list(PRESETS) and sorted(FUNCTIONS.values()) == sorted(presets.__all__)


@pytest.mark.parametrize("name", [field.name for field in fields(Hyperparameters)])
def test_no_field_is_without_effect(name: str) -> None:
    if name == "max_positions":
        learned = replace(BASE, positions="learned")
        assert build_model(replace(learned, max_positions=31)) != build_model(learned)
    else:
        assert build_model(replace(BASE, **{name: CHANGES[name]})) != build_model(BASE)


def nodes(model: spec.Model, kind: type[spec.Node]) -> dict[str, spec.Node]:
    return {path: node for path, node in spec.walk(model) if isinstance(node, kind)}


def test_self_attention_of_the_decoder_alone_is_causal_and_positions_are_for_self_attention() -> None:
    for positions in ("rotary", "alibi", "buckets"):
        model = build_model(replace(BASE, positions=positions))
        for path, node in nodes(model, spec.Attention).items():
            placed = node.position is not None or node.score_bias is not None
            assert placed == (node.source == "self"), path
            causal = path.startswith("decoder") and node.source == "self"
            assert node.mask == (spec.Causal() if causal else spec.Full()), path
    buckets = nodes(model, spec.RelativeBuckets)
    assert {path: node.bidirectional for path, node in buckets.items()} == {
        "encoder.score_table": True,
        "decoder.score_table": False,
    }


@pytest.mark.parametrize(("position", "final"), [("post", None), ("pre", None), ("post", True), ("pre", False)])
def test_norms_stand_where_the_recipe_puts_them(position: str, final: bool | None) -> None:
    model = build_model(replace(BASE, norm_place=position, final_norm=final))
    for node in nodes(model, spec.Step).values():
        assert (node.out is not None) == (position == "post")
        assert (node.branches[0].pre is not None) == (position == "pre")
    ends = (position == "pre") if final is None else final
    assert (model.encoder.final_norm is not None) == (model.decoder.final_norm is not None) == ends


def test_tying_follows_the_hyperparameters() -> None:
    table = "encoder.embedding.table"
    everything = build_model(BASE)
    assert everything.decoder.embedding.table == everything.head.layers[-1].weight == spec.Reference(path=table)
    half = build_spec(replace(BASE, tie="decoder"), source_vocab=29, target_vocab=31)
    assert half.decoder.embedding.table == spec.Table(rows=31)
    assert half.head.layers[-1].weight == spec.Reference(path="decoder.embedding.table")
    assert build_model(replace(BASE, tie="none")).head.layers[-1].weight is None


def test_all_faults_are_named_together() -> None:
    with pytest.raises(InputError) as caught:
        build_spec(Hyperparameters(width=15, heads=4, kv_heads=3), source_vocab=7, target_vocab=11)
    report = str(caught.value)
    assert report.startswith("4 faults in the model:")
    for words in ("15 is not a multiple of heads 4", "kv_heads 3", "even width, got 15", "7 entries and the target 11"):
        assert words in report


@pytest.mark.parametrize("name", PRESETS)
def test_every_recipe_resolves_and_survives_json(name: str) -> None:
    model = build_spec(PRESETS[name], source_vocab=101, target_vocab=101)
    assert spec.Model.from_json(model.to_json()) == model


def test_presets_have_the_published_sizes() -> None:
    base = presets.transformer_base(37000)
    assert (base.encoder.width, len(base.encoder.layers), len(base.decoder.layers)) == (512, 6, 6)
    heads = nodes(base, spec.Attention).values()
    assert {(node.num_heads, node.head_size) for node in heads} == {(8, 64)}
    assert {node.size for node in nodes(base, spec.FeedForward).values()} == {2048}
    assert base.encoder.embedding.scale == pytest.approx(512**0.5)
    llama = presets.llama_tiny()
    assert {(n.num_heads, n.num_kv_heads, n.head_size) for n in nodes(llama, spec.Attention).values()} == {(8, 4, 8)}
