"""Surgery on vocabularies: add or remove entries of the model and its tokenizer."""

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
    """Add words to the vocabulary of a model; the logits of old words stay the same.

    Args:
        model: a module or a model; it is not changed.
        words: the words, each of which becomes one id of the tokenizer; or a number of rows without words.
        start: the initial values of new rows. The value "mean" is the mean of all rows, so that a new word is about as
            likely as an old word. The value "pieces" is the mean of the rows of the word's tokens, and "draw" is
            random initialization. A list of ids for each word means the mean of their rows. A tensor [words, width] is
            the rows of the token embeddings; an untied output layer then starts as the mean.
        side: the vocabulary, "source" or "target". None means the only one.

    Raises:
        InputError: a word cannot be added, initial values do not fit, or `side` is missing with two vocabularies.

    Source: the mean: John Hewitt, "Initializing new word embeddings for pretrained language models", 2021.
    """
    if isinstance(words, int):
        return _with_rows(model, words, start, side)
    if not isinstance(model, Model):
        raise InputError("a module has no tokenizer for words: give a number of rows")
    if not words:
        raise InputError("`words` must not be empty: give words, or a number of rows")
    old = _tokenizer_of(model, side)
    new = old.with_words(words)
    count = VocabularyRows.of(model.spec, side).rows
    # A table may have more rows than the tokenizer has entries. Rows that get a word now are initialized again.
    rows = [
        index if index < old.vocab_size or index >= new.vocab_size else None
        for index in range(max(count, new.vocab_size))
    ]
    if isinstance(start, str) and start == "pieces":
        # A word without tokens starts as the mean of all rows.
        start = [old.encode(word) or list(range(old.vocab_size)) for word in words]
    return _with_tokenizer(model, side, new, rows, start)


@check_types
def cut_vocabulary(
    model: AnyModel, keep: Sequence[int], *, side: VocabularySide | None = None
) -> EditedModel[AnyModel]:
    """Reduce the vocabulary of a model and its tokenizer to some entries, with new ids in the order of `keep`.

    Args:
        model: a module or a model; it is not changed.
        keep: the ids that stay. The tokenizer must work without the others, and special tokens must keep their ids;
            `model.tokenizer.needed_ids(texts)` returns the ids that texts need.
        side: the vocabulary, "source" or "target". None means the only one.

    Raises:
        InputError: an id does not exist or is named twice, `keep` is empty, `side` is missing with two vocabularies, or
            the tokenizer cannot be reduced.

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
        raise InputError(f"the number of rows must be at least 1, got {count}")
    if isinstance(start, str) and start == "pieces":
        raise InputError("start='pieces' needs words: use start='mean' or start='draw' for rows without words")
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
        raise InputError("each side has its own tokenizer: choose side='source' or side='target'")
    return pair.target if side == "target" else pair.source


def _with_tokenizer(
    model: Model, side: VocabularySide | None, tokenizer: Tokenizer, rows: Sequence[int | None], start: RowInit
) -> EditedModel[Any]:
    """Return a model with added or removed rows of the vocabulary and a new tokenizer."""
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
    """Raise an `InputError` if a cut vocabulary would change an id that config.json names."""
    if model.hf_checkpoint is None:
        return
    rows = max(model.module.num_source_ids, model.module.num_target_ids)
    for key, value in model.hf_checkpoint.config.items():
        for index in value if isinstance(value, list) else [value]:
            named = key.endswith(("_token_id", "_tokens", "_token_ids")) and isinstance(index, int)
            if named and 0 <= index < rows and (index >= len(keep) or keep[index] != index):
                raise InputError(f"the id {index} is {key} in config.json and must not change: keep all ids up to it")


VocabularySide = Literal["source", "target"]
# Initial values of new rows: the mean of all rows, random, the mean of the rows of some ids, or a tensor.
RowInit = Literal["mean", "draw"] | Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True)
class VocabularyRows:
    """Addresses of the tensors with one row per token of a vocabulary: token embeddings and output layer.

    Args:
        tables: the addresses of the token embeddings.
        rows: the number of rows of each table.
        output: the index of the head layer that computes the logits. None means that no layer does, or the labels
            are not words.
    """

    tables: tuple[str, ...]
    rows: int
    output: int | None

    @classmethod
    def of(cls, model: spec.Model, side: VocabularySide | None) -> VocabularyRows:
        """Return the token embeddings and the output layer of a vocabulary of a model.

        Args:
            model: the spec of the model.
            side: the vocabulary, "source" or "target". None means the only one.

        Raises:
            InputError: `side` is missing with two vocabularies, or given with one.
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
        # An output layer of another size is for labels.
        if not is_tied and not (target in paths and layer.size == rows):
            return cls(paths, rows, None)
        if layer.weight is not None and not is_tied:
            raise InputError(
                f"the output layer is {layer.weight.path}, which belongs to the other vocabulary: leave side out"
            )
        return cls(paths, rows, index)


def plan_rows(module: Transformer, words: VocabularyRows, rows: Sequence[int | None], start: RowInit) -> SurgeryPlan:
    """Return the plan for a model whose vocabulary has added, removed or reordered rows.

    Args:
        module: the module.
        words: the token embeddings and the output layer of the vocabulary.
        rows: the index of the old row for each new row. None means a new row.
        start: the initial values of new rows.

    Raises:
        InputError: a row does not exist or is named twice, no row is left, or initial values do not fit.
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
        raise InputError(f"row {twice} is named twice: name each row once")
    if not rows:
        raise InputError("no row would be left: name at least one row to keep")


def _check_start(model: spec.Model, words: VocabularyRows, start: RowInit, count: int) -> None:
    if isinstance(start, str):
        if start not in ("mean", "draw"):
            raise InputError(f"start cannot be '{start}': use 'mean', 'draw', ids for each row, or a tensor")
        return
    if len(start) != count:
        raise InputError(f"{count} new rows need {count} initial values, got {len(start)}")
    if isinstance(start, Tensor):
        widths = {path: getattr(model, path.split(".")[0]).table_width for path in words.tables}
        wrong = [f"{path} is {width} wide" for path, width in widths.items() if list(start.shape) != [count, width]]
        if wrong:
            raise InputError(f"new rows have the shape {list(start.shape)}, but {wrong[0]}")
        return
    for ids in start:
        if not ids or any(not 0 <= index < words.rows for index in ids):
            raise InputError(f"ids of initial rows must be from 0 to {words.rows - 1}, at least one, got {list(ids)}")


def _change(rows: Sequence[int | None], start: RowInit) -> Change:
    """Return the function that changes a token embedding, an untied output layer, or the bias of that layer."""
    index = torch.tensor([0 if row is None else row for row in rows])
    places = torch.tensor([number for number, row in enumerate(rows) if row is None], dtype=torch.long)

    def change(old: Tensor, drawn: Tensor) -> Tensor:
        rows_now = old[index.to(old.device)]
        if len(places):
            rows_now[places.to(old.device)] = initial_rows(old, drawn).to(rows_now)
        return rows_now

    def initial_rows(old: Tensor, drawn: Tensor) -> Tensor:
        """Return the initial values of the new rows: given, drawn, or means of old rows (computed in float32)."""
        if isinstance(start, Tensor) and start.shape[1:] == old.shape[1:]:
            return start
        if isinstance(start, str) and start == "draw":
            return drawn[places.to(drawn.device)]
        if isinstance(start, str | Tensor):
            return old.float().mean(dim=0, keepdim=True).expand(len(places), *old.shape[1:])
        return torch.stack([old[list(ids)].float().mean(dim=0) for ids in start])

    return change
