"""What a checkpoint family is: data from which both loading and saving follow.

A family says which config keys there are, with the default of the class that reads them, how they become a spec, and
which tensor belongs in which slot. A config is written by reading the address beside each key off the spec, and is
checked by parsing it again: a spec that does not come back is not expressible in this family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from clearhead import spec
from clearhead.checkpoints.hf.mapping.tensor_rules import Rule
from clearhead.spec.base import MAX_LAYERS, MAX_SIZE
from clearhead.spec.tasks.record import Repeats

Address = str | Callable[[spec.Model], Any]


@dataclass(frozen=True)
class Key:
    """A supported config key.

    Args:
        name: in config.json.
        default: of the config class where the key is absent; never a copy of some checkpoint's value.
        address: of the value in the spec ({layer} stands for the first layer), or a function that finds it there.
        kind: the type of the value, where the default is null: one of Python's, or one of pydantic with its ranges.
        is_nullable: whether null is allowed although the default is not null.
        names: the config's values and what they are in a spec; the first of several is written.
        aliases: other names of the key.
    """

    name: str
    default: Any
    address: Address | None = None
    kind: Any = None
    is_nullable: bool = False
    names: Mapping[str, Any] | None = None
    aliases: tuple[str, ...] = ()

    @property
    def least(self) -> int:
        """The least whole number: 0, or the default where that is less and stands for none."""
        return min(0, self.default or 0)

    @property
    def most(self) -> int:
        """The greatest whole number: what no model exceeds."""
        return MAX_LAYERS if "layer" in self.name else MAX_SIZE


@dataclass(frozen=True)
class Fixed:
    """A config key of which only some values are supported.

    Args:
        name: in config.json.
        values: those that are supported.
        reason: what is not supported, as a short sentence.
    """

    name: str
    values: tuple[Any, ...]
    reason: str


class Values(dict[str, Any]):
    """The values of all keys of a family, with defaults filled in and names translated.

    Args:
        values: by key.
        num_labels: of the config.
        original: values before anything was replaced; None: the same.
    """

    def __init__(
        self, values: Mapping[str, Any], num_labels: int = 2, original: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(values)
        self.num_labels = num_labels
        self.original: Mapping[str, Any] = values if original is None else original

    def with_values(self, **changes: Any) -> Values:
        """Return the same with other values; `original` still holds those of the config."""
        return Values(self | changes, self.num_labels, self.original)


@dataclass(frozen=True)
class Constant:
    """A computed table that a file may also hold, and then with the computed values.

    Args:
        name: after the prefix.
        compute: the table of so many rows.
        is_written: whether classes with a head expect it in a file; those without one do.
    """

    name: str
    compute: Callable[[spec.Model, int], Tensor]
    is_written: bool = False


@dataclass(frozen=True)
class Variant:
    """One of the classes of a family: the same stacks with one head.

    Args:
        classes: names under `architectures`; the first is written.
        task: of its outputs.
        head: makes the head, or None.
        rules: of the head's tensors, by their full names.
        is_bare: whether tensors of the stacks are saved without the family's prefix.
        output: the tensor that may be tied to the token embedding.
        unused: patterns of tensors that a file of this class may hold and the class does not use.
        has_decoder: whether the family's decoder, if it has one, is part of this class.
        prefix: of the stacks' tensors in files of this class; None: the family's.
        repeats: whether the decoder reads the encoder's input shifted right, beginning with the start token ("start")
            or the last id of the text ("last"); None: it reads a text of its own.
    """

    classes: tuple[str, ...]
    task: str
    head: Callable[[Values], spec.Head | None]
    rules: tuple[Rule, ...] = ()
    is_bare: bool = False
    output: str | None = None
    unused: tuple[str, ...] = ()
    has_decoder: bool = True
    prefix: str | None = None
    repeats: Repeats | None = None

    def leaves_unused(self, name: str) -> bool:
        """Return whether a file of this class may hold a tensor that the class does not use."""
        return any(re.fullmatch(pattern, name) for pattern in self.unused)


@dataclass(frozen=True)
class Family:
    """A family of checkpoints.

    Args:
        model_type: its name in config.json.
        keys: all that are supported.
        model: makes the spec of the stacks, without a head.
        rules: of the stacks' tensors, by their names after the prefix.
        variants: its classes; the first is the default.
        fixed: keys of which only some values are supported.
        inert: keys that do not change what is computed.
        prefix: of the stacks' tensors in files of models with a head.
        table: the name of the token embedding after the prefix.
        table_copies: other names after the prefix under which the token embedding may be stored again.
        ignored: patterns, after the prefix, of tensors without learned values.
        is_tied_by_file: whether a file without an output is tied, whatever the config says.
        constants: tables that are computed here.
        written: inert keys that are written for a model that was not loaded, because the class's default may not fit.
        rows_key: the key with the number of rows of such tables, and the longest sequence of computed positions.
        layouts: rules that replace `rules` in files with a tensor whose name after the prefix matches this pattern.
    """

    model_type: str
    keys: tuple[Key, ...]
    model: Callable[[Values], spec.Model]
    rules: tuple[Rule, ...]
    variants: tuple[Variant, ...]
    fixed: tuple[Fixed, ...] = ()
    inert: tuple[str, ...] = ()
    prefix: str = ""
    table: str = ""
    table_copies: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    is_tied_by_file: bool = False
    constants: tuple[Constant, ...] = ()
    written_keys: Mapping[str, Any] = field(default_factory=dict)
    rows_key: str = "max_position_embeddings"
    layouts: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)

    def with_layout(self, names: Iterable[str]) -> Family:
        """Return the family with the rules of a file's layout, recognised by the names of its tensors."""
        matching = [rules for pattern, rules in self.layouts.items() if any(re.search(pattern, name) for name in names)]
        return replace(self, rules=matching[0], layouts={}) if matching else self

    def prefix_of(self, variant: Variant) -> str:
        """Return the prefix of the stacks' tensors in files of a variant."""
        return self.prefix if variant.prefix is None else variant.prefix

    def prefix_to_save(self, variant: Variant) -> str:
        """Return the prefix of the stacks' tensors in a new file of a variant."""
        return "" if variant.is_bare else self.prefix_of(variant)

    def spec_of(self, values: Values, variant: Variant) -> spec.Model:
        """Return the spec of a variant.

        Raises:
            InputError: values that do not fit together; every fault is named.
        """
        return spec.validate(self.build_unvalidated_spec(values, variant))

    def build_unvalidated_spec(self, values: Values, variant: Variant) -> spec.Model:
        """Return the spec of a variant, whose parts may not fit together."""
        model = self.model(values)
        if not variant.has_decoder:
            model = model.model_copy(update={"decoder": None})
        length = model.declared_length
        if any(isinstance(node, spec.Rotary | spec.Sinusoidal) for _, node in spec.walk(model)):
            length = values.get(self.rows_key, length)
        return model.model_copy(update={"head": variant.head(values), "declared_length": length})
