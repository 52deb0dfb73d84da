"""Registry of extensions: custom modules, and the nodes that describe them in a spec.

A frozen dataclass describes a custom module. Its node in the spec has the same fields, and may be used in every union
that accepts its role.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, TypeAdapter, create_model, model_validator
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from pydantic_core import CoreSchema, PydanticKnownError, SchemaValidator, core_schema

from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError, did_you_mean, json_text
from clearhead.spec.base import Node
from clearhead.spec.pydantic_errors import EXTENSION_TAG, kinds_of_nodes
from clearhead.spec.traversal import walk

if TYPE_CHECKING:
    from torch import nn

Role = Literal["function", "norm", "position", "scores", "weights"]
"""The role of a custom module: the function of a branch, a norm, or the positions of an embedding.

"scores" and "weights" are steps of an attention: one changes the scores, the other turns them into weights.
"""
ENTRY_POINTS: Final = "clearhead.parts"
"""The group of entry points by which a package provides custom modules: KIND = "MODULE:CLASS"."""
_WORD_BREAK: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class Part(Node):
    """Node of a custom module: its kind, and the fields of its dataclass."""

    model_config: ClassVar[ConfigDict] = ConfigDict(protected_namespaces=())
    described_by: ClassVar[type]
    if TYPE_CHECKING:
        kind: str

    def as_dataclass(self) -> Any:
        """Return the values as an instance of the dataclass that describes the module."""
        names = [field.name for field in dataclasses.fields(self.described_by) if field.init]
        return self.described_by(**{name: getattr(self, name) for name in names})

    @model_validator(mode="after")
    def _is_consistent(self) -> Part:
        for name in type(self).model_fields:
            if not _is_json(getattr(self, name)):
                raise ValueError(
                    f"{name} cannot be written as JSON: {json_text(getattr(self, name))}; use numbers, text, truth "
                    "values and tuples of them"
                )
        self.as_dataclass()  # its __post_init__ may raise a ValueError
        return self


def _is_json(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


@dataclass(frozen=True)
class PartSource:
    """The file that defines a custom module.

    Args:
        file: the name of the file.
        sha256: the SHA-256 digest of its content.
        package: the name and version of the installed package that contains the file, or "".
    """

    file: str
    sha256: str
    package: str = ""

    def __str__(self) -> str:
        return f"{self.file} of {self.package}" if self.package else self.file


@dataclass(frozen=True)
class PartKind:
    """A registered kind of custom module.

    Args:
        name: the name of the kind, such as "gated_recurrence".
        role: the role of the module in a spec.
        node: the class of its nodes.
        source: the file that defines the module.
        path: the path of that file.
        build: function that builds the module from a size and the dataclass.
        flops: function of a node and the size that returns two FLOP counts of the forward pass. The first is per token,
            the second per pair of a query and a key.
        cache_numbers: function of a node and the size that returns the numbers in the cache per token.
    """

    name: str
    role: Role
    node: type[Part]
    source: PartSource
    path: str
    build: Callable[[int, Any], nn.Module]
    flops: Callable[[Any, int], tuple[int, int]]
    cache_numbers: Callable[[Any, int], int]

    @cached_property
    def validator(self) -> SchemaValidator:
        """Validator for tables of values; the locations of its errors include the kind."""
        return SchemaValidator(
            core_schema.tagged_union_schema({self.name: TypeAdapter(self.node).core_schema}, discriminator="kind")
        )


@cache
def _kinds() -> dict[str, PartKind]:
    return {}


def build_part(node: Part, size: int) -> nn.Module:
    """Build a custom module from its node.

    Args:
        node: the node that describes the module.
        size: the width of its input, or the number of heads.
    """
    return kind_of(node).build(size, node.as_dataclass())


def add_kind(
    described_by: type,
    role: Role,
    origin: tuple[PartSource, str],
    build: Callable[[int, Any], nn.Module],
    cost: tuple[Callable[[Any, int], tuple[int, int]], Callable[[Any, int], int]],
) -> PartKind:
    """Register a custom module by the frozen dataclass that describes it, and return its kind.

    Args:
        described_by: the dataclass. Its name in snake case is the kind: GatedRecurrence becomes gated_recurrence.
        role: the role of the module in a spec.
        origin: the file that defines the module, and its path. A module of the same file replaces an earlier one.
        build: function that builds the module from a size and the dataclass.
        cost: the functions `flops` and `cache_numbers` of `PartKind`.

    Raises:
        InputError: the class is no frozen dataclass, cannot be written as JSON, or its name is taken.
    """
    name = _WORD_BREAK.sub("_", described_by.__name__).lower()
    _refuse_taken(name, origin[1])
    kind = PartKind(name, role, _node_type(described_by, name), *origin, build, *cost)
    _kinds()[name] = kind
    return kind


def _refuse_taken(name: str, path: str) -> None:
    kind = _kinds().get(name)
    if name in kinds_of_nodes(Node, without=Part):
        raise InputError(f"the name '{name}' of a custom module is taken by clearhead: give its dataclass another name")
    if kind is not None and kind.path != path:
        raise InputError(
            f"the name '{name}' of a custom module is taken by {kind.source}: give its dataclass another name"
        )


def _node_type(described_by: type, name: str) -> type[Part]:
    if not getattr(getattr(described_by, "__dataclass_params__", None), "frozen", False):
        raise InputError(
            f"the spec of a custom module must be a frozen dataclass: put @dataclass(frozen=True) above {name}"
        )
    hints = get_type_hints(described_by, include_extras=True)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(described_by):
        default = ... if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.init:
            fields[field.name] = (hints[field.name], default)
    if "kind" in fields:
        raise InputError(
            f"the dataclass {described_by.__name__} has a field 'kind', which is reserved for the name of the module: "
            "rename the field"
        )
    try:
        kind: Any = (Literal[name], name)
        node = create_model(described_by.__name__, __base__=Part, kind=kind, **fields)
        node.model_json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"the dataclass {described_by.__name__} cannot be written as JSON: use numbers, text, truth values and "
            f"tuples of them ({reason})"
        ) from None
    node.described_by, node.__doc__ = described_by, described_by.__doc__
    return node


def kind_of(node: Part) -> PartKind:
    """Return the registered kind of custom module that a node describes."""
    return _kinds()[node.kind]


@check_types
def own_parts(root: Node) -> Iterator[tuple[str, Part]]:
    """Yield every node of a custom module in a spec, with its path."""
    return ((path, node) for path, node in walk(root) if isinstance(node, Part))


def find_kind(name: str, role: Role | None = None) -> PartKind | None:
    """Return the registered or installed kind of custom module with a name; None if no kind has this name and role.

    Args:
        name: the name of the kind.
        role: the role that the module must have; None means any.

    Raises:
        InputError: the package that provides the module cannot be imported.
    """
    kinds = _kinds()
    if name not in kinds:
        for point in metadata.entry_points(group=ENTRY_POINTS):
            if point.name == name:
                _load(point)
    kind = kinds.get(name)
    return kind if kind is None or role in (None, kind.role) else None


def _load(point: metadata.EntryPoint) -> None:
    try:
        point.load()
    except Exception as error:  # noqa: BLE001 - the code of another package
        reason = f"{type(error).__name__}: {error}"
        raise InputError(
            f"the custom module '{point.name}' of {point.value} cannot be imported ({reason}); update its package"
        ) from None


def kinds_of_file(path: str) -> list[PartKind]:
    """Return the kinds of custom modules that the file at a path registered."""
    return [kind for kind in _kinds().values() if kind.path == path]


@contextmanager
def unregister_on_failure() -> Iterator[None]:
    """Return a context manager that undoes the registrations made inside it if it ends with an error."""
    kinds, before = _kinds(), dict(_kinds())
    try:
        yield
    except BaseException:
        kinds.clear()
        kinds.update(before)
        raise


class AcceptsParts:
    """Pydantic annotation of a union of nodes that includes `Part`: accepts custom modules of one role."""

    def __init__(self, role: Role) -> None:
        self.role = role

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = [member for member in get_args(source) or (source,) if member is not Part]
        choices: dict[Any, CoreSchema] = {
            str(member.model_fields["kind"].default): handler.generate_schema(member) for member in members
        }
        names = [*choices]
        choices[EXTENSION_TAG] = core_schema.no_info_plain_validator_function(
            partial(_parse, self.role, names),
            serialization=core_schema.plain_serializer_function_ser_schema(_dump, info_arg=True),
        )

        def tag(value: Any) -> str | None:
            name = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", EXTENSION_TAG)
            return name if name in names or name is None else EXTENSION_TAG

        return core_schema.tagged_union_schema(choices, discriminator=tag)


def _dump(node: Part, info: Any) -> dict[str, Any]:
    return node.model_dump(mode=info.mode)


def _parse(role: Role, names: list[str], value: Any) -> Part:
    """Return the node of a custom module, made from a table of values, a dataclass or a node."""
    kinds = {kind.node.described_by: kind for kind in _kinds().values()}
    described = kinds.get(type(value))
    if described is not None:
        names_of_fields = described.node.model_fields.keys() - {"kind"}
        value = described.node(**{name: getattr(value, name) for name in names_of_fields})
    name = str(value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", type(value).__name__))
    kind = find_kind(name, role)
    if kind is None:
        others = (kind.name for kind in _kinds().values() if kind.role == role)
        expected = (
            ", ".join(f"'{choice}'" for choice in (*names, *others)) or "the name of a custom module of this role"
        )
        raise PydanticKnownError(
            "union_tag_invalid", {"discriminator": "'kind'", "tag": name, "expected_tags": expected}
        )
    if isinstance(value, Part):
        return value
    checked: Part = kind.validator.validate_json(json.dumps(value, default=repr))
    return checked


class RequiredPart(BaseModel):
    """Entry of a spec file for one custom module: its kind, and the file and package that define it."""

    kind: str
    file: str
    sha256: str
    package: str = ""


def required_parts(root: Node) -> list[dict[str, str]]:
    """Return one entry per kind of custom module in a spec: kind, file, SHA-256 digest of the file, and package."""
    kinds = {kind.name: kind for kind in (kind_of(node) for _, node in own_parts(root))}
    for name, kind in kinds.items():
        if not kind.source.file:
            raise InputError(
                f"the custom module '{name}' was not defined in a file, so a saved model could not find it; write it "
                "to a file, and name the file in parts"
            )
    return [{"kind": name, **dataclasses.asdict(kind.source)} for name, kind in sorted(kinds.items())]


def refuse_absent_parts(needed: list[RequiredPart]) -> None:
    """Raise an error if a custom module of a spec is not registered, or its file has changed.

    Raises:
        InputError: a custom module is missing, or its file has another digest.
    """
    for need in needed:
        kind, source = find_kind(need.kind), PartSource(need.file, need.sha256, need.package)
        if kind is None:
            how = f"install {need.package}" if need.package else f"name its file: parts={need.file}, or --parts"
            raise InputError(
                f"this model needs the custom module '{need.kind}' of {source} (SHA-256 {need.sha256[:12]}), which is "
                f"not loaded{did_you_mean(need.kind, _kinds())}; {how}"
            )
        if kind.source.sha256 != need.sha256:
            raise InputError(
                f"this model was made with another version of {source}: the loaded '{need.kind}' is from "
                f"{kind.source} with SHA-256 {kind.source.sha256[:12]}, not {need.sha256[:12]}; restore the file"
            )
