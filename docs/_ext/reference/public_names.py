"""Every name that a package exports, by autodoc: functions and classes with their methods."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator

import clearhead

# Whose methods are those of a library, and documented there.
FOREIGN = "Module, BaseModel, Node, tuple, dict, object, Printed, PrintedModule, ValueError, Exception"


def lines(package: str) -> Iterator[str]:
    """Yield the names of a package in the order of the alphabet; classes last."""
    module = pkgutil.resolve_name(package)
    names = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name)) and name != "__version__"]
    if package != "clearhead":
        names = [name for name in names if getattr(clearhead, name, None) is not getattr(module, name)]
    functions = [name for name in names if inspect.isfunction(getattr(module, name))]
    classes = [name for name in names if inspect.isclass(getattr(module, name))]
    yield from ("```{eval-rst}", "")
    for name in sorted(functions):
        yield from (f".. autofunction:: {package}.{name}", "")
    for name in sorted(classes):
        yield from (f".. autoclass:: {package}.{name}", "   :members:", f"   :inherited-members: {FOREIGN}", "")
    yield "```"
