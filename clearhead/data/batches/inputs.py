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

# The texts of one call differ in length, so their axis has no name.
Ids = Integer[ndarray, " _"] | Sequence[int]


@dataclass(frozen=True)
class ModelInputs(DeviceBatch):
    """The inputs of a model for some texts: padded ids with special ids, masks, segments and decoder input.

    Args:
        ids: the ids, padded on the right.
        mask: the mask of `ids`, True at real tokens. None means that all tokens are real.
        segments: the segment number of each id. None means that all are 0, or that the model has no segments.
        target_ids: the decoder input of a two-stack model: its start token, or the text again. None for other models.
        target_mask: the mask of `target_ids`. None means that all tokens are real.
        num_tokens: the number of real tokens that the stacks read.
    """

    ids: Int64[Tensor, "batch tokens"]
    mask: Bool[Tensor, "batch tokens"] | None
    segments: Int64[Tensor, "batch tokens"] | None
    target_ids: Int64[Tensor, "batch target"] | None
    num_tokens: int
    target_mask: Bool[Tensor, "batch target"] | None = None

    def with_labels(self, labels: Tensor, rows: Indices, *, num_labels: int) -> Batch:
        """Return a batch of these inputs with labels.

        Args:
            labels: the labels, as in `Batch`.
            rows: the numbers of these examples in the store.
            num_labels: the number of labels that are not NO_LABEL.
        """
        inputs = {field.name: getattr(self, field.name) for field in fields(self)}
        return Batch(**inputs, labels=labels, num_labels=num_labels, rows=rows)


@dataclass(frozen=True)
class InputCollator:
    """Turns ids of texts into the inputs of one model: adds special ids, segments and padding.

    Args:
        special_tokens: the special tokens of a single text and of a pair.
        pad: the padding id.
        has_segments: True if the model has a segment embedding, which tells the two texts of a pair apart.
        start: the start id of the decoder of a two-stack model. None means that the model has one stack, or that the
            decoder starts with the last id of the text.
        repeats: the way in which the decoder reads the text again, as in the task record. None means that it reads the
            start token alone.

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
            model: the spec of the model.
            tokenizer: the tokenizer of the model.
            repeats: the field `repeats` of the model's task record.

        Raises:
            InputError: the model has two stacks, and the start token of its decoder is not known.
        """
        first = model.encoder or model.decoder
        assert first is not None, "the model has no stack: validate its spec first"
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
        """The number of special ids before a single text."""
        return len(self.special_tokens.prefix)

    @property
    def has_pair_front(self) -> bool:
        """True if a special id precedes a pair."""
        return not isinstance(self.special_tokens.template(paired=True)[0][0], str)

    def second_start(self, num_first: int) -> int:
        """Return the position at which the second text of a pair starts, after a first text of `num_first` ids."""
        template = [item for item, _ in self.special_tokens.template(paired=True)]
        return sum(num_first if item == "A" else 1 for item in template[: template.index("B")])

    def collate(
        self, firsts: Sequence[Ids], seconds: Sequence[Ids] | None = None, *, limit: int | None = None
    ) -> ModelInputs:
        """Return the model inputs of some texts.

        Args:
            firsts: the plain ids of each text, or of the first text of each pair; at least one.
            seconds: the plain ids of the second text of each pair. None means single texts.
            limit: the limit of `padded_length`. None means that texts are padded to the longest of them.

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
        """Return the ids that the decoder reads, and their mask; None for models with one stack."""
        if self.repeats is None:
            return None if self.start is None else torch.full((len(ids_BT), 1), self.start), None
        # The state of the end token represents the text; some templates have a language token after it.
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
    """Shift ids right by one position for a decoder that reads the text again; the last real token is dropped.

    At each position, the decoder then sees the tokens before it, and the encoder output of the whole text.

    Args:
        ids_BT: the input ids of the encoder.
        mask_BT: the mask, True at real tokens; the real tokens of a row may start anywhere, without gaps.
        start: the first id of the shifted text. None means the last id of the text.

    Source: arXiv 1910.13461, section 3.1 and 3.2.
    """
    places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    first_B = mask_BT.int().argmax(1)
    last_B = torch.where(mask_BT, places_T, -1).argmax(1)
    rows_B = torch.arange(len(ids_BT), device=ids_BT.device)
    shifted_BT = ids_BT.roll(1, dims=1)
    shifted_BT[rows_B, first_B] = ids_BT[rows_B, last_B] if start is None else start
    return torch.where(mask_BT, shifted_BT, ids_BT)
