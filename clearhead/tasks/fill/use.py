"""Predictions and metrics of masked language modelling: the most probable tokens for blanks.

Shape suffixes: B texts of a batch, T tokens, N blanks of a batch, D width, V vocabulary, K candidates.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from clearhead import spec
from clearhead.base.errors import InputError, argument, at_text, nth_text
from clearhead.base.hooks import naming_texts
from clearhead.base.printing import Printed
from clearhead.core import Transformer
from clearhead.data.batches.base import DeviceBatch
from clearhead.data.batches.inputs import InputCollator, ModelInputs
from clearhead.data.feed import compute_each, computes_late
from clearhead.data.objectives.build import build_objective
from clearhead.fast.replica import in_evaluation
from clearhead.generate.batching import batches_by_cost, device_of, pad_ids, read_tokens
from clearhead.generate.scoring.result import Measures
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks.evaluate.options import EvaluatedModel, EvaluateOptions
from clearhead.tasks.outputs import block_starts, max_input_length, refuse_not_finite
from clearhead.tasks.use import collate_texts, corpus_of, measure_hidden_tokens, noise_of, refuse_pair
from clearhead.text.long_texts import CHARACTERS_PER_TOKEN, warn_of_long_texts
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.word_starts import WordBoundaries, word_boundaries

BLANK = "___"
"""The mark of a blank, for every model; a longer row of underscores is also one blank."""

# A digit in place of a blank, since every subword tokenizer splits between a digit and a letter or punctuation.
_PLACEHOLDER = "0"
_BATCH_TOKENS = 4096
_TRAIN = 'train a masked model with [task] kind = "fill" and [model] family = "encoder"'


@dataclass(frozen=True, repr=False)
class Filled(Printed):
    """One candidate for a blank.

    Args:
        text: the text for the blank.
        token: the vocabulary entry of the text.
        probability: the probability of this entry among the whole vocabulary, 0 to 1.
        start, end: the character offsets of the blank in the input text; `end` is exclusive.
        filled: the whole text with this candidate in the blank, and the best candidates in the other blanks.
    """

    text: str
    token: str
    probability: float
    start: int
    end: int
    filled: str


@dataclass(frozen=True)
class _MaskedText:
    """A text with a mask token for each blank: its ids, and the blanks' positions in the ids and in the characters."""

    ids: list[int]
    places: list[int]
    spans: list[tuple[int, int]]


def fill(
    module: Transformer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    top_k: int = 5,
    max_length: int | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> list[list[list[Filled]]]:
    """Return the most probable vocabulary entries for each blank of each text, best first.

    A blank is one vocabulary entry, so a word of several tokens cannot fill it. All blanks of a text are filled
    independently. Special tokens keep their share of the probability but are never candidates.

    Args:
        module: an encoder with a head over its vocabulary; in training mode, a replica in evaluation mode runs instead.
        tokenizer: a tokenizer with a mask token; the mask token marks a blank, as `BLANK` does.
        texts: the texts, each with at least one blank.
        top_k: the number of candidates per blank, at least 1.
        max_length: the maximum length of a text in tokens, special tokens included. The rest of a longer text is not
            read, and its blanks are not filled. None means that only the model limits it.
        batch_size: the maximum number of texts in a batch; None means that only `batch_tokens` limits it.
        batch_tokens: the maximum number of padded tokens in a batch; a longer text forms a separate batch. None means
            4,096, and `read_tokens` on a GPU.

    Returns:
        The candidates for each text and each of its blanks, from left to right.

    Raises:
        InputError: the model or the tokenizer cannot fill blanks. Also if a text has no blank in the part that is read,
            or one that the tokenizer joins with a neighbouring word.
        RunFailure: the model's outputs are not finite.
    """
    words = _check_request(module, tokenizer, top_k)
    module, device = in_evaluation(module), device_of(module)
    budget = batch_tokens or (read_tokens(module) if computes_late(device) else _BATCH_TOKENS)
    limit, pad_id = max_input_length(module, max_length), tokenizer.pad_id
    masked_texts, starts, num_cut = list[_MaskedText](), block_starts(len(texts), module), 0

    def make_batches() -> Iterator[tuple[list[int], _BlankBatch]]:
        nonlocal num_cut
        for start in starts:
            block = enumerate(texts[start : start + starts.step], start=start + 1)
            for number, text in block:
                masked, is_cut = _read_start(text, number, tokenizer, words, limit)
                masked_texts.append(masked)
                num_cut += is_cut
            lengths = [len(masked.ids) for masked in masked_texts[start:]]
            for rows in batches_by_cost(lengths, budget=budget, most_rows=batch_size, before=start, total=len(texts)):
                batch = [start + row for row in rows]
                yield batch, _BlankBatch.of([masked_texts[index] for index in batch], pad_id)

    ordinary_V = torch.from_numpy(words.ordinary).to(device)
    candidates: list[list[list[Filled]]] = [[] for _ in texts]
    for index, best in _best_of_texts(module, make_batches(), masked_texts, ordinary_V, top_k):
        candidates[index] = _answers(texts[index], masked_texts[index], best, tokenizer, words)
    warn_of_long_texts(num_cut, limit)
    return candidates


def masked_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text with special tokens, and with a mask token in place of each blank.

    Raises:
        InputError: the tokenizer has no mask token, or joins a blank with a word.
    """
    if not _blank_spans(text, tokenizer):
        return tokenizer.special_tokens.add_to(tokenizer.encode(text))[0]
    return _mask_blanks(text, 1, tokenizer, word_boundaries(tokenizer)).ids


def _check_request(module: Transformer, tokenizer: Tokenizer, top_k: int) -> WordBoundaries:
    """Return the word boundaries of the vocabulary; raise an error if the model cannot give `top_k` candidates."""
    _check_model(module)
    _mask_id(tokenizer)
    words = word_boundaries(tokenizer)
    most = int(words.ordinary.sum())
    if not 1 <= top_k <= most:
        raise InputError(argument("top_k") + f" is {top_k}; expected 1 to {most}, the entries that can fill a blank")
    return words


def _check_model(module: Transformer) -> None:
    if module.decoder is not None or module.encoder is None:
        raise InputError(f"this model reads only from left to right, so it cannot fill blanks; {_TRAIN}")
    head = module.spec.head
    pools = head is not None and any(isinstance(layer, spec.Pool) for layer in head.layers)
    if pools or module.spec.num_outputs != module.num_source_ids:
        raise InputError(f"the head of this model does not predict vocabulary entries; {_TRAIN}")


def _mask_id(tokenizer: Tokenizer) -> int:
    if tokenizer.mask_id is None:
        raise InputError(f"the tokenizer of this model has no mask token, so it cannot fill blanks; {_TRAIN}")
    return tokenizer.mask_id


def _blank_spans(text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    mask_text = tokenizer.tokens([_mask_id(tokenizer)])[0]
    return [blank.span() for blank in re.finditer(rf"{re.escape(mask_text)}|_{{{len(BLANK)},}}", text)]


def _read_start(
    text: str, number: int, tokenizer: Tokenizer, words: WordBoundaries, most: int
) -> tuple[_MaskedText, bool]:
    """Return a text masked at its blanks, truncated to `most` ids, and whether it was truncated."""
    late_blanks = InputError(
        nth_text(number) + f" has its blanks after the {most} tokens that the model reads; shorten the text before them"
    )
    start = text[: most * CHARACTERS_PER_TOKEN]
    is_cut = len(start) < len(text)
    if is_cut and _blank_spans(text, tokenizer) and not _blank_spans(start, tokenizer):
        raise late_blanks
    masked = _mask_blanks(start, number, tokenizer, words)
    if len(masked.ids) <= most:
        return masked, is_cut
    suffix = tokenizer.special_tokens.for_text.suffix
    num_kept = most - len(suffix)
    count = bisect_left(masked.places, num_kept)
    if count == 0:
        raise late_blanks
    return _MaskedText([*masked.ids[:num_kept], *suffix], masked.places[:count], masked.spans[:count]), True


def _mask_blanks(text: str, number: int, tokenizer: Tokenizer, words: WordBoundaries) -> _MaskedText:
    """Return the ids of a text with a mask token in place of each blank, and the positions of the blanks."""
    mask_id = _mask_id(tokenizer)
    mask_text = tokenizer.tokens([mask_id])[0]
    spans = _blank_spans(text, tokenizer)
    if not spans:
        raise InputError(nth_text(number) + f" has no blank: write {BLANK} or {mask_text} in place of a word")
    # Blanks are encoded as words of one character, so that the white space around them is tokenized as for any word.
    placeholder_text, blank_starts, last = "", [], 0
    for start, end in spans:
        placeholder_text += text[last:start]
        blank_starts.append(len(placeholder_text))
        placeholder_text, last = placeholder_text + _PLACEHOLDER, end
    placeholder_text += text[last:]
    ids, places = tokenizer.encode_with_spans(placeholder_text)
    framing = tokenizer.special_tokens.for_text
    masked_ids, mask_places, token = [*framing.prefix], [], 0
    for (start, end), blank_start in zip(spans, blank_starts, strict=True):
        while token < len(ids) and places[token][1] <= blank_start:
            masked_ids.append(ids[token])
            token += 1
        # A token for the space alone comes from the placeholder, since a word includes its space.
        if words.carries_space and len(masked_ids) > len(framing.prefix) and words.texts[masked_ids[-1]] == " ":
            masked_ids.pop()
        mask_places.append(len(masked_ids))
        masked_ids.append(mask_id)
        while token < len(ids) and places[token][0] <= blank_start:
            if placeholder_text[slice(*places[token])].strip() not in ("", _PLACEHOLDER):
                raise InputError(
                    at_text(number) + f": the blank at characters {start} to {end} and the text next to it are one "
                    "word for the tokenizer of this model; put white space around the blank"
                )
            token += 1
    return _MaskedText([*masked_ids, *ids[token:], *framing.suffix], mask_places, spans)


@dataclass(frozen=True)
class _BlankBatch(DeviceBatch):
    """Batch of masked texts: padded ids, their mask, and the positions of all blanks, counted over all rows."""

    ids: Int[Tensor, "batch tokens"]
    mask: Bool[Tensor, "batch tokens"]
    positions: Int[Tensor, " blanks"]

    @classmethod
    def of(cls, masked_texts: Sequence[_MaskedText], pad_id: int) -> _BlankBatch:
        """Return the batch of some masked texts, on the CPU."""
        ids_BT, mask_BT = pad_ids([masked.ids for masked in masked_texts], pad_id, torch.device("cpu"))
        starts = range(0, ids_BT.numel(), ids_BT.shape[1])
        positions = [start + each for start, masked in zip(starts, masked_texts, strict=True) for each in masked.places]
        return cls(ids_BT, mask_BT, torch.tensor(positions))


def _best_candidates(
    module: Transformer, batch: _BlankBatch, ordinary_V: Bool[Tensor, " vocabulary"], count: int
) -> tuple[Bool[Tensor, ""], Float[Tensor, "blanks count"], Int[Tensor, "blanks count"]]:
    """Return whether all logits are finite, and the probabilities and ids of the best candidates for all blanks."""
    hidden_BTD = module(batch.ids, mask=batch.mask, head=False).hidden
    assert module.head is not None, "a model that fills blanks has a head"
    logits_NV = module.head(hidden_BTD.flatten(0, 1)[batch.positions][:, None])[:, 0].float()
    probabilities_NV = logits_NV.softmax(dim=1)
    # Embedding tables may have padding rows after the vocabulary.
    candidates_V = F.pad(ordinary_V, (0, logits_NV.shape[1] - len(ordinary_V)))
    probabilities_NK, ids_NK = probabilities_NV.masked_fill(~candidates_V, -1.0).topk(count, dim=1)
    return torch.isfinite(logits_NV).all(), probabilities_NK, ids_NK


def _best_of_texts(
    module: Transformer,
    batches: Iterator[tuple[list[int], _BlankBatch]],
    masked_texts: Sequence[_MaskedText],
    ordinary_V: Bool[Tensor, " vocabulary"],
    count: int,
) -> Iterator[tuple[int, tuple[list[list[float]], list[list[int]]]]]:
    """Yield the index of each text, and the probabilities and ids of the best candidates for its blanks."""

    def run(batch: list[int], blanks: _BlankBatch) -> Sequence[Tensor]:
        with torch.inference_mode(), naming_texts(batch):
            return _best_candidates(module, blanks, ordinary_V, count)

    for batch, (is_finite, *best) in compute_each(batches, run, ordinary_V.device):
        refuse_not_finite(bool(is_finite))
        sizes = [len(masked_texts[index].places) for index in batch]
        best_by_text = zip(*(tensor_NK.split(sizes) for tensor_NK in best), strict=True)
        for index, (probabilities_NK, ids_NK) in zip(batch, best_by_text, strict=True):
            yield index, (probabilities_NK.tolist(), ids_NK.tolist())


def _answers(
    text: str,
    masked: _MaskedText,
    candidates: tuple[list[list[float]], list[list[int]]],
    tokenizer: Tokenizer,
    words: WordBoundaries,
) -> list[list[Filled]]:
    """Return the candidates for all blanks of one text."""
    probabilities, ids = candidates
    best = [words.texts[blank[0]] for blank in ids]
    answers: list[list[Filled]] = []
    for number, (start, end) in enumerate(masked.spans):
        answers.append([])
        for index, probability in zip(ids[number], probabilities[number], strict=True):
            written = words.texts[index]
            answers[-1].append(
                Filled(
                    text=written.strip() or written,
                    token=tokenizer.tokens([index])[0],
                    probability=probability,
                    start=start,
                    end=end,
                    filled=_fill_blanks(
                        text, masked.spans, [*best[:number], written, *best[number + 1 :]], words.carries_space
                    ),
                )
            )
    return answers


def _fill_blanks(text: str, spans: Sequence[tuple[int, int]], fillings: Sequence[str], carries_space: bool) -> str:
    """Return a text with filled blanks; if `carries_space`, a filling without leading space joins the word before."""
    result, last = "", 0
    for (start, end), filling in zip(spans, fillings, strict=True):
        result, last = result + text[last:start], end
        if not carries_space:
            result += filling
        elif filling.startswith(" "):
            result += filling[1:] if not result or result[-1].isspace() else filling
        else:
            result = result.removesuffix(" ") + filling
    return result + text[last:]


def predict(model: Any, texts: Sequence[str], *, batch_size: int | None = None) -> list[list[list[Filled]]]:
    """Return the candidates for each blank of each text; see `Model.fill`."""
    candidates: list[list[list[Filled]]] = model.fill(list(texts), batch_size=batch_size)
    return candidates


def read_texts(texts: Sequence[str], collator: InputCollator, tokenizer: Tokenizer, task: TaskRecord) -> ModelInputs:
    """Return the model inputs for a text, with mask tokens in place of its blanks; see `collate_texts`."""
    refuse_pair(texts, task)
    inputs = collate_texts(texts, collator, tokenizer, task)
    if tokenizer.mask_id is None:
        return inputs
    return replace(inputs, ids=inputs.ids.new_tensor([masked_ids(texts[0], tokenizer)]))


def measure(model: EvaluatedModel, data: object, options: EvaluateOptions) -> Measures:
    """Return loss and accuracy for the masked tokens of a text, masked as in training."""
    objective = build_objective(noise_of(model), model.tokenizers.source)
    return measure_hidden_tokens(model, corpus_of(model, data), objective, options.batch_size)
