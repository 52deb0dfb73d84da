"""Data of masked language modelling: plain text."""

from __future__ import annotations

from typing import Final

from clearhead.data.sources.run_file_tables import Share
from clearhead.data.sources.texts import TEXT_FORMS
from clearhead.data.task_tables import TEXT_EXAMPLES, TaskData, TaskSection


class FillTask(TaskSection):
    """The [task] table of masked language modelling, with the settings of the mask."""

    #: Share of the tokens to mask and predict, 0 to 1.
    mask_share: Share = 0.15
    #: true masks all tokens of a word together.
    whole_words: bool = False


DATA: Final = TaskData(FillTask, TEXT_FORMS, TEXT_EXAMPLES, num_signs=lambda length: 1)
