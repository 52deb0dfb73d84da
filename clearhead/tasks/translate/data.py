"""Data of translation: pairs of texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from clearhead.data.sources.pairs import PAIR_FORMS, read_pairs
from clearhead.data.task_tables import PAIR_EXAMPLES, PairSection, TaskData, TaskSection
from clearhead.spec.tasks.base import Family


class TranslateTask(TaskSection):
    """The [task] table of translation, with the languages of a multilingual checkpoint."""

    #: The code of the source language of a multilingual checkpoint.
    from_language: str | None = None
    #: The code of the target language of a multilingual checkpoint.
    to_language: str | None = None

    @property
    def languages(self) -> tuple[str | None, str | None]:
        """The codes of the source and target language of a multilingual initial model."""
        return self.from_language, self.to_language

    def faults(self, family: Family) -> Iterator[tuple[str, str]]:
        """Yield an error message for each language code that is set without an initial checkpoint."""
        for name in ("from_language", "to_language"):
            if getattr(self, name) is not None and not self.init:
                yield name, "has an effect only with a multilingual checkpoint in [task] init; remove it"


DATA: Final = TaskData(
    TranslateTask, PAIR_FORMS, PAIR_EXAMPLES, PairSection, read=lambda source, share, task: read_pairs(source, share)
)
