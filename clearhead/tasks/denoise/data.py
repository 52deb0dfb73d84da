"""Data of denoising: plain text."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from clearhead.data.sources.run_file_tables import Share
from clearhead.data.sources.texts import TEXT_FORMS
from clearhead.data.task_tables import TEXT_EXAMPLES, TaskData, TaskSection
from clearhead.spec.tasks.base import Family


class DenoiseTask(TaskSection):
    """The [task] table of denoising, with the settings of the noise."""

    #: Kind of noise: "spans" replaces spans by sentinels, and the model predicts the spans (T5). With "infill" one mask
    #: replaces each span, and the model predicts the whole text (BART).
    noise: Literal["spans", "infill"] = "spans"
    #: Share of the tokens in spans, 0 to 1.
    noise_share: Share | None = None
    #: Mean length of a span in tokens.
    mean_span: Annotated[float, Field(ge=1.0)] = 3.0

    def defaults(self, family: Family) -> dict[str, object]:
        """Return the default share of tokens to corrupt, from the papers: 15 % for "spans", 30 % for "infill"."""
        return {"noise_share": 0.3 if self.noise == "infill" else 0.15}


def _num_sentinels(length: int) -> int:
    # Imported late: it loads torch, which would delay the messages about faulty run files.
    from clearhead.data.objectives.spans import num_sentinels

    return num_sentinels(length)


DATA: Final = TaskData(DenoiseTask, TEXT_FORMS, TEXT_EXAMPLES, num_signs=_num_sentinels)
