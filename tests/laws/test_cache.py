"""Caches that no law of `test_invariances.py` has: windows, late masks, beams over one memory, selected rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clearhead import spec
from clearhead.core import Cache, Transformer, build
from tests.laws.tiny import Reader, difference, hparams, pad_rows, resolve_spec, tiny, with_mask

PROMPT, NEW = 5, 3
CHUNKS = {"one by one": [1] * 8, "prompt, then one by one": [5, 1, 1, 1], "in chunks": [3, 1, 4]}


def decode_in_pieces(reader: Reader, ids: Tensor, mask: Tensor | None, chunks: list[int]) -> Tensor:
    """Return the logits of all tokens, processed chunk by chunk with one cache."""
    cache, start, logits = Cache(), 0, []
    for size in chunks:
        piece = slice(start, start + size)
        logits.append(reader(ids[:, piece], None if mask is None else mask[:, piece], cache=cache).logits)
        start += size
        assert cache.length == start
    return torch.cat(logits, dim=1)


def prompts(vocab: int, side: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the real tokens of three rows, and the rows as padded prompts continued by real tokens."""
    rows = [torch.randint(vocab, (length + NEW,)) for length in (5, 1, 3)]
    ids, mask = pad_rows([row[:-NEW] for row in rows], side, PROMPT)
    ids = torch.cat([ids, torch.stack([row[-NEW:] for row in rows])], dim=1)
    return rows, ids, torch.cat([mask, torch.ones(3, NEW, dtype=torch.bool)], dim=1)


def check_rows(module: Transformer, side: str, chunks: list[int]) -> None:
    """Each row of a padded batch with a cache equals the row alone in one pass without a cache."""
    reader = Reader.of(module, 3)
    rows, ids, mask = prompts(reader.vocab, side)
    actual = decode_in_pieces(reader, ids, mask, chunks)
    for index, row in enumerate(rows):
        alone = reader.row(index)(row[None]).logits[0]
        assert difference(actual[index, mask[index]], alone) <= 1e-5, f"row {index}"


@torch.no_grad()
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_window_counts_real_tokens_through_a_cache(side: str, chunks: str) -> None:
    """Padding between a prompt and its continuation does not count in the window."""
    model = resolve_spec(hparams("decoder/post/rotary"))
    check_rows(build(with_mask(model, spec.Window(before=3, after=0), "decoder")).eval(), side, CHUNKS[chunks])


@torch.no_grad()
def test_a_mask_may_come_late(kernel: str) -> None:
    """Tokens before the first mask were real, and so are those after it."""
    reader = Reader.of(tiny("decoder/post/alibi"), 2)
    rows = [torch.randint(reader.vocab, (length,)) for length in (11, 9)]
    ids, mask = torch.zeros(2, 11, dtype=torch.long), torch.ones(2, 11, dtype=torch.bool)
    ids[0], ids[1, :5], ids[1, 7:], mask[1, 5:7] = rows[0], rows[1][:5], rows[1][5:], False
    cache = Cache()
    pieces = [reader(ids[:, :4], cache=cache), reader(ids[:, 4:8], mask[:, 4:8], cache=cache)]
    pieces.append(reader(ids[:, 8:], cache=cache))
    actual = torch.cat([piece.logits for piece in pieces], dim=1)
    for index, row in enumerate(rows):
        assert difference(actual[index, mask[index]], reader(row[None]).logits[0]) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("style", ["post/sinusoidal", "pre-grouped/rotary", "pre-grouped/buckets"])
def test_beams_over_one_memory_are_rows_over_repeated_memory(style: str, kernel: str) -> None:
    beams, module = 5, tiny(f"encoder-decoder/{style}")
    once = Reader.of(module, 3)
    repeated = Reader(module, once.memory.repeat_interleave(beams, 0), once.memory_mask.repeat_interleave(beams, 0))
    ids = torch.randint(once.vocab, (3 * beams, 7))
    expected = repeated(ids).logits
    assert difference(once(ids).logits, expected) <= 1e-5
    assert difference(decode_in_pieces(once, ids, None, [2, 1, 4]), expected) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ["encoder-decoder/post/learned", "encoder-decoder/pre-grouped/rotary"])
def test_selected_rows_continue_as_if_alone(name: str) -> None:
    """Sentence 0 is dropped, and the beams of the others are reordered and repeated."""
    module, beams = tiny(name), 2
    reader = Reader.of(module, 3)
    ids = torch.randint(reader.vocab, (3 * beams, 7))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[3, :2] = False
    cache = Cache()
    reader(ids[:, :5], mask[:, :5], cache=cache)
    rows, sentences = torch.tensor([5, 4, 3, 3]), torch.tensor([2, 1])
    cache.select(rows, sentences)
    actual = reader(ids[rows, 5:], cache=cache).logits
    remaining = Reader(module, reader.memory[sentences], reader.memory_mask[sentences])
    assert difference(actual, remaining(ids[rows], mask[rows]).logits[:, 5:]) <= 1e-5
