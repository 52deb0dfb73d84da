"""What a model was trained for: kept beside its weights, so that a later command knows what its outputs mean."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from clearhead.errors import InputError

TaskKind = Literal["translate", "generate", "fill", "classify", "tag", "embed", "denoise", "answer"]

LabelKind = Literal["single_label", "multi_label", "regression"]

Repeats = Literal["start", "last"]


class Noise(BaseModel):
    """How text was damaged for a model that learned to mend it.

    Args:
        kind: single tokens masked, spans replaced by sentinels, or spans replaced by one mask each.
        share: of the tokens.
        mean_span: mean length of a span in tokens; None where single tokens are masked.
        whole_words: all tokens of a word are masked or none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["mask", "spans", "infill"]
    share: float
    mean_span: float | None = None
    whole_words: bool = False


class TaskRecord(BaseModel):
    """What a model was trained for.

    Args:
        kind: the task of its run file.
        labels: names of its labels, in the order of its outputs; empty where outputs are words or vectors.
        label_kind: whether one label is right, several may be, or the output is a number.
        max_length: the longest sequence it was trained on, in tokens with special ones; None: not known.
        is_paired: whether it reads pairs of texts; None: not known, so that it reads either.
        number_mean, number_scale: a number that it gives is output * number_scale + number_mean.
        noise: how the text was damaged that it learned to mend; None for all other tasks.
        repeats: the decoder of a model with two stacks reads what the encoder reads, one place later, and begins with
            its start token ("start") or with the last id of the text ("last"); None: it reads a text of its own, or the
            start token alone.
        inner_signs, sign_runs: how raw text becomes words like those it was trained on; see `WordSplitter`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: TaskKind
    labels: tuple[str, ...] = ()
    label_kind: LabelKind | None = None
    max_length: int | None = None
    is_paired: bool | None = False
    number_mean: float = 0.0
    number_scale: float = 1.0
    noise: Noise | None = None
    repeats: Repeats | None = None
    inner_signs: str = ""
    sign_runs: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Write the record as JSON."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str) -> TaskRecord:
        """Read what `to_json` wrote; `name` is what a message calls it.

        Raises:
            InputError: the text is not such a record.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise InputError(f"{name}: not a record of a task: {place}: {first['msg'].lower()}") from None
