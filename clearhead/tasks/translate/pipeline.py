"""Parameters of the server's pipeline "translation"; the server batches its texts with those of other requests."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from clearhead.tasks.pipelines import PipelineParameters

NAME = "translation"


class SearchParameters(BaseModel):
    """Settings of the beam search for a translation."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    num_beams: int | None = Field(default=None, ge=1, le=100)
    max_length: int | None = Field(default=None, ge=1, lt=2**20)
    length_penalty: float | None = Field(default=None, ge=-10, le=10)

    @property
    def options(self) -> dict[str, Any]:
        """The options that the client set, by their names in `SearchOptions`."""
        named = {"beam_size": self.num_beams, "max_length": self.max_length, "length_penalty": self.length_penalty}
        return {name: value for name, value in named.items() if value is not None}


class Parameters(PipelineParameters):
    """Parameters that a request may set."""

    src_lang: str | None = None
    tgt_lang: str | None = None
    alignments: bool = False
    generate_parameters: SearchParameters = SearchParameters()
