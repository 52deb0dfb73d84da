"""Hook points: captured values are the computed ones, edits take effect, and points without a watcher cost nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead import surgery
from clearhead.base.errors import InputError
from clearhead.base.hooks import HookPoints, is_seen
from clearhead.core import Cache, MultiHeadAttention, Sequence, build
from clearhead.core.attention import Attention, MemoryAttention, attention_weights
from clearhead.core.kernels import attention as kernels
from clearhead.generate.continuation import GenerateRequest, RequestStarter
from clearhead.generate.options import SearchOptions
from clearhead.interpret.maps.hook_points import ActivationContext, addresses, capture, edit
from tests.generate.tiny import run_search
from tests.laws.hf_parts import HF_PARTS, hf_part
from tests.laws.tiny import MODELS, TARGET_VOCAB, Reader, difference, hparams, pad_rows, random_rows, resolve_spec, tiny

PAIR = "encoder-decoder/post/sinusoidal"
POINTS = ("queries", "keys", "values", "scores", "weights", "mixed")


def reader_and_batch(name: str) -> tuple[Reader, Tensor, Tensor]:
    reader = Reader.of(tiny(name) if "/" in name else hf_part(name), 5)
    return reader, *pad_rows(random_rows(reader.vocab), "left", 13)


class Operations(TorchDispatchMode):
    """Counts every operation that PyTorch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(call: Callable[[], object]) -> Counter[str]:
    with Operations() as mode:
        call()
    return mode.counts


def leave_unchanged(tensor: Tensor, at: ActivationContext) -> Tensor:
    return tensor


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_an_edit_that_returns_its_argument_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SHORT_ON_CPU", 1000)  # the eager kernel in both, for watched scores need it
    reader, ids, mask = reader_and_batch(name)
    expected = reader(ids, mask)
    with edit(reader.module, dict.fromkeys(addresses(reader.module), leave_unchanged)):
        actual = reader(ids, mask)
    assert torch.equal(actual.logits, expected.logits) and torch.equal(actual.hidden, expected.hidden)


@torch.no_grad()
@pytest.mark.parametrize("name", [*MODELS[::3], "shared layers with a memory", "disentangled", "sink on the memory"])
def test_captured_values_agree_with_each_other(name: str) -> None:
    """weights = softmax(scores), mixed = weights @ values, out(mixed) = the output of the module."""
    reader, ids, mask = reader_and_batch(name)
    module = reader.module
    with capture(module, "**") as seen:
        out = reader(ids, mask)
    stack = "encoder" if module.decoder is None else "decoder"
    assert torch.equal(seen.tensor("hidden"), out.hidden) and torch.equal(seen.tensor("logits"), out.logits)
    assert torch.equal(seen.tensor("head"), out.logits) and torch.equal(seen.tensor(stack), out.hidden)
    attentions = [(path, child) for path, child in module.named_modules() if isinstance(child, Attention)]
    watched = [(path, child) for path, child in attentions if seen[f"{path}.mixed"]]
    assert watched
    for path, child in watched:
        records = {point: [record.tensor for record in seen[f"{path}.{point}"]] for point in POINTS}
        for keys, values, queries, scores, weights, mixed, result in zip(
            *(records[point] for point in ("keys", "values", "queries", "scores", "weights", "mixed")),
            (record.tensor for record in seen[path]),
            strict=True,
        ):
            rows, groups = len(queries), child.spec.num_heads // child.spec.num_kv_heads
            assert scores.shape == weights.shape == (*queries.shape[:3], keys.shape[2])
            allowed = scores > float("-inf")
            torch.testing.assert_close(weights, attention_weights(scores, allowed, child.sink), atol=1e-6, rtol=1e-5)
            values = values.repeat_interleave(rows // len(values), 0).repeat_interleave(groups, 1)
            torch.testing.assert_close(mixed, weights.to(values.dtype) @ values, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(result, child.out(mixed.transpose(1, 2).flatten(2)), atol=1e-6, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", [PAIR, *MODELS[:2], "disentangled", "experts"])
def test_every_address_has_a_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an absent norm or projection, and also watched alone, where the fused kernel could run."""
    monkeypatch.setattr(kernels, "SHORT_ON_CPU", 0)
    module = tiny(name, qk_norm=False) if "/" in name else hf_part(name)
    ids = torch.randint(min(module.num_source_ids, module.num_target_ids), (2, 7))
    arguments = (ids, ids) if module.encoder is not None and module.decoder is not None else (ids,)
    known = addresses(module)
    assert any(address.endswith(".query_norm") for address in known)
    for patterns in ["**", *known]:
        with capture(module, patterns) as seen:
            module(*arguments)
        assert not [address for address, records in seen.items() if not records], patterns


def test_a_model_without_a_head_has_no_logits() -> None:
    module = build(resolve_spec(hparams("encoder/post/rotary")).model_copy(update={"head": None}))
    assert "hidden" in addresses(module) and "logits" not in addresses(module)


@torch.no_grad()
def test_the_residual_stream_is_continuous() -> None:
    module, ids = tiny("decoder/pre-grouped/rotary"), torch.randint(TARGET_VOCAB, (3, 7))
    with capture(module, ["**.before", "**.after", "decoder.embedded", "decoder.final_norm"]) as seen:
        module(ids)
    stream = seen.tensor("decoder.embedded")
    for layer in range(2):
        path = f"decoder.layers.{layer}"
        assert torch.equal(seen.tensor(f"{path}.before"), stream)
        for step in range(2):
            assert torch.equal(seen.tensor(f"{path}.steps.{step}.before"), stream)
            stream = seen.tensor(f"{path}.steps.{step}.after")
        assert torch.equal(seen.tensor(f"{path}.after"), stream)
    assert torch.equal(seen.tensor("decoder.final_norm"), module.decoder.final_norm(stream))


@torch.no_grad()
def test_shared_layers_leave_a_record_for_each_depth() -> None:
    module = hf_part("shared layers")
    (name, stack), *_ = ((n, s) for n, s in (("encoder", module.encoder), ("decoder", module.decoder)) if s)
    with capture(module, [f"{name}.layers.*.after", f"{name}.final_norm"]) as seen:
        module(torch.randint(module.num_source_ids, (2, 7)))
    for index in range(len(stack.layers)):
        depths = [depth for depth, layer in enumerate(stack.order) if layer == index]
        assert [record.depth for record in seen[f"{name}.layers.{index}.after"]] == depths
    assert len(stack.order) > len(stack.layers)


@torch.no_grad()
@pytest.mark.parametrize("name", ["decoder/pre-grouped/rotary", "decoder/post/alibi", PAIR])
def test_every_decoding_step_leaves_a_record(name: str) -> None:
    """With a cache only new keys are recorded, those of the memory once; the weights equal those without a cache."""
    reader, ids, _ = reader_and_batch(name)
    pattern = "decoder.**.weights"
    with capture(reader.module, pattern) as whole:
        reader(ids)
    cache = Cache()
    with capture(reader.module, [pattern, "decoder.**.keys", "logits"]) as steps:
        for position in range(4):
            reader(ids[:, position : position + 1], cache=cache)
    assert [record.step for record in steps["logits"]] == [0, 1, 2, 3]
    for path, child in reader.module.named_modules():
        if not (isinstance(child, Attention) and path.startswith("decoder")):
            continue
        keys = steps[f"{path}.keys"]
        assert [record.step for record in keys] == ([0] if isinstance(child, MemoryAttention) else [0, 1, 2, 3])
        expected = whole.tensor(f"{path}.weights")
        for record in steps[f"{path}.weights"]:
            assert record.depth == int(path.split(".")[2])
            actual, row = record.tensor[:, :, 0], expected[:, :, record.step]
            torch.testing.assert_close(actual, row[..., : actual.shape[-1]], atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_beams_are_recorded_row_by_row() -> None:
    """Beams of one sentence are folded into queries; a record separates them, as with a repeated memory."""
    module = tiny(PAIR)
    ids, beams = torch.randint(29, (2, 7)), torch.randint(TARGET_VOCAB, (6, 5))
    memory = module.encode(ids).memory
    with capture(module, "decoder.**.weights") as folded:
        module.decode(beams, memory)
    with capture(module, "decoder.**.weights") as repeated:
        module.decode(beams, memory.repeat_interleave(3, 0))
    for address in folded:
        assert len(folded.tensor(address)) == 6
        torch.testing.assert_close(folded.tensor(address), repeated.tensor(address), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_search_is_captured_and_edited() -> None:
    module, ids = tiny(PAIR), torch.randint(29, (2, 7))
    options = SearchOptions(beam_size=3, max_length=6)
    request = GenerateRequest([[1], [1]], options, eos_id=2, pad_id=0, banned=(1, 0), sources=ids.tolist())
    start = partial(RequestStarter(module, request, [6, 6], with_text=False).start, [0, 1])
    with capture(module, ["decoder.layers.0.**.weights", "logits"]) as seen:
        plain = run_search(module, start)
    assert [record.step for record in seen["logits"]] == list(range(len(seen["logits"])))
    with edit(module, {"logits": lambda logits, at: logits.index_fill(-1, torch.tensor([5]), 100.0)}):
        steered = run_search(module, start)
    assert all(set(generations[0].ids) <= {2, 5} for generations in steered), "5, and the end token at the limit"
    assert [generations[0].ids for generations in plain] != [generations[0].ids for generations in steered]


@torch.no_grad()
@pytest.mark.parametrize("name", ["encoder/post/learned", "decoder/pre-grouped/rotary", PAIR])
def test_a_head_set_to_zero_equals_a_removed_head(name: str) -> None:
    module = tiny(name, qk_norm=False)
    path, child = next((p, m) for p, m in module.named_modules() if isinstance(m, Attention))
    group = child.spec.num_heads // child.spec.num_kv_heads
    heads = list(range(group))  # a whole group, so that its key/value head goes as well
    without = surgery.remove_heads(module, {path: heads}).model
    reader = Reader.of(module, 5)
    ids, mask = pad_rows(random_rows(reader.vocab), "right", 11)
    source = (torch.randint(29, (5, 7)), ids) if reader.memory is not None else (ids,)
    options = {} if reader.memory is not None else {"mask": mask}

    def silence(mixed: Tensor, at: ActivationContext) -> Tensor:
        return mixed.index_fill(1, torch.tensor(heads), 0.0)

    with edit(module, {f"{path}.mixed": silence}):
        actual = module(*source, **options).logits
    expected = without(*source, **options).logits
    assert difference(actual, expected, None if reader.memory is not None else mask) <= 1e-6
    assert difference(module(*source, **options).logits, expected) > 1e-3


def test_gradients_flow_through_an_edit_in_training() -> None:
    module, ids = tiny("decoder/post/learned").train(), torch.randint(TARGET_VOCAB, (3, 7))
    factor = torch.ones((), requires_grad=True)
    with edit(module, {"decoder.layers.0.after": lambda x, at: x * factor}), capture(module, "hidden") as seen:
        module(ids).logits.square().sum().backward()
    assert factor.grad is not None and factor.grad.abs() > 0
    assert seen.tensor("hidden").requires_grad
    assert all(p.grad is not None for p in module.decoder.layers[0].parameters() if p.dim() > 1)


@torch.no_grad()
@pytest.mark.parametrize("name", [*MODELS, *list(HF_PARTS)[::5]])
def test_points_without_a_watcher_dispatch_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, ids, mask = reader_and_batch(name)
    reader(ids, mask)  # tables of positions grow at the first call
    plain_operations = operations(lambda: reader(ids, mask))
    with capture(reader.module, ["**.before", "hidden"]):
        assert operations(lambda: reader(ids, mask)) == plain_operations, (
            "what is captured as it is computed costs no operation"
        )
    assert operations(lambda: reader(ids, mask)) == plain_operations
    monkeypatch.setattr(HookPoints, "point", lambda self, name, x: x)
    assert operations(lambda: reader(ids, mask)) == plain_operations


@torch.no_grad()
@pytest.mark.parametrize(("pattern", "fused"), [("**.mixed", True), ("**.queries", True), ("**.weights", False)])
def test_the_fused_kernel_stays_where_its_inputs_and_outputs_are_watched(pattern: str, fused: bool) -> None:
    module = tiny("decoder/pre-grouped/rotary")
    ids = torch.randint(TARGET_VOCAB, (2, kernels.SHORT_ON_CPU + 3))
    with capture(module, pattern) as seen:
        counts = operations(lambda: module(ids))
    assert any("scaled_dot_product" in name or "flash" in name for name in counts) == fused
    assert all(len(records) == 1 for records in seen.values())


def test_blocks_nest_and_leave_nothing_behind() -> None:
    module, ids = tiny("decoder/post/learned"), torch.randint(TARGET_VOCAB, (2, 7))
    expected = module(ids).logits
    outer = capture(module, "**.mixed")
    with outer as first:
        with pytest.raises(RuntimeError, match="boom"), edit(module, {"**.mixed": lambda x, at: x * 0}):
            inner = module(ids).logits
            raise RuntimeError("boom")
        assert torch.equal(module(ids).logits, expected)
    assert [len(records) for records in first.values()] == [2, 2]
    assert (inner - expected).abs().max() > 1e-3
    assert torch.equal(module(ids).logits, expected)
    for child in module.modules():
        assert not child._forward_hooks and not child._forward_pre_hooks
        assert not is_seen(child)


def test_an_unknown_address_is_refused_with_the_nearest() -> None:
    module = tiny("decoder/post/learned")
    with (
        pytest.raises(InputError, match=r"did you mean 'decoder\.layers\.0\.after'"),
        capture(module, "decoder.layers.0.aftr"),
    ):
        pass
    with pytest.raises(InputError, match="must return a tensor of"), edit(module, {"hidden": lambda x, at: x[:, :1]}):
        module(torch.randint(TARGET_VOCAB, (2, 7)))
    with pytest.raises(InputError, match="got NoneType"), edit(module, {"hidden": lambda x, at: None}):
        module(torch.randint(TARGET_VOCAB, (2, 7)))


@torch.no_grad()
def test_parts_and_attention_alone_have_points_too() -> None:
    attention, x = MultiHeadAttention(14, 2).eval(), torch.randn(3, 5, 14)
    with capture(attention.attention, ["weights", "mixed"]) as seen:
        _, weights = attention(x, return_weights=True)
    assert torch.equal(seen.tensor("weights"), weights)
    stack = build(resolve_spec(hparams("encoder/post/rotary"))).eval().encoder
    with capture(stack, "layers.[0-9].after") as seen:
        stack(Sequence(torch.randint(29, (2, 7))))
    assert [record.depth for records in seen.values() for record in records] == [0, 1, 2]


def test_addresses_are_those_of_the_parameters() -> None:
    module = tiny(PAIR)
    known = addresses(module)
    assert len(known) == len(set(known))
    owners = {name.rpartition(".")[0] for name, _ in module.named_parameters()}
    assert owners <= set(known)
    assert {"hidden", "logits", "head", "encoder.embedded", "decoder.layers.1.steps.2.after"} <= set(known)
