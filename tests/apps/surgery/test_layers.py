"""Selected layers in any order: the new stack computes the same as the old layers in this order."""

from __future__ import annotations

import copy

import pytest
import torch

from clearhead import spec
from clearhead.apps.surgery import keep_layers
from clearhead.base.errors import InputError
from clearhead.core import Transformer, build
from tests.apps.surgery.models import BOTH, FAMILIES, build_model, family, same_run
from tests.laws.tiny import hparams, resolve_spec, tiny


def stacks(module: Transformer) -> list[str]:
    return [name for name in ("encoder", "decoder") if getattr(module, name) is not None]


def check(module: Transformer, stack: str, order: list[int]) -> Transformer:
    edited = keep_layers(module, order, stack=stack).model
    expected = copy.deepcopy(module)
    running = getattr(expected, stack)
    running.order = tuple(running.order[depth] for depth in order)
    output, wanted = same_run(edited), same_run(expected)
    assert torch.equal(output.hidden, wanted.hidden)
    assert output.logits is None or torch.equal(output.logits, wanted.logits)
    return edited


@pytest.mark.parametrize("name", [*BOTH, "shared layers", "shared layers with a memory", "own buckets", "disentangled"])
def test_the_layers_run_in_the_order_given(name: str) -> None:
    module = build_model(name)
    for stack in stacks(module):
        last = len(getattr(module.spec, stack).depths) - 1
        check(module, stack, [last, 0, last])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str) -> None:
    module = family(FAMILIES[name])
    for stack in stacks(module):
        last = len(getattr(module.spec, stack).depths) - 1
        check(module, stack, [last, 0])


def test_layers_that_share_weights_still_do() -> None:
    module = build_model("shared layers")
    edited = keep_layers(module, [1, 4, 2, 1])
    assert module.spec.decoder.sharing == (0, 1, 1, 0, 1)
    assert len(edited.model.spec.decoder.layers) == 1
    assert edited.model.spec.decoder.sharing == (0, 0, 0, 0)
    assert all(".layers.0." in address for address in edited.report.dropped)


def test_the_report_says_where_each_layer_came_from() -> None:
    report = keep_layers(tiny("encoder/post/learned"), [2, 0]).report
    address = "encoder.layers.{}.steps.1.branches.0.function.up.weight"
    assert report.copied[address.format(0)] == address.format(2)
    assert report.copied[address.format(1)] == address.format(0)
    assert not report.new and not report.changed
    assert set(report.dropped) == {a for a in report.dropped if a.startswith("encoder.layers.1.")} != set()
    assert "dropped: 16 tensors" in str(report)


def build_shared_bias() -> Transformer:
    """Return a stack whose first layer owns the table of scores of the others."""
    model = resolve_spec(hparams("decoder/post/buckets"))
    first, second = model.decoder.layers
    path = "decoder.layers.0.steps.0.branches.0.function.score_bias"
    table, tied = model.decoder.score_table, spec.Reference(path=path)

    def owning(layer: spec.Layer, bias: spec.ScoreBias) -> spec.Layer:
        branch = layer.steps[0].branches[0]
        function = branch.function.model_copy(update={"score_bias": bias})
        step = layer.steps[0].model_copy(update={"branches": (branch.model_copy(update={"function": function}),)})
        return layer.model_copy(update={"steps": (step, *layer.steps[1:])})

    layers = (owning(first, table), owning(second, tied), owning(second, tied))
    return build(
        model.model_copy(update={"decoder": model.decoder.model_copy(update={"layers": layers, "score_table": None})})
    ).eval()


@pytest.mark.parametrize("order", [[1, 2], [2], [2, 0, 1], [0, 0]])
def test_a_table_that_layers_share_has_one_owner_still(order: list[int]) -> None:
    edited = check(build_shared_bias(), "decoder", order)
    assert sum("score_bias.weight" in address for address in edited.state_dict()) == 1


def test_the_old_model_and_the_new_one_share_no_memory() -> None:
    module = tiny("decoder/post/alibi")
    edited = keep_layers(module, [0]).model
    with torch.no_grad():
        for parameter in edited.parameters():
            parameter.zero_()
    assert same_run(module).logits.abs().max() > 0


def test_dtype_and_mode_stay() -> None:
    edited = keep_layers(tiny("decoder/post/alibi").bfloat16().train(), [0]).model
    assert edited.training and next(edited.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("layers", "stack", "words"),
    [
        ([0, 3], "encoder", "the encoder has no layer 3; its 3 layers are numbered from 0"),
        ([-1], "encoder", "no layer -1"),
        ([], "decoder", "no layer of the decoder would be left"),
        ([0], None, "two stacks: choose whose layers"),
    ],
)
def test_layers_that_are_not_there(layers: list[int], stack: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        keep_layers(tiny("encoder-decoder/post/learned"), layers, stack=stack)


def test_a_stack_that_is_not_there() -> None:
    with pytest.raises(InputError, match="no stack 'decoder'; it has encoder"):
        keep_layers(tiny("encoder/post/learned"), [0], stack="decoder")


def test_a_module_that_was_changed_by_hand_is_refused() -> None:
    module = tiny("decoder/post/alibi")
    module.decoder.extra = torch.nn.Linear(3, 5)
    with pytest.raises(InputError, match="tensors of the module do not match its spec"):
        keep_layers(module, [0])
