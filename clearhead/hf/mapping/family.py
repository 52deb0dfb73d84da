"""What a checkpoint family is: one record of data, from which loading and saving both follow.

A record says which config keys there are, with the default of the class that reads them, how they become a spec, and
which tensors go where. What goes back to a config is read off the spec by the address beside each key, and is proved by
reading it again: a spec that does not come back is not one that this family can say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from clearhead import spec
from clearhead.hf.mapping.tensor_rules import Rule
from clearhead.task import Repeats, TaskKind

Address = str | Callable[[spec.Model], Any]


@dataclass(frozen=True)
class Key:
    """A config key that is honoured.

    Args:
        name: as it is written.
        default: what the reading class takes where the key is absent; never a copy of a published file.
        at: the address in the spec that holds the value ({layer} stands for the first), or how to find it there.
        kind: the type of the value, where the default is null.
        is_nullable: whether null may be given although the default is not null.
        names: their words for ours, where the value is a word; the first of several is written.
        aliases: other names under which the key is read.
    """

    name: str
    default: Any
    at: Address | None = None
    kind: type | None = None
    is_nullable: bool = False
    names: Mapping[str, Any] | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fixed:
    """A config key that would change what is computed, and the values under which it does not."""

    name: str
    values: tuple[Any, ...]
    otherwise: str


class Values(Mapping[str, Any]):
    """The values of all keys of a record, defaults filled in, words translated to ours."""

    def __init__(self, values: Mapping[str, Any], num_labels: int = 2, said: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values)
        self.num_labels = num_labels
        self.said = values if said is None else said

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def replaced(self, **changes: Any) -> Values:
        """The same with other values; `said` still holds what the config says."""
        return Values(self._values | changes, self.num_labels, self.said)


@dataclass(frozen=True)
class Constant:
    """A table that a file may hold although it can be computed; then it must be what is computed.

    Args:
        name: after the prefix.
        compute: the table of so many rows.
        is_written: whether the classes with a head expect it in a file; those without one do.
    """

    name: str
    compute: Callable[[spec.Model, int], Tensor]
    is_written: bool = False


@dataclass(frozen=True)
class Variant:
    """One of the classes of a family: the same stacks with one head.

    Args:
        classes: names under `architectures`; the first is written.
        task: what its outputs are for.
        head: what stands on the stacks; None: nothing.
        rules: of the head's tensors, by their full names.
        is_bare: whether the names of the stacks stand without the family's prefix when it is saved.
        output: the tensor that may be one with the word table.
        spare: patterns of tensors that this variant may carry unused.
        has_decoder: whether the family's decoder, if it has one, is part of this class.
        prefix: what stands before the names of the stacks in files of this class, where it is not the family's.
        repeats: whether the decoder reads what the encoder reads, one place later, and begins with its start token
            ("start") or with the last id of the text ("last"); None: it reads a text of its own.
    """

    classes: tuple[str, ...]
    task: TaskKind
    head: Callable[[Values], spec.Head | None]
    rules: tuple[Rule, ...] = ()
    is_bare: bool = False
    output: str | None = None
    spare: tuple[str, ...] = ()
    has_decoder: bool = True
    prefix: str | None = None
    repeats: Repeats | None = None


@dataclass(frozen=True)
class Family:
    """A family of checkpoints.

    Args:
        model_type: what config.json calls it.
        keys: all that is honoured.
        model: the spec of the stacks, without a head.
        rules: of the tensors of the stacks, by their names after the prefix.
        variants: the heads there are; the first is taken where a file tells nothing else.
        only: keys that are refused unless they say what is computed here.
        inert: keys without effect on what is computed.
        prefix: what stands before the names of the stacks in files of models with a head.
        table: the word table's name after the prefix.
        twins: names after the prefix under which the word table may stand once more.
        ignored: patterns, after the prefix, of tensors that hold nothing learned.
        is_tied_by_file: whether the config's word on tying counts for nothing where the file lacks the output.
        constants: tables that are computed here.
        written: inert keys that are written where a model was not loaded, because the class's default may not fit it.
        rows: the key that counts the rows of such tables.
        layouts: rules that hold in place of `rules` in files with a name like this pattern, after the prefix.
    """

    model_type: str
    keys: tuple[Key, ...]
    model: Callable[[Values], spec.Model]
    rules: tuple[Rule, ...]
    variants: tuple[Variant, ...]
    only: tuple[Fixed, ...] = ()
    inert: tuple[str, ...] = ()
    prefix: str = ""
    table: str = ""
    twins: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    is_tied_by_file: bool = False
    constants: tuple[Constant, ...] = ()
    written: Mapping[str, Any] = field(default_factory=dict)
    rows: str = "max_position_embeddings"
    layouts: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)

    def laid_out(self, names: Iterable[str]) -> Family:
        """Return the record with the rules of the layout that a file has, told by the names of its tensors."""
        found = [rules for pattern, rules in self.layouts.items() if any(re.search(pattern, name) for name in names)]
        return replace(self, rules=found[0], layouts={}) if found else self

    def prefix_of(self, variant: Variant) -> str:
        """Return what stands before the names of the stacks in files of a variant, if anything does."""
        return self.prefix if variant.prefix is None else variant.prefix

    def whole(self, values: Values, variant: Variant) -> spec.Model:
        """Return the spec of a variant.

        Raises:
            InputError: values that do not fit together; every fault is named.
        """
        return spec.validate(self.parts(values, variant))

    def parts(self, values: Values, variant: Variant) -> spec.Model:
        """Return the same, though its parts may not fit together."""
        model = self.model(values)
        if not variant.has_decoder:
            model = model.model_copy(update={"decoder": None})
        return model.model_copy(update={"head": variant.head(values)})
