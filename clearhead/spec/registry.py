"""The registry of extensions: custom modules of a user, and the nodes that describe them in a spec.

The spec of an own part is a frozen dataclass of the user; its node has the same fields, and stands wherever a union is
open to its role.
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
"""Where an own part stands: as the function of a branch, a norm, the positions of an embedding, or a step of attention
that changes scores or turns them into weights."""
ENTRY_POINTS: Final = "clearhead.parts"
"""The group of entry points by which a package has parts: KIND = "MODULE:CLASS"."""
_WORD_BREAK: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class Part(Node):
    """The spec of an own part: its kind, and the fields of its dataclass."""

    model_config: ClassVar[ConfigDict] = ConfigDict(protected_namespaces=())
    described_by: ClassVar[type]
    if TYPE_CHECKING:
        kind: str

    def as_dataclass(self) -> Any:
        """Return the values as the user's own dataclass."""
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
        self.as_dataclass()  # whose __post_init__ may raise a ValueError
        return self


def _is_json(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


@dataclass(frozen=True)
class PartSource:
    """The file that an own part is from.

    Args:
        file: its name.
        sha256: of its content.
        package: name and version of the installed package that has it, or "".
    """

    file: str
    sha256: str
    package: str = ""

    def __str__(self) -> str:
        return f"{self.file} of {self.package}" if self.package else self.file


@dataclass(frozen=True)
class PartKind:
    """An own part.

    Args:
        name: of its kind.
        role: where it stands.
        node: the class of its nodes.
        source: the file that it is from.
        path: where that file is.
        build: makes the module from a size and the user's dataclass.
        flops: for a node and the size that it is built for, the FLOPs of the forward pass for a token, and those for a
            pair of a query and a key.
        cache_numbers: for a node and that size, how many numbers are kept for each token while decoding.
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
        """Validates tables of values, with the kind in the places of errors."""
        return SchemaValidator(
            core_schema.tagged_union_schema({self.name: TypeAdapter(self.node).core_schema}, discriminator="kind")
        )


@cache
def _kinds() -> dict[str, PartKind]:
    return {}


def build_part(node: Part, size: int) -> nn.Module:
    """Build the module of an extension.

    Args:
        node: describes it.
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
    """Register an own part by the frozen dataclass that is its spec.

    Args:
        described_by: the dataclass; its kind is its name in lower case, GatedRecurrence as gated_recurrence.
        role: where the part stands.
        origin: the file that it is from, and its path; a part of the same file takes the place of an earlier one.
        build: makes the module, from a size and a dataclass.
        cost: `flops` and `cache_numbers` of `Kind`.

    Raises:
        InputError: it is no frozen dataclass, cannot be written as JSON, or its name is taken.
    """
    name = _WORD_BREAK.sub("_", described_by.__name__).lower()
    _refuse_taken(name, origin[1])
    kind = PartKind(name, role, _node_type(described_by, name), *origin, build, *cost)
    _kinds()[name] = kind
    return kind


def _refuse_taken(name: str, path: str) -> None:
    kind = _kinds().get(name)
    if name in kinds_of_nodes(Node, without=Part):
        raise InputError(f"the name '{name}' of a part is taken by clearhead: give its dataclass another name")
    if kind is not None and kind.path != path:
        raise InputError(f"the name '{name}' of a part is taken by {kind.source}: give its dataclass another name")


def _node_type(described_by: type, name: str) -> type[Part]:
    if not getattr(getattr(described_by, "__dataclass_params__", None), "frozen", False):
        raise InputError(f"the spec of a part is a frozen dataclass: put @dataclass(frozen=True) over {name}")
    hints = get_type_hints(described_by, include_extras=True)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(described_by):
        default = ... if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.init:
            fields[field.name] = (hints[field.name], default)
    if "kind" in fields:
        raise InputError(f"the dataclass {described_by.__name__} has a field 'kind', which names the part: rename it")
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
    """Return the own part that a node is of."""
    return _kinds()[node.kind]


@check_types
def own_parts(root: Node) -> Iterator[tuple[str, Part]]:
    """Yield every node of an own part in a tree, with its path."""
    return ((path, node) for path, node in walk(root) if isinstance(node, Part))


def find_kind(name: str, role: Role | None = None) -> PartKind | None:
    """Return an own part by the name of its kind, also that of an installed package; None: there is none.

    Args:
        name: of the kind.
        role: that it must have; None: any.

    Raises:
        InputError: the package that has it cannot be imported.
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
        raise InputError(f"the part '{point.name}' of {point.value} cannot be imported ({reason})") from None


def kinds_of_file(path: str) -> list[PartKind]:
    """Return the own parts that the file at a path registered."""
    return [kind for kind in _kinds().values() if kind.path == path]


@contextmanager
def unregister_on_failure() -> Iterator[None]:
    """Forget what was registered while this was open if it ends with an error."""
    kinds, before = _kinds(), dict(_kinds())
    try:
        yield
    except BaseException:
        kinds.clear()
        kinds.update(before)
        raise


class AcceptsParts:
    """In the annotation of a union of nodes, `Part` among them: own parts of a role are members too."""

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
    """Return the node of an own part from a table of values, a dataclass or a node."""
    kinds = {kind.node.described_by: kind for kind in _kinds().values()}
    described = kinds.get(type(value))
    if described is not None:
        names_of_fields = described.node.model_fields.keys() - {"kind"}
        value = described.node(**{name: getattr(value, name) for name in names_of_fields})
    name = str(value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", type(value).__name__))
    kind = find_kind(name, role)
    if kind is None:
        others = (kind.name for kind in _kinds().values() if kind.role == role)
        expected = ", ".join(f"'{choice}'" for choice in (*names, *others)) or "the name of a part of this role"
        raise PydanticKnownError(
            "union_tag_invalid", {"discriminator": "'kind'", "tag": name, "expected_tags": expected}
        )
    if isinstance(value, Part):
        return value
    checked: Part = kind.validator.validate_json(json.dumps(value, default=repr))
    return checked


class RequiredPart(BaseModel):
    """What a spec in a file says of an own part in it."""

    kind: str
    file: str
    sha256: str
    package: str = ""


def required_parts(root: Node) -> list[dict[str, str]]:
    """Return what a spec needs beside clearhead: an entry for each kind of own part in it."""
    kinds = {kind.name: kind for kind in (kind_of(node) for _, node in own_parts(root))}
    for name, kind in kinds.items():
        if not kind.source.file:
            raise InputError(
                f"the part '{name}' was defined in no file, so what needs it could not name it: put it into a file of "
                "its own, and name that in parts"
            )
    return [{"kind": name, **dataclasses.asdict(kind.source)} for name, kind in sorted(kinds.items())]


def refuse_absent_parts(needed: list[RequiredPart]) -> None:
    """Refuse a spec whose own parts are not there, or are from files that have changed.

    Raises:
        InputError: a part is missing, or its file has another digest.
    """
    for need in needed:
        kind, source = find_kind(need.kind), PartSource(need.file, need.sha256, need.package)
        if kind is None:
            how = f"install {need.package}" if need.package else f"name its file: parts={need.file}, or --parts"
            raise InputError(
                f"this model needs the part '{need.kind}' of {source} (SHA-256 {need.sha256[:12]}), which is not "
                f"here{did_you_mean(need.kind, _kinds())}; {how}"
            )
        if kind.source.sha256 != need.sha256:
            raise InputError(
                f"this model was made with another version of {source}: the part '{need.kind}' here is from "
                f"{kind.source} with SHA-256 {kind.source.sha256[:12]}, not {need.sha256[:12]}; restore the file"
            )
