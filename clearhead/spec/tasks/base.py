"""Descriptions of tasks: facts, help texts of their commands, and default values of their run files.

This module imports only the standard library, so that `clearhead --help` stays fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from clearhead.base.errors import InputError

Family = Literal["encoder", "decoder", "encoder-decoder"]
Outputs = Literal["vocabulary", "labels", "token_labels", "span", "vector"]
"""The output of a head.

- "vocabulary": scores of vocabulary entries.
- "labels", "token_labels": scores of the labels of a text, or of each token.
- "span": scores of each token as the start and as the end of a span.
- "vector": one vector per text.
"""
Value = str | int | float | bool


@dataclass(frozen=True)
class Size:
    """One model size of a recipe, and the number of training tokens from which it is better than a smaller one.

    Args:
        layers, width, heads, feedforward, dropout: the keys of [model] with these names.
        least_tokens: the fewest training tokens, repetitions included, at which this size beats the previous one.
    """

    layers: int
    width: int
    heads: int
    feedforward: int
    dropout: float
    least_tokens: int = 0


@dataclass(frozen=True)
class Architecture:
    """The settings of [model] that do not depend on the size of the model.

    Args:
        keys: the keys of [model] with their values.
        saved_as: the Hugging Face architecture that `clearhead convert --to hf` saves; empty means that none fits.
    """

    keys: Mapping[str, Value]
    saved_as: str = ""


@dataclass(frozen=True)
class Recipe:
    """Run-file values for one task and one amount of data: those that scored best on validation data.

    Args:
        up_to: the largest amount of data for this recipe, in texts, pairs or sentences, or in characters of running
            text. None means any amount.
        tokenizer: the kind of tokenizer. Instead of "character", text with many different characters gets byte-bpe.
        vocab_size: the largest vocabulary size; it shrinks if fewer words are frequent.
        least_count: the number of occurrences from which a word counts as frequent.
        max_length: the block length in tokens, for running text whose documents are not lines. For all other data, the
            upper limit of max_length, which the longest text decides.
        sizes: the sizes of the model, smallest first.
        model: the other settings of [model].
        train: the keys of [train] except its length and its run directory.
        most_epochs: the number of passes over the data after which more passes no longer help.
        task: the keys of [task] except its kind.
        below: a simple baseline that beats a model trained from scratch on this amount of data; empty means none.
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
    """Help texts and data options of `clearhead new` for a task.

    Attributes:
        does: the purpose of the command in one sentence.
        examples: arguments for `clearhead new TASK`, one example each.
        data: lines of help about the data formats and their treatment.
        needed, optional: the names of the required and of the optional data options.
        longer: a note on the treatment of sequences that are too long.
        batch: the comment on the unit of batch_tokens.
        comments: the comments on keys of [task] in a run file, in the order of the keys.
    """

    does: str
    examples: tuple[str, ...]
    data: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    longer: str
    batch: str = "padded tokens in one batch; lower it if memory is short"
    comments: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluateWords:
    """The options of `clearhead evaluate` for a task.

    Attributes:
        data: the names of the options that name the data.
        measures: the names of the metrics, for the help.
        optional: the names of the other options, including those that only `Model.evaluate` takes.
    """

    data: tuple[str, ...]
    measures: str
    optional: tuple[str, ...] = ("batch_size",)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all options of the command."""
        return *self.data, *self.optional


@dataclass(frozen=True)
class Task:
    """Description of a task, such as translate or classify.

    Attributes:
        kind: the name of the task, the value of [task] kind.
        outputs: the kind of output of its head.
        families: the model families that suit the task; the first is the default.
        new, evaluate: the help texts and options of these commands.
        used_with: the command that uses a trained model, without `clearhead`; "{run}" stands for the run.
        recipes: the default values of run files by amount of data, smallest first.
        options: the help of additional data options of `clearhead new` and `clearhead evaluate`, by option name.
        score: the name of the validation score.
        scores_translations: True if the score is computed from translations of [train] bleu_sentences sentences.
        learns_head: True if the head starts untrained, because no text contains its outputs, such as labels, borders of
            spans or numbers.
        smooths_labels: True if the loss uses [train] label_smoothing.
        writes: True if the model generates text token by token.
        continues: True if the generated text continues the input.
        is_paired: True if the data are pairs of texts, line by line.
        has_two_vocabularies: True if the two texts may have separate tokenizers.
        measured_on_pairs_as: the task whose metrics apply if the evaluation data are pairs; empty means that pairs are
            refused.
        home: the package with the modules of a task that is not part of clearhead; empty means `clearhead.tasks.KIND`.
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
        """Import and return a module of the task.

        Args:
            name: "data" (data formats), "use" (predictions and metrics), "train" (training), or "pipeline" (the schema
                for the server).

        Raises:
            InputError: the task belongs to another package, and the module cannot be imported.
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
        """True if the outputs are scores of named labels."""
        return self.outputs in ("labels", "token_labels")

    def recipe(self, amount: int) -> Recipe:
        """Return the recipe for an amount of data, in texts, pairs or sentences, or in characters of running text."""
        return next(row for row in self.recipes if row.up_to is None or amount <= row.up_to)
