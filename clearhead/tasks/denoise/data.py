"""The data of denoising: plain text."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from clearhead.data.sources.run_file_tables import Share
from clearhead.data.sources.texts import TEXT_FORMS
from clearhead.data.task_tables import TEXT_EXAMPLES, TaskData, TaskSection
from clearhead.spec.tasks.base import Family


class DenoiseTask(TaskSection):
    """The [task] table: how the text is corrupted."""

    #: Spans replaced by sentinels and predicted alone (T5), or replaced by one mask each, with the whole text predicted
    #: (BART).
    noise: Literal["spans", "infill"] = "spans"
    #: Share of the tokens in the spans.
    noise_share: Share | None = None
    #: Mean length of a span in tokens.
    mean_span: Annotated[float, Field(ge=1.0)] = 3.0

    def defaults(self, family: Family) -> dict[str, object]:
        """Return the share of the papers: 15 % of the tokens in spans, or 30 % for infilling."""
        return {"noise_share": 0.3 if self.noise == "infill" else 0.15}


def _num_sentinels(length: int) -> int:
    # Only now: batches load torch, and faults in a run file should not wait for it.
    from clearhead.data.objectives.spans import num_sentinels

    return num_sentinels(length)


DATA: Final = TaskData(DenoiseTask, TEXT_FORMS, TEXT_EXAMPLES, num_signs=_num_sentinels)
