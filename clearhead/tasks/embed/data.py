"""Data of text embedding: pairs of texts with the same meaning."""

from __future__ import annotations

from typing import Final

from clearhead.data.sources.pairs import PAIR_FORMS, read_pairs
from clearhead.data.sources.run_file_tables import Positive
from clearhead.data.task_tables import PAIR_EXAMPLES, PairSection, PooledSection, TaskData


class EmbedTask(PooledSection):
    """The [task] table of text embedding, with the temperature."""

    #: Temperature that divides the cosines before the softmax; smaller is sharper.
    temperature: Positive = 0.05


DATA: Final = TaskData(
    EmbedTask, PAIR_FORMS, PAIR_EXAMPLES, PairSection, read=lambda source, share, task: read_pairs(source, share)
)
