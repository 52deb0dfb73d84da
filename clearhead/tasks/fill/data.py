"""The data of masked language modelling: plain text."""

from __future__ import annotations

from typing import Final

from clearhead.data.sources.run_file_tables import Share
from clearhead.data.sources.texts import TEXT_FORMS
from clearhead.data.task_tables import TEXT_EXAMPLES, TaskData, TaskSection


class FillTask(TaskSection):
    """The [task] table: how much of the text is masked."""

    #: Share of the tokens that are to be predicted.
    mask_share: Share = 0.15
    #: Whether all tokens of a word are masked together.
    whole_words: bool = False


DATA: Final = TaskData(FillTask, TEXT_FORMS, TEXT_EXAMPLES, num_signs=lambda length: 1)
