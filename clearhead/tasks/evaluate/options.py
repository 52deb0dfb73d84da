"""Options of an evaluation, and the interface of models that can be evaluated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, Unpack, runtime_checkable

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.generate.options import (
    Option,
    SearchKwargs,
    SearchOptions,
    TranslateKwargs,
    drop_unset_options,
    value_faults,
)
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find_task
from clearhead.tasks.evaluate.translations import tokenize_faults
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import SpecialTokens

_COUNTS = MappingProxyType(dict.fromkeys(("window", "stride", "batch_size"), (int | None, Option("", 1))))


@runtime_checkable
class EvaluatedModel(Protocol):
    """Interface of a model that can be evaluated: its module, tokenizers and task, and its predictions.

    Attributes:
        module, tokenizers, task: the attributes of `Model` with these names.
    """

    module: Transformer
    tokenizers: TokenizerPair
    task: TaskRecord

    @property
    def tree(self) -> Transformer:
        """The module that computes the outputs: the plain module, or a replica, which may round weights and inputs."""

    @property
    def hf_checkpoint(self) -> object | None:
        """The Hugging Face checkpoint that the model was loaded from; None for a model trained by clearhead."""

    @property
    def special_tokens(self) -> SpecialTokens:
        """The special tokens of the model's input and output texts."""

    def translate(self, texts: list[str], **options: Unpack[TranslateKwargs]) -> list[str]:
        """Return the translation of each text."""

    def embed(self, texts: list[str], *, batch_size: int | None) -> Float32[ndarray, "texts width"]:
        """Return the vector of each text."""


class EvaluateKwargs(SearchKwargs, total=False):
    """Options of an evaluation as keyword arguments, see `EvaluateOptions`; None means the default."""

    window: int | None
    stride: int | None
    tokenize: str | None
    lowercase: bool | None
    similarities: Sequence[float | int] | None
    from_language: str | None
    to_language: str | None


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of an evaluation.

    Args:
        window, stride: the number of tokens in a window of a language model, and from one window to the next.
        tokenize, lowercase: the settings of sacreBLEU. None means no tokenization for segmented text, 13a otherwise.
        beam_size, length_penalty: the settings of the beam search for translations.
        batch_size: the maximum number of texts, windows or chunks in a batch; None means that a token budget decides.
        similarities: the expected similarity of each pair of texts; None means that recall is measured.

    Raises:
        InputError: a number is out of range; one report names all such options.
    """

    window: int | None = None
    stride: int | None = None
    tokenize: str | None = None
    lowercase: bool = False
    beam_size: int | None = None
    length_penalty: float | int | None = None
    batch_size: int | None = None
    similarities: Sequence[float | int] | None = None

    def __post_init__(self) -> None:
        """Check the values of all options."""
        faults = value_faults(_COUNTS, vars(self))
        numbers: Sequence[object] = () if self.similarities is None else self.similarities
        if not all(isinstance(number, int | float | np.floating) and math.isfinite(number) for number in numbers):
            faults.append("every similarity must be a finite number")
        if self.tokenize is not None:
            faults += tokenize_faults(self.tokenize)
        if faults:
            raise InputError.from_faults(faults, subject="the options")
        search = {"beam_size": self.beam_size, "length_penalty": self.length_penalty}
        SearchOptions(**drop_unset_options(search, SearchKwargs))

    def refuse_unused(self, kind: str) -> None:
        """Raise an error if an option has no effect on a kind of task.

        Raises:
            InputError: an option has no effect; the message names all such options.
        """
        used = [name for name in find_task(kind).evaluate.optional if name in vars(self)]
        unused = [
            name for name, value in vars(self).items() if name not in used and value is not None and value is not False
        ]
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            raise InputError(
                f"{', '.join(unused)} {verb} no effect on a model trained to '{kind}'; its options are "
                + ", ".join(used)
            )
