"""Every planted defect is named with its address; the same experiment without it finds nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import spec
from clearhead.apps.check.handwritten.report import Finding
from clearhead.apps.check.model import health
from clearhead.apps.check.model.flow import check_flow
from clearhead.apps.check.model.invariances import check_invariances
from clearhead.apps.check.model.report import Outcome
from clearhead.core import Transformer, attention, build, context
from clearhead.generate.search import beam
from clearhead.spec.presets.task_heads import label_head, with_head
from tests.laws.tiny import hparams, resolved, tiny, with_mask

FIRST = "decoder.layers.0.steps.0.branches.0.function"


def draw(count: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (count,))


def flows(module: Transformer) -> Iterator[Outcome | Finding]:
    with torch.no_grad():
        yield from check_flow(module.double(), draw, 64)


def invariances(module: Transformer) -> Iterator[Outcome | Finding]:
    exact = build(module.spec).double().eval()
    exact.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
    yield from check_invariances(module, exact, draw)


def findings(found: Iterable[Outcome | Finding]) -> list[Finding]:
    return [one for one in found if isinstance(one, Finding)]


def the_first(found: Iterable[Outcome | Finding]) -> Finding:
    return findings(found)[0]


def masked(change: Callable[..., Tensor | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the mask that attentions are given; the change gets its arguments and the right one."""
    build_mask = context.Masking.build

    def wrong(masking: context.Masking, mask: spec.Mask, device: torch.device) -> Tensor | None:
        return change(masking, mask, device, build_mask)

    monkeypatch.setattr(context.Masking, "build", wrong)


def window(before: int) -> Transformer:
    model = resolved(hparams("decoder/post/rotary"))
    return build(with_mask(model, spec.Window(before=before, after=0), "decoder")).eval()


def off_by_one(masking: Any, mask: spec.Mask, device: torch.device, right: Any) -> Tensor | None:
    return right(masking, mask, device) | torch.ones(masking.num_keys, masking.num_keys).bool().triu(1).tril(1)


def too_narrow(masking: Any, mask: spec.Mask, device: torch.device, right: Any) -> Tensor:
    return right(masking, mask, device).triu(-3)


def without(**left_out: None) -> Callable[..., Tensor | None]:
    return lambda masking, mask, device, right: right(replace(masking, **left_out), mask, device)


MASKS: dict[str, tuple[Callable[..., Tensor | None], Callable[[], Transformer], str]] = {
    "one later": (off_by_one, lambda: tiny("decoder/post/learned"), "off by one"),
    "none": (lambda *_: None, lambda: tiny("decoder/post/rotary"), "no causal mask"),
    "hides too much": (too_narrow, lambda: tiny("decoder/post/alibi"), "hides more than is declared"),
    "padding": (without(key_mask=None), lambda: tiny("encoder/post/learned"), "padding is not masked"),
    "documents": (without(documents=None), lambda: tiny("decoder/post/alibi"), "documents are not masked"),
    "window": (
        lambda masking, mask, device, right: right(
            masking, mask.model_copy(update={"before": mask.before + 1}), device
        ),
        lambda: window(3),
        "the window is one token too wide",
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_wrong_mask_is_named_with_its_cause(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, make, cause = MASKS[name]
    module = make()
    assert not findings(flows(module)), "the model is right without the defect"
    masked(change, monkeypatch)
    found = the_first(flows(module))
    assert found.where.endswith(".layers.0.steps.0.branches.0.function") and cause in found.says


def test_padding_of_the_source_that_is_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny("encoder-decoder/post/sinusoidal")
    assert not findings(flows(module))
    monkeypatch.setattr(attention.MemoryAttention, "mask", lambda self, context: None)
    found = the_first(flows(module))
    assert found.where == "decoder" and "padding" in found.says and "mask of the source" in found.says


def test_rows_that_read_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention.Attention.attend

    def mixed(self: attention.Attention, query: Tensor, key: Tensor, value: Tensor, shared: context.Context) -> Tensor:
        return attend(self, query, key, value + 0.1 * value.roll(1, 0), shared)

    monkeypatch.setattr(attention.Attention, "attend", mixed)
    found = the_first(flows(tiny("decoder/post/learned")))
    assert found.where == FIRST and "batch mates" in found.says


@pytest.mark.parametrize(("place", "where"), [("learned", "decoder.embedded"), ("rotary", f"{FIRST}.queries")])
def test_positions_that_padding_shifts_are_named(place: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny(f"decoder/post/{place}")
    assert not findings(invariances(module))
    monkeypatch.setattr(context, "token_positions", lambda mask, documents, keys, device: torch.arange(keys)[None])
    by_name = {one.says.partition(":")[0]: one for one in findings(invariances(module))}
    # Right padding shifts nothing, and rotations alone do not show in what is left of a uniform shift.
    assert "right padding = none" not in by_name
    shown = by_name["packed = separate" if place == "rotary" else "left padding = none"]
    assert shown.where == where and "positions" in shown.says


def test_a_cache_off_by_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    append = context.KeyValues.append

    def late(self: context.KeyValues, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = append(self, key, value)
        return keys, torch.cat([values[:, :, 1:], values[:, :, -1:]], 2) if keys.shape[2] > key.shape[2] else values

    monkeypatch.setattr(context.KeyValues, "append", late)
    found = findings(invariances(tiny("decoder/post/learned")))
    assert found and all("cache" in one.says for one in found)
    assert found[0].where == f"{FIRST}.mixed" and "keys and values" in found[0].says


def test_a_beam_that_is_not_greedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny("decoder/post/learned")
    assert not findings(invariances(module))

    def second(chain: object, scores: Tensor, ids: Tensor) -> Tensor:
        return scores.scatter(1, scores.argmax(1, keepdim=True), -30.0)

    monkeypatch.setattr(beam, "only_banned", lambda *where: None)
    monkeypatch.setattr(beam, "apply", second)
    (found,) = findings(invariances(module))
    assert found.says.startswith(
        "beam 1 = greedy = no cache: beam search with one beam chooses another token at step 0"
    )


def test_a_fused_kernel_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny("decoder/post/rotary")
    fused = attention.fused_attention

    def unscaled(*tensors: Any, scale: float, **options: Any) -> Tensor:
        return fused(*tensors, scale=scale * 1.5, **options)

    monkeypatch.setattr(attention, "fused_attention", unscaled)
    found = [one for one in findings(invariances(module)) if one.says.startswith("fused = eager")]
    assert found and found[0].where == f"{FIRST}.mixed"


def healthy() -> Transformer:
    module = tiny("decoder/post/learned", tie="none")
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return module


def test_the_health_of_weights() -> None:
    def found(change: Callable[[Transformer], None]) -> list[Finding]:
        module = healthy()
        with torch.no_grad():
            change(module)
            exact = build(module.spec).double().eval()
            exact.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
            numbers = list(health.check_numbers(module))
            return findings([*numbers, *health.check_health(module, exact, draw)])

    attention_of = f"{FIRST}".removeprefix("decoder.")
    part = lambda module: module.decoder.get_submodule(attention_of)  # noqa: E731

    def dead(module: Transformer) -> None:
        part(module).out.weight[:, 20:30] = 0.0

    def twins(module: Transformer) -> None:
        for linear in (part(module).query, part(module).key, part(module).value):
            linear.weight[10:20] = linear.weight[40:50].clone()

    def collapsed(module: Transformer) -> None:
        module.decoder.layers[1].steps[0].out.weight.zero_()

    def alike(module: Transformer) -> None:
        module.decoder.embedding.table.weight[[5, 9]] = module.decoder.embedding.table.weight[3].clone()

    def huge(module: Transformer) -> None:
        part(module).value.bias[3] = 1e6

    def new_head(module: Transformer) -> None:
        torch.nn.init.normal_(module.head.layers[0].weight, std=0.02)
        module.head.layers[0].bias.zero_()

    assert not found(lambda module: None)
    expected = {
        dead: (f"{FIRST}, head 2", "weights of out are zero"),
        twins: (f"{FIRST}, heads 1 and 4", "same weights"),
        collapsed: ("decoder.layers.1.steps.0.out", "collapsed"),
        alike: ("decoder.embedding.table", "the ids 3, 5, 9"),
        huge: (f"{FIRST}.value.bias", "1e+06"),
        new_head: ("head.layers.0", "untrained"),
    }
    for change, (where, says) in expected.items():
        (one,) = found(change)
        assert one.where == where and says in one.says, change


def test_a_new_output_behind_a_trained_pooler_is_untrained() -> None:
    model = healthy().spec
    module = build(with_head(model, label_head(model.decoder.width, 2, pool="last")))
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    assert not findings(health.check_health(module, module.double(), draw))
    with torch.no_grad():
        torch.nn.init.normal_(module.head.layers[-1].weight, std=0.02)
        module.head.layers[-1].bias.zero_()
    (one,) = findings(health.check_health(module, module.double(), draw))
    assert one.where == f"head.layers.{len(module.head.layers) - 1}" and "untrained" in one.says


def test_weights_that_are_no_numbers_are_named() -> None:
    module = healthy()
    with torch.no_grad():
        module.decoder.layers[1].steps[1].branches[0].function.up.weight[3, 2] = float("nan")
    found = the_first(health.check_numbers(module))
    assert found.where == "decoder.layers.1.steps.1.branches.0.function.up.weight" and "[3, 2]" in found.says
