"""Several callers of one model do not see, slow down or change each other, and kernels serve them all.

A caller is a suspended stream, a block of `capture` or `edit`, or a thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.core.stack import Stack
from clearhead.fast.native import load as native
from clearhead.fast.native.options import TRAINING
from clearhead.fast.runner import Runner
from clearhead.fast.stack import PlannedStack
from clearhead.fast.stored import INT8, store
from tests import hf_models

PRECISIONS = ("fp32", "bf16 products", "int8")
TEXTS = ["the cat", "a dog sat on the mat", "the"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"decoder": hf_models.language_model(folder / "lm"), "two stacks": hf_models.translator(folder / "mt")}


def load(folders: dict[str, Path], name: str, precision: str) -> ch.Model:
    model = ch.load(folders[name], device="cpu", precision="fp32")
    if precision == "int8":
        store(model.module, INT8)
    model.runner = Runner(model.module, in_bf16=precision == "bf16 products")
    decoding = {entry.backend for entry in model.runner.report() if entry.address.startswith(("decoder", "head"))}
    assert decoding == {"kernels"}, "a law about kernels runs by them"
    return model


@pytest.fixture(params=PRECISIONS)
def decoder(folders: dict[str, Path], request: pytest.FixtureRequest) -> ch.Model:
    return load(folders, "decoder", request.param)


def suspend_stream(model: ch.Model) -> Iterator[str]:
    """Return a stream that has yielded its first piece."""
    stream = model.stream("the cat", max_new_tokens=30, min_new_tokens=30, temperature=0)
    next(stream)
    return stream


def write_text(model: ch.Model) -> str:
    return "".join(model.stream("the cat", max_new_tokens=30, min_new_tokens=30, temperature=0))


def twice(x: torch.Tensor, at: ch.Place) -> torch.Tensor:
    return 2.0 * x


def observe(model: ch.Model) -> dict[str, Any]:
    """Return the results of captures, edits and evaluations."""
    ids = torch.tensor([[1, 5, 3]])
    with model.capture(["decoder.layers.*.after", "decoder.layers.0.steps.0.branches.0.function"]) as seen:
        (first,) = model.generate("the", max_new_tokens=4, temperature=0)
        direct = model.module(ids).logits
    with model.edit({"decoder.layers.0.steps.1.branches.0.function": twice}):
        (edited,) = model.generate("the", max_new_tokens=4, temperature=0)
        changed = model.module(ids).logits
    assert not torch.equal(direct, changed), "the edit has an effect"
    maps = model.attention("the cat sat")
    return {
        "seen": {address: [record.tensor.tolist() for record in records] for address, records in seen.items()},
        "texts": [first.tokens, edited.tokens, edited.score],
        "direct": [direct.tolist(), changed.tolist()],
        "weights": maps.weights("decoder.self", layer=0, head=1).tolist(),
        "heads": [str(row) for row in maps.heads()],
        "effects": [effect.change for effect in maps.effects(of=1)],
        "score": model.score("the cat").score,
    }


def test_blocks_beside_a_suspended_stream_see_and_do_what_they_do_alone(decoder: ch.Model, calls: list[str]) -> None:
    alone, text = observe(decoder), write_text(decoder)
    assert calls and all(alone["seen"].values()) and alone["heads"]
    stream = suspend_stream(decoder)
    assert observe(decoder) == alone
    assert text.endswith("".join(stream)), "the stream is what it is alone"


def test_a_stream_goes_on_as_it_began_inside_a_block(decoder: ch.Model) -> None:
    text, stream = write_text(decoder), suspend_stream(decoder)
    with decoder.capture("decoder.**") as seen, decoder.edit({"logits": twice}):
        rest = "".join(stream)
    assert text.endswith(rest)
    assert not any(seen.values()), "a call that began before a block is not in it"


def test_two_suspended_streams_write_what_they_write_alone(decoder: ch.Model) -> None:
    text = write_text(decoder)
    streams = [suspend_stream(decoder), suspend_stream(decoder)]
    pieces = ["".join(piece) for piece in zip(*streams, strict=True)]
    assert pieces and text.endswith("".join(piece[: len(piece) // 2] for piece in pieces))


def test_a_copy_made_meanwhile_computes_with_its_own_weights(decoder: ch.Model) -> None:
    stream, text = suspend_stream(decoder), write_text(decoder)
    other = decoder.with_module(copy.deepcopy(decoder.module))
    other.runner = copy.deepcopy(decoder.runner)
    other.module = other.runner.module
    with torch.no_grad():
        for tensor in (*other.module.parameters(), *other.module.buffers()):
            tensor.zero_()
    assert other.score("the cat").score != decoder.score("the cat").score
    assert text.endswith("".join(stream)) and write_text(decoder) == text


def test_a_block_belongs_to_its_thread(decoder: ch.Model, calls: list[str]) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        alone = pool.submit(write_text, decoder).result()
        calls.clear()
        with decoder.capture("decoder.**") as seen, decoder.edit({"logits": twice}):
            assert pool.submit(write_text, decoder).result() == alone
            assert calls and set(calls) == {"other_0"}, "kernels serve whoever watches nothing"
            assert not any(seen.values())
            decoder.generate("the", max_new_tokens=2, temperature=0)
        assert all(seen[address] for address in ("decoder.final_norm", "decoder.layers.1.after"))


def decoder_jobs(model: ch.Model) -> dict[str, Callable[[], Any]]:
    vectors = Runner(model.module, in_bf16=model.runner.in_bf16).tree()
    return {
        "generate": lambda: model.generate(TEXTS, max_new_tokens=6, temperature=0),
        "sample": lambda: model.generate("the", max_new_tokens=6, temperature=0.9, seed=3),
        "stream": lambda: write_text(model),
        "score": lambda: model.score(TEXTS),
        "watch": lambda: observe(model),
        "states": lambda: vectors(torch.tensor([[1, 2, 3, 4]])).hidden.tolist(),
    }


def translator_jobs(model: ch.Model) -> dict[str, Callable[[], Any]]:
    return {
        "greedy": lambda: model.translate(TEXTS, beam_size=1, max_length=9),
        "beams": lambda: model.translate_n_best(TEXTS, n=3, max_length=9),
        "score": lambda: model.score(TEXTS, TEXTS),
        "attention": lambda: model.attention("the cat", target="a dog").weights("decoder.memory", 0, 0).tolist(),
    }


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("name", "jobs"), [("decoder", decoder_jobs), ("two stacks", translator_jobs)])
def test_threads_get_bit_by_bit_what_each_gets_alone(
    folders: dict[str, Path], name: str, jobs: Callable[..., Any], precision: str, calls: list[str]
) -> None:
    model = load(folders, name, precision)
    work = jobs(model)
    alone = {job: run() for job, run in work.items()}
    calls.clear()
    with ThreadPoolExecutor(4, thread_name_prefix="caller") as pool:
        for _ in range(3):
            running = {job: pool.submit(run) for job, run in [*work.items(), *work.items()]}
            for job, future in running.items():
                assert future.result() == alone[job], job
    assert len(set(calls)) > 1, "kernels served several threads"


def test_a_changed_model_has_another_tree(decoder: ch.Model) -> None:
    """Settings and patched methods count as weights do; the mode does not."""
    text, tree = write_text(decoder), decoder.tree
    decoder.module.train()
    assert decoder.tree is tree
    branch = decoder.module.get_submodule("decoder.layers.0.steps.0.branches.0")
    branch.scale = 9.0
    assert write_text(decoder) != text
    branch.scale = 1.0
    assert write_text(decoder) == text
    branch.function.out.forward = torch.zeros_like
    assert decoder.tree is not tree and write_text(decoder) != text


def snapshot(module: nn.Module) -> list[dict[str, Any]]:
    """Return the identities of the attributes of every module, and the contents of its hooks."""
    return [
        {name: (id(value), dict(value) if isinstance(value, dict) else value) for name, value in vars(child).items()}
        for child in module.modules()
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("name", "jobs"), [("decoder", decoder_jobs), ("two stacks", translator_jobs)])
def test_no_call_writes_into_the_plain_tree(
    folders: dict[str, Path], name: str, jobs: Callable[..., Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, during and after each public call that opens no block of the caller's."""
    model = load(folders, name, precision)
    before, during = snapshot(model.module), []
    for method in ("forward", "embed", "continue_from"):
        owner = Stack if method == "embed" else PlannedStack
        original = getattr(owner, method)

        def check_snapshot(*arguments: Any, original: Callable[..., Any] = original) -> Any:
            during.append(snapshot(model.module) == before)
            return original(*arguments)

        monkeypatch.setattr(owner, method, check_snapshot)
    for job, run in jobs(model).items():
        if job != "watch":
            during.clear()
            run()
            assert during and all(during), job
            assert snapshot(model.module) == before, job
    maps = model.attention("the cat", **({} if name == "decoder" else {"target": "a dog"}))
    maps.effects(of=1)
    assert snapshot(model.module) == before


def test_the_plain_tree_alone_is_used_where_that_is_asked_for(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    monkeypatch.setenv(native.KERNELS, "plain")
    model = ch.load(folders["decoder"], device="cpu", precision="int8")
    assert [entry.backend for entry in model.runner.report()] == ["plain"]
    model.generate("the", max_new_tokens=2, temperature=0)
    assert not calls and native.library() is native.library(TRAINING) is None
    assert native.function("top_float32", pointers=5, numbers=5) is None
    monkeypatch.setenv(native.KERNELS, "fast")
    with pytest.raises(ch.InputError, match="must be auto or plain"):
        model.generate("the")
