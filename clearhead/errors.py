"""The two kinds of error for users: wrong input, and a failure while running."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class InputError(ValueError):
    """Wrong input; the command line exits with code 2."""

    @classmethod
    def from_faults(cls, faults: Sequence[str], *, subject: str = "the input") -> InputError:
        """Put every fault into one report.

        Args:
            faults: one sentence for each fault; at least one.
            subject: what was checked, for the first line of a report with several faults.
        """
        assert faults, "an error report needs at least one fault"
        if len(faults) == 1:
            return cls(faults[0])
        lines = "\n".join(f"  - {fault}" for fault in faults)
        return cls(f"{len(faults)} faults in {subject}:\n{lines}")


class RunFailure(RuntimeError):
    """A failure while running; the command line exits with code 1."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the closest valid name, or an empty string if none is close.

    A prefix of exactly one valid name is close to it: "de" to "de_DE".
    """
    names = list(valid)
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    longer = [valid_name for valid_name in names if name and valid_name.startswith(name)]
    found = matches or (longer if len(longer) == 1 else [])
    return f" (did you mean '{found[0]}'?)" if found else ""
