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
from clearhead.apps.check.model.report import CheckOutcome
from clearhead.core import Transformer, attention, build, context
from clearhead.generate.search import beam
from clearhead.spec.presets.task_heads import label_head, with_head
from tests.laws.tiny import hparams, resolve_spec, tiny, with_mask

FIRST = "decoder.layers.0.steps.0.branches.0.function"


def draw(count: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (count,))


def flows(module: Transformer) -> Iterator[CheckOutcome | Finding]:
    with torch.no_grad():
        yield from check_flow(module.double(), draw, 64)


def invariances(module: Transformer) -> Iterator[CheckOutcome | Finding]:
    exact = build(module.spec).double().eval()
    exact.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
    yield from check_invariances(module, exact, draw)


def findings(results: Iterable[CheckOutcome | Finding]) -> list[Finding]:
    return [finding for finding in results if isinstance(finding, Finding)]


def the_first(results: Iterable[CheckOutcome | Finding]) -> Finding:
    return findings(results)[0]


def replace_mask(change: Callable[..., Tensor | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the masks of all attentions; `change` gets the arguments of the mask builder and the builder."""
    build_mask = context.Masking.build

    def wrong(masking: context.Masking, mask: spec.Mask, device: torch.device) -> Tensor | None:
        return change(masking, mask, device, build_mask)

    monkeypatch.setattr(context.Masking, "build", wrong)


def window(before: int) -> Transformer:
    model = resolve_spec(hparams("decoder/post/rotary"))
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
    replace_mask(change, monkeypatch)
    finding = the_first(flows(module))
    assert finding.where.endswith(".layers.0.steps.0.branches.0.function") and cause in finding.says


def test_padding_of_the_source_that_is_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny("encoder-decoder/post/sinusoidal")
    assert not findings(flows(module))
    monkeypatch.setattr(attention.MemoryAttention, "mask", lambda self, context: None)
    finding = the_first(flows(module))
    assert finding.where == "decoder" and "padding" in finding.says and "mask of the source" in finding.says


def test_rows_that_read_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention.Attention.attend

    def mix_rows(
        self: attention.Attention, query: Tensor, key: Tensor, value: Tensor, shared: context.Context
    ) -> Tensor:
        return attend(self, query, key, value + 0.1 * value.roll(1, 0), shared)

    monkeypatch.setattr(attention.Attention, "attend", mix_rows)
    finding = the_first(flows(tiny("decoder/post/learned")))
    assert finding.where == FIRST and "batch mates" in finding.says


@pytest.mark.parametrize(("position", "where"), [("learned", "decoder.embedded"), ("rotary", f"{FIRST}.queries")])
def test_positions_that_padding_shifts_are_named(position: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny(f"decoder/post/{position}")
    assert not findings(invariances(module))
    monkeypatch.setattr(context, "token_positions", lambda mask, documents, keys, device: torch.arange(keys)[None])
    by_name = {finding.says.partition(":")[0]: finding for finding in findings(invariances(module))}
    # Right padding shifts nothing, and rotations alone do not show in what is left of a uniform shift.
    assert "right padding = none" not in by_name
    shown = by_name["packed = separate" if position == "rotary" else "left padding = none"]
    assert shown.where == where and "positions" in shown.says


def test_a_cache_off_by_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    append = context.KeyValues.append

    def late(self: context.KeyValues, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = append(self, key, value)
        return keys, torch.cat([values[:, :, 1:], values[:, :, -1:]], 2) if keys.shape[2] > key.shape[2] else values

    monkeypatch.setattr(context.KeyValues, "append", late)
    faults = findings(invariances(tiny("decoder/post/learned")))
    assert faults and all("cache" in finding.says for finding in faults)
    assert faults[0].where == f"{FIRST}.mixed" and "keys and values" in faults[0].says


def test_a_beam_that_is_not_greedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny("decoder/post/learned")
    assert not findings(invariances(module))

    def second(chain: object, scores: Tensor, ids: Tensor) -> Tensor:
        return scores.scatter(1, scores.argmax(1, keepdim=True), -30.0)

    monkeypatch.setattr(beam, "only_banned", lambda *where: None)
    monkeypatch.setattr(beam, "apply", second)
    (finding,) = findings(invariances(module))
    assert finding.says.startswith(
        "beam 1 = greedy = no cache: beam search with one beam chooses another token at step 0"
    )


def test_a_fused_kernel_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny("decoder/post/rotary")
    fused = attention.fused_attention

    def scale_wrongly(*tensors: Any, scale: float, **options: Any) -> Tensor:
        return fused(*tensors, scale=scale * 1.5, **options)

    monkeypatch.setattr(attention, "fused_attention", scale_wrongly)
    faults = [finding for finding in findings(invariances(module)) if finding.says.startswith("fused = eager")]
    assert faults and faults[0].where == f"{FIRST}.mixed"


def healthy() -> Transformer:
    module = tiny("decoder/post/learned", tie="none")
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return module


def test_the_health_of_weights() -> None:
    def find_health_faults(change: Callable[[Transformer], None]) -> list[Finding]:
        module = healthy()
        with torch.no_grad():
            change(module)
            exact = build(module.spec).double().eval()
            exact.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
            numbers = list(health.check_numbers(module))
            return findings([*numbers, *health.check_health(module, exact, draw)])

    attention_of = f"{FIRST}".removeprefix("decoder.")
    find_attention = lambda module: module.decoder.get_submodule(attention_of)  # noqa: E731

    def dead(module: Transformer) -> None:
        find_attention(module).out.weight[:, 20:30] = 0.0

    def twins(module: Transformer) -> None:
        for linear in (find_attention(module).query, find_attention(module).key, find_attention(module).value):
            linear.weight[10:20] = linear.weight[40:50].clone()

    def collapse(module: Transformer) -> None:
        module.decoder.layers[1].steps[0].out.weight.zero_()

    def alike(module: Transformer) -> None:
        module.decoder.embedding.table.weight[[5, 9]] = module.decoder.embedding.table.weight[3].clone()

    def huge(module: Transformer) -> None:
        find_attention(module).value.bias[3] = 1e6

    def new_head(module: Transformer) -> None:
        torch.nn.init.normal_(module.head.layers[0].weight, std=0.02)
        module.head.layers[0].bias.zero_()

    assert not find_health_faults(lambda module: None)
    expected = {
        dead: (f"{FIRST}, head 2", "weights of out are zero"),
        twins: (f"{FIRST}, heads 1 and 4", "same weights"),
        collapse: ("decoder.layers.1.steps.0.out", "collapsed"),
        alike: ("decoder.embedding.table", "the ids 3, 5, 9"),
        huge: (f"{FIRST}.value.bias", "1e+06"),
        new_head: ("head.layers.0", "untrained"),
    }
    for change, (where, says) in expected.items():
        (finding,) = find_health_faults(change)
        assert finding.where == where and says in finding.says, change


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
    (finding,) = findings(health.check_health(module, module.double(), draw))
    assert finding.where == f"head.layers.{len(module.head.layers) - 1}" and "untrained" in finding.says


def test_weights_that_are_no_numbers_are_named() -> None:
    module = healthy()
    with torch.no_grad():
        module.decoder.layers[1].steps[1].branches[0].function.up.weight[3, 2] = float("nan")
    finding = the_first(health.check_numbers(module))
    assert finding.where == "decoder.layers.1.steps.1.branches.0.function.up.weight" and "[3, 2]" in finding.says
