"""Fill the blanks of a text with what a masked model finds most probable there.

Shape suffixes: B texts of a batch, T tokens, N blanks of a batch, D width, V vocabulary, K candidates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from clearhead import core, spec
from clearhead.core import Transformer
from clearhead.errors import InputError, RunFailure
from clearhead.generate.batching import batches_by_cost, check_lengths, device_of, evaluation_mode, pad_ids
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.word_starts import WordBoundaries

BLANK = "___"
"""What marks a blank for every model; more underscores in a row are one blank as well."""

# Every tokenizer that cuts at all cuts between a digit and a letter or sign.
_STAND_IN = "0"
_BATCH_TOKENS = 4096
_TRAIN = 'train a masked model with [task] kind = "fill" and [model] family = "encoder"'


@dataclass(frozen=True)
class Filled:
    """One candidate for one blank.

    Args:
        text: what stands in the blank.
        token: its entry in the vocabulary.
        probability: of this entry among all entries of the vocabulary, 0 to 1.
        start, end: where the blank is in the given text, in characters; `end` is behind its last one.
        filled: the whole text with this candidate in its blank and the best candidates in the other blanks.
    """

    text: str
    token: str
    probability: float
    start: int
    end: int
    filled: str


@dataclass(frozen=True)
class _Question:
    """A text as ids, and where its blanks are in both."""

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
    batch_tokens: int = _BATCH_TOKENS,
) -> list[list[list[Filled]]]:
    """Return the most probable entries for each blank of each text, best first.

    A blank is one entry of the vocabulary: a word that the tokenizer writes in several pieces cannot come out of one
    blank. All blanks of a text are filled at once, so the candidates of one do not know those of another. Special
    entries have their share of the probability but are never candidates.

    Args:
        module: an encoder with a head over its vocabulary; used in evaluation mode, its own mode is restored.
        tokenizer: has a mask token; its text marks a blank just as `BLANK` does.
        texts: each with one blank or more.
        top_k: candidates for each blank, at least 1.
        max_length: longest text in tokens, start and end token included; None: what the model has positions for.
        batch_tokens: most padded tokens of one batch; a longer text is a batch of its own.

    Returns:
        for each text, for each of its blanks from left to right, the candidates.

    Raises:
        InputError: the model or the tokenizer cannot fill blanks, or a text has no blank, is too long, or has a blank
            that the tokenizer cannot tell from the word it touches.
        RunFailure: the model's outputs are not finite.
    """
    if isinstance(texts, str):
        raise InputError("fill() takes a list of texts; put the single text into a list")
    _check_model(module)
    _mask_id(tokenizer)
    words = WordBoundaries(tokenizer)
    if not 1 <= top_k <= int(words.ordinary.sum()):
        raise InputError(f"top_k is {top_k}; expected 1 to {int(words.ordinary.sum())}, the entries a blank can hold")
    questions = [_question(text, number, tokenizer, words) for number, text in enumerate(texts, start=1)]
    lengths = [len(question.ids) for question in questions]
    limits = [limit for limit in (module.max_positions, max_length) if limit is not None]
    check_lengths([question.ids for question in questions], min(limits, default=None), what="text")
    ordinary_V = torch.from_numpy(words.ordinary)
    found: list[list[list[Filled]]] = [[] for _ in texts]
    with evaluation_mode(module), torch.inference_mode():
        for batch in batches_by_cost(lengths, budget=batch_tokens, most_rows=None):
            chosen = [questions[index] for index in batch]
            probabilities_NK, ids_NK = _best(module, chosen, tokenizer.pad_id, ordinary_V, top_k)
            taken = 0
            for index, question in zip(batch, chosen, strict=True):
                rows = slice(taken, taken + len(question.places))
                taken = rows.stop
                candidates = (probabilities_NK[rows].tolist(), ids_NK[rows].tolist())
                found[index] = _answers(texts[index], question, candidates, tokenizer, words)
    return found


def _check_model(module: Transformer) -> None:
    if module.decoder is not None or module.encoder is None:
        raise InputError(f"this model reads from left to right, which leaves nothing to fill a blank from; {_TRAIN}")
    head = module.spec.head
    linears = [layer for layer in head.layers if isinstance(layer, spec.Linear)] if head is not None else []
    pools = head is not None and any(isinstance(layer, spec.Pool) for layer in head.layers)
    if pools or not linears or linears[-1].size != module.num_source_ids:
        raise InputError(f"the head of this model does not name the entries of its vocabulary; {_TRAIN}")


def _mask_id(tokenizer: Tokenizer) -> int:
    if tokenizer.mask_id is None:
        raise InputError(f"the tokenizer of this model has no mask token, so there is nothing to fill; {_TRAIN}")
    return tokenizer.mask_id


def _question(text: str, number: int, tokenizer: Tokenizer, words: WordBoundaries) -> _Question:
    """Turn a text with blanks into ids with mask tokens."""
    mask_id = _mask_id(tokenizer)
    mask_text = tokenizer.tokens([mask_id])[0]
    spans = [found.span() for found in re.finditer(rf"{re.escape(mask_text)}|_{{{len(BLANK)},}}", text)]
    if not spans:
        raise InputError(f"text {number} has no blank: write {BLANK} or {mask_text} where a word is wanted")
    # Blanks are read as words of one sign, so that the white space around them is cut as it is around any word.
    stood_in, stands, last = "", [], 0
    for start, end in spans:
        stood_in += text[last:start]
        stands.append(len(stood_in))
        stood_in, last = stood_in + _STAND_IN, end
    stood_in += text[last:]
    ids, places = tokenizer.encode_with_spans(stood_in)
    around = tokenizer.special_tokens.for_text
    asked, asked_at, token = [*around.prefix], [], 0
    for (start, end), stand in zip(spans, stands, strict=True):
        while token < len(ids) and places[token][1] <= stand:
            asked.append(ids[token])
            token += 1
        # A mark of white space by itself is here because of the stand-in: a word brings its own.
        if words.carries_space and len(asked) > len(around.prefix) and words.texts[asked[-1]] == " ":
            asked.pop()
        asked_at.append(len(asked))
        asked.append(mask_id)
        while token < len(ids) and places[token][0] <= stand:
            if stood_in[slice(*places[token])].strip() not in ("", _STAND_IN):
                raise InputError(
                    f"text {number}: the blank at characters {start} to {end} is one word with what it touches for the "
                    "tokenizer of this model: put white space around it"
                )
            token += 1
    return _Question([*asked, *ids[token:], *around.suffix], asked_at, spans)


def _best(
    module: Transformer,
    questions: Sequence[_Question],
    pad_id: int,
    ordinary_V: Bool[Tensor, " vocabulary"],
    count: int,
) -> tuple[Float[Tensor, "blanks count"], Int[Tensor, "blanks count"]]:
    """Return the probabilities and ids of the best candidates of every blank, text by text."""
    device = device_of(module)
    ids_BT, mask_BT = pad_ids([question.ids for question in questions], pad_id, device)
    hidden_BTD = module.states(core.Sequence(ids_BT, mask_BT)).hidden
    row_N = torch.tensor([row for row, question in enumerate(questions) for _ in question.places], device=device)
    place_N = torch.tensor([place for question in questions for place in question.places], device=device)
    assert module.head is not None, "a model that fills blanks has a head"
    states_ND = module.head.prepare(hidden_BTD[row_N, place_N])
    logits_NV = module.head.projection().outputs(states_ND).float()
    if not bool(torch.isfinite(logits_NV).all()):
        raise RunFailure("the outputs of this model are not finite numbers: its weights are damaged or too large")
    probabilities_NV = logits_NV.softmax(dim=1)
    # Published tables can have more rows than their vocabulary has entries.
    candidates_V = F.pad(ordinary_V, (0, logits_NV.shape[1] - len(ordinary_V))).to(device)
    probabilities_NK, ids_NK = probabilities_NV.masked_fill(~candidates_V, -1.0).topk(count, dim=1)
    return probabilities_NK.cpu(), ids_NK.cpu()


def _answers(
    text: str,
    question: _Question,
    candidates: tuple[list[list[float]], list[list[int]]],
    tokenizer: Tokenizer,
    words: WordBoundaries,
) -> list[list[Filled]]:
    """Write out the candidates of all blanks of one text."""
    probabilities, ids = candidates
    best = [words.texts[blank[0]] for blank in ids]
    answers: list[list[Filled]] = []
    for number, (start, end) in enumerate(question.spans):
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
                    filled=_written(
                        text, question.spans, [*best[:number], written, *best[number + 1 :]], words.carries_space
                    ),
                )
            )
    return answers


def _written(text: str, spans: Sequence[tuple[int, int]], fillings: Sequence[str], carries_space: bool) -> str:
    """Put fillings into the blanks of a text; where entries hold the space before a word, they decide about it."""
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
