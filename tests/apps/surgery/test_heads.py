"""Removed heads and neurons: the output equals that of the whole model with them set to zero."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping

import pytest
import torch

from clearhead import spec
from clearhead.apps.surgery import remove_heads, remove_neurons
from clearhead.base.errors import InputError
from clearhead.core import Transformer
from tests.apps.surgery.models import BOTH, FAMILIES, attentions, build_model, family, same_run
from tests.laws.hf_parts import HF_PARTS
from tests.laws.tiny import difference, tiny

SILENT = 1e-5
PARTS = ("query-key", "soft cap", "sink", "clip", "alibi", "slopes", "table", "buckets", "disentangled", "shared")
ATTENDING = [name for name in HF_PARTS if any(pattern in name for pattern in PARTS)]


def silence(module: Transformer, heads: Mapping[str, Collection[int]]) -> Transformer:
    """Set the columns of heads in the last projection to zero."""
    masked = copy.deepcopy(module)
    for address, numbers in heads.items():
        attention = masked.get_submodule(address)
        with torch.no_grad():
            for head in numbers:
                attention.out.weight[:, head * attention.spec.head_size : (head + 1) * attention.spec.head_size] = 0
    return masked


def check(module: Transformer, heads: Mapping[str, Collection[int]]) -> Transformer:
    edited = remove_heads(module, heads)
    output, expected = same_run(edited.model), same_run(silence(module, heads))
    assert difference(output.hidden, expected.hidden) <= SILENT
    assert difference(output.hidden, same_run(module).hidden) > 1e-4
    assert not edited.report.new and not edited.report.dropped
    before, after = module.state_dict(), edited.model.state_dict()
    assert sum(tensor.numel() for tensor in after.values()) < sum(tensor.numel() for tensor in before.values())
    return edited.model


def some(attention: spec.Attention) -> list[int]:
    """Return removable heads: the first and the last but one group, or one head of a single group."""
    group = attention.num_heads // attention.num_kv_heads
    groups = [0] if attention.num_kv_heads < 4 else [0, attention.num_kv_heads - 2]
    if attention.num_kv_heads == 1:
        return [] if group == 1 else [0]
    return [head for number in groups for head in range(number * group, (number + 1) * group)]


def is_normed_together(attention: spec.Attention) -> bool:
    return attention.query_key_norm is not None and attention.query_key_norm.over == "width"


@pytest.mark.parametrize("name", [*BOTH, *ATTENDING])
def test_the_output_is_that_of_silenced_heads(name: str) -> None:
    """Remove different heads in each attention, so that a shared table of scores cannot shrink."""
    module = build_model(name)
    attention_nodes = dict(attentions(module.spec))
    heads = {
        address: some(attention)
        for number, (address, attention) in enumerate(attention_nodes.items())
        if number % 2 == 0
    }
    if any(is_normed_together(attention) for attention in attention_nodes.values()):
        with pytest.raises(InputError, match="normalized over all heads at once"):
            remove_heads(module, heads)
        return
    edited = check(module, heads)
    for address, numbers in heads.items():
        left = edited.get_submodule(address)
        assert left.spec.num_heads == attention_nodes[address].num_heads - len(numbers)
        assert left.query.weight.shape[0] == left.spec.num_heads * left.spec.head_size


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str) -> None:
    module = family(FAMILIES[name])
    attention_nodes = dict(attentions(module.spec))
    heads = {address: some(attention) for address, attention in attention_nodes.items() if some(attention)}
    if any(is_normed_together(attention) for attention in attention_nodes.values()):
        with pytest.raises(InputError, match="normalized over all heads at once"):
            remove_heads(module, heads)
    elif heads:
        check(module, heads)


def test_a_table_that_all_read_shrinks_where_all_lose_the_same_heads() -> None:
    module = build_model("decoder/post/buckets")
    edited = check(module, {address: [1, 4] for address, _ in attentions(module.spec)})
    assert edited.spec.decoder.score_table.num_heads == 4
    expected_table = module.decoder.score_table.weight[:, [0, 2, 3, 5]]
    assert torch.equal(edited.decoder.score_table.weight, expected_table)


def test_heads_leave_twice() -> None:
    for name in ("decoder/post/alibi", "decoder/post/buckets"):
        module = build_model(name)
        first = next(iter(dict(attentions(module.spec))))
        once = remove_heads(module, {first: [1]}).model
        twice = remove_heads(once, {first: [0]}).model
        assert difference(same_run(twice).hidden, same_run(silence(module, {first: [0, 1]})).hidden) <= SILENT


def test_as_many_of_each_group() -> None:
    """With six heads in two groups, any one head of each group can be removed."""
    check(build_model("decoder/pre-grouped/rotary"), {"decoder.layers.1.steps.0.branches.0.function": [1, 5]})


def test_a_layer_stands_for_its_attention() -> None:
    module = build_model("encoder/post/learned")
    whole = "encoder.layers.{}.steps.0.branches.0.function"
    edited = remove_heads(module, {"encoder.layers.*": [2]}).model
    expected = silence(module, {whole.format(number): [2] for number in range(3)})
    assert difference(same_run(edited).hidden, same_run(expected).hidden) <= SILENT


def test_what_removes_nothing_changes_nothing() -> None:
    module = build_model("encoder/post/learned")
    edited = remove_heads(module, {"encoder.layers.0": []})
    assert edited.model.spec == module.spec
    assert all(torch.equal(tensor, edited.model.state_dict()[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize(
    ("name", "heads", "words"),
    [
        ("encoder/post/learned", {"encoder.layers.0": [6]}, "there is no head 6; the 6 are numbered from 0"),
        ("encoder/post/learned", {"encoder.layers.0": range(6)}, "all 6 heads would be removed"),
        ("encoder/post/learned", {"encoder.layers.7": [0]}, "encoder.layers.7: no attention is there"),
        (
            "encoder/post/learned",
            {"encodr.layers.0": [0]},
            "addresses like encoder.layers.0.steps.0",
        ),
        ("decoder/pre-grouped/rotary", {"decoder.layers.0": [1]}, "3 heads share each key and value; of group 0"),
        ("encoder-decoder/post/learned", {"decoder.layers.0": [1]}, "has 2 of these: choose one of"),
        ("shared layers", {"decoder.layers.3": [1]}, "depth 3 runs decoder.layers.0, .* other depths run too"),
    ],
)
def test_heads_that_cannot_leave(name: str, heads: Mapping[str, Collection[int]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        remove_heads(build_model(name), heads)


def test_every_fault_is_in_one_report() -> None:
    with pytest.raises(InputError, match="2 faults") as error:
        remove_heads(tiny("encoder/post/learned"), {"encoder.layers.0": [6], "encoder.layers.1": [-1]})
    assert "head 6" in str(error.value) and "head -1" in str(error.value)


@pytest.mark.parametrize(
    "name", ["encoder/post/learned", "decoder/pre-grouped/rotary", "experts", "experts with biases"]
)
def test_the_output_is_that_of_silenced_neurons(name: str) -> None:
    module = build_model(name)
    side = "decoder" if module.decoder else "encoder"
    address = f"{side}.layers.1.steps.1.branches.0.function"
    edited = remove_neurons(module, {f"{side}.layers.1": [0, 17, 3]})
    masked = copy.deepcopy(module)
    down = masked.get_submodule(f"{address}.expert.down" if "experts" in name else f"{address}.down")
    with torch.no_grad():
        down.weight[..., [0, 17, 3]] = 0
    assert difference(same_run(edited.model).hidden, same_run(masked).hidden) <= SILENT
    assert difference(same_run(edited.model).hidden, same_run(module).hidden) > 1e-4
    with pytest.raises(InputError, match="all 19 neurons would be removed"):
        remove_neurons(module, {address: range(19)})
