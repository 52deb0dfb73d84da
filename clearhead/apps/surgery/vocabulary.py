"""Vocabularies extended or reduced: entries added to or removed from the model and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead import spec
from clearhead.apps.surgery.addresses import token_output, update_nodes, word_table
from clearhead.apps.surgery.plan import Change, Origin, SurgeryPlan, apply_plan, copy_origins
from clearhead.apps.surgery.report import AnyModel, EditedModel
from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.model.facade import Model
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer


@check_types
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


@check_types
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
        tables: VocabularyRows = VocabularyRows.of(module.spec, side)
        return plan_rows(module, tables, [*range(tables.rows), *([None] * count)], row_init)

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
    return EditedModel(model.with_module(edited.model, tokenizers=changed), edited.report)


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


VocabularySide = Literal["source", "target"]
# How new rows begin: the mean of all rows, randomly initialized, the mean of the rows of some ids, or given values.
RowInit = Literal["mean", "draw"] | Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True)
class VocabularyRows:
    """The tables of a vocabulary, and the output that has a row for each entry.

    Args:
        tables: addresses of the word tables.
        rows: how many each has.
        output: the index of the head's layer that gives the logits of the entries; None: there is none.
    """

    tables: tuple[str, ...]
    rows: int
    output: int | None

    @classmethod
    def of(cls, model: spec.Model, side: VocabularySide | None) -> VocabularyRows:
        """Find the tables of a model.

        Args:
            model: its spec.
            side: "source" or "target"; None: the only vocabulary.

        Raises:
            InputError: there are two vocabularies and no side, or one vocabulary and a side.
        """
        tables = {path: node for path, node in spec.walk(model) if isinstance(node, spec.Table)}
        source, _ = word_table(model, "encoder" if model.encoder is not None else "decoder")
        target, _ = word_table(model, "decoder" if model.decoder is not None else "encoder")
        if source == target and side is not None:
            raise InputError(f"the model has one vocabulary for both sides: leave out side='{side}'")
        if side is None and len({table.rows for table in tables.values()}) > 1:
            sizes = ", ".join(f"{path} has {table.rows} rows" for path, table in tables.items())
            raise InputError(f"the model has two vocabularies ({sizes}): choose side='source' or side='target'")
        paths = {"source": (source,), "target": (target,), None: tuple(tables)}[side]
        rows = tables[paths[0]].rows
        output = token_output(model.head)
        if output is None:
            return cls(paths, rows, None)
        index, layer = output
        is_tied = layer.weight is not None and layer.weight.path in paths
        # An output of another size is for labels.
        if not is_tied and not (target in paths and layer.size == rows):
            return cls(paths, rows, None)
        if layer.weight is not None and not is_tied:
            raise InputError(
                f"the output is {layer.weight.path}, which belongs to the other vocabulary: leave side out"
            )
        return cls(paths, rows, index)


def plan_rows(module: Transformer, words: VocabularyRows, rows: Sequence[int | None], start: RowInit) -> SurgeryPlan:
    """Plan other rows of a vocabulary.

    Args:
        module: the module.
        words: the tables and the output of the vocabulary.
        rows: for each new row the index of the old one; None: the row is new.
        start: how new rows begin.

    Raises:
        InputError: rows that do not exist or are named twice, no row, or initial values of another number or width.
    """
    _check_rows(words, [row for row in rows if row is not None])
    _check_start(module.spec, words, start, sum(row is None for row in rows))
    origins = copy_origins(module)
    addresses = [f"{path}.weight" for path in words.tables]
    if words.output is not None:
        addresses += [f"head.layers.{words.output}.{leaf}" for leaf in ("weight", "bias")]
    is_drawn = isinstance(start, str) and start == "draw" and None in rows
    if list(rows) != list(range(words.rows)):
        for address in addresses:
            if address in origins:
                origins[address] = Origin(address, _change(rows, start), is_drawn=is_drawn)

    updates = {path: {"rows": len(rows)} for path in words.tables}
    updates[f"head.layers.{words.output}"] = {"size": len(rows)}
    return SurgeryPlan(update_nodes(module.spec, updates), origins)


def _check_rows(words: VocabularyRows, rows: Sequence[int]) -> None:
    wrong = [row for row in rows if not 0 <= row < words.rows]
    if wrong:
        raise InputError(f"there is no row {wrong[0]}; the {words.rows} rows are numbered from 0")
    if len(set(rows)) != len(rows):
        twice = next(row for number, row in enumerate(rows) if row in rows[:number])
        raise InputError(f"row {twice} is named twice; a row has one place in the new vocabulary")
    if not rows:
        raise InputError("no row would be left; name those to keep")


def _check_start(model: spec.Model, words: VocabularyRows, start: RowInit, count: int) -> None:
    if isinstance(start, str):
        if start not in ("mean", "draw"):
            raise InputError(f"new rows cannot begin as '{start}'; expected 'mean', 'draw', ids for each, or a tensor")
        return
    if len(start) != count:
        raise InputError(f"{count} new rows need {count} initial values, got {len(start)}")
    if isinstance(start, Tensor):
        widths = {path: getattr(model, path.split(".")[0]).table_width for path in words.tables}
        wrong = [f"{path} is {width} wide" for path, width in widths.items() if list(start.shape) != [count, width]]
        if wrong:
            raise InputError(f"new rows were given in the shape {list(start.shape)}, but {wrong[0]}")
        return
    for ids in start:
        if not ids or any(not 0 <= index < words.rows for index in ids):
            raise InputError(f"a new row begins as the mean of rows 0 to {words.rows - 1}; got {list(ids)}")


def _change(rows: Sequence[int | None], start: RowInit) -> Change:
    """Return the change of a table, of an output of its own, or of its bias."""
    index = torch.tensor([0 if row is None else row for row in rows])
    places = torch.tensor([number for number, row in enumerate(rows) if row is None], dtype=torch.long)

    def change(old: Tensor, drawn: Tensor) -> Tensor:
        rows_now = old[index.to(old.device)]
        if len(places):
            rows_now[places.to(old.device)] = initial_rows(old, drawn).to(rows_now)
        return rows_now

    def initial_rows(old: Tensor, drawn: Tensor) -> Tensor:
        """Return the new rows; means are taken in float32, because sums of many rows lose precision in fewer bits."""
        if isinstance(start, Tensor) and start.shape[1:] == old.shape[1:]:
            return start
        if isinstance(start, str) and start == "draw":
            return drawn[places.to(drawn.device)]
        if isinstance(start, str | Tensor):
            return old.float().mean(dim=0, keepdim=True).expand(len(places), *old.shape[1:])
        return torch.stack([old[list(ids)].float().mean(dim=0) for ids in start])

    return change
