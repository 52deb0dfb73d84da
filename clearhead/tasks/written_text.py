"""The schemas "summarization" and "text2text-generation", which every model with encoder and decoder answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from clearhead.generate.options import DECLARED, GenerateOptions, number_type
from clearhead.tasks.pipelines import PipelineParameters

FIELDS: Final[Mapping[str, str]] = {"summarization": "summary_text", "text2text-generation": "generated_text"}
"""The field of an answer that holds the text, by schema."""
_OPTIONS: Final = {
    option.hf: name
    for name, (_, option) in DECLARED[GenerateOptions].items()
    if option.hf is not None and name != "num_return_sequences"  # an answer has one text
}


class _GenerateParameters(BaseModel):
    """Options of generation, by their names in generation_config.json."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @property
    def options(self) -> dict[str, Any]:
        """The options that the client sent, by our names."""
        return {_OPTIONS[name]: getattr(self, name) for name in self.model_fields_set}


def _parameters_model() -> type[_GenerateParameters]:
    """Return the model of all options, each with its range."""
    fields: dict[str, Any] = {}
    for hf_name, name in _OPTIONS.items():
        kind, option = DECLARED[GenerateOptions][name]
        least: dict[str, Any] = {"gt" if option.above else "ge": option.least}
        fields[hf_name] = (Annotated[number_type(kind), Field(**least, le=option.most)], None)
    return create_model("GenerateParameters", __base__=_GenerateParameters, **fields)


GenerateParameters = _parameters_model()


class Parameters(PipelineParameters):
    """The parameters of both schemas.

    Args:
        truncation: "do_not_truncate" refuses a text that is longer than the encoder reads; the others read its start.
        generate_parameters: the options of generation.
    """

    truncation: Literal["do_not_truncate", "longest_first", "only_first", "only_second"] = "longest_first"
    generate_parameters: GenerateParameters = GenerateParameters()  # type: ignore[valid-type]

    def options(self, *, has_limit: bool) -> dict[str, Any]:
        """Return the options of generation, by our names.

        Args:
            has_limit: whether the positions of the model have a limit.
        """
        options: dict[str, Any] = self.generate_parameters.options  # type: ignore[attr-defined]
        return {**options, "truncate": has_limit and self.truncation != "do_not_truncate"}
