"""Texts or pairs of texts as model inputs: special ids, segments, padding, and the decoder's input.

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

from clearhead.data.arrays import Indices
from clearhead.data.batches.base import Batch, DeviceBatch, padded_length
from clearhead.spec import Model
from clearhead.spec.tasks.record import Repeats
from clearhead.text.special_tokens import SpecialTokens, TemplateItem
from clearhead.text.tokenizer import Tokenizer

# Texts of one call differ in length, so their axis has no name.
Ids = Integer[ndarray, " _"] | Sequence[int]


@dataclass(frozen=True)
class ModelInputs(DeviceBatch):
    """Padded texts with their special ids, and the other inputs of a model.

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
    """Adds the special ids, segments and padding that one model reads.

    Args:
        special_tokens: of one text, and of a pair.
        pad: the padding id.
        has_segments: the model has a table that tells the two texts apart.
        start: the start id of a decoder behind an encoder; None: there is one stack.
        repeats: how the decoder reads the text once more, as in a task record; None: it reads the start token alone.

    Source: arXiv 1810.04805, section 3 (pairs); arXiv 1910.13461, section 3.1 (two stacks).
    """

    special_tokens: SpecialTokens
    pad: int
    has_segments: bool = False
    start: int | None = None
    repeats: Repeats | None = None

    @classmethod
    def of(cls, model: Model, tokenizer: Tokenizer, repeats: Repeats | None = None) -> InputCollator:
        """Return the collator of a model.

        Args:
            model: its spec.
            tokenizer: its tokenizer.
            repeats: as in its task record.

        Raises:
            InputError: the start token of a decoder behind an encoder is not known.
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
        """The number of special ids in front of a single text."""
        return len(self.special_tokens.prefix)

    @property
    def has_pair_front(self) -> bool:
        """Whether a special id stands in front of a pair."""
        return not isinstance(self.special_tokens.template(paired=True)[0][0], str)

    def second_start(self, num_first: int) -> int:
        """Return the place of the second text of a pair, behind a first text of so many ids."""
        template = [item for item, _ in self.special_tokens.template(paired=True)]
        return sum(num_first if item == "A" else 1 for item in template[: template.index("B")])

    def collate(
        self, firsts: Sequence[Ids], seconds: Sequence[Ids] | None = None, *, limit: int | None = None
    ) -> ModelInputs:
        """Add special ids and padding to some texts.

        Args:
            firsts: plain ids of each text; at least one text.
            seconds: plain ids of the second text of each pair; None: single texts.
            limit: as of `padded_length`; None: texts are padded to the longest of them.

        Raises:
            InputError: there are pairs, and the tokenizer has no template for them.
        """
        template = self.special_tokens.template(paired=seconds is not None)
        extra = self.special_tokens.num_added(paired=seconds is not None)
        counts, flat = {"A": _lengths(firsts)}, {"A": _concat_ids(firsts)}
        if seconds is not None:
            counts["B"], flat["B"] = _lengths(seconds), _concat_ids(seconds)
        lengths_B = np.sum(list(counts.values()), axis=0) + extra
        length = int(lengths_B.max())
        if limit is not None:
            length = padded_length(length, limit)
        ids_BT = np.full((len(firsts), length), self.pad, dtype=np.int64)
        segments_BT, start_B, columns_T = np.zeros_like(ids_BT), np.zeros_like(lengths_B), np.arange(length)
        for item, segment in template:
            count, ids = (counts[item], flat[item]) if isinstance(item, str) else (1, item)
            stop_B = start_B + count
            here_BT = (columns_T >= start_B[:, None]) & (columns_T < stop_B[:, None])
            ids_BT[here_BT] = ids
            segments_BT[here_BT], start_B = segment, stop_B
        mask_BT = columns_T < lengths_B[:, None]
        has_segments = self.has_segments and any(segment for _, segment in template)
        padded, mask = torch.from_numpy(ids_BT), torch.from_numpy(mask_BT)
        target, target_mask = self._target(padded, mask, template)
        num_tokens = int(lengths_B.sum())
        if target is not None:
            num_tokens += target.numel() if target_mask is None else int(target_mask.sum())
        return ModelInputs(
            ids=padded,
            mask=None if mask_BT.all() else mask,
            segments=torch.from_numpy(segments_BT) if has_segments else None,
            target_ids=target,
            num_tokens=num_tokens,
            target_mask=target_mask,
        )

    def _target(
        self,
        ids_BT: Int64[Tensor, "batch tokens"],
        mask_BT: Bool[Tensor, "batch tokens"],
        template: Sequence[TemplateItem],
    ) -> tuple[Int64[Tensor, "batch target"] | None, Bool[Tensor, "batch target"] | None]:
        """Return what the decoder reads, and its mask."""
        if self.repeats is None:
            return None if self.start is None else torch.full((len(ids_BT), 1), self.start), None
        # The state of the end token represents the text, and some templates have a language token behind it.
        last = next(index for index, (item, _) in enumerate(reversed(template)) if isinstance(item, str))
        num_after = max(last - 1, 0)
        ends_B1 = mask_BT.sum(1, keepdim=True) - num_after
        target_mask_BT = torch.arange(ids_BT.shape[1]) < ends_B1
        return shift_right(ids_BT, mask_BT, start=self.start), target_mask_BT


def _lengths(texts: Sequence[Ids]) -> Int64[np.ndarray, " texts"]:
    return np.array([len(ids) for ids in texts])


def _concat_ids(texts: Sequence[Ids]) -> Int64[np.ndarray, " tokens"]:
    return np.concatenate([np.asarray(ids, np.int64) for ids in texts])


def shift_right(
    ids_BT: Int[Tensor, "batch tokens"], mask_BT: Bool[Tensor, "batch tokens"], *, start: int | None
) -> Int[Tensor, "batch tokens"]:
    """Shift the ids right by one position; the last real token is dropped.

    At each position, a decoder then sees the tokens before it, and the memory of the whole text.

    Args:
        ids_BT: what the encoder reads.
        mask_BT: True = a real token; the real tokens of a row may be anywhere, without gaps.
        start: the first id; None: the last id of the text.

    Source: arXiv 1910.13461, section 3.1 and 3.2.
    """
    places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    first_B = mask_BT.int().argmax(1)
    last_B = torch.where(mask_BT, places_T, -1).argmax(1)
    rows_B = torch.arange(len(ids_BT), device=ids_BT.device)
    shifted_BT = ids_BT.roll(1, dims=1)
    shifted_BT[rows_B, first_B] = ids_BT[rows_B, last_B] if start is None else start
    return torch.where(mask_BT, shifted_BT, ids_BT)
