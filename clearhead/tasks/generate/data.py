"""The data of language modelling: plain text, which may be streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from clearhead.data.sources.run_file_tables import Count
from clearhead.data.sources.texts import TEXT_FORMS, TextDataset
from clearhead.data.task_tables import TEXT_EXAMPLES, DataSection, TaskData, TaskSection
from clearhead.spec.tasks.base import Family


class GenerateTask(TaskSection):
    """The [task] table: what is predicted of a text, each next token or the rest after a prefix."""

    #: Whether each next token is predicted (causal), or the rest of a text after a prefix that an encoder reads
    #: (prefix).
    objective: Literal["causal", "prefix"] | None = None

    def defaults(self, family: Family) -> dict[str, object]:
        """Return the objective of the stacks."""
        return {"objective": "prefix" if family == "encoder-decoder" else "causal"}

    def faults(self, family: Family) -> Iterator[tuple[str, str]]:
        """Refuse an objective that does not fit the stacks."""
        if self.objective == "causal" and family == "encoder-decoder":
            yield "objective", "= 'causal' needs [model] family = 'decoder'; with an encoder it is 'prefix'"
        if self.objective == "prefix" and family == "decoder":
            yield "objective", "= 'prefix' needs [model] family = 'encoder-decoder': masks of a decoder are causal"


class GenerateData(DataSection):
    """The [data] table; with `stream`, `shuffle_buffer` characters of the text are read and shuffled at a time."""

    #: Whether short documents share a block, where they do not see each other; without it each has a padded block of
    #: its own.
    pack: bool = True
    #: Characters of a streamed text that are read and shuffled at a time.
    shuffle_buffer: Count | None = None

    def defaults(self) -> dict[str, object]:
        """Return the size of the buffer of a streamed text."""
        return {"shuffle_buffer": 16_000_000} if self.stream else {}

    def faults(self) -> Iterator[tuple[str, str]]:
        """Go through what cannot be streamed."""
        if not self.stream:
            if self.shuffle_buffer is not None:
                yield "shuffle_buffer", "is for a streamed text, whose pieces it shuffles; remove it"
            return
        if isinstance(self.valid, float):
            yield "valid", "must be a text of its own for a streamed text, whose end is not known"
        if isinstance(self.train, TextDataset):
            yield "stream", "reads text files, but a dataset by name is on disk as a whole; remove it"


DATA: Final = TaskData(GenerateTask, TEXT_FORMS, TEXT_EXAMPLES, GenerateData, streams=True)
