"""Task record of a model, stored in the folder of its weights: its task, labels and input format."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, JsonValue, ValidationError
from pydantic_core import PydanticKnownError

from clearhead.base.errors import InputError
from clearhead.base.printing import Printed
from clearhead.spec.tasks.registry import task_kinds, unknown_task_message


def _check_kind(kind: str) -> str:
    if kind not in task_kinds():
        raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, task_kinds()))})
    return kind


TaskKind = Annotated[str, AfterValidator(_check_kind)]
"""The name of a built-in task, or of a task from an installed package."""

LabelKind = Literal["single_label", "multi_label", "regression"]

Repeats = Literal["start", "last"]


class Noise(Printed, BaseModel):
    """Settings of the noise for masked language modelling and denoising.

    Args:
        kind: "mask" masks single tokens, "spans" replaces spans by sentinels, "infill" replaces each span by one mask.
        share: the share of the tokens to corrupt, 0 to 1.
        mean_span: the mean length of a span in tokens; None for "mask".
        whole_words: True to mask either all tokens of a word or none.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["mask", "spans", "infill"]
    share: float
    mean_span: float | None = None
    whole_words: bool = False


class DataFormat(Printed, BaseModel):
    """Format of the training data of a model, in which evaluation data are read too.

    Args:
        form: the key of the [data] table that names the data: text, source, tsv, jsonl or dataset.
        ending: the ending of a text file with columns or fields: .tsv, .csv or .jsonl.
        keys: the other keys of the table, such as document = "line".
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    form: str
    ending: str = ""
    keys: dict[str, JsonValue] = {}


class TaskRecord(Printed, BaseModel):
    """Record of the task that a model was trained for.

    Args:
        kind: the name of the task, as in its run file.
        labels: the names of the labels, in the order of the outputs; empty for vocabulary heads and vectors.
        label_kind: the kind of labels; None for a task without such a kind, such as tag.
        max_length: the longest training sequence in tokens, with special tokens; None means unknown.
        is_paired: True if the model reads pairs of texts. None means unknown; then texts and pairs are accepted.
        number_mean, number_scale: mean and scale of a regression: a predicted number is output * number_scale +
            number_mean.
        noise: the noise in the training text; None for a task without noise.
        repeats: the first id of the decoder's input, if the decoder reads the encoder's input shifted right. It
            is the start token ("start") or the last id of the text ("last"). None means that the
            decoder reads another text, or the start token alone.
        reading: the format of the training data, in which evaluation data are read; None means unknown.
        answer_tokens: the number of tokens of the longest answer in the training data; None means unknown.
        inner_signs, sign_runs: the rules that split raw text into words, see `WordSplitter`.
        prompt: the text put in front of every text to embed.
        facts: further values that a task of another package stores.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: TaskKind
    labels: tuple[str, ...] = ()
    label_kind: LabelKind | None = None
    max_length: int | None = None
    is_paired: bool | None = False
    number_mean: float = 0.0
    number_scale: float = 1.0
    noise: Noise | None = None
    repeats: Repeats | None = None
    reading: DataFormat | None = None
    answer_tokens: int | None = None
    inner_signs: str = ""
    sign_runs: tuple[str, ...] = ()
    prompt: str = ""
    facts: dict[str, JsonValue] = {}

    def to_json(self) -> str:
        """Return the record as JSON text; an empty prompt is left out."""
        return self.model_dump_json(indent=2, exclude=None if self.prompt else {"prompt"}) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str) -> TaskRecord:
        """Return the record in a JSON text that `to_json` wrote.

        Args:
            text: the JSON text.
            name: the name of its file, for messages.

        Raises:
            InputError: the text is not a task record.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["loc"] == ("kind",) and first["type"] == "literal_error":
                raise InputError(f"{name}: {unknown_task_message(first['input'])}") from None
            field = ".".join(map(str, first["loc"])) or "the file"
            raise InputError(f"{name}: not a task record: {field}: {first['msg'].lower()}") from None
