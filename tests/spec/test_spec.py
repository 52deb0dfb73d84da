"""The spec tree: every fault in one report, one address for spec and module, immutable, and the same after JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.core import build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from tests.laws.hf_parts import HF_PARTS

HPARAMS = Hyperparameters(
    layers=3, encoder_layers=2, width=14, heads=2, head_size=6, feedforward=17, positions="buckets", segments=3
)


def model() -> spec.Model:
    return build_spec(HPARAMS, source_vocab=29, target_vocab=29)


def tree() -> dict[str, Any]:
    return json.loads(model().to_json())


def report(broken: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        spec.Model.from_json(json.dumps(broken))
    assert "pydantic" not in str(caught.value) and "http" not in str(caught.value)
    return str(caught.value)


def attention(**changes: Any) -> spec.Attention:
    return spec.Attention(**({"num_heads": 2, "num_kv_heads": 2, "head_size": 6} | changes))


def one_layer(function: spec.Attention | spec.FeedForward, **stack: Any) -> spec.Stack:
    step = spec.Step(branches=(spec.Branch(function=function),))
    options = {"width": 14, "embedding": spec.Embedding(table=spec.Table(rows=29))} | stack
    return spec.Stack(layers=(spec.Layer(steps=(step,)),), **options)


def build_query_key_norm(norm: spec.RMSNorm | None = None, **changes: Any) -> spec.QueryKeyNorm:
    return spec.QueryKeyNorm(norm=norm or spec.RMSNorm(), **changes)


def build_rotary(scaling: Any, size: int | None = None) -> spec.Rotary:
    return spec.Rotary(scaling=scaling, size=size)


def build_disentangled(*terms: str) -> spec.Disentangled:
    reference = spec.Reference(path="encoder.score_table")
    return spec.Disentangled(table=reference, terms=terms or ("content_to_position",))


def embedding(**fields: Any) -> spec.Stack:
    return one_layer(attention(), embedding=spec.Embedding(table=spec.Table(rows=29), **fields))


def test_every_fault_is_in_one_report() -> None:
    """Unknown keys, wrong types, missing values and sizes that do not fit: none hides another."""
    broken = tree()
    first = broken["encoder"]["layers"]["distinct"][0]["steps"]
    first[0]["branches"][0]["function"]["num_heads"] = 3
    first[0]["branches"][0]["function"]["num_kv_heads"] = 2
    first[1]["branches"][0]["function"]["sise"] = 5
    broken["encoder"]["embedding"]["dropout"] = 1.5
    broken["decoder"]["width"] = "wide"
    del broken["decoder"]["score_table"]["num_heads"]
    broken["head"]["layers"][0]["kind"] = "liner"
    faults = report(broken)
    for words in (
        "num_heads 3 is not a multiple of num_kv_heads 2",
        "steps.1.branches.0.function.sise: unknown key (did you mean 'size'?)",
        "encoder.embedding.dropout: expected less than 1, got 1.5",
        "decoder.width: expected integer, got 'wide'",
        "decoder.score_table.num_heads: missing",
        "head.layers.0: kind must be one of 'linear', 'activation', 'layer_norm', 'rms_norm', 'pool', 'soft_cap', "
        "'l2_normalize'; "
        "got 'liner' (did you mean 'linear'?)",
    ):
        assert words in faults, faults
    lines = faults.splitlines()
    assert lines[0] == f"{len(lines) - 1} faults in the spec:"
    assert len(set(lines)) == len(lines)


def test_constructors_report_all_faults_too() -> None:
    with pytest.raises(InputError) as caught:
        spec.Attention(num_heads=0, num_kv_heads=2, head_sizes=6, dropout="much")
    for words in ("num_heads: expected greater", "head_size: missing", "did you mean 'head_size'", "got 'much'"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (attention(num_heads=5, num_kv_heads=2), "num_heads 5 is not a multiple of num_kv_heads 2"),
        (attention(position=spec.Rotary(), head_size=7), "rotary size must be even and at most head_size 7, got 7"),
        (attention(position=spec.Rotary(size=8)), "rotary size must be even and at most head_size 6, got 8"),
        (
            attention(score_bias=spec.RelativeBuckets(num_heads=3, bidirectional=True)),
            "score_bias has 3 heads, but the attention has 2",
        ),
        (attention(source="memory", mask=spec.Causal()), "attention to the memory needs a full mask and no position"),
        (attention(source="memory", position=spec.Rotary()), "needs a full mask and no position"),
        (
            one_layer(
                attention(), width=7, embedding=spec.Embedding(table=spec.Table(rows=5), position=spec.Sinusoidal())
            ),
            "need an even width, got 7",
        ),
        (
            one_layer(
                attention(), embedding=spec.Embedding(table=spec.Table(rows=5), position=spec.Learned(rows=3, offset=3))
            ),
            "positions have 3 rows, which must be more than the offset 3",
        ),
        (spec.RelativeBuckets(num_heads=2, count=7, bidirectional=True), "need an even count, got 7"),
        (
            spec.RelativeBuckets(num_heads=2, count=32, max_distance=16, bidirectional=False),
            "max_distance 16 is too small for 32 buckets",
        ),
        (
            spec.RelativeBuckets(num_heads=2, count=32, max_distance=8, bidirectional=True),
            "max_distance 8 is too small for 32 buckets",
        ),
        (spec.RMSNorm(weight=False, unit_offset=True), "unit_offset has no effect without a weight"),
        (
            attention(query_key_norm=build_query_key_norm(per_head=True, over="width")),
            "per_head has no effect on a norm over the width",
        ),
        (
            attention(query_key_norm=build_query_key_norm(spec.RMSNorm(weight=False), per_head=True)),
            "per_head has no effect on a norm",
        ),
        (attention(query_key_norm=build_query_key_norm(after_rotation=True)), "has no effect without rotary positions"),
        (
            attention(query_key_norm=build_query_key_norm(after_rotation=True, over="width"), position=spec.Rotary()),
            "before the split into heads",
        ),
        (attention(query_key_norm=build_query_key_norm(), clip=0.5), "models differ in their order"),
        (
            attention(position=build_rotary(spec.DynamicScaling(factor=2.0, original_length=5), size=2)),
            "rotary size of 2",
        ),
        (
            attention(
                position=build_rotary(
                    spec.LongRopeScaling(short_factor=(1.0,), long_factor=(1.0,) * 3, original_length=5)
                )
            ),
            "short_factor needs a number for each of 3 frequencies, got 1",
        ),
        (
            spec.BandScaling(factor=2.0, low_frequency_factor=3.0, high_frequency_factor=3.0, original_length=5),
            "low_frequency_factor 3 must be below high_frequency_factor 3",
        ),
        (
            spec.YarnScaling(factor=2.0, original_length=5, beta_fast=1.0, beta_slow=2.0),
            "beta_slow 2 must be below beta_fast 1",
        ),
        (attention(score_bias=spec.Alibi(rounding="bfloat16")), "need a causal mask, got full"),
        (attention(score_bias=build_disentangled(), num_kv_heads=1), "as many kv heads as heads, got 1 and 2"),
        (
            attention(score_bias=build_disentangled(), soft_cap=3.0),
            "soft_cap with disentangled scores is not supported",
        ),
        (
            attention(score_bias=build_disentangled(), position=spec.Rotary()),
            "position with disentangled scores is not supported",
        ),
        (build_disentangled("content_to_position", "content_to_position"), "each term may occur only once"),
        (spec.DistanceTable(span=7, buckets=6), "set together or not at all"),
        (spec.DistanceTable(span=7, buckets=6, max_distance=4), "max_distance 4 is too small for 6 buckets"),
        (spec.FeedForward(size=5, activation=spec.ClampedGate(alpha=1.0, limit=2.0)), "needs gated = true"),
        (
            spec.MixtureOfExperts(count=3, top_k=5, expert=spec.FeedForward(size=7)),
            "top_k 5 must be at most the number of experts, 3",
        ),
        (embedding(width=5), "an embedding of width 5 needs a projection to the width 14 of the stack"),
        (embedding(scale_rounding="weights"), "scale_rounding has no effect on a scale of 1"),
        (
            embedding(width=7, projection=spec.Projection(place="after_norm", bias=True), position=spec.Sinusoidal()),
            "need an even width, got 7",
        ),
        (
            embedding(
                width=2,
                projection=spec.Projection(place="before_norm", bias=True),
                position=spec.Sinusoidal(layout="fairseq"),
            ),
            "a width of at least 4, got 2",
        ),
        (one_layer(attention(), sharing=(0, 1)), "sharing names layer 1, but there are 1 layers"),
        (one_layer(attention(), sharing=(0,)), "sharing has no effect if every layer runs once"),
        (one_layer(attention(), sharing=()), "sharing never runs layer 0; remove the layer"),
    ],
)
def test_sizes_that_do_not_fit_together(node: spec.Node, words: str) -> None:
    with pytest.raises(InputError, match=words):
        spec.validate(node)


def change_model(**parts: Any) -> spec.Model:
    return model().model_copy(update=parts)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (spec.Model(), "a model needs an encoder, a decoder or both; got neither"),
        (change_model(encoder=None), "attends to the memory, but the model has no encoder"),
        (
            spec.Model(encoder=one_layer(attention(source="memory"))),
            "an encoder cannot attend to the memory, which is its own output",
        ),
        (
            spec.Model(encoder=one_layer(attention()), decoder=one_layer(attention())),
            "no step attends to the memory, so the encoder has no effect",
        ),
        (
            change_model(
                head=spec.Head(layers=(spec.Linear(size=29, weight=spec.Reference(path="encoder.embeding.table")),))
            ),
            r"no table at 'encoder.embeding.table' \(did you mean 'encoder.embedding.table'\?\)",
        ),
        (
            change_model(
                head=spec.Head(layers=(spec.Linear(size=29, weight=spec.Reference(path="encoder.score_table")),))
            ),
            "'encoder.score_table' is a table of the wrong kind for this field",
        ),
        (
            change_model(
                head=spec.Head(layers=(spec.Linear(size=31, weight=spec.Reference(path="encoder.embedding.table")),))
            ),
            "head.layers.0: size 31 differs from the 29 rows of the tied table",
        ),
        (
            change_model(head=spec.Head(layers=(spec.Linear(size=29), spec.Activation(function="relu")))),
            "without a pool the last layer must be linear, or a soft_cap after it; got activation",
        ),
        (
            change_model(encoder=model().encoder.model_copy(update={"width": 22})),
            "'encoder.embedding.table' has width 22, but 14 is needed",
        ),
        (
            spec.Model(
                encoder=one_layer(
                    attention(score_bias=spec.Reference(path="encoder.score_table")),
                    score_table=spec.RelativeBuckets(num_heads=3, bidirectional=True),
                )
            ),
            "'encoder.score_table' has 3 heads, but the attention has 2",
        ),
        (
            spec.Model(encoder=one_layer(attention(score_bias=spec.Alibi(slopes=(0.5, 0.25, 0.125))))),
            "score_bias has 3 slopes, but the attention has 2 heads",
        ),
        (
            change_model(head=spec.Head(layers=(spec.SoftCap(value=3.0), spec.Linear(size=29)))),
            "a soft_cap must be the last layer",
        ),
        (
            change_model(head=spec.Head(layers=(spec.Activation(function="relu2"), spec.SoftCap(value=3.0)))),
            "without a pool the last layer must be linear, or a soft_cap after it; got soft_cap",
        ),
        (
            spec.Model(encoder=one_layer(attention(score_bias=spec.Reference(path="encoder.embedding.table")))),
            "'encoder.embedding.table' is a table of the wrong kind for this field",
        ),
        (
            spec.Model(
                encoder=one_layer(
                    attention(score_bias=build_disentangled()),
                    score_table=spec.RelativeBuckets(num_heads=2, bidirectional=True),
                )
            ),
            "'encoder.score_table' is a table of the wrong kind for this field",
        ),
        (
            spec.Model(
                encoder=one_layer(
                    attention(score_bias=spec.Reference(path="encoder.score_table")),
                    score_table=spec.DistanceTable(span=3),
                )
            ),
            "'encoder.score_table' is a table of the wrong kind for this field",
        ),
        (
            change_model(
                encoder=one_layer(attention(), width=22, score_table=spec.DistanceTable(span=3)),
                decoder=one_layer(
                    attention(score_bias=build_disentangled()),
                    score_table=spec.RelativeBuckets(num_heads=2, bidirectional=False),
                ),
            ),
            "'encoder.score_table' belongs to another stack; a distance table cannot be shared",
        ),
    ],
)
def test_parts_that_do_not_fit_together(broken: spec.Model, words: str) -> None:
    with pytest.raises(InputError, match=words):
        build(broken)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"encoder": \n oops}', "the spec is not JSON: Expecting value at line 2"),
        ("[1, 2]", "the spec must be a JSON object, got list"),
        ('{"encoder": {"layers": {"distinct": []}}}', "layers must hold 'distinct'"),
        ('{"encoder": {"layers": {"distinct": [{}], "order": [0, 1]}}}', "1 is not an index of the 1 distinct layers"),
        ('{"encoder": {"layers": {"distinct": [{}], "order": [-1]}}}', "-1 is not an index"),
        ('{"encoder": {"layers": {"distinct": [{}], "order": [' + "0," * 1024 + "0]}}}", "1025 layers are too many"),
        ('{"encoder": {"layers": [' + "{}," * 1024 + "{}]}}", "1025 layers are too many"),
        ('{"encoder": {"width": 67108865}}', "less than or equal to 67108864"),
        ("{" + " " * 2**24 + "}", "characters; at most"),
        ('{"encoder": 7}', "encoder: expected"),
        ('{"encodr": null}', r"encodr: unknown key \(did you mean 'encoder'\?\)"),
    ],
)
def test_json_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        spec.Model.from_json(text)


def test_a_repeated_layer_is_written_once_and_read_back() -> None:
    first = model()
    written = tree()
    assert len(written["decoder"]["layers"]["distinct"]) == 1
    assert written["decoder"]["layers"]["order"] == [0, 0, 0]
    other = build_spec(replace(HPARAMS, feedforward=19), source_vocab=29, target_vocab=29).decoder.layers[0]
    mixed = (*first.decoder.layers[:1], other, *first.decoder.layers[:1])
    changed_model = first.model_copy(update={"decoder": first.decoder.model_copy(update={"layers": mixed})})
    again = spec.Model.from_json(changed_model.to_json())
    assert again == changed_model != first
    assert json.loads(again.to_json())["decoder"]["layers"]["order"] == [0, 1, 0]


def test_nodes_cannot_be_changed_and_compare_by_value() -> None:
    node = attention()
    with pytest.raises(ValidationError, match="frozen"):
        node.num_heads = 3
    assert node == attention() and hash(node) == hash(attention()) and node != attention(head_size=7)
    assert spec.Full() != spec.Causal()
    assert hash(model()) == hash(model())


def test_nothing_is_converted_on_the_way_in() -> None:
    for wrong in (2.0, "2", True):
        with pytest.raises(InputError, match="num_heads: expected integer"):
            attention(num_heads=wrong)


def test_one_address_for_spec_module_and_weight() -> None:
    """Each path that owns weights in the tree is the module's path, and each weight lies below the path of its node."""
    module = build(model())
    nodes, modules = dict(spec.walk(model())), dict(module.named_modules())
    built = (spec.Attention, spec.FeedForward, spec.Branch, spec.Step, spec.Layer, spec.Stack, spec.Embedding)
    owning = (*built, spec.Table, spec.RelativeBuckets, spec.Head, spec.Linear, spec.LayerNorm, spec.RMSNorm)
    assert {path for path, node in nodes.items() if isinstance(node, owning)} <= set(modules)
    for path, node in nodes.items():
        if isinstance(node, spec.Attention | spec.FeedForward):
            assert modules[path].spec == node
    for name in module.state_dict():
        prefixes = [name.rsplit(".", count)[0] for count in (1, 2)]
        assert any(isinstance(nodes.get(prefix), owning) for prefix in prefixes), name
    assert isinstance(nodes["decoder.layers.2.steps.1.branches.0.function"], spec.Attention)
    assert nodes["decoder.layers.2.steps.1.branches.0.function"].source == "memory"


def test_an_activation_is_a_name_or_a_node_and_faults_say_so() -> None:
    with pytest.raises(InputError) as caught:
        spec.FeedForward(size=5, activation="silly")
    assert "activation: expected 'relu', 'gelu'" in str(caught.value) and "got 'silly'" in str(caught.value)
    with pytest.raises(InputError, match=r"activation\.alpha: expected greater than 0, got -1\.0"):
        spec.FeedForward(size=5, activation={"kind": "clamped_gate", "alpha": -1.0, "limit": 7.0})
    with pytest.raises(InputError, match=r"activation\.limit: missing"):
        spec.FeedForward(size=5, activation={"kind": "clamped_gate", "alpha": 1.0})


def test_the_published_parts_are_the_same_after_json() -> None:
    for make in HF_PARTS.values():
        node = make()
        assert spec.Model.from_json(node.to_json()) == node


def test_an_unknown_key_is_compared_with_the_keys_of_its_own_node() -> None:
    broken = tree()
    layer = broken["encoder"]["layers"]["distinct"][0]
    layer["steps"][0]["branches"][0]["function"]["query_key_norm"] = {"kind": "rms_norm"}
    faults = report(broken)
    assert "query_key_norm.kind: unknown key" in faults
    assert "did you mean 'kind'" not in faults, "a key of other nodes was recommended"
    assert "branches: expected" not in faults, "what follows from a fault is none of its own"


def test_a_field_of_earlier_versions_is_read_where_it_was_empty() -> None:
    earlier = tree()
    earlier["decoder"]["projection_out"] = None
    assert spec.Model.from_json(json.dumps(earlier)) == model()
    earlier["decoder"]["projection_out"] = {"bias": False}
    assert "projection_out" in report(earlier)
