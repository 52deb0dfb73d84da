"""The layers of a stack in one compiled call, compared with the modules of the core token by token."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from clearhead import presets, spec
from clearhead.core import Transformer, build
from clearhead.core.embedding import Embedding, Table
from clearhead.core.kernels.key_values import KeyValues
from clearhead.fast import kernel_arguments
from clearhead.fast import stack as compiled
from clearhead.fast.cache import IndexedCache
from clearhead.fast.runner import Runner
from clearhead.fast.stored import BF16, FP16, INT4, INT8, choose_int4, store, stored_matrices
from clearhead.spec.presets.hyperparameters import build_spec
from clearhead.spec.presets.named import PRESETS

VOCABULARY = 60
Attend = dict[str, object]


def decoder(attention: Attend | None = None, feed_forward: Attend | None = None, **of_step: object) -> spec.Model:
    """A small decoder whose attentions, feed-forward networks and steps have the given fields."""
    model = presets.llama_tiny(VOCABULARY, layers=2)
    changes = {spec.Attention: attention or {}, spec.FeedForward: feed_forward or {}, spec.Step: of_step}
    return spec.map_nodes(model, lambda _, node: node.model_copy(update=changes.get(type(node), {})))


def parallel() -> spec.Model:
    """Put both functions of a layer into one step, with a shared norm."""
    model = presets.llama_tiny(VOCABULARY, layers=2)
    assert model.decoder is not None

    def join_branches(layer: spec.Layer) -> spec.Layer:
        branches = tuple(branch for step in layer.steps for branch in step.branches)
        branch_copies = tuple(branch.model_copy(update={"pre": None, "scale": 0.5}) for branch in branches)
        return spec.Layer(steps=(spec.Step(pre=spec.LayerNorm(), branches=branch_copies, out=spec.RMSNorm()),))

    layers = tuple(join_branches(layer) for layer in model.decoder.layers)
    return model.model_copy(update={"decoder": model.decoder.model_copy(update={"layers": layers})})


MODELS: dict[str, Callable[[], spec.Model]] = {
    "rotary, grouped heads, gate": decoder,
    "ALiBi": lambda: decoder({"position": None, "score_bias": spec.Alibi()}),
    "window": lambda: decoder({"mask": spec.Window(before=3, after=0)}),
    "soft cap and sink": lambda: decoder({"soft_cap": 0.5, "sink": True}),
    "norms of queries and keys": lambda: decoder({"query_key_norm": spec.QueryKeyNorm(norm=spec.RMSNorm())}),
    "norms after the rotation": lambda: decoder(
        {"query_key_norm": spec.QueryKeyNorm(norm=spec.RMSNorm(unit_offset=True), after_rotation=True)}
    ),
    "part of a head rotated": lambda: decoder({"position": spec.Rotary(size=4)}),
    "quick GELU, no gate": lambda: decoder(feed_forward={"activation": "quick_gelu", "gated": False}),
    "squared ReLU": lambda: decoder(feed_forward={"activation": "relu2", "size": 37}),
    "GELU by tanh": lambda: decoder(feed_forward={"activation": "gelu_tanh"}),
    "parallel branches": parallel,
}


def small(model: spec.Model, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    module = build(model).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def preset(name: str) -> Transformer:
    """A model from the literature, with two narrow layers."""
    hparams = replace(PRESETS[name], layers=2, width=64, heads=4, head_size=16, feedforward=128)
    return small(build_spec(hparams, source_vocab=VOCABULARY, target_vocab=VOCABULARY))


Model = Transformer | Runner


def plain(model: Model) -> Transformer:
    return model.module if isinstance(model, Runner) else model


def fast(model: Model) -> Transformer:
    return (model if isinstance(model, Runner) else Runner(model)).tree()


def decode(model: Model, *, is_fast: bool, several: bool = False) -> Tensor:
    """Return the logits of twelve steps for padded prompts, while rows are reordered, doubled and dropped."""
    module = fast(model) if is_fast else plain(model)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(VOCABULARY, (3, 4), generator=generator)
    mask = torch.tensor([[True] * 4, [False, True, True, True], [True] * 4])
    cache, all_logits = IndexedCache(), []
    memory = memory_mask = None
    with torch.inference_mode():
        if module.encoder is not None:
            memory = module.encode(prompts, mask=mask).memory
            memory_mask, mask = mask, torch.ones(3, 4, dtype=torch.bool)
        start = module.decode(prompts, memory, memory_mask=memory_mask, target_mask=mask, cache=cache).logits
        assert start is not None
        all_logits.append(start[:, -1])
        order = {2: [0, 0, 1, 1, 2, 2], 4: [1, 0, 3, 3, 5, 4], 5: [0, 0, 2, 3, 5, 5], 7: [1, 0, 5, 4]}
        sentences = {7: [0, 2]}
        rows = 3
        for step in range(1, 13):
            if step in order:
                remaining = torch.tensor(sentences[step]) if step in sentences and memory is not None else None
                cache.select(torch.tensor(order[step]), remaining)
                rows = len(order[step])
            count = 2 if several and step in (6, 9) else 1
            tokens = torch.randint(VOCABULARY, (rows, count), generator=generator)
            logits = module.decode(tokens, cache=cache).logits
            assert logits is not None
            all_logits.append(logits[:, -1].float())
    return torch.cat(all_logits)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that the compiled layers computed."""
    calls: list[str] = []
    for name in ("extend", "read"):
        plain_method = getattr(compiled.StackPlan, name)
        monkeypatch.setattr(
            compiled.StackPlan,
            name,
            lambda *arguments, plain_method=plain_method, name=name: (calls.append(name), plain_method(*arguments))[1],
        )
    return calls


def check(module: Model, served: list[str], *, several: bool = False) -> None:
    expected = decode(module, is_fast=False, several=several)
    assert not served
    actual = decode(module, is_fast=True, several=several)
    assert served.count("extend") == (11 if several else 13)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_the_modules(name: str, served: list[str]) -> None:
    check(small(MODELS[name]()), served)


@pytest.mark.parametrize("name", ["gpt2", "transformer", "t5-small"])
def test_steps_of_models_with_positions_memory_or_biases_by_distance(name: str, served: list[str]) -> None:
    check(preset(name), served)


@pytest.mark.parametrize("name", ["llama-tiny", "transformer"])
def test_plain_calls_between_compiled_ones_find_keys_in_order(
    name: str, served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_serves = compiled.StackPlan.serves
    monkeypatch.setattr(
        compiled.StackPlan, "serves", lambda *arguments: arguments[-1] != 2 and plain_serves(*arguments)
    )
    check(preset(name), served, several=True)


def test_steps_are_the_same_on_other_processors(kernels: ctypes.CDLL, served: list[str]) -> None:
    check(small(decoder()), served)
    served.clear()
    check(preset("transformer"), served)


def test_steps_with_weights_that_lie_the_other_way_round(kernels: ctypes.CDLL, served: list[str]) -> None:
    module = preset("gpt2")
    for submodule in module.modules():
        if isinstance(submodule, torch.nn.Linear):
            # Slices of a wider matrix, like queries, keys and values in GPT-2's files.
            wide = torch.cat([submodule.weight, submodule.weight]).t().contiguous()
            submodule.weight.data = wide[:, : len(submodule.weight)].t()
    check(module, served)


def rounded_copy(module: Transformer, weights: str) -> Runner:
    rounded = copy.deepcopy(module)
    if weights == "int8":
        return Runner(store(rounded, INT8))
    if weights == "int4":
        # Queries are in 8 bits too.
        formats = choose_int4(rounded)
        eighths = [address for address, kind in formats.items() if kind == INT4 and address.endswith("query")]
        return Runner(store(rounded, formats | dict.fromkeys(eighths, INT8)))
    return Runner(rounded.bfloat16() if weights == "bf16" else rounded, in_bf16=weights == "mixed")


@pytest.fixture
def by_layers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Runner, Callable[[Runner], Tensor]], Tensor]:
    """Compute with compiled linear layers, without the compiled stack."""

    def refuse(*_: object, **__: object) -> None:
        raise compiled.NotServed("the test asks for linear layers")

    def run(runner: Runner, compute: Callable[[Runner], Tensor]) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(compiled.StackPlan, "__init__", refuse)
            other = Runner(runner.module, in_bf16=runner.in_bf16)
            assert {entry.backend for entry in other.report() if "layers" in entry.address} == {"kernels"}
            return compute(other)

    return run


@pytest.mark.parametrize("weights", ["mixed", "int8", "int4", "bf16"])
def test_rounded_steps_differ_as_little_as_rounded_layers(
    kernels: ctypes.CDLL, weights: str, by_layers: Callable[..., Tensor], served: list[str]
) -> None:
    for exact in (small(decoder(feed_forward={"size": 192})), preset("transformer")):
        expected, rounded = decode(exact, is_fast=False), rounded_copy(exact, weights)
        served.clear()
        actual = decode(rounded, is_fast=True)
        assert "extend" in served
        beside = by_layers(rounded, lambda module: decode(module, is_fast=True))
        assert not torch.equal(actual, expected)
        assert (actual - expected).norm() <= 1.3 * (beside - expected).norm()


def test_layers_in_fp16_have_the_bits_of_the_same_layers_in_bf16(kernels: ctypes.CDLL, served: list[str]) -> None:
    for module in (small(decoder(feed_forward={"size": 192})), preset("transformer")):
        # Embeddings are not rounded, so their numbers must be the same in both dtypes.
        tables = [submodule for submodule in module.modules() if isinstance(submodule, Table)]
        for table in tables:
            table.weight.data = table.weight.bfloat16().half().bfloat16().float()
        half = store(module, FP16)
        formats = {address: BF16 if address.endswith(("query", "out")) else FP16 for address in stored_matrices(half)}
        rounded = store(copy.deepcopy(half), BF16)
        mixture = store(copy.deepcopy(half), formats)
        served.clear()
        expected, *others = (decode(Runner(other, in_bf16=True), is_fast=True) for other in (rounded, half, mixture))
        assert served.count("extend") == 3 * 13
        assert all(torch.equal(actual, expected) for actual in others)


@pytest.mark.parametrize("weights", ["mixed", "int8"])
def test_texts_are_read_without_their_padding(
    kernels: ctypes.CDLL, weights: str, by_layers: Callable[..., Tensor], served: list[str]
) -> None:
    exact = preset("bert")
    # Enough texts for several per thread, and fewer than threads.
    ids, mask = torch.randint(VOCABULARY, (40, 20)), torch.ones(40, 20, dtype=torch.bool)
    mask[1, 15:], mask[2, :7] = False, False

    def read(model: Model) -> Tensor:
        with torch.inference_mode():
            return fast(model).encode(ids, mask=mask).hidden

    expected, rounded = read(exact), rounded_copy(exact, weights)
    served.clear()
    actual = read(rounded)
    with torch.inference_mode():
        alone, whole = (fast(rounded).encode(chunk).hidden for chunk in (ids[1:2, :15], ids[:1]))
    assert served == ["read"] * 3
    assert actual[~mask].abs().max() == 0
    for states, there in ((alone, actual[1:2, :15]), (whole, actual[:1])):
        torch.testing.assert_close(states, there, rtol=1e-4, atol=1e-4)
    beside = by_layers(rounded, read)
    assert (actual - expected)[mask].norm() <= 1.3 * (beside - expected)[mask].norm()


@pytest.mark.parametrize("has_padding", [True, False])
def test_segments_and_given_positions_of_whole_texts(has_padding: bool, served: list[str]) -> None:
    rounded = rounded_copy(preset("bert"), "mixed")
    assert rounded.module.encoder is not None and rounded.module.encoder.embedding.segments is not None
    ids, positions = torch.randint(VOCABULARY, (5, 11)), torch.randint(13, (5, 11))
    segments, mask = torch.randint(2, (5, 11)), torch.ones(5, 11, dtype=torch.bool)
    mask[2, 7:] = not has_padding

    def read(text: slice, tokens: slice, mask: Tensor | None) -> Tensor:
        selected = (x[text, tokens] for x in (ids, segments, positions))
        with torch.inference_mode():
            return (
                fast(rounded)
                .encode(next(selected), segments=next(selected), positions=next(selected), mask=mask)
                .hidden
            )

    actual = read(slice(None), slice(None), mask if has_padding else None)
    for text in range(5):
        count = int(mask[text].sum())
        alone = read(slice(text, text + 1), slice(count), None)
        torch.testing.assert_close(actual[text : text + 1, :count], alone, rtol=1e-4, atol=1e-4)
    assert served == ["read"] * 6
    others = rounded.module.encode(ids, segments=1 - segments, positions=positions).hidden
    assert (others - actual)[mask].norm() > 0.1 * actual.norm()


def test_padding_is_not_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, plain = [], Embedding.forward

    def count_calls(self: Embedding, ids_BT: Tensor, *arguments: object) -> Tensor:
        counts.append(ids_BT.numel())
        return plain(self, ids_BT, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Embedding, "forward", count_calls)
    ids, mask = torch.randint(VOCABULARY, (3, 7)), torch.arange(7) < torch.tensor([[7], [2], [5]])
    module = fast(rounded_copy(preset("bert"), "int8"))
    with torch.inference_mode():
        module.encode(ids, mask=mask)
        module.encode(ids)
    assert counts == [14, 21]


def test_vectors_of_the_caller_stay_as_they_are() -> None:
    runner = rounded_copy(small(decoder()), "mixed")
    ids, vectors = torch.zeros(3, 5, dtype=torch.int64), torch.randn(3, 5, 64)
    with torch.inference_mode():
        copied = vectors.clone()
        expected, actual = (module(ids, embeddings=copied).hidden for module in (runner.module, runner.tree()))
    assert torch.equal(copied, vectors)
    assert (actual - expected).norm() <= 0.05 * expected.norm()


def run_prompt(model: Model, *, has_padding: bool, is_fast: bool = True) -> Tensor:
    """Return the logits of a prompt that is read in three calls, the last with one token."""
    module = fast(model) if is_fast else plain(model)
    generator = torch.Generator().manual_seed(2)
    prompts, mask = torch.randint(VOCABULARY, (5, 70), generator=generator), torch.ones(5, 70, dtype=torch.bool)
    if has_padding:
        mask[1, :9], mask[3, :50] = False, False
    cache, all_logits = IndexedCache(), []
    with torch.inference_mode():
        for span in (slice(0, 43), slice(43, 69), slice(69, 70)):
            of_part = mask[:, span] if has_padding else None
            logits = module.decode(prompts[:, span], target_mask=of_part, cache=cache).logits
            assert logits is not None
            all_logits.append(logits[mask[:, span]].float())
    return torch.cat(all_logits)


PROMPTED = {
    "heads of 48 numbers": lambda: decoder({"head_size": 48}),
    "heads of 22 numbers": lambda: decoder({"head_size": 22}),
    "window": MODELS["window"],
    "soft cap and sink": MODELS["soft cap and sink"],
    "norms after the rotation": MODELS["norms after the rotation"],
}


@pytest.mark.parametrize("weights", ["mixed", "int8", "bf16"])
@pytest.mark.parametrize("name", [*PROMPTED, "gpt2"])
def test_prompts_are_read_in_pieces(
    kernels: ctypes.CDLL,
    name: str,
    weights: str,
    by_layers: Callable[..., Tensor],
    served: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = small(PROMPTED[name]()) if name in PROMPTED else preset(name)
    rounded = rounded_copy(exact, weights)
    for piece_tokens, has_padding in ((30, False), (100, True)):
        monkeypatch.setattr(kernel_arguments, "CHUNK_TOKENS", piece_tokens)
        expected = run_prompt(exact, has_padding=has_padding, is_fast=False)
        served.clear()
        actual = run_prompt(rounded, has_padding=has_padding)
        # If a row of the first call is only padding, the plain modules count distances.
        assert served == ["extend"] * (2 if has_padding and name == "window" else 3)
        beside = by_layers(rounded, lambda module, padding=has_padding: run_prompt(module, has_padding=padding))
        assert (actual - expected).norm() <= 1.3 * (beside - expected).norm()


def in_8_bits(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.mark.parametrize("name", ["grouped heads", "soft cap and sink", "ALiBi", "gpt2"])
def test_keys_in_8_bits_are_those_of_the_modules_rounded(
    kernels: ctypes.CDLL, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with a cache of the modules that rounds its keys and values where compiled layers read them."""
    append = KeyValues.append

    def round_and_append(self: KeyValues, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        appended = append(self, key, value)
        for tensor in appended:
            tensor.copy_(in_8_bits(tensor))
        return appended

    models = {"grouped heads": decoder, **MODELS}
    module = small(models[name]()) if name in models else preset(name)
    exact = decode(module, is_fast=False, several=True)
    with monkeypatch.context() as patch:
        patch.setitem(compiled.CACHE_DTYPES, "float32", torch.int8)  # fp32 rows, which are not rounded
        actual = decode(module, is_fast=True, several=True)
    monkeypatch.setattr(KeyValues, "append", round_and_append)
    expected = decode(module, is_fast=False, several=True)
    assert 0 < (actual - expected).norm() <= 0.1 * (exact - expected).norm()


@pytest.mark.parametrize("weights", ["mixed", "int8"])
def test_long_prompts_are_read_in_parts(
    kernels: ctypes.CDLL, weights: str, by_layers: Callable[..., Tensor], served: list[str]
) -> None:
    """Each thread takes some of the many rows, and parts of one prompt see each other's keys."""
    ids, mask = torch.randint(VOCABULARY, (2, 300)), torch.ones(2, 300, dtype=torch.bool)
    mask[1, :45] = False

    def read(model: Model) -> Tensor:
        module, cache, all_logits = fast(model), IndexedCache(), []
        with torch.inference_mode():
            for span in (slice(0, 280), slice(280, 300)):
                logits = module.decode(ids[:, span], target_mask=mask[:, span], cache=cache).logits
                assert logits is not None
                all_logits.append(logits[mask[:, span]].float())
        return torch.cat(all_logits)

    exact = small(decoder(feed_forward={"size": 192}))
    expected, rounded = read(exact), rounded_copy(exact, weights)
    served.clear()
    actual = read(rounded)
    assert served == ["extend"] * 2
    assert (actual - expected).norm() <= 1.3 * (by_layers(rounded, read) - expected).norm()


def test_long_texts_are_read_with_their_masks(by_layers: Callable[..., Tensor], served: list[str]) -> None:
    ids, mask = torch.randint(VOCABULARY, (3, 300)), torch.ones(3, 300, dtype=torch.bool)
    mask[1, 40:], mask[2, 290:] = False, False

    def read(model: Model) -> Tensor:
        with torch.inference_mode():
            return fast(model)(ids, mask=mask).hidden[mask].float()

    for model in (decoder(), decoder({"mask": spec.Window(before=20, after=0)}), decoder({"mask": spec.Full()})):
        exact = small(model)
        expected, rounded = read(exact), rounded_copy(exact, "mixed")
        served.clear()
        actual = read(rounded)
        assert served == ["read"]
        assert (actual - expected).norm() <= 1.3 * (by_layers(rounded, read) - expected).norm()


def test_changed_weights_are_seen_and_copies_have_their_own(served: list[str]) -> None:
    runner = Runner(small(decoder()))
    decode(runner, is_fast=True)
    other = copy.deepcopy(runner)
    for parameter in other.module.parameters():
        parameter.mul_(1.5)
    served.clear()
    check(other, served)
    served.clear()
    check(runner, served)
    runner.module.decoder.layers[0].steps[1].branches[0].function.up = torch.nn.Linear(64, 172, bias=False)  # type: ignore[union-attr]
    runner.module.requires_grad_(False)
    served.clear()
    check(runner, served)


def test_other_layers_masks_and_long_texts_take_the_plain_way(served: list[str]) -> None:
    experts = spec.MixtureOfExperts(count=2, top_k=1, expert=spec.FeedForward(size=8))
    model = spec.map_nodes(
        decoder(),
        lambda _, node: (
            node.model_copy(update={"function": experts})
            if isinstance(node, spec.Branch) and isinstance(node.function, spec.FeedForward)
            else node
        ),
    )
    for module in (small(model), small(decoder({"clip": 0.5}))):
        torch.testing.assert_close(decode(module, is_fast=True), decode(module, is_fast=False))
    assert not served
