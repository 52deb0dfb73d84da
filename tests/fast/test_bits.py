"""The law of bits: what a request gets depends on that request alone, whatever shares its batch.

Every case runs requests of unlike lengths together, and each of them by itself, with the same number of threads; all
that comes out has to have the same bits.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import spec
from clearhead.core import Transformer, build
from clearhead.fast import kernel_arguments, stack
from clearhead.fast.runner import Runner
from clearhead.fast.stored import INT8, choose_int4, store
from clearhead.generate import prefill
from clearhead.generate.continuation import GenerateRequest, PromptReader, generate_ids
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.prefill import prefill_prompts
from clearhead.generate.running import RunningBatch
from clearhead.generate.scoring.texts import score_targets
from clearhead.spec.presets.hyperparameters import build_spec
from clearhead.spec.presets.named import PRESETS
from clearhead.spec.presets.task_heads import vector_head, with_head

VOCABULARY = 67
COUNTS = 1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 129, 257
LENGTHS = 3, 17, 1, 40, 8, 2, 7, 25, 9, 33, 5, 12
Run = Callable[[Transformer, Sequence[list[int]]], list[object]]


def small(name: str, **of_attention: object) -> spec.Model:
    """A model of the literature with two narrow layers."""
    from dataclasses import replace

    hparams = replace(PRESETS[name], layers=2, width=64, heads=4, head_size=16, feedforward=128)
    model = build_spec(hparams, source_vocab=VOCABULARY, target_vocab=VOCABULARY)
    changes = {spec.Attention: of_attention}
    return spec.map_nodes(model, lambda _, node: node.model_copy(update=changes.get(type(node), {})))


def ids_of(count: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    sizes = [lengths[i % len(lengths)] for i in range(count)]
    return [torch.randint(5, VOCABULARY, (size,), generator=generator).tolist() for size in sizes]


def steps(tree: Transformer, prompts: Sequence[list[int]]) -> list[object]:
    """The logits of a prompt and of three tokens after it."""
    with torch.inference_mode():
        prefill = prefill_prompts(tree, prompts, pad_id=0)
        all_logits = [prefill.logits]
        for _ in range(3):
            logits = tree.decode(all_logits[-1].argmax(1)[:, None], cache=prefill.cache).logits
            assert logits is not None
            all_logits.append(logits[:, -1])
    return list(torch.stack(all_logits, 1))


def run_continuations(tree: Transformer, prompts: Sequence[list[int]]) -> list[object]:
    options = GenerateOptions(max_new_tokens=5, temperature=0.9, top_k=9, seed=1, num_return_sequences=2)
    return list(generate_ids(tree, GenerateRequest(prompts, options, eos_id=3, pad_id=0)))


def translate(beams: int) -> Run:
    def run(tree: Transformer, sources: Sequence[list[int]]) -> list[object]:
        options = SearchOptions(beam_size=beams, max_length=7, n_best=beams)
        request = GenerateRequest([[2]] * len(sources), options, eos_id=3, pad_id=0, banned=(2, 0), sources=sources)
        return list(generate_ids(tree, request))

    return run


def score(tree: Transformer, sources: Sequence[list[int]]) -> list[object]:
    targets = [[2, *source[::-1][:9], 3] for source in sources]
    return list(score_targets(tree, sources, targets, pad_id=0, length_penalty=1.0))


def embed(tree: Transformer, texts: Sequence[list[int]]) -> list[object]:
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    with torch.inference_mode():
        logits = tree(ids, mask=torch.arange(longest) < torch.tensor([[len(text)] for text in texts])).logits
    assert logits is not None
    return list(logits)


def embedder() -> spec.Model:
    return with_head(small("bert"), vector_head(pool="mean"))


CASES: dict[str, tuple[Callable[[], spec.Model], Run]] = {
    "logits of a decoder": (lambda: small("llama-tiny"), steps),
    "logits of a decoder with a window": (lambda: small("llama-tiny", mask=spec.Window(before=5, after=0)), steps),
    "logits of a decoder with ALiBi": (lambda: small("llama-tiny", position=None, score_bias=spec.Alibi()), steps),
    "samples of a decoder": (lambda: small("gpt2"), run_continuations),
    "greedy translations": (lambda: small("transformer"), translate(1)),
    "translations by beams": (lambda: small("t5-small"), translate(4)),
    "scores of translations": (lambda: small("transformer"), score),
    "embeddings": (embedder, embed),
}
LONG = 300, 3, 140, 31
"""Of texts that are divided among threads, and read in chunks."""


def of_model(model: spec.Model, precision: str, *, is_transposed: bool = False) -> Transformer:
    torch.manual_seed(0)
    module = build(model).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    for submodule in module.modules():
        if is_transposed and isinstance(submodule, torch.nn.Linear):  # as in GPT-2's files
            submodule.weight.data = submodule.weight.t().contiguous().t()
    formats = {"fp32": dict, "int8": lambda: INT8, "int4": lambda: choose_int4(module)}[precision]()
    runner = Runner(store(module, formats))
    for submodule in runner.report():
        assert submodule.backend == "kernels", submodule
    return runner.tree()


def same(first: object, other: object) -> bool:
    return torch.equal(first, other) if isinstance(first, Tensor) and isinstance(other, Tensor) else first == other


@pytest.mark.parametrize(
    ("case", "precision"),
    [*itertools.product(CASES, ("int8", "fp32")), ("greedy translations", "int4"), ("embeddings", "int4")],
)
def test_result_does_not_depend_on_the_requests_beside_it(case: str, precision: str) -> None:
    model, run = CASES[case]
    tree = of_model(model(), precision)
    requests = ids_of(max(COUNTS))
    alone = [run(tree, [request])[0] for request in requests]
    for count in COUNTS:
        together = run(tree, requests[:count])
        wrong = [i for i in range(count) if not same(together[i], alone[i])]
        assert not wrong, (count, wrong)


def test_rows_by_transposed_weights_do_not_depend_on_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, counts = stack.stack_runner, list[int]()

    def record_run(kind: Any, branches: Any, width: int) -> Any:
        counts.extend(branch.first.ldb for branch in branches)
        return plain(kind, branches, width)

    monkeypatch.setattr(stack, "stack_runner", record_run)
    tree = of_model(small("gpt2"), "fp32", is_transposed=True)
    requests = ids_of(max(COUNTS))
    alone = [steps(tree, [request])[0] for request in requests]
    for count in COUNTS:
        assert all(map(same, steps(tree, requests[:count]), alone)), count
    assert counts and min(counts) > 0, "the kernels read the weights as they lie"


@pytest.mark.parametrize("tokens", [256, 512])
@pytest.mark.parametrize("precision", ["int4", "int8", "fp32"])
@pytest.mark.parametrize("case", ["logits of a decoder", "embeddings"])
def test_long_requests_do_not_depend_on_those_beside_them(
    case: str, precision: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divided among threads in parts of unlike length, the last of which fills no tile."""
    monkeypatch.setattr(kernel_arguments, "CHUNK_TOKENS", tokens)
    model, run = CASES[case]
    tree, requests = of_model(model(), precision), ids_of(len(LONG), LONG)
    together = run(tree, requests)
    assert all(same(result, run(tree, [request])[0]) for result, request in zip(together, requests, strict=True))


def read(tree: Transformer, prompts: Sequence[list[int]]) -> list[object]:
    """What a server makes of prompts that it reads together, in pieces where there is one."""
    options = GenerateOptions(max_new_tokens=4)
    first, *others = [PromptReader(tree, GenerateRequest([prompt], options, eos_id=3, pad_id=0)) for prompt in prompts]
    with torch.inference_mode():
        while not (starts := first.step(others)):
            pass
        logits, batch = [start.logits.clone() for start in starts], RunningBatch(tree)
        rows = [start.member.sequences[0] for start in starts]
        batch.join(starts)
        while batch.members:
            batch.step()
    return [
        (step_logits.tolist(), row.ids, row.log_probabilities) for step_logits, row in zip(logits, rows, strict=True)
    ]


@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize("name", ["gpt2", "llama-tiny"])
def test_prompts_that_a_server_reads_together_have_the_bits_of_each_alone(name: str, precision: str) -> None:
    tree, prompts = of_model(small(name), precision), ids_of(9)
    assert read(tree, prompts) == [read(tree, [prompt])[0] for prompt in prompts]


def test_a_prompt_in_pieces_has_the_bits_of_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one token is left behind the pieces, which a step of one token would read otherwise."""
    tree = of_model(small("llama-tiny"), "int8")
    for length in (63, 64, 65, 66, 97, 129):
        (prompt,) = ids_of(1, [length])
        (whole,) = read(tree, [prompt])
        with monkeypatch.context() as patch:
            patch.setattr(prefill, "CHUNK_TOKENS", 32)
            assert read(tree, [prompt]) == [whole], length


def test_whether_results_depend_on_the_batch_is_said() -> None:
    torch.manual_seed(0)
    module = build(small("gpt2")).eval().requires_grad_(False)
    assert Runner(module).is_batch_invariant
    assert not Runner(module, in_bf16=True).is_batch_invariant
    assert Runner(store(copy.deepcopy(module), INT8)).is_batch_invariant
    assert Runner(store(module, choose_int4(module))).is_batch_invariant
