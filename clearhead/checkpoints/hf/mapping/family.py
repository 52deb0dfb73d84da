"""Description of a checkpoint family: data from which both loading and saving follow.

A family lists the config keys with their defaults, the function from config values to a spec, and the slot of each
tensor. A config is written by reading the value at the address of each key from the spec. Then the config is parsed
again: a family cannot express a spec if the result differs.
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
        name: the name of the key in config.json.
        default: the value of transformers' config class if the key is absent; never that of a released checkpoint.
        address: the address of the value in the spec, with {layer} for the first layer, or a function from a spec to
            the value. None means that the spec has no such value.
        kind: the Python type or pydantic type of the value. None means the type of the default.
        is_nullable: True if null is allowed although the default is not null.
        names: the spec's value for each value in a config; if several mean the same, the first is written.
        aliases: other names of the key in config.json.
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
        """Smallest valid integer for the value of the key: 0, or a negative default that stands for an absent value."""
        return min(0, self.default or 0)

    @property
    def most(self) -> int:
        """Largest valid integer for the value of the key, which no model exceeds."""
        return MAX_LAYERS if "layer" in self.name else MAX_SIZE


@dataclass(frozen=True)
class Fixed:
    """A config key with few supported values.

    Args:
        name: the name of the key in config.json.
        values: the supported values.
        reason: a short clause for messages about the feature that is not supported.
    """

    name: str
    values: tuple[Any, ...]
    reason: str


class Values(dict[str, Any]):
    """Values of all keys of a family, with defaults filled in and names translated.

    Args:
        values: the values by key.
        num_labels: the number of labels in the config.
        original: the values before `with_values` replaced any. None means `values`.
    """

    def __init__(
        self, values: Mapping[str, Any], num_labels: int = 2, original: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(values)
        self.num_labels = num_labels
        self.original: Mapping[str, Any] = values if original is None else original

    def with_values(self, **changes: Any) -> Values:
        """Return a copy with some values replaced; `original` still has the values of the config."""
        return Values(self | changes, self.num_labels, self.original)


@dataclass(frozen=True)
class Constant:
    """A computed table that a file may also contain, with the same values.

    Args:
        name: the name of the tensor after the prefix.
        compute: the function from a spec and a number of rows to the table.
        is_written: True if classes with a head expect the table in a file. Classes without a head always do.
    """

    name: str
    compute: Callable[[spec.Model, int], Tensor]
    is_written: bool = False


@dataclass(frozen=True)
class Variant:
    """A transformers class of a family, such as BertForMaskedLM: the family's stacks with one head.

    Args:
        classes: the class names under `architectures`; the first is written.
        task: the task of the outputs.
        head: the function from config values to the head, or to None for a class without a head.
        rules: the rules of the head's tensors, with full names.
        is_bare: True if tensors of the stacks are saved without the family's prefix.
        output: the tensor that may be tied to the token embedding. None means that no tensor can be tied.
        unused: patterns of tensors that a file of this class may contain and the class does not use.
        has_decoder: True if this class contains the family's decoder, if there is one.
        prefix: the prefix of the stacks' tensors in files of this class. None means the family's prefix.
        repeats: the first token if the decoder reads the source text shifted right: "start" for the start token, "last"
            for the last id of the text. None means that the decoder reads a separate text.
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
        """Return whether files of this class may contain a tensor of this name that the class does not use."""
        return any(re.fullmatch(pattern, name) for pattern in self.unused)


@dataclass(frozen=True)
class Family:
    """A family of checkpoints.

    Args:
        model_type: the name of the family in config.json.
        keys: the supported keys.
        model: the function from config values to the spec of the stacks, without a head.
        rules: the rules of the stacks' tensors, with names after the prefix.
        variants: the classes of the family; the first is the default.
        fixed: the keys with few supported values.
        inert: the keys that do not change the computation.
        prefix: the prefix of the stacks' tensors in files of models with a head.
        table: the name of the token embedding after the prefix.
        table_copies: other names after the prefix under which files may store the token embedding again.
        ignored: patterns, after the prefix, of tensors without learned values.
        is_tied_by_file: True if a file without an output tensor is tied, whatever the config says.
        constants: the tables that clearhead computes and files may contain.
        written_keys: inert keys to write for a model that was not loaded, because the class's default may not fit.
        rows_key: the key with the number of rows of `constants` and with the longest sequence of computed positions.
        layouts: rules that replace `rules` if the name of a tensor in the file matches the pattern.
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
        """Return the family with the rules for the layout of a file, recognized by the names of its tensors."""
        matching = [rules for pattern, rules in self.layouts.items() if any(re.search(pattern, name) for name in names)]
        return replace(self, rules=matching[0], layouts={}) if matching else self

    def prefix_of(self, variant: Variant) -> str:
        """Return the prefix of the stacks' tensors in files of a variant."""
        return self.prefix if variant.prefix is None else variant.prefix

    def prefix_to_save(self, variant: Variant) -> str:
        """Return the prefix of the stacks' tensors in a new file of a variant."""
        return "" if variant.is_bare else self.prefix_of(variant)

    def spec_of(self, values: Values, variant: Variant) -> spec.Model:
        """Return the validated spec of a model: the family's stacks with the head of a class.

        Raises:
            InputError: the values do not fit together; every fault is named.
        """
        return spec.validate(self.build_unvalidated_spec(values, variant))

    def build_unvalidated_spec(self, values: Values, variant: Variant) -> spec.Model:
        """Return the spec of a model without validation: its nodes may not fit together."""
        model = self.model(values)
        if not variant.has_decoder:
            model = model.model_copy(update={"decoder": None})
        length = model.declared_length
        if any(isinstance(node, spec.Rotary | spec.Sinusoidal) for _, node in spec.walk(model)):
            length = values.get(self.rows_key, length)
        return model.model_copy(update={"head": variant.head(values), "declared_length": length})
