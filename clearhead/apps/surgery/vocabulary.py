"""Vocabularies extended or reduced: entries added to or removed from the model and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from clearhead.apps.surgery.plan import SurgeryPlan, apply_plan
from clearhead.apps.surgery.report import AnyModel, EditedModel
from clearhead.apps.surgery.vocabulary_rows import RowInit, VocabularyRows, VocabularySide, plan_rows
from clearhead.base.arguments import checked
from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.model.facade import Model
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer


@checked
def grow_vocabulary(
    model: AnyModel,
    words: int | Sequence[str],
    *,
    start: RowInit | Literal["pieces"] = "mean",
    side: VocabularySide | None = None,
) -> EditedModel[AnyModel]:
    """Add words to the word tables and the outputs with their biases; the logits of old words stay the same.

    Args:
        model: a module or a model; it is not changed.
        words: words that the tokenizer of a model gets too, each as one id; or a number of rows without words.
        start: how new rows begin: "mean": as the mean of all rows, so that a new word is about as likely as an old
            one; "pieces": as the mean of the tokens that the word was encoded as; "draw": randomly initialized; or for
            each word the ids whose rows are averaged; or a tensor [words, width] for the word tables, while outputs of
            their own begin as the mean.
        side: "source" or "target"; None: the only vocabulary.

    Raises:
        InputError: words that cannot be added, initial values that do not fit, or two vocabularies and no side.

    Source: the mean: John Hewitt, "Initializing new word embeddings for pretrained language models", 2021.
    """
    if isinstance(words, int):
        return _with_rows(model, words, start, side)
    if not isinstance(model, Model):
        raise InputError("a module has no tokenizer to add words to: give a number of rows")
    if not words:
        raise InputError("name the words to add, or give a number of rows")
    old = _tokenizer_of(model, side)
    new = old.with_words(words)
    count = VocabularyRows.of(model.spec, side).rows
    # A table may have rows beyond the last entry of the tokenizer: those that get a word now are initialized again.
    rows = [
        index if index < old.vocab_size or index >= new.vocab_size else None
        for index in range(max(count, new.vocab_size))
    ]
    if isinstance(start, str) and start == "pieces":
        # A word without tokens begins as the mean of all rows.
        start = [old.encode(word) or list(range(old.vocab_size)) for word in words]
    return _with_tokenizer(model, side, new, rows, start)


@checked
def cut_vocabulary(
    model: AnyModel, keep: Sequence[int], *, side: VocabularySide | None = None
) -> EditedModel[AnyModel]:
    """Keep some rows of the vocabulary in the order given, with new ids; the tokenizer is reduced too.

    Args:
        model: a module or a model; it is not changed.
        keep: ids. The tokenizer of a model must work without the rest, and special tokens must keep their ids:
            `model.tokenizer.needed_ids(texts)` returns those that texts need.
        side: as for `grow_vocabulary`.

    Raises:
        InputError: ids that do not exist or are named twice, no id, two vocabularies and no side, or a tokenizer that
            cannot be reduced.

    Source: arXiv 2010.05609, section 3.
    """
    if not isinstance(model, Model):
        return apply_plan(model, lambda module: plan_rows(module, VocabularyRows.of(module.spec, side), keep, "mean"))
    _check_named(model, keep)
    return _with_tokenizer(model, side, _tokenizer_of(model, side).with_entries(keep), keep, "mean")


def _with_rows(
    model: AnyModel, count: int, start: RowInit | Literal["pieces"], side: VocabularySide | None
) -> EditedModel[AnyModel]:
    if count < 1:
        raise InputError(f"at least 1 row can be added; got {count}")
    if isinstance(start, str) and start == "pieces":
        raise InputError("start='pieces' is for words; rows without words begin as 'mean' or 'draw'")
    row_init: RowInit = start

    def plan(module: Transformer) -> SurgeryPlan:
        found: VocabularyRows = VocabularyRows.of(module.spec, side)
        return plan_rows(module, found, [*range(found.rows), *([None] * count)], row_init)

    return apply_plan(model, plan)


def _tokenizer_of(model: Model, side: VocabularySide | None) -> Tokenizer:
    pair = model.tokenizers
    if pair.joint and side is not None:
        raise InputError("both sides share one tokenizer: leave side out")
    if not pair.joint and side is None:
        raise InputError("each side has a tokenizer of its own: choose side='source' or side='target'")
    return pair.target if side == "target" else pair.source


def _with_tokenizer(
    model: Model, side: VocabularySide | None, tokenizer: Tokenizer, rows: Sequence[int | None], start: RowInit
) -> EditedModel[Any]:
    """Change the module, and give the model its new tokenizer."""
    edited = apply_plan(
        model.module, lambda module: plan_rows(module, VocabularyRows.of(module.spec, side), rows, start)
    )
    pair = model.tokenizers
    if pair.joint:
        changed = TokenizerPair(tokenizer, tokenizer, joint=True)
    else:
        changed = replace(pair, target=tokenizer) if side == "target" else replace(pair, source=tokenizer)
    return EditedModel(model.replaced(edited.model, tokenizers=changed), edited.report)


def _check_named(model: Model, keep: Sequence[int]) -> None:
    """Refuse to change ids that config.json names."""
    if model.hf_checkpoint is None:
        return
    rows = max(model.module.num_source_ids, model.module.num_target_ids)
    for key, value in model.hf_checkpoint.config.items():
        for index in value if isinstance(value, list) else [value]:
            named = key.endswith(("_token_id", "_tokens", "_token_ids")) and isinstance(index, int)
            if named and 0 <= index < rows and (index >= len(keep) or keep[index] != index):
                raise InputError(f"config.json names {index} as {key}, so it must keep it: keep all ids up to it")
