"""How a model reads one text or a pair of texts: special ids around them, segments, and a decoder's start.

Shape suffixes: B texts, T tokens, U tokens of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Int64, Integer
from numpy import ndarray
from torch import Tensor

from clearhead.spec import Model
from clearhead.text import Tokenizer

# Texts of one call differ in length, so their axis has no name.
Ids = Integer[ndarray, " _"] | Sequence[int]


@dataclass(frozen=True)
class Rectangle:
    """Framed texts as a rectangle of ids, and what else a model reads with them.

    Args:
        ids: with padding on the right.
        mask: where `ids` is real; None where all are.
        segments: 0 at the first text and the special ids around it, 1 at the second; None where a model has none.
        target_ids: the start token for the decoder of a two-stack model; None for other models.
        num_tokens: real tokens that the stacks read.
    """

    ids: Int64[Tensor, "batch tokens"]
    mask: Bool[Tensor, "batch tokens"] | None
    segments: Int64[Tensor, "batch tokens"] | None
    target_ids: Int64[Tensor, "batch 1"] | None
    num_tokens: int

    def to(self, device: torch.device | str) -> Rectangle:
        """Return the same rectangle on a device."""
        return replace(
            self,
            ids=self.ids.to(device),
            mask=None if self.mask is None else self.mask.to(device),
            segments=None if self.segments is None else self.segments.to(device),
            target_ids=None if self.target_ids is None else self.target_ids.to(device),
        )


@dataclass(frozen=True)
class Framing:
    """The sequence [start] first [end], and for a pair [start] first [end] second [end].

    Args:
        start: id in front.
        end: id behind each text.
        pad: id that fills a rectangle.
        has_segments: the model has a table that tells the two texts apart.
        has_decoder_start: an encoder reads the sequence, and a decoder the start token alone.

    Source: arXiv 1810.04805, section 3 (pairs); arXiv 1910.13461, section 3.1 (two stacks).
    """

    start: int
    end: int
    pad: int
    has_segments: bool
    has_decoder_start: bool

    @classmethod
    def of(cls, model: Model, tokenizer: Tokenizer) -> Framing:
        """Return how a model with a tokenizer reads texts."""
        first = model.encoder or model.decoder
        assert first is not None, "a validated model has a stack"
        return cls(
            start=tokenizer.bos_id,
            end=tokenizer.eos_id,
            pad=tokenizer.pad_id,
            has_segments=first.embedding.num_segments > 1,
            has_decoder_start=model.encoder is not None and model.decoder is not None,
        )

    def batch(self, firsts: Sequence[Ids], seconds: Sequence[Ids] | None = None) -> Rectangle:
        """Frame some texts.

        Args:
            firsts: plain ids of each text; at least one text.
            seconds: plain ids of the second text of each pair; None: texts stand alone.
        """
        num_ends = framed_length(0, paired=seconds is not None) - 1
        lengths_B = np.array([len(first) for first in firsts])
        lengths_B += [len(second) for second in seconds] if seconds is not None else 0
        lengths_B += 1 + num_ends
        ids_BT = np.full((len(firsts), int(lengths_B.max())), self.pad, dtype=np.int64)
        segments_BT = np.zeros_like(ids_BT)
        for row, first in enumerate(firsts):
            behind = 1 + len(first)
            ids_BT[row, 0], ids_BT[row, 1:behind], ids_BT[row, behind] = self.start, first, self.end
            if seconds is not None:
                last = lengths_B[row] - 1
                ids_BT[row, behind + 1 : last], ids_BT[row, last] = seconds[row], self.end
                segments_BT[row, behind + 1 : last + 1] = 1
        mask_BT = np.arange(ids_BT.shape[1]) < lengths_B[:, None]
        starts_B1 = torch.full((len(firsts), 1), self.start) if self.has_decoder_start else None
        return Rectangle(
            ids=torch.from_numpy(ids_BT),
            mask=None if mask_BT.all() else torch.from_numpy(mask_BT),
            segments=torch.from_numpy(segments_BT) if self.has_segments and seconds is not None else None,
            target_ids=starts_B1,
            num_tokens=int(lengths_B.sum()) + (0 if starts_B1 is None else len(firsts)),
        )


def framed_length(num_ids: int, *, paired: bool) -> int:
    """Return the length of a sequence with its special ids; for a pair num_ids counts both texts."""
    return num_ids + (3 if paired else 2)


def framed_room(max_length: int, *, paired: bool = False) -> int:
    """Return how many plain ids fit into a sequence of some length."""
    return max_length - framed_length(0, paired=paired)


def cut_pair(
    first_N: Integer[ndarray, " texts"], second_N: Integer[ndarray, " texts"], room: int
) -> tuple[Int64[ndarray, " texts"], Int64[ndarray, " texts"]]:
    """Return how many ids of each text stay where a pair must fit into some room: the longer of the two is cut first.

    Args:
        first_N: ids of the first texts.
        second_N: ids of the second texts.
        room: ids of both together that fit.
    """
    share = (room + 1) // 2
    kept_first_N = np.minimum(first_N, np.maximum(share, room - second_N))
    kept_second_N = np.minimum(second_N, room - kept_first_N)
    return kept_first_N.astype(np.int64), kept_second_N.astype(np.int64)
