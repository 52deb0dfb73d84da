"""How a model reads one text or a pair of texts: special ids around them, segments, and a decoder's start.

Shape suffixes: B texts, T tokens, U tokens of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64, Integer
from numpy import ndarray
from torch import Tensor

from clearhead.data.batches.base import Batch, DeviceBatch
from clearhead.data.stores.arrays import Indices
from clearhead.spec import Model
from clearhead.task import Repeats
from clearhead.text.special_tokens import Part, SpecialTokens
from clearhead.text.tokenizer import Tokenizer

# Texts of one call differ in length, so their axis has no name.
Ids = Integer[ndarray, " _"] | Sequence[int]


@dataclass(frozen=True)
class ModelInputs(DeviceBatch):
    """Framed texts as a rectangle of ids, and what else a model reads with them.

    Args:
        ids: with padding on the right.
        mask: where `ids` is real; None where all are.
        segments: which text each id belongs to; None where all are 0, or a model has no segments.
        target_ids: what the decoder of a two-stack model reads: its start token, or the text once more; None for other
            models.
        target_mask: where `target_ids` is real; None where all are.
        num_tokens: real tokens that the stacks read.
    """

    ids: Int64[Tensor, "batch tokens"]
    mask: Bool[Tensor, "batch tokens"] | None
    segments: Int64[Tensor, "batch tokens"] | None
    target_ids: Int64[Tensor, "batch target"] | None
    num_tokens: int
    target_mask: Bool[Tensor, "batch target"] | None = None

    def with_labels(self, labels: Tensor, rows: Indices, *, num_labels: int) -> Batch:
        """Return a batch with labels.

        Args:
            labels: as of `Batch`.
            rows: which examples these are.
            num_labels: labels that are not NO_LABEL.
        """
        inputs = {field.name: getattr(self, field.name) for field in fields(self)}
        return Batch(**inputs, labels=labels, num_labels=num_labels, rows=rows)


@dataclass(frozen=True)
class InputCollator:
    """A tokenizer's frame as one model reads it.

    Args:
        special_tokens: of one text, and of a pair.
        pad: id that fills a rectangle.
        has_segments: the model has a table that tells the two texts apart.
        start: what the decoder behind an encoder reads; None: there is one stack.
        repeats: the decoder reads the text once more, as a record of a task says; None: the start token alone.

    Source: arXiv 1810.04805, section 3 (pairs); arXiv 1910.13461, section 3.1 (two stacks).
    """

    special_tokens: SpecialTokens
    pad: int
    has_segments: bool = False
    start: int | None = None
    repeats: Repeats | None = None

    @classmethod
    def of(cls, model: Model, tokenizer: Tokenizer, repeats: Repeats | None = None) -> InputCollator:
        """Return how a model with a tokenizer reads texts.

        Args:
            model: what it is.
            tokenizer: of what it reads.
            repeats: what the record of its task says of its decoder.

        Raises:
            InputError: a decoder behind an encoder, and nothing says where it begins.
        """
        first = model.encoder or model.decoder
        assert first is not None, "a validated model has a stack"
        has_two_stacks = model.encoder is not None and model.decoder is not None
        return cls(
            special_tokens=tokenizer.special_tokens,
            pad=tokenizer.pad_id,
            has_segments=first.embedding.num_segments > 1,
            start=tokenizer.special_tokens.for_target.prefix[0] if has_two_stacks and repeats != "last" else None,
            repeats=repeats if has_two_stacks else None,
        )

    @property
    def front(self) -> int:
        """How many ids stand in front of a single text."""
        return len(self.special_tokens.prefix)

    def collate(self, firsts: Sequence[Ids], seconds: Sequence[Ids] | None = None) -> ModelInputs:
        """Frame some texts.

        Args:
            firsts: plain ids of each text; at least one text.
            seconds: plain ids of the second text of each pair; None: texts stand alone.

        Raises:
            InputError: there are pairs, and the tokenizer has no template for them.
        """
        template = self.special_tokens.template(paired=seconds is not None)
        extra = self.special_tokens.num_added(paired=seconds is not None)
        lengths_B = np.array([len(first) for first in firsts]) + extra
        lengths_B += [len(second) for second in seconds] if seconds is not None else 0
        ids_BT = np.full((len(firsts), int(lengths_B.max())), self.pad, dtype=np.int64)
        segments_BT = np.zeros_like(ids_BT)
        for row, first in enumerate(firsts):
            texts: dict[str, Ids] = {"A": first, "B": seconds[row] if seconds is not None else ()}
            place = 0
            for part, segment in template:
                piece = texts[part] if isinstance(part, str) else (part,)
                here = slice(place, place + len(piece))
                ids_BT[row, here], segments_BT[row, here] = piece, segment
                place = here.stop
        mask_BT = np.arange(ids_BT.shape[1]) < lengths_B[:, None]
        has_segments = self.has_segments and any(segment for _, segment in template)
        ids, mask = torch.from_numpy(ids_BT), torch.from_numpy(mask_BT)
        target, target_mask = self._target(ids, mask, template)
        num_said = 0 if target is None else target.numel() if target_mask is None else int(target_mask.sum())
        return ModelInputs(
            ids=ids,
            mask=None if mask_BT.all() else mask,
            segments=torch.from_numpy(segments_BT) if has_segments else None,
            target_ids=target,
            num_tokens=int(lengths_B.sum()) + num_said,
            target_mask=target_mask,
        )

    def _target(
        self, ids_BT: Int64[Tensor, "batch tokens"], mask_BT: Bool[Tensor, "batch tokens"], template: Sequence[Part]
    ) -> tuple[Int64[Tensor, "batch target"] | None, Bool[Tensor, "batch target"] | None]:
        """Return what the decoder reads, and where that is real."""
        if self.repeats is None:
            return None if self.start is None else torch.full((len(ids_BT), 1), self.start), None
        # The state of the end token stands for the text, and some templates have a language behind it.
        last = next(place for place, (part, _) in enumerate(reversed(template)) if isinstance(part, str))
        behind = max(last - 1, 0)
        ends_B1 = mask_BT.sum(1, keepdim=True) - behind
        target_mask_BT = torch.arange(ids_BT.shape[1]) < ends_B1
        return shift_right(ids_BT, mask_BT, start=self.start), target_mask_BT


def shift_right(
    ids_BT: Int[Tensor, "batch tokens"], mask_BT: Bool[Tensor, "batch tokens"], *, start: int | None
) -> Int[Tensor, "batch tokens"]:
    """Return the ids one place later: each real token stands where the next one was, and the last one is gone.

    So what a decoder computes at a token's place knows all that is before the token, and the memory of the whole.

    Args:
        ids_BT: what the encoder reads.
        mask_BT: True = a real token; where the real tokens stand in a row does not matter, if nothing is between them.
        start: the id in front; None: the last id of the text.

    Source: arXiv 1910.13461, section 3.1 and 3.2.
    """
    places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    first_B = mask_BT.int().argmax(1)
    last_B = torch.where(mask_BT, places_T, -1).argmax(1)
    rows_B = torch.arange(len(ids_BT), device=ids_BT.device)
    shifted_BT = ids_BT.roll(1, dims=1)
    shifted_BT[rows_B, first_B] = ids_BT[rows_B, last_B] if start is None else start
    return torch.where(mask_BT, shifted_BT, ids_BT)
