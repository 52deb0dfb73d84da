"""Vocabularies grown or cut: word tables, what is tied to them, outputs of their own, and biases of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from clearhead import spec
from clearhead.core import Transformer
from clearhead.errors import InputError
from clearhead.surgery.plan import Change, Origin, SurgeryPlan, unchanged_origins

Reads = Literal["source", "target"]
# How a new row begins: the mean of all rows, drawn as in a new model, the mean of the rows of some ids, or as given.
RowInit = Literal["mean", "draw"] | Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True)
class VocabularyRows:
    """The tables of a vocabulary, and the output that has a row for each word.

    Args:
        tables: addresses of the word tables.
        rows: how many each has.
        output: the index of the head's layer that scores the words; None: none does, or the other vocabulary's.
    """

    tables: tuple[str, ...]
    rows: int
    output: int | None

    @classmethod
    def of(cls, model: spec.Model, side: Reads | None) -> VocabularyRows:
        """Find the tables of a model.

        Args:
            model: its spec.
            side: the vocabulary of what is read or of what is written; None: the only one.

        Raises:
            InputError: there are two vocabularies and none is named, or one and it is named.
        """
        tables = {path: node for path, node in spec.walk(model) if isinstance(node, spec.Table)}
        target = _table_of(model, "decoder" if model.decoder is not None else "encoder")
        source = _table_of(model, "encoder" if model.encoder is not None else "decoder")
        if source == target and side is not None:
            raise InputError(f"the model reads and writes one vocabulary, so '{side}' is not to be told from the other")
        if side is None and len({table.rows for table in tables.values()}) > 1:
            sizes = ", ".join(f"{path} has {table.rows} rows" for path, table in tables.items())
            raise InputError(f"the model has two vocabularies ({sizes}): say which, side='source' or side='target'")
        meant = tuple(tables) if side is None else (target if side == "target" else source,)
        rows = tables[meant[0]].rows
        output = _output(model, rows) if target in meant else None
        tied = _tied(model)
        if output is None and tied in meant:
            output = len(model.head.layers) - 1 if model.head is not None else None
        if output is not None and tied is not None and tied not in meant:
            raise InputError(f"the output is {tied}, which belongs to the other vocabulary: leave side out")
        return cls(meant, rows, output)


def _table_of(model: spec.Model, side: str) -> str:
    stack: spec.Stack = getattr(model, side)
    table = stack.embedding.table
    return table.path if isinstance(table, spec.Reference) else f"{side}.embedding.table"


def _last_map(model: spec.Model) -> tuple[int, spec.Linear] | None:
    """Return the map that gives the outputs of every token, and its place in the head."""
    layers = model.head.layers if model.head is not None else ()
    maps = [(index, one) for index, one in enumerate(layers) if isinstance(one, spec.Linear)]
    return None if not maps or any(isinstance(one, spec.Pool) for one in layers) else maps[-1]


def _tied(model: spec.Model) -> str | None:
    found = _last_map(model)
    return None if found is None or found[1].weight is None else found[1].weight.path


def _output(model: spec.Model, rows: int) -> int | None:
    """Return the place of the map that scores words; a map of another size scores labels."""
    found = _last_map(model)
    return found[0] if found is not None and found[1].size == rows else None


def plan_rows(module: Transformer, words: VocabularyRows, rows: Sequence[int | None], start: RowInit) -> SurgeryPlan:
    """Plan a vocabulary.

    Args:
        module: what has the vocabulary.
        words: where its rows are.
        rows: for each row the old one that it is; None: it is new.
        start: how new rows begin.

    Raises:
        InputError: rows that do not exist or stand twice, none left, or beginnings of another number or width.
    """
    _check_rows(words, [row for row in rows if row is not None])
    _check_start(module.spec, words, start, sum(row is None for row in rows))
    origins = unchanged_origins(module)
    places = [f"{path}.weight" for path in words.tables]
    if words.output is not None:
        places += [f"head.layers.{words.output}.{leaf}" for leaf in ("weight", "bias")]
    is_drawn = isinstance(start, str) and start == "draw" and None in rows
    for place in places if list(rows) != list(range(words.rows)) else ():
        if place in origins:
            origins[place] = Origin(place, _change(rows, start), is_drawn=is_drawn)

    def change(path: str, node: spec.Node) -> spec.Node:
        if path in words.tables and isinstance(node, spec.Table):
            return node.model_copy(update={"rows": len(rows)})
        if words.output is not None and path == f"head.layers.{words.output}" and isinstance(node, spec.Linear):
            return node.model_copy(update={"size": len(rows)})
        return node

    return SurgeryPlan(spec.map_nodes(module.spec, change), origins)


def _check_rows(words: VocabularyRows, kept: Sequence[int]) -> None:
    wrong = [row for row in kept if not 0 <= row < words.rows]
    if wrong:
        raise InputError(f"there is no row {wrong[0]}; the {words.rows} rows are numbered from 0")
    if len(set(kept)) != len(kept):
        twice = next(row for place, row in enumerate(kept) if row in kept[:place])
        raise InputError(f"row {twice} is named twice; a row has one place in the new vocabulary")
    if not kept:
        raise InputError("no row would be left; name those to keep")


def _check_start(model: spec.Model, words: VocabularyRows, start: RowInit, count: int) -> None:
    if isinstance(start, str):
        if start not in ("mean", "draw"):
            raise InputError(f"new rows cannot begin as '{start}'; expected 'mean', 'draw', ids for each, or a tensor")
        return
    if len(start) != count:
        raise InputError(f"{count} new rows need {count} beginnings, got {len(start)}")
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
    """Return what is made of a table, of an output of its own, or of its bias."""
    index = torch.tensor([0 if row is None else row for row in rows])
    places = torch.tensor([place for place, row in enumerate(rows) if row is None], dtype=torch.long)

    def change(old: Tensor, drawn: Tensor) -> Tensor:
        made = old[index.to(old.device)]
        if len(places):
            made[places.to(old.device)] = beginnings(old, drawn).to(made)
        return made

    def beginnings(old: Tensor, drawn: Tensor) -> Tensor:
        """Return the new rows; sums are in float32, for a mean of many rows in fewer bits would be off."""
        if isinstance(start, Tensor) and start.shape[1:] == old.shape[1:]:
            return start
        if isinstance(start, str) and start == "draw":
            return drawn[places.to(drawn.device)]
        if isinstance(start, str | Tensor):
            return old.float().mean(dim=0, keepdim=True).expand(len(places), *old.shape[1:])
        return torch.stack([old[list(ids)].float().mean(dim=0) for ids in start])

    return change
