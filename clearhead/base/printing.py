"""Short text of objects for `repr` and `print`: a few lines, whatever the size of their content."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Set
from dataclasses import MISSING, fields, is_dataclass
from pathlib import PurePath
from typing import Any

WIDTH = 120
MOST_LINES = 40
_MOST_ITEMS = 8
_MOST_CHARACTERS = 400


class Printed:
    """Object that prints its class and fields, such as `Record(tensor=float32 [1, 7, 512], depth=0, step=0)`.

    A dataclass inherits this where it is declared with `repr=False`.
    """

    def __repr__(self) -> str:
        line = one_line(self)
        if len(line) <= WIDTH:
            return line
        # With a closing parenthesis, so that several in a list can be told apart.
        parts = ",\n".join(f"  {name}={short(value)}" for name, value in self._fields_to_print().items())
        return block([f"{type(self).__name__}(", *f"{parts})".split("\n")])

    # The `__str__` of pydantic is a line of any length.
    def __str__(self) -> str:
        return repr(self)

    def _fields_to_print(self) -> Mapping[str, object]:
        """Return the fields to print: those without their default value, or attributes that are not None."""
        return {name: value for name, value in vars(self).items() if name[:1] != "_" and not _is_default(self, name)}


class PrintedModule:
    """Base of torch modules that print their spec, or the shapes of their parameters and their settings."""

    def __repr__(self) -> str:
        module: Any = self
        node = vars(self).get("spec")
        if node is None:
            return super().__repr__()
        mode = "training" if module.training else "evaluation"
        head = f"{type(self).__name__}: {module_summary(module)}, in {mode} mode"
        return block([head, *(f"  {line}" for line in repr(node).splitlines())], more="its `spec` has the whole model")

    def extra_repr(self) -> str:
        """Return the text that torch prints between the parentheses, before the submodules."""
        shown: dict[str, object] = {
            name: list(value.shape) for name, value in vars(self)["_parameters"].items() if value is not None
        }
        for name, value in vars(self).items():
            if isinstance(value, int | float | str) and value is not False and name != "training" and name[:1] != "_":
                shown[name] = value
        return ", ".join(f"{name}={short(value)}" for name, value in shown.items())


def module_summary(module: Any) -> str:
    """Return a text with the number, dtype and device of the parameters of a torch module."""
    parameters = list(module.parameters())
    names = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
    devices = {str(parameter.device) for parameter in parameters}
    where = f", {' and '.join(sorted(names))} on {' and '.join(sorted(devices))}" if parameters else ""
    return f"{num_parameters(module):,} parameters{where}"


def num_parameters(module: Any, *, only_trained: bool = False) -> int:
    """Return the number of parameters of a torch module; shared ones count once.

    Args:
        module: the module, on any device, such as one built on "meta".
        only_trained: True to count only parameters with a gradient, such as those of LoRA.
    """
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not only_trained)


def one_line(value: Printed) -> str:
    """Return the class and fields of an object in one line of any length."""
    fields_shown = ", ".join(f"{name}={short(field)}" for name, field in value._fields_to_print().items())
    return f"{type(value).__name__}({fields_shown})"


def _is_default(owner: object, name: str) -> bool:
    value = getattr(owner, name)
    if value is None or not isinstance(value, bool | int | float | str | tuple | list | dict):
        return value is None
    if is_dataclass(owner):
        field = next((field for field in fields(owner) if field.name == name), None)
        default = MISSING if field is None else field.default
        if field is not None and field.default_factory is not MISSING:
            default = field.default_factory()
        return bool(value == default)
    declared = getattr(type(owner), "model_fields", {}).get(name)  # of pydantic
    return declared is not None and bool(value == declared.get_default(call_default_factory=True))


def short(value: object) -> str:
    """Return a short text of a value: type and shape of an array, or the beginning of a long text or collection."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    match value:
        case float():
            return f"{value:.6g}"
        case str():
            shown = repr(value[:_MOST_CHARACTERS])
            return shown if len(value) <= _MOST_CHARACTERS else f"{shown}... ({len(value):,} characters)"
        case PurePath():
            return repr(str(value))
        case Mapping():
            if all(isinstance(key, str | int) for key in value):
                return f"{{{_items(f'{short(key)}: {short(item)}' for key, item in value.items())}}}"
            return f"{{{len(value):,} entries}}"
        case list():
            return f"[{_items(map(short, value))}]"
        case tuple():
            return f"({_items(map(short, value))}{',' if len(value) == 1 else ''})"
        case Set() if not value:
            return "set()"
        case Set():
            return f"{{{_items(map(short, value))}}}"
        case Printed():
            shown = one_line(value)
        case _:
            shown = _object_text(value)
    return shown if len(shown) <= _MOST_CHARACTERS else f"{shown[:_MOST_CHARACTERS]} ..."


def _object_text(value: object) -> str:
    # Avoid the default repr of an object, which has only its address in memory.
    if type(value).__repr__ is object.__repr__ or callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    return " ".join(repr(value).split())


def _items(items: Iterable[str]) -> str:
    every = list(items)
    return ", ".join(every[:_MOST_ITEMS]) + (f", ... {len(every):,} in all" if len(every) > _MOST_ITEMS else "")


def block(lines: Iterable[str], more: str = "") -> str:
    """Return lines as one text of at most 40 lines, wrapped at 120 characters.

    Args:
        lines: the lines with their indentation; wrapped text is indented deeper.
        more: a hint where to read the lines that are left out.
    """
    wrapped: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        wrapped += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]
    if len(wrapped) > MOST_LINES:
        rest = len(wrapped) - MOST_LINES + 1
        wrapped[MOST_LINES - 1 :] = [f"... {rest} more lines{f'; {more}' if more else ''}"]
    return "\n".join(wrapped)


def human_count(value: float | int) -> str:
    """Return a large number with three digits and its unit: 2.61M, 512k."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def human_bytes(count: float | int) -> str:
    """Return a number of bytes with its unit: "512 B", "41.7 MB", "1.2 GB"."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
