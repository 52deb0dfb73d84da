"""Invariances of a model: batching, padding, caches, packing, kernels, one-beam search and saving keep its results.

Each pair is computed in single and in double precision. Rounding falls by about 1e8 between them; a defect does not.
The first point where the two computations differ is the address of the defect.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from clearhead.apps.check.handwritten.report import Finding
from clearhead.apps.check.model.flow import Draw
from clearhead.apps.check.model.readers import Reader, Side, Trace, TracePoint, concat_traces, run
from clearhead.apps.check.model.report import CheckOutcome
from clearhead.base.errors import InputError
from clearhead.base.tensors import relative_error
from clearhead.core import Attention, Sequence, Transformer
from clearhead.core.kernels.attention import SHORT_ON_CPU
from clearhead.fast.stored import is_quantized, stored_matrices
from clearhead.generate.continuation import GenerateRequest, generate_ids
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.prefill import prefill_prompts
from clearhead.generate.processors import BannedIds
from clearhead.generate.results import Sentence
from clearhead.generate.running import PrefilledMember, RunningBatch
from clearhead.generate.search.beam import Search

if TYPE_CHECKING:
    from clearhead.model.facade import Model

GROUP: Final = "invariances"
EXACT, FALLS = 1e-11, 1e-5
"""Largest rounding in double precision, and its largest share of the rounding in single precision."""
LENGTHS = (7, 11, 4)
NEW_TOKENS = 6
_CAUSES: Final = {
    "embedded": "the positions that are added to the embeddings",
    "queries": "the positions by which queries are rotated, or their norm",
    "keys": "the positions by which keys are rotated, or their norm",
    "mixed": "the mask of this attention, its bias, or the keys and values that it reads",
    "after": "the feed-forward part, or a norm, reads more than one token",
    "states": "the final norm or projection",
    "head": "the head, such as its pooling",
}
"""Likely causes by the kind of value that differs first."""


@dataclass(frozen=True)
class InvarianceCase:
    """Two computations of the same values.

    Args:
        name: name of the invariance.
        side: the stack, "encoder" or "decoder".
        run: function that runs both computations on a model of any precision and returns their traces.
        reason: explanation if the case is not tried; empty otherwise.
    """

    name: str
    side: Side
    run: Callable[[Transformer], tuple[Trace, Trace]]
    reason: str = ""


def is_rounding(single: float, double: float) -> bool:
    """Return whether a difference is rounding: it (nearly) vanishes in double precision.

    Args:
        single, double: relative difference in single and in double precision.
    """
    return double <= EXACT or double <= FALLS * single


def check_invariances(module: Transformer, exact: Transformer, draw: Draw) -> Iterator[CheckOutcome | Finding]:
    """Compare both computations of every invariance case, and yield outcomes and findings.

    Args:
        module: the model in single precision.
        exact: the model in double precision.
        draw: function that draws ids.
    """
    sides: list[Side] = ["encoder"] if module.encoder is not None else []
    sides += ["decoder"] if module.decoder is not None else []
    for side in sides:
        prefix = f"{side}: " if len(sides) == 2 else ""
        for case in _list_cases(module, side, draw):
            named = replace(case, name=prefix + case.name)
            if case.reason:
                yield CheckOutcome(GROUP, named.name, "not tried", case.reason)
            else:
                yield from _compare(named, module, exact)
    yield from _check_search(exact, draw)


def _compare(case: InvarianceCase, module: Transformer, exact: Transformer) -> Iterator[CheckOutcome | Finding]:
    try:
        singles, doubles = (_differences(*case.run(model)) for model in (module, exact))
    except (InputError, RuntimeError, IndexError) as error:
        yield CheckOutcome(GROUP, case.name, "wrong", "one of the two computations fails")
        yield Finding(where=case.side, says=f"{case.name}: it cannot be computed: {' '.join(str(error).split())}")
        return
    ends = [point for point in doubles if point.address == "head" or point.address.endswith(" states")]
    single, double = (max(errors[point] for point in ends) for errors in (singles, doubles))
    numbers = (("single", single), ("double", double))
    wrong = [point for point in doubles if not is_rounding(singles[point], doubles[point])]
    if not wrong:
        yield CheckOutcome(GROUP, case.name, "right", "equal up to rounding", numbers)
        return
    first_point = wrong[0]
    name = first_point.address.rpartition(".")[2].rpartition(" ")[2]
    yield CheckOutcome(GROUP, case.name, "wrong", "a difference that stays in double precision", numbers)
    yield Finding(
        where=first_point.address,
        says=(
            f"{case.name}: here the two computations differ first, also in double precision; likely cause: "
            f"{_CAUSES[name]}"
        ),
        difference=doubles[first_point],
    )


def _differences(actual: Trace, expected: Trace) -> dict[TracePoint, float]:
    """Return the relative difference at every point."""
    return {point: relative_error(actual[point], expected[point]) for point in sorted(actual.keys() & expected.keys())}


class _CaseRows:
    """Rows of unequal lengths, with one source per row for the decoder of an encoder-decoder.

    Args:
        module: the model.
        side: the stack, "encoder" or "decoder".
        draw: function that draws ids.
        lengths: lengths of the rows, limited by the positions of the model.
    """

    def __init__(self, module: Transformer, side: Side, draw: Draw, lengths: Many[int]) -> None:
        most = module.max_positions or max(lengths)
        vocabulary = module.num_source_ids if side == "encoder" else module.num_target_ids
        self.side: Side = side
        self.ids = [draw(min(length, most), vocabulary) for length in lengths]
        self.source: Sequence | None = None
        if side == "decoder" and module.encoder is not None:
            length = min(9, most)
            mask = torch.arange(length) < torch.tensor([[length], [4], [7]][: len(lengths)]).clamp(max=length)
            self.source = Sequence(torch.stack([draw(length, module.num_source_ids) for _ in lengths]), mask)
        self._alone: dict[Transformer, Trace] = {}

    def reader(self, module: Transformer) -> Reader:
        return Reader.of(module, self.side, self.source)

    def alone(self, module: Transformer) -> Trace:
        """Return the activations and outputs of each row run alone; computed once per model."""
        if module not in self._alone:
            reader = self.reader(module)
            self._alone[module] = concat_traces(
                [run(reader.row(index), Sequence(row[None])) for index, row in enumerate(self.ids)]
            )
        return self._alone[module]

    def pad(self, side: str, new_tokens: int = 0) -> Sequence:
        """Return the rows as one padded batch; the last `new_tokens` of each row come after the padding."""
        longest = max(map(len, self.ids)) + 2
        ids, mask = self.ids[0].new_zeros(len(self.ids), longest), torch.zeros(len(self.ids), longest, dtype=torch.bool)
        end = longest - new_tokens
        for index, row in enumerate(self.ids):
            first = len(row) - new_tokens
            columns = slice(end - first, end) if side == "left" else slice(0, first)
            for where, tokens in ((columns, row[:first]), (slice(end, longest), row[first:])):
                ids[index, where], mask[index, where] = tokens, True
        return Sequence(ids, mask)


def _list_cases(module: Transformer, side: Side, draw: Draw) -> Iterator[InvarianceCase]:
    rows = _CaseRows(module, side, draw, LENGTHS)
    yield from _batch_cases(module, rows, _CaseRows(module, side, draw, (9, 9)))
    if side == "decoder":
        yield from _cache_cases(rows)
    yield _kernel_case(_CaseRows(module, side, draw, (SHORT_ON_CPU + 8,)), Reader(module, side))


def _batch_cases(module: Transformer, rows: _CaseRows, equal: _CaseRows) -> Iterator[InvarianceCase]:
    def run_batched(model: Transformer) -> tuple[Trace, Trace]:
        return run(equal.reader(model), Sequence(torch.stack(equal.ids))), equal.alone(model)

    def run_padded(where: str) -> Callable[[Transformer], tuple[Trace, Trace]]:
        return lambda model: (run(rows.reader(model), rows.pad(where)), rows.alone(model))

    def run_packed(model: Transformer) -> tuple[Trace, Trace]:
        numbers = torch.cat([torch.full((len(row),), 7 - index) for index, row in enumerate(rows.ids)])
        whole = Sequence(torch.cat(rows.ids)[None], documents=numbers[None])
        return run(Reader(model, rows.side), whole, head=not is_pooled), rows.alone(model)

    is_pooled = module.head is not None and module.head.is_pooled
    yield InvarianceCase("batched = single", rows.side, run_batched)
    yield InvarianceCase("left padding = none", rows.side, run_padded("left"))
    yield InvarianceCase("right padding = none", rows.side, run_padded("right"))
    reason = "" if rows.source is None else "a decoder with a memory reads one text per row"
    yield InvarianceCase("packed = separate", rows.side, run_packed, reason)


def _cache_cases(rows: _CaseRows) -> Iterator[InvarianceCase]:
    new = min(3, *(len(row) - 1 for row in rows.ids))

    def run_cached(sequence: Sequence, first: int, *pieces: int) -> Callable[[Transformer], tuple[Trace, Trace]]:
        assert sequence.mask is not None
        sequence = replace(sequence, total_length=sequence.mask.sum(1))
        rest = sequence.ids.shape[1] - first - sum(pieces)
        pieces = (first, *pieces, *[1] * rest)
        return lambda model: (run(rows.reader(model), sequence, pieces=pieces), rows.alone(model))

    for where in ("left", "right"):
        prompts = rows.pad(where, new)
        yield InvarianceCase(
            f"cache = none, prompts padded {where}", rows.side, run_cached(prompts, prompts.ids.shape[1] - new)
        )
    yield InvarianceCase("cache = none, token by token", rows.side, run_cached(rows.pad("right"), 1))
    pieces = rows.pad("left")
    yield InvarianceCase("cache = none, in pieces", rows.side, run_cached(pieces, 3, 1, pieces.ids.shape[1] - 5))


def _kernel_case(rows: _CaseRows, reader: Reader) -> InvarianceCase:
    attentions = [submodule for submodule in reader.stack.modules() if isinstance(submodule, Attention)]
    kernels = [attention.kernel() for attention in attentions if attention.spec.source == "self"]
    reason = ""
    if all(kernel == "eager" for kernel, _ in kernels):
        reason = kernels[0][1] if kernels else "there is no attention"
    elif len(rows.ids[0]) <= SHORT_ON_CPU:
        reason = f"texts of at most {len(rows.ids[0])} tokens are all read by the eager kernel"

    def both(model: Transformer) -> tuple[Trace, Trace]:
        reader, text = rows.reader(model), Sequence(rows.ids[0][None])
        return run(reader, text), run(reader, text, is_eager=True)

    return InvarianceCase("fused = eager", rows.side, both, reason)


def _check_search(exact: Transformer, draw: Draw) -> Iterator[CheckOutcome | Finding]:
    """Compare greedy search without a cache, greedy search with a cache, and beam search with one beam."""
    name = "beam 1 = greedy = no cache"
    predicts = exact.decoder is not None and exact.head is not None and not exact.head.is_pooled
    if not predicts or exact.spec.num_outputs != exact.num_target_ids:
        yield CheckOutcome(GROUP, name, "not tried", "the model does not predict the next token")
        return
    room = exact.max_positions or 64
    prompt = draw(min(4, room - 1), exact.num_target_ids)
    new = min(NEW_TOKENS, room - len(prompt))
    source = None if exact.encoder is None else draw(min(6, room), exact.num_source_ids)
    ids, margins = _search_greedily(exact, prompt, source, new)
    end = next(index for index in range(exact.num_target_ids) if index not in ids)
    sources = None if source is None else [source.tolist()]
    request = GenerateRequest(
        [prompt.tolist()],
        GenerateOptions(max_new_tokens=new, temperature=0),
        eos_id=end,
        pad_id=0,
        banned=[end],
        sources=sources,
    )
    beam = _search_with_one_beam(exact, request, new, end)
    results = {
        "greedy search with a cache": list(generate_ids(exact, request)[0][0].ids),
        "beam search with one beam": beam,
    }
    for method, other in results.items():
        step = next((number for number, pair in enumerate(zip(other, ids, strict=False)) if pair[0] != pair[1]), None)
        if step is not None and margins[step] > 1e-5:  # for equally probable tokens, either is right
            yield CheckOutcome(GROUP, name, "wrong", f"{method} gives {other}, and greedy search without a cache {ids}")
            yield Finding(
                where="decoder",
                says=(
                    f"{name}: {method} chooses another token at step {step} than greedy search without a cache; "
                    "likely cause: the cache or the positions of new tokens, if the cases above fail; else the search"
                ),
            )
            return
    yield CheckOutcome(GROUP, name, "right", f"the same {len(ids)} tokens by all three")


@torch.inference_mode()
def _search_with_one_beam(exact: Transformer, request: GenerateRequest, new: int, end: int) -> list[int]:
    """Return the token ids of beam search with one beam, for which `generate_ids` has no option."""
    prefill = prefill_prompts(exact, request.prompts, request.sources, pad_id=request.pad_id, limits=[new])
    sentence, options = Sentence(0, new), SearchOptions(beam_size=1)
    batch = RunningBatch(exact)
    search = Search([sentence], (end,), options, prefill.ids, chain=[BannedIds((end,))], open_ended=True)
    batch.join([PrefilledMember(search, prefill.cache, prefill.logits)])
    while batch.num_rows:
        batch.step()
    return list(sentence.candidates[0].ids)


@torch.no_grad()
def _search_greedily(
    exact: Transformer, prompt: Tensor, source: Tensor | None, new: int
) -> tuple[list[int], list[float]]:
    """Return the most probable tokens, computed without a cache, and the relative lead of each over the second."""
    reader = Reader.of(exact, "decoder", None if source is None else Sequence(source[None]))
    ids, margins = prompt, []
    for _ in range(new):
        sequence = Sequence(ids[None], total_length=len(prompt) + new)
        logits = reader.outputs(reader.hidden_states(sequence), None)[0, -1].float()
        first, second = logits.topk(2).values.tolist()
        margins.append((first - second) / max(1e-30, float(logits.abs().max())))
        ids = torch.cat([ids, logits.argmax()[None]])
    return ids[len(prompt) :].tolist(), margins


def check_saving(model: Model) -> Iterator[CheckOutcome | Finding]:
    """Save a model in both formats, load it again, and compare every bit.

    Args:
        model: the loaded model.
    """
    from clearhead.model.loading import load

    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.module.parameters())
    for format in ("clearhead", "hf"):
        name = f"save = load, {'our own files' if format == 'clearhead' else 'Hugging Face layout'}"
        with tempfile.TemporaryDirectory(prefix="clearhead-check-") as folder:
            if shutil.disk_usage(folder).free < 2 * needed:
                yield CheckOutcome(
                    GROUP, name, "not tried", f"less than {2 * needed:,} bytes are free for temporary files"
                )
                continue
            try:
                model.save(Path(folder) / "model", format=format)
            except InputError:
                if format == "clearhead":
                    raise
                reason = "its matrices are quantized" if is_quantized(model.module) else "no family has these modules"
                yield CheckOutcome(GROUP, name, "not tried", f"no Hugging Face checkpoint can hold the model: {reason}")
                continue
            again = load(Path(folder) / "model", device="cpu", precision=precision_of(model.module))
            yield from _compare_models(name, model, again)


def precision_of(module: Transformer) -> str:
    """Return the precision that makes `load` keep the dtype of a model's weights."""
    if stored_matrices(module):
        return "auto"
    return "bf16" if next(module.parameters()).dtype == torch.bfloat16 else "fp32"


def _compare_models(name: str, model: Model, again: Model) -> Iterator[CheckOutcome | Finding]:
    before, after = model.module.state_dict(), again.module.state_dict()
    wrong = [
        address
        for address in dict.fromkeys([*before, *after])
        if address not in before or address not in after or not _is_bitwise(before[address].cpu(), after[address])
    ]
    if wrong:
        says = f"{name}: {len(wrong)} of {len(before)} weights have other bits; likely cause: a rule that renames, "
        yield Finding(where=wrong[0], says=f"{says}transposes, splits or permutes is not undone when it is loaded")
    tokenizers = model.tokenizers.fingerprint == again.tokenizers.fingerprint
    if not tokenizers and model.tokenizers.source.vocab_size != again.tokenizers.source.vocab_size:
        yield Finding(where="tokenizer", says=f"{name}: the tokenizer differs")
        wrong.append("tokenizer")
    if model.spec != again.spec and model.hf_checkpoint is None and "own" in name:
        yield Finding(where="spec.json", says=f"{name}: the spec differs")
        wrong.append("spec")
    says = f"{len(wrong)} differ" if wrong else f"all {len(before)} weights are equal bit for bit"
    yield CheckOutcome(GROUP, name, "wrong" if wrong else "right", says)


def _is_bitwise(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and tensor.shape == other.shape and torch.equal(tensor, other)
