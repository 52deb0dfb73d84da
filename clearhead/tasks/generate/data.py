"""Data of language modelling: plain text, optionally streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from clearhead.data.sources.run_file_tables import Count
from clearhead.data.sources.texts import TEXT_FORMS, TextDataset
from clearhead.data.task_tables import TEXT_EXAMPLES, DataSection, TaskData, TaskSection
from clearhead.spec.tasks.base import Family


class GenerateTask(TaskSection):
    """The [task] table of language modelling, with the objective."""

    #: Training objective: predict each next token (causal), or the rest of a text after a prefix that an encoder reads
    #: (prefix).
    objective: Literal["causal", "prefix"] | None = None

    def defaults(self, family: Family) -> dict[str, object]:
        """Return the default objective of a model family: "prefix" with an encoder, otherwise "causal"."""
        return {"objective": "prefix" if family == "encoder-decoder" else "causal"}

    def faults(self, family: Family) -> Iterator[tuple[str, str]]:
        """Yield an error message if the objective does not fit the model family."""
        if self.objective == "causal" and family == "encoder-decoder":
            yield "objective", "= 'causal' needs [model] family = 'decoder'; with an encoder use 'prefix'"
        if self.objective == "prefix" and family == "decoder":
            yield "objective", "= 'prefix' needs [model] family = 'encoder-decoder': a decoder alone is causal"


class GenerateData(DataSection):
    """The [data] table of language modelling, with the settings of packing and streaming."""

    #: true packs several short documents into a block, without attention between them; false gives each document a
    #: padded block.
    pack: bool = True
    #: Number of characters of a streamed text that are read and shuffled at a time.
    shuffle_buffer: Count | None = None

    def defaults(self) -> dict[str, object]:
        """Return the default size of the shuffle buffer if the text is streamed."""
        return {"shuffle_buffer": 16_000_000} if self.stream else {}

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield an error message for each key that contradicts the value of `stream`."""
        if not self.stream:
            if self.shuffle_buffer is not None:
                yield "shuffle_buffer", "has an effect only with stream = true; remove it"
            return
        if isinstance(self.valid, float):
            yield "valid", "must name a separate text, since the length of a streamed text is unknown"
        if isinstance(self.train, TextDataset):
            yield "stream", "works with text files only, but train names a data set; remove it"


DATA: Final = TaskData(GenerateTask, TEXT_FORMS, TEXT_EXAMPLES, GenerateData, streams=True)
