"""The spec of a model: one tree, validated as a whole, with its JSON form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from clearhead.errors import InputError
from clearhead.files import read_text_file
from clearhead.spec.base import AnyNode, Node
from clearhead.spec.model_checks import consistency_faults, partial_faults
from clearhead.spec.node_checks import node_faults
from clearhead.spec.nodes import Head, Normal, Stack, Xavier
from clearhead.spec.pydantic_errors import error_messages


class Model(Node):
    """A Transformer: an encoder, a decoder, or both, and the head."""

    encoder: Stack | None = None
    decoder: Stack | None = None
    head: Head | None = None
    initialization: Annotated[Xavier | Normal, Field(discriminator="kind")] = Xavier()

    def to_json(self) -> str:
        """Write the tree as JSON; each distinct layer of a stack is written once."""
        tree = self.model_dump(mode="json")
        for name in ("encoder", "decoder"):
            if tree[name] is not None:
                tree[name]["layers"] = _fold(tree[name]["layers"])
        return json.dumps(tree, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Model:
        """Read what `to_json` wrote.

        Raises:
            InputError: every error of structure, type and consistency, in one report.
        """
        try:
            tree = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"the spec is not JSON: {error.msg} at line {error.lineno}") from None
        if not isinstance(tree, dict):
            raise InputError(f"the spec must be a JSON object, got {type(tree).__name__}")
        for name in ("encoder", "decoder"):
            if isinstance(tree.get(name), dict):
                tree[name]["layers"] = _unfold(tree[name].get("layers"))
        faults: list[str] = []
        model = None
        try:
            model = cls.model_validate_json(json.dumps(tree))
        except ValidationError as error:
            faults += error_messages(error, cls)
        faults += consistency_faults(model) if model is not None else list(partial_faults(tree, ""))
        if faults or model is None:
            raise InputError.from_faults(list(dict.fromkeys(faults)), subject="the spec")
        return model

    @classmethod
    def from_file(cls, path: Path, what: str = "spec file") -> Model:
        """Read a file that holds what `to_json` wrote.

        Args:
            path: the file.
            what: what is expected there, for messages.

        Raises:
            InputError: the file is missing, or its spec is faulty.
        """
        text = read_text_file(path, what)
        try:
            return cls.from_json(text)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def validate(node: AnyNode) -> AnyNode:
    """Return the node, or raise one `InputError` that lists every inconsistency in it."""
    faults = consistency_faults(node) if isinstance(node, Model) else node_faults(node, "")
    if faults:
        raise InputError.from_faults(faults, subject="the spec")
    return node


def _fold(layers: list[Any]) -> dict[str, Any]:
    distinct: list[Any] = []
    order = []
    for layer in layers:
        if layer not in distinct:
            distinct.append(layer)
        order.append(distinct.index(layer))
    return {"distinct": distinct, "order": order}


def _unfold(layers: Any) -> Any:
    if not isinstance(layers, dict):
        return layers
    distinct, order = layers.get("distinct"), layers.get("order")
    if not isinstance(distinct, list) or not isinstance(order, list):
        raise InputError("layers must hold 'distinct' (a list of layers) and 'order' (a list of their indices)")
    wrong = [index for index in order if not isinstance(index, int) or not 0 <= index < len(distinct)]
    if wrong:
        raise InputError(f"layers.order: {wrong[0]!r} is not an index of the {len(distinct)} distinct layers")
    return [distinct[index] for index in order]
