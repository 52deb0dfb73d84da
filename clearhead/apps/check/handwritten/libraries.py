"""Modules of known libraries: the check never reports them as wrong, since they compute variants on purpose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from torch import nn

from clearhead.apps.check.handwritten.report import Report

LIBRARIES: Final = ("torch", "transformers", "x_transformers")
# The user chose the modules in these containers and their order.
_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
CheckT = TypeVar("CheckT", bound=Callable[..., Report])


def library_of(candidate: Callable[..., Any]) -> str | None:
    """Return the library of a module, such as "torch"; None for functions, containers and custom submodules."""
    if not isinstance(candidate, nn.Module) or type(candidate) in _CONTAINERS:
        return None
    names = {type(module).__module__.split(".")[0] for module in candidate.modules()}
    return type(candidate).__module__.split(".")[0] if names <= {*LIBRARIES, "einops"} else None


def spares_libraries(check: CheckT) -> CheckT:
    """Decorate a check so that a module of a library is reported as "cannot compare" instead of "wrong"."""

    @functools.wraps(check)
    def call(candidate: Callable[..., Any], **options: Any) -> Report:
        report = check(candidate, **options)
        library = library_of(candidate)
        if report.verdict != "wrong" or library is None:
            return report
        says = next(finding.says for finding in report.findings if finding.severity == "wrong")
        reason = (
            f"a module of {library} that computes another variant ({says}); modules of libraries are not called wrong"
        )
        return Report(report.subject, "cannot compare", notes=report.notes, reason=reason)

    return cast(CheckT, call)
