"""What a task is: its facts, the words of its commands, and the values of its run files.

Only the standard library is needed, as `clearhead --help` loads nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from clearhead.base.errors import InputError

Family = Literal["encoder", "decoder", "encoder-decoder"]
Outputs = Literal["vocabulary", "labels", "token_labels", "span", "vector"]
"""What a head returns: scores of the vocabulary, of the labels of a text, of the labels of each token, of each token as
start and as end of a span; or a vector."""
Value = str | int | float | bool


@dataclass(frozen=True)
class Size:
    """One size of a model, and when it is worth its time.

    Args:
        layers, width, heads, feedforward: as in [model].
        dropout: as in [model].
        least_tokens: the fewest tokens, repetitions included, that it must read to be better than the size before it.
    """

    layers: int
    width: int
    heads: int
    feedforward: int
    dropout: float
    least_tokens: int = 0


@dataclass(frozen=True)
class Architecture:
    """The parts of a model that do not depend on its size.

    Args:
        keys: of [model].
        saved_as: the Hugging Face architecture in which `clearhead convert --to hf` saves it; empty: none fits.
    """

    keys: Mapping[str, Value]
    saved_as: str = ""


@dataclass(frozen=True)
class Recipe:
    """The values of a run file for one task and amount of data: those that were best on validation data.

    Args:
        up_to: the most texts, pairs or sentences, or characters of running text, of this row; None: any number.
        tokenizer: kind of tokenizer. For "character", text with many different characters takes byte-bpe instead.
        vocab_size: the largest vocabulary. It is smaller where fewer words are frequent.
        least_count: a word counts as frequent if it occurs this often.
        max_length: for running text whose documents are not lines, the length of a block in tokens; for all other
            data, the most tokens of a text: the longest text decides.
        sizes: of the model, the smallest first.
        model: the rest of [model].
        train: the keys of [train] other than its length and its run directory.
        most_epochs: the passes over the data after which more of them do harm or no good.
        task: keys of [task] beside its kind.
        below: the plain baseline that a model from scratch stays below on so much data; empty: none.
    """

    up_to: int | None
    tokenizer: str
    vocab_size: int
    max_length: int
    sizes: tuple[Size, ...]
    model: Architecture
    train: Mapping[str, Value]
    most_epochs: int
    least_count: int = 2
    task: Mapping[str, Value] = field(default_factory=dict)
    below: str = ""


@dataclass(frozen=True)
class NewWords:
    """What `clearhead new` says of a task, and which options name its data.

    Attributes:
        does: its help in one sentence.
        examples: what follows `clearhead new TASK`.
        data: the forms of data, line by line, and what is done with it.
        needed, optional: the names of its data options.
        longer: what happens to sequences that are too long.
        batch: what a batch counts.
        comments: on keys of [task] in a run file, in the order in which they stand there.
    """

    does: str
    examples: tuple[str, ...]
    data: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    longer: str
    batch: str = "padded tokens in one batch: less if memory is short"
    comments: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluateWords:
    """The options of `clearhead evaluate` for a task.

    Attributes:
        data: the names of those that name its data.
        measures: what is measured, for the help.
        optional: the names of the others that it takes, and those of `Model.evaluate` alone.
    """

    data: tuple[str, ...]
    measures: str
    optional: tuple[str, ...] = ("batch_size",)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all options."""
        return *self.data, *self.optional


@dataclass(frozen=True)
class Task:
    """A kind of task.

    Attributes:
        kind: its name, as in [task] kind.
        outputs: what its head returns.
        families: of the models that it is for; the first is the default.
        new, evaluate: its words in these commands.
        used_with: the command that uses a trained model, behind `clearhead`; "{run}" stands for its name.
        recipes: by amount of data, the smallest first.
        options: the help of its own options that name data, by their names; each is a text.
        score: the name of the score of a validation.
        scores_translations: whether it is computed from translations of some sentences ([train] bleu_sentences).
        learns_head: whether the head is learned from nothing, as its outputs are what no text has: labels, borders of
            spans, numbers.
        smooths_labels: whether its loss has a use for [train] label_smoothing.
        writes: whether its models write text token by token.
        continues: whether that text continues the input.
        is_paired: whether its data are pairs of texts, line by line.
        has_two_vocabularies: whether its two texts may have a tokenizer each.
        measured_on_pairs_as: the task whose measures it has for pairs of texts; empty: it has none for them.
        home: the package of its parts, for a task that is not of this package; empty: its folder here.
    """

    kind: str
    outputs: Outputs
    families: tuple[Family, ...]
    new: NewWords
    evaluate: EvaluateWords
    used_with: str
    recipes: tuple[Recipe, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    score: str = "score"
    scores_translations: bool = False
    learns_head: bool = False
    smooths_labels: bool = True
    writes: bool = False
    continues: bool = False
    is_paired: bool = False
    has_two_vocabularies: bool = False
    measured_on_pairs_as: str = ""
    home: str = ""

    def module(self, name: Literal["data", "use", "train", "pipeline"]) -> Any:
        """Return the module of its data, its use and measures, its training or its schema for a server, imported then.

        Raises:
            InputError: another package has the task, and the module cannot be imported.
        """
        if not self.home:
            return importlib.import_module(f"clearhead.tasks.{self.kind}.{name}")
        try:
            return importlib.import_module(f"{self.home}.{name}")
        except ImportError as error:
            raise InputError(
                f"the task '{self.kind}' cannot be used: {error}; update the package {self.home}"
            ) from error

    @property
    def has_labels(self) -> bool:
        """Whether the outputs are scores of named labels."""
        return self.outputs in ("labels", "token_labels")

    def recipe(self, amount: int) -> Recipe:
        """Return the recipe for an amount of data: texts, pairs or sentences, or characters of running text."""
        return next(row for row in self.recipes if row.up_to is None or amount <= row.up_to)
