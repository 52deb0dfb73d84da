"""Child process that checks classes and functions of a user's file: python -m ...child FILE NAME KIND SETTINGS.

It writes one JSON object per line to its standard output. The first object is empty and precedes the import. The names
of the classes and functions to check follow, then one report for each. If nothing can be checked, one object with the
fault takes their place. NAME and KIND may be empty. SETTINGS are the arguments of the checks as JSON.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import json
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import ExecutionLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from torch import nn

from clearhead.apps.check.handwritten.adapters import ADAPTERS
from clearhead.apps.check.handwritten.attentions import attention
from clearhead.apps.check.handwritten.layers import layer
from clearhead.apps.check.handwritten.modules import module
from clearhead.apps.check.handwritten.report import CannotCompare, Report
from clearhead.apps.check.handwritten.running import describe_error
from clearhead.apps.check.handwritten.small_parts import loss, norm, positions, rope
from clearhead.apps.check.handwritten.transformers import transformer
from clearhead.base.errors import InputError, did_you_mean, shorten

_MAGIC = re.compile(r"([ \t]*)[%!].*")
_OTHER_LANGUAGE = re.compile(r"\s*%%(?!time\b|timeit\b|capture\b|prun\b)")


def import_file(path: Path) -> ModuleType:
    """Import a user's Python file or notebook; its imports search its folder before installed packages.

    Raises:
        InputError: the file is no notebook although its name says so, or a code cell does not parse.
    """
    packages = [number for number, entry in enumerate(sys.path) if entry.endswith("-packages")]
    sys.path.insert(min(packages, default=len(sys.path)), str(path.parent.resolve()))
    is_taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"checked_{path.stem}" if is_taken else path.stem
    cells = _cells(path) if path.suffix == ".ipynb" else None
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        specification = importlib.util.spec_from_loader(name, None, origin=str(path))
    assert specification is not None
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    for loader in (specification.loader,) if cells is None else cells:
        assert loader is not None
        loader.exec_module(module)
    return module


class _Cell(ExecutionLoader):
    """Import loader of one code cell of a notebook; tracebacks show its label, such as "a.ipynb, code cell 3"."""

    def __init__(self, label: str, source: str) -> None:
        self.label = label
        self.source = source
        linecache.cache[label] = len(source), None, source.splitlines(keepends=True), label

    def get_filename(self, fullname: str) -> str:
        """Return the label of the code cell, which tracebacks show in place of a file name."""
        return self.label

    def get_source(self, fullname: str) -> str:
        """Return the source code of the code cell."""
        return self.source


def _cells(path: Path) -> list[_Cell]:
    """Return import loaders for the code cells of a notebook, without cells in other languages such as %%bash.

    Raises:
        InputError: the file is no notebook, or a cell does not parse.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        sources = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        raise InputError("it is no notebook: expected JSON with a list of cells, as Jupyter writes it") from None
    numbered = [(number, text) for number, text in enumerate(sources, start=1) if not _OTHER_LANGUAGE.match(text)]
    return [_Cell(f"{path.name}, code cell {number}", _without_magic(source, number)) for number, source in numbered]


def _without_magic(source: str, number: int) -> str:
    """Return a code cell with `pass` for IPython commands: lines that begin with % or ! and do not parse."""
    lines = source.splitlines(keepends=True)
    while True:
        try:
            ast.parse("".join(lines))
        except (SyntaxError, ValueError) as error:
            at = (getattr(error, "lineno", None) or 1) - 1
            if at < len(lines) and _MAGIC.match(lines[at]):
                lines[at] = _MAGIC.sub(r"\1pass", lines[at])
                continue
            first = shorten(next(filter(str.strip, lines), "").strip(), 60)
            raise InputError(f"code cell {number} ({first}) does not parse: {error}; fix it, or delete it") from None
        return "".join(lines)


Check = Callable[..., Report]
CHECKS: Final[Mapping[str, tuple[str, Check]]] = {
    "rope": ("rope|rotary", rope),
    "positions": ("pos(?!t)|sinus", positions),
    "attention": ("att|mha|multi_?head", attention),
    "norm": ("norm", norm),
    "loss": ("loss|entropy", loss),
    "layer": ("layer|block", layer),
    "transformer": ("transformer|lm$|language|model|decoder|encoder", transformer),
    "module": ("$^", module),
}
"""Check of each kind of class or function: a pattern for its name, and the function that compares it."""
_SIZES: Mapping[str, str] = {
    "width": r"^(width|d_model|dim|embed_dim|hidden(_size|_dim)?|n_embd|embed(_size)?|emb(_dim|_size)?|model_dim|d|c|"
    r"features|normalized_shape|size)$",
    "heads": r"^(n|num)?_?(attention_)?heads?$|^h$|^nhead$|^n_head$",
    "head_size": r"^(head_size|head_dim|d_k|d_head)$",
    "inner": r"d_ff|ff|inner|hidden|mlp|intermediate",
    "vocabulary": r"voc",
    "length": r"len|ctx|context|block_size|seq|positions",
    "layers": r"layers|depth|blocks|^n$",
    "dropout": r"drop|^p$",
    "theta": r"theta|base",
}


def build(cls: type[Any], width: int, heads: int) -> Any:
    """Create an instance of a user's class; values such as `width` are passed by the names of its arguments.

    Raises:
        CannotCompare: a required argument has an unknown name.
    """
    values = {"width": width, "heads": heads, "head_size": width // heads, "inner": 2 * width, "vocabulary": 29,
              "length": 64, "layers": 2, "dropout": 0.1, "theta": 10000.0}  # fmt: skip
    arguments = {}
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        role = next((role for role, names in _SIZES.items() if re.search(names, parameter.name.lower())), None)
        if role in ("width", "heads", "head_size") or (parameter.default is parameter.empty and role is not None):
            arguments[parameter.name] = values[role]
        elif parameter.default is parameter.empty:
            raise CannotCompare(
                f"no known value fits the argument '{parameter.name}' of its constructor; give it a default"
            )
    return cls(**arguments)


def kind_of(name: str) -> str | None:
    """Return the kind of a class or function by its name, such as "attention" for MyAttention; None if unknown."""
    low = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return next((kind for kind, (names, _) in CHECKS.items() if re.search(names, low)), None)


def _find_parts(user_module: ModuleType, name: str, kind: str) -> dict[str, str]:
    """Return the names of the user's classes and functions to check, each with its kind, such as "attention".

    Raises:
        InputError: the file has no such class or function, or a name does not show its kind.
    """
    members = {
        each: value
        for each, value in vars(user_module).items()
        if not each.startswith("_")
        and callable(value)
        and (value.__module__ == user_module.__name__ or each in ADAPTERS or each == name)
    }
    if name:
        if name not in members:
            raise InputError(f"there is no class or function '{name}' in it{did_you_mean(name, members)}")
        known = kind or ("adapter" if name in ADAPTERS else kind_of(name))
        if known is None:
            raise InputError(f"the name '{name}' does not show its kind: pass --as and one of {', '.join(CHECKS)}")
        return {name: known}
    adapters = dict.fromkeys((each for each in members if each in ADAPTERS), "adapter")
    if adapters:
        return adapters
    parts = {each: kind or kind_of(each) for each in members if inspect.isclass(members[each]) or kind_of(each)}
    usual = {each: known for each, known in parts.items() if known is not None}
    if not usual:
        raise InputError(
            "it has no class or function whose name shows its kind (such as MyAttention): name one, FILE.py:NAME"
        )
    return usual


def _arguments(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Select the settings and sizes that are keyword arguments of the check for `kind`, such as "attention"."""
    sizes = {**settings, "head_size": settings["width"] // settings["heads"]}
    return {name: sizes[name] for name in inspect.signature(CHECKS[kind][1]).parameters if name in sizes}


def _refuse_unused(settings: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    """Raise `InputError` for a setting that no check of the chosen kinds takes."""
    taken = {
        name for kind in kinds.values() if kind in CHECKS for name in inspect.signature(CHECKS[kind][1]).parameters
    }
    for name in settings.keys() - taken - {"width", "heads"}:
        known = ", ".join(sorted(taken - {"candidate", "width", "heads", "head_size", "parameters"})) or "no setting"
        raise InputError(
            f"no class or function in it takes the setting '{name}'{did_you_mean(name, taken)}; available: {known}"
        )


def _compare(candidate: Any, name: str, kind: str, settings: Mapping[str, Any]) -> Report:
    width, heads = settings["width"], settings["heads"]
    try:
        if kind == "adapter":
            return ADAPTERS[name](candidate, width, heads)
        if inspect.isclass(candidate):
            if not issubclass(candidate, nn.Module):
                raise CannotCompare("it is a class, but no subclass of nn.Module")
            candidate = build(candidate, width, heads)
        return CHECKS[kind][1](candidate, **_arguments(kind, settings))
    except NotImplementedError:
        return Report(name, "not written yet")
    except (CannotCompare, InputError) as reason:
        return Report(name, "cannot compare", reason=f"{reason}")
    except Exception as error:  # noqa: BLE001 user code may raise anything
        return Report(name, "cannot compare", reason=f"it raises {describe_error(error)}")


def answers(path: Path, name: str, kind: str, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Import a user's file; yield the names to check, then a report for each; or one fault if it cannot be checked."""
    try:
        user_module = import_file(path)
        parts = _find_parts(user_module, name, kind)
        _refuse_unused(settings, parts)
    except InputError as error:
        yield {"fault": f"{error}"}
        return
    except Exception as error:  # noqa: BLE001 user code may raise anything
        yield {"fault": f"importing it raises {describe_error(error)}"}
        return
    yield {"parts": list(parts)}
    for each, known in parts.items():
        yield {"report": _compare(getattr(user_module, each), each, known, settings).record()}


def main(path: str, name: str, kind: str, settings: str) -> None:
    """Check a user's file; write the reports to standard output, and what the user's code prints to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)
        pipe.write("{}\n")
        pipe.flush()
        for answer in answers(Path(path), name, kind, json.loads(settings)):
            pipe.write(json.dumps(answer) + "\n")
            pipe.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
