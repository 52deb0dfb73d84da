"""The two kinds of failure a user can meet: a mistake in the input, and a failure while running."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class InputError(ValueError):
    """A mistake in what the user gave; the command line ends with exit code 2."""

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
    """A failure while running that no change of the input would have shown; exit code 1."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the closest valid name, or an empty string where none is close.

    A name that only one valid one begins with is close to it: "de" to "de_DE".
    """
    names = list(valid)
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    begun = [one for one in names if name and one.startswith(name)]
    found = matches or (begun if len(begun) == 1 else [])
    return f" (did you mean '{found[0]}'?)" if found else ""
