"""The rows of a vocabulary: word tables, the outputs tied to them or of their own, and the biases of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from clearhead import spec
from clearhead.apps.surgery.addresses import token_output, update_nodes, word_table
from clearhead.apps.surgery.plan import Change, Origin, SurgeryPlan, unchanged_origins
from clearhead.base.errors import InputError
from clearhead.core import Transformer

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
    origins = unchanged_origins(module)
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
    places = torch.tensor([place for place, row in enumerate(rows) if row is None], dtype=torch.long)

    def change(old: Tensor, drawn: Tensor) -> Tensor:
        made = old[index.to(old.device)]
        if len(places):
            made[places.to(old.device)] = initial_rows(old, drawn).to(made)
        return made

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
