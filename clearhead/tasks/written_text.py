"""Parameters of the server's pipelines "summarization" and "text2text-generation", for encoder-decoder models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field

from clearhead.base.errors import InputError
from clearhead.generate.options import DECLARED, GenerateOptions
from clearhead.tasks.pipelines import PipelineParameters

FIELDS: Final[Mapping[str, str]] = {"summarization": "summary_text", "text2text-generation": "generated_text"}
"""The field of an answer that holds the text, for each schema."""
_OPTIONS: Final[Mapping[str, str]] = {
    option.hf: name
    for name, (_, option) in DECLARED[GenerateOptions].items()
    if option.hf is not None and name != "num_return_sequences"  # an answer has one text
}


class Parameters(PipelineParameters):
    """Parameters that a request to one of the two pipelines may set.

    Args:
        truncation: the treatment of texts that the encoder cannot read whole. "do_not_truncate" refuses them; the other
            values read their start.
        generate_parameters: the options of generation, by their names in generation_config.json.
    """

    truncation: Literal["do_not_truncate", "longest_first", "only_first", "only_second"] = "longest_first"
    generate_parameters: dict[str, Any] = Field(default_factory=dict)

    def options(self, *, has_limit: bool) -> dict[str, Any]:
        """Return the options of generation, by the names of clearhead.

        Args:
            has_limit: True if the number of positions of the model is limited.

        Raises:
            InputError: an option is not supported.
        """
        unknown = next((name for name in self.generate_parameters if name not in _OPTIONS), None)
        if unknown is not None:
            raise InputError(f"parameters.generate_parameters.{unknown} is not supported: leave it out")
        options = {_OPTIONS[name]: value for name, value in self.generate_parameters.items()}
        return {**options, "truncate": has_limit and self.truncation != "do_not_truncate"}
