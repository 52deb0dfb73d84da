"""What must not change a model's results: batches, padding, caches, packing, kernels, search by one beam, files.

Each pair is computed in the model's own precision and in double precision. Rounding falls by about 1e8 between them;
what stays is a defect, and the first place where the two ways differ is its address.
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
from clearhead.apps.check.model.readers import Place, Reader, Side, Trace, joined, run
from clearhead.apps.check.model.report import Outcome
from clearhead.base.errors import InputError
from clearhead.base.tensors import relative_error
from clearhead.core import Attention, Sequence, Transformer
from clearhead.core.kernels.attention import SHORT_ON_CPU
from clearhead.fast.stored import stored_matrices
from clearhead.generate.continuation import GenerateRequest, generate_ids
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.prefill import prefill_prompts
from clearhead.generate.processors import BannedIds
from clearhead.generate.results import Sentence
from clearhead.generate.running import RunningBatch, Started
from clearhead.generate.search.beam import Search

if TYPE_CHECKING:
    from clearhead.model.facade import Model

GROUP: Final = "invariances"
EXACT, FALLS = 1e-11, 1e-5
"""Rounding in double precision, and how much less it is at least than in single precision."""
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
"""What decides a value, by the place where two ways differ first."""


@dataclass(frozen=True)
class Case:
    """Two ways to the same values.

    Args:
        name: of the invariance.
        side: of the stack.
        run: both ways, of a model in any precision.
        reason: why it is not tried; empty: it is.
    """

    name: str
    side: Side
    run: Callable[[Transformer], tuple[Trace, Trace]]
    reason: str = ""


def is_rounding(single: float, double: float) -> bool:
    """Return whether a difference is rounding: it (nearly) vanishes in double precision.

    Args:
        single, double: the difference in single and in double precision.
    """
    return double <= EXACT or double <= FALLS * single


def check_invariances(module: Transformer, exact: Transformer, draw: Draw) -> Iterator[Outcome | Finding]:
    """Yield the outcome of each pair of ways.

    Args:
        module: the model in single precision.
        exact: in double precision.
        draw: ids.
    """
    sides: list[Side] = ["encoder"] if module.encoder is not None else []
    sides += ["decoder"] if module.decoder is not None else []
    for side in sides:
        prefix = f"{side}: " if len(sides) == 2 else ""
        for case in _pairs(module, side, draw):
            named = replace(case, name=prefix + case.name)
            if case.reason:
                yield Outcome(GROUP, named.name, "not tried", case.reason)
            else:
                yield from _compare(named, module, exact)
    yield from _search(exact, draw)


def _compare(case: Case, module: Transformer, exact: Transformer) -> Iterator[Outcome | Finding]:
    try:
        singles, doubles = (_differences(*case.run(one)) for one in (module, exact))
    except (InputError, RuntimeError, IndexError) as error:
        yield Outcome(GROUP, case.name, "wrong", "one of the two ways fails")
        yield Finding(where=case.side, says=f"{case.name}: it cannot be computed: {' '.join(str(error).split())}")
        return
    ends = [place for place in doubles if place.address == "head" or place.address.endswith(" states")]
    single, double = (max(found[place] for place in ends) for found in (singles, doubles))
    numbers = (("single", single), ("double", double))
    wrong = [place for place in doubles if not is_rounding(singles[place], doubles[place])]
    if not wrong:
        yield Outcome(GROUP, case.name, "right", "equal up to rounding", numbers)
        return
    place = wrong[0]
    name = place.address.rpartition(".")[2].rpartition(" ")[2]
    yield Outcome(GROUP, case.name, "wrong", "a difference that stays in double precision", numbers)
    yield Finding(
        where=place.address,
        says=(
            f"{case.name}: this is the first place where the two ways differ, also in double precision; likely cause: "
            f"{_CAUSES[name]}"
        ),
        difference=doubles[place],
    )


def _differences(found: Trace, expected: Trace) -> dict[Place, float]:
    """Return the relative difference at every place."""
    return {place: relative_error(found[place], expected[place]) for place in sorted(found.keys() & expected.keys())}


class _Rows:
    """Rows of unequal lengths, and a source for each where there are two stacks.

    Args:
        module: of which the stack is.
        side: which stack.
        draw: ids.
        lengths: of the rows, as far as the model has positions.
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
        """Return the values of each row by itself; computed once for a model."""
        if module not in self._alone:
            reader = self.reader(module)
            self._alone[module] = joined(
                [run(reader.row(index), Sequence(row[None])) for index, row in enumerate(self.ids)]
            )
        return self._alone[module]

    def padded(self, side: str, new_tokens: int = 0) -> Sequence:
        """Return the rows in one batch; the last tokens of each may stand behind the padding."""
        longest = max(map(len, self.ids)) + 2
        ids, mask = self.ids[0].new_zeros(len(self.ids), longest), torch.zeros(len(self.ids), longest, dtype=torch.bool)
        end = longest - new_tokens
        for index, row in enumerate(self.ids):
            first = len(row) - new_tokens
            place = slice(end - first, end) if side == "left" else slice(0, first)
            for where, part in ((place, row[:first]), (slice(end, longest), row[first:])):
                ids[index, where], mask[index, where] = part, True
        return Sequence(ids, mask)


def _pairs(module: Transformer, side: Side, draw: Draw) -> Iterator[Case]:
    rows = _Rows(module, side, draw, LENGTHS)
    yield from _batches(module, rows, _Rows(module, side, draw, (9, 9)))
    if side == "decoder":
        yield from _caches(rows)
    yield _kernels(_Rows(module, side, draw, (SHORT_ON_CPU + 8,)), Reader(module, side))


def _batches(module: Transformer, rows: _Rows, equal: _Rows) -> Iterator[Case]:
    def batched(one: Transformer) -> tuple[Trace, Trace]:
        return run(equal.reader(one), Sequence(torch.stack(equal.ids))), equal.alone(one)

    def padded(where: str) -> Callable[[Transformer], tuple[Trace, Trace]]:
        return lambda one: (run(rows.reader(one), rows.padded(where)), rows.alone(one))

    def packed(one: Transformer) -> tuple[Trace, Trace]:
        numbers = torch.cat([torch.full((len(row),), 7 - index) for index, row in enumerate(rows.ids)])
        whole = Sequence(torch.cat(rows.ids)[None], documents=numbers[None])
        return run(Reader(one, rows.side), whole, head=not is_pooled), rows.alone(one)

    is_pooled = module.head is not None and module.head.is_pooled
    yield Case("batched = single", rows.side, batched)
    yield Case("left padding = none", rows.side, padded("left"))
    yield Case("right padding = none", rows.side, padded("right"))
    reason = "" if rows.source is None else "a decoder that reads a memory reads one text for each row"
    yield Case("packed = separate", rows.side, packed, reason)


def _caches(rows: _Rows) -> Iterator[Case]:
    new = min(3, *(len(row) - 1 for row in rows.ids))

    def cached(sequence: Sequence, first: int, *pieces: int) -> Callable[[Transformer], tuple[Trace, Trace]]:
        assert sequence.mask is not None
        sequence = replace(sequence, total_length=sequence.mask.sum(1))
        rest = sequence.ids.shape[1] - first - sum(pieces)
        pieces = (first, *pieces, *[1] * rest)
        return lambda one: (run(rows.reader(one), sequence, pieces=pieces), rows.alone(one))

    for where in ("left", "right"):
        prompts = rows.padded(where, new)
        yield Case(f"cache = none, prompts padded {where}", rows.side, cached(prompts, prompts.ids.shape[1] - new))
    yield Case("cache = none, token by token", rows.side, cached(rows.padded("right"), 1))
    pieces = rows.padded("left")
    yield Case("cache = none, in pieces", rows.side, cached(pieces, 3, 1, pieces.ids.shape[1] - 5))


def _kernels(rows: _Rows, reader: Reader) -> Case:
    attentions = [part for part in reader.stack.modules() if isinstance(part, Attention)]
    kernels = [part.kernel() for part in attentions if part.spec.source == "self"]
    reason = ""
    if all(kernel == "eager" for kernel, _ in kernels):
        reason = kernels[0][1] if kernels else "there is no attention"
    elif len(rows.ids[0]) <= SHORT_ON_CPU:
        reason = f"texts of at most {len(rows.ids[0])} tokens are all read by the eager kernel"

    def both(one: Transformer) -> tuple[Trace, Trace]:
        reader, text = rows.reader(one), Sequence(rows.ids[0][None])
        return run(reader, text), run(reader, text, is_eager=True)

    return Case("fused = eager", rows.side, both, reason)


def _search(exact: Transformer, draw: Draw) -> Iterator[Outcome | Finding]:
    """Compare greedy search without a cache, greedy search, and beam search with one beam."""
    name = "beam 1 = greedy = no cache"
    predicts = exact.decoder is not None and exact.head is not None and not exact.head.is_pooled
    if not predicts or exact.spec.num_outputs != exact.num_target_ids:
        yield Outcome(GROUP, name, "not tried", "the model does not predict the next token")
        return
    room = exact.max_positions or 64
    prompt = draw(min(4, room - 1), exact.num_target_ids)
    new = min(NEW_TOKENS, room - len(prompt))
    source = None if exact.encoder is None else draw(min(6, room), exact.num_source_ids)
    ids, margins = _greedily(exact, prompt, source, new)
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
    beam = _by_one_beam(exact, request, new, end)
    found = {
        "greedy search with a cache": list(generate_ids(exact, request)[0][0].ids),
        "beam search with one beam": beam,
    }
    for way, other in found.items():
        place = next((place for place, pair in enumerate(zip(other, ids, strict=False)) if pair[0] != pair[1]), None)
        if place is not None and margins[place] > 1e-5:  # of two equal tokens either may be chosen
            yield Outcome(GROUP, name, "wrong", f"{way} gives {other}, and greedy search without a cache {ids}")
            yield Finding(
                where="decoder",
                says=(
                    f"{name}: {way} chooses another token at step {place} than the most probable one without a cache; "
                    "likely cause: the cache or the positions of new tokens, if the cases above fail; else the search"
                ),
            )
            return
    yield Outcome(GROUP, name, "right", f"the same {len(ids)} tokens by all three")


@torch.inference_mode()
def _by_one_beam(exact: Transformer, request: GenerateRequest, new: int, end: int) -> list[int]:
    """Return what beam search finds with one beam, which no option of a call asks for."""
    prefill = prefill_prompts(exact, request.prompts, request.sources, pad_id=request.pad_id, limits=[new])
    sentence, options = Sentence(0, new), SearchOptions(beam_size=1)
    batch = RunningBatch(exact)
    search = Search([sentence], (end,), options, prefill.ids, chain=[BannedIds((end,))], open_ended=True)
    batch.join([Started(search, prefill.cache, prefill.logits)])
    while batch.num_rows:
        batch.step()
    return list(sentence.candidates[0].ids)


@torch.no_grad()
def _greedily(exact: Transformer, prompt: Tensor, source: Tensor | None, new: int) -> tuple[list[int], list[float]]:
    """Return the most probable tokens after a prompt, each by reading everything again, and by how much they lead."""
    reader = Reader.of(exact, "decoder", None if source is None else Sequence(source[None]))
    ids, margins = prompt, []
    for _ in range(new):
        sequence = Sequence(ids[None], total_length=len(prompt) + new)
        logits = reader.outputs(reader.hidden(sequence), None)[0, -1].float()
        first, second = logits.topk(2).values.tolist()
        margins.append((first - second) / max(1e-30, float(logits.abs().max())))
        ids = torch.cat([ids, logits.argmax()[None]])
    return ids[len(prompt) :].tolist(), margins


def check_saving(model: Model) -> Iterator[Outcome | Finding]:
    """Save a model in both formats, load it, and compare every bit.

    Args:
        model: with weights that are loaded as they are saved.
    """
    from clearhead.model.loading import load

    needed = sum(one.numel() * one.element_size() for one in model.module.parameters())
    for format in ("clearhead", "hf"):
        name = f"save = load, {'our own files' if format == 'clearhead' else 'Hugging Face layout'}"
        with tempfile.TemporaryDirectory(prefix="clearhead-check-") as folder:
            if shutil.disk_usage(folder).free < 2 * needed:
                yield Outcome(GROUP, name, "not tried", f"less than {2 * needed:,} bytes are free for temporary files")
                continue
            try:
                model.save(Path(folder) / "model", format=format)
            except InputError:
                if format == "clearhead":
                    raise
                yield Outcome(GROUP, name, "not tried", "no Hugging Face architecture has these parts")
                continue
            again = load(Path(folder) / "model", device="cpu", precision=precision_of(model.module))
            yield from _same_model(name, model, again)


def precision_of(module: Transformer) -> str:
    """Return the precision of a model's weights, as `load` calls it."""
    if stored_matrices(module):
        return "auto"
    return "bf16" if next(module.parameters()).dtype == torch.bfloat16 else "fp32"


def _same_model(name: str, model: Model, again: Model) -> Iterator[Outcome | Finding]:
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
        yield Finding(where="tokenizer", says=f"{name}: the tokenizer is another one")
        wrong.append("tokenizer")
    if model.spec != again.spec and model.hf_checkpoint is None and "own" in name:
        yield Finding(where="spec.json", says=f"{name}: the spec is another one")
        wrong.append("spec")
    says = f"{len(wrong)} differ" if wrong else f"all {len(before)} weights are equal in every bit"
    yield Outcome(GROUP, name, "wrong" if wrong else "right", says)


def _is_bitwise(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
