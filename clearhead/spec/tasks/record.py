"""The task record of a model, stored beside its weights: its task, its labels and its input format."""

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
"""The name of a task that is built in or installed."""

LabelKind = Literal["single_label", "multi_label", "regression"]

Repeats = Literal["start", "last"]


class Noise(Printed, BaseModel):
    """The corruption of text for masked language modelling and denoising.

    Args:
        kind: mask single tokens ("mask"), replace spans by sentinels ("spans") or by one mask each ("infill").
        share: share of the tokens to corrupt.
        mean_span: mean length of a span in tokens; None for "mask".
        whole_words: mask all tokens of a word or none.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["mask", "spans", "infill"]
    share: float
    mean_span: float | None = None
    whole_words: bool = False


class DataFormat(Printed, BaseModel):
    """How the data that a model was trained on was read.

    Args:
        form: the key of its [data] table that names it: text, source, tsv, jsonl or dataset.
        ending: of a text file with columns or fields: .tsv, .csv or .jsonl.
        keys: the other keys of the table, such as document = "line".
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    form: str
    ending: str = ""
    keys: dict[str, JsonValue] = {}


class TaskRecord(Printed, BaseModel):
    """The task that a model was trained for.

    Args:
        kind: the task of its run file.
        labels: names of the labels, in the order of the outputs; empty for vocabulary heads and vectors.
        label_kind: single-label, multi-label or regression; None for other tasks.
        max_length: the longest training sequence in tokens, with special tokens; None: not known.
        is_paired: whether the model reads pairs of texts; None: not known, so that it reads either.
        number_mean, number_scale: a predicted number is output * number_scale + number_mean.
        noise: the corruption of its training text; None for other tasks.
        repeats: the decoder reads the input of the encoder shifted right, after its start token ("start") or after the
            last id of the text ("last"); None: it reads a text of its own, or the start token alone.
        reading: how its training data was read, which is how evaluation data is read; None: not known.
        answer_tokens: tokens of the longest answer of the training data; None: not known.
        inner_signs, sign_runs: how raw text is split into words as in training; see `WordSplitter`.
        prompt: text in front of every text that becomes a vector.
        facts: what else a task of another package remembers of its training.
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
        """Return the record as JSON; a prompt is written only where there is one."""
        return self.model_dump_json(indent=2, exclude=None if self.prompt else {"prompt"}) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str) -> TaskRecord:
        """Read what `to_json` wrote; `name` is for messages.

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
