"""Predictions of models: masked words, labels, tags, vectors and answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

from jaxtyping import Float32
from numpy import ndarray

from clearhead.base.arguments import PAIR, answer_each, check_types
from clearhead.core import Transformer
from clearhead.fast.runner import Runner
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find_task
from clearhead.tasks.answer.use import Answer, answer
from clearhead.tasks.classify.use import Classification, classify
from clearhead.tasks.embed.use import check_vectors, embed
from clearhead.tasks.fill.use import Filled
from clearhead.tasks.fill.use import fill as fill_blanks
from clearhead.tasks.outputs import texts_together
from clearhead.tasks.tag.use import Entity, tag
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer


@check_types
class Predictions:
    """Methods of `Model` for predictions.

    Attributes:
        module, runner, tokenizers, task: same as in `Model`.
    """

    module: Transformer
    runner: Runner
    tokenizers: TokenizerPair
    task: TaskRecord

    @property
    def tree(self) -> Transformer:
        """Fastest form of the module for one request, in evaluation mode; see `Runner.tree`."""
        return self.runner.tree()

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model's input."""
        return self.tokenizers.source

    def predict(self, texts: Any, *, batch_size: int | None = None) -> Any:
        """Return the prediction of the model's task for a text, or for each text of a list or an iterator.

        Every task has this method. The tasks of clearhead also have a method with the name of the task and its options.

        Args:
            texts: one text or several; (question, context) for answer, and pairs for a model trained on pairs.
            batch_size: the maximum number of texts in a batch. None means a token budget.

        Raises:
            InputError: a text does not have the form that the task reads.
        """
        use = find_task(self.task.kind).module("use")
        return answer_each(
            texts,
            lambda texts: use.predict(self, texts, batch_size=batch_size),
            form=PAIR,
            is_paired=bool(self.task.is_paired),
            batch_size=batch_size,
            largest=texts_together(self.module),
        )

    @overload
    def fill(self, texts: str, *, top_k: int = 5, batch_size: int | None = None) -> list[list[Filled]]: ...
    @overload
    def fill(self, texts: list[str], *, top_k: int = 5, batch_size: int | None = None) -> list[list[list[Filled]]]: ...
    @overload
    def fill(
        self, texts: Iterator[str], *, top_k: int = 5, batch_size: int | None = None
    ) -> Iterator[list[list[Filled]]]: ...

    def fill(
        self, texts: object, *, top_k: int = 5, batch_size: int | None = None
    ) -> list[list[Filled]] | list[list[list[Filled]]] | Iterator[list[list[Filled]]]:
        """Return the most probable tokens for the blanks of a text, or of each of several texts.

        Args:
            texts: one text, a list or an iterator. A blank is "___" or the tokenizer's mask token, and stands for one
                token.
            top_k: the number of candidates for each blank.
            batch_size: the maximum number of texts in a batch. None means a token budget.

        Returns:
            A list of candidates for each blank, most probable first; for several texts, one list of blanks for each
            text. A text that is too long is truncated, and blanks after the cut have no candidates.

        Raises:
            InputError: a text has no blank that the model reads, or the model was not trained to fill blanks.
        """
        longest, tree = self.task.max_length, self.tree

        def fill_all(texts: list[str]) -> list[list[list[Filled]]]:
            return fill_blanks(tree, self.tokenizer, texts, top_k=top_k, max_length=longest, batch_size=batch_size)

        return answer_each(texts, fill_all, batch_size=batch_size, largest=texts_together(tree))

    @overload
    def classify(self, texts: str, *, batch_size: int | None = None) -> Classification: ...
    @overload
    def classify(
        self, texts: list[str] | list[tuple[str, str]], *, batch_size: int | None = None
    ) -> list[Classification]: ...
    @overload
    def classify(
        self, texts: Iterator[str] | Iterator[tuple[str, str]], *, batch_size: int | None = None
    ) -> Iterator[Classification]: ...

    def classify(
        self, texts: object, *, batch_size: int | None = None
    ) -> Classification | list[Classification] | Iterator[Classification]:
        """Return the label of a text, or of each text of a list or an iterator.

        Args:
            texts: one text or several; a model trained on pairs takes a tuple of two texts instead of a text. Long
                texts are truncated.
            batch_size: the maximum number of texts in a batch. None means a token budget.

        Raises:
            InputError: the model was not trained to classify, a text is empty, or pairs were expected or not expected.
        """
        tree = self.tree
        return answer_each(
            texts,
            lambda texts: classify(tree, self.tokenizer, self.task, texts, batch_size=batch_size),
            form=PAIR,
            is_paired=bool(self.task.is_paired),
            batch_size=batch_size,
            largest=texts_together(self.module),
        )

    @overload
    def tag(self, texts: str, *, batch_size: int | None = None) -> list[Entity]: ...
    @overload
    def tag(self, texts: list[str] | list[list[str]], *, batch_size: int | None = None) -> list[list[Entity]]: ...
    @overload
    def tag(
        self, texts: Iterator[str] | Iterator[list[str]], *, batch_size: int | None = None
    ) -> Iterator[list[Entity]]: ...

    def tag(
        self, texts: object, *, batch_size: int | None = None
    ) -> list[Entity] | list[list[Entity]] | Iterator[list[Entity]]:
        """Return the entities of a text, or of each text of a list or an iterator, with character offsets.

        Args:
            texts: one text; or several, each a text or a list of words. Long texts are read in chunks.
            batch_size: the maximum number of chunks in a batch. None means a token budget.

        Raises:
            InputError: the model was not trained to tag.
        """
        tree = self.tree
        return answer_each(
            texts,
            lambda texts: tag(tree, self.tokenizer, self.task, texts, batch_size=batch_size),
            form="a list of words",
            batch_size=batch_size,
            largest=texts_together(self.module),
        )

    @overload
    def embed(self, texts: str, *, batch_size: int | None = None) -> Float32[ndarray, " width"]: ...
    @overload
    def embed(
        self, texts: list[str] | list[tuple[str, str]], *, batch_size: int | None = None
    ) -> Float32[ndarray, "texts width"]: ...
    @overload
    def embed(
        self, texts: Iterator[str] | Iterator[tuple[str, str]], *, batch_size: int | None = None
    ) -> Iterator[Float32[ndarray, " width"]]: ...

    def embed(
        self, texts: object, *, batch_size: int | None = None
    ) -> Float32[ndarray, "*texts width"] | Iterator[Float32[ndarray, " width"]]:
        """Return the vector of a text, or one per text of a list; the model's head defines pooling and normalization.

        Args:
            texts: one text, a list, or an iterator, which gives an iterator of vectors. A pair of texts in a list is
                read as one text. Long texts are truncated.
            batch_size: the maximum number of texts in a batch. None means a token budget.

        Raises:
            InputError: the model's head does not pool.
        """
        check_vectors(self.task)
        options, tree = {"max_length": self.task.max_length, "batch_size": batch_size}, self.tree
        return answer_each(
            texts,
            lambda texts: embed(tree, self.tokenizer, texts, prompt=self.task.prompt, **options),
            form=PAIR,
            batch_size=batch_size,
            largest=texts_together(self.module),
        )

    def answer(
        self,
        question: str,
        context: str,
        *,
        top_k: int = 1,
        allow_no_answer: bool = False,
        doc_stride: int | None = None,
        align_to_words: bool = False,
        batch_size: int | None = None,
    ) -> list[Answer]:
        """Return the spans of a context that answer a question, best first.

        Args:
            question, context: texts that are not empty; a long context is read in overlapping windows.
            top_k: the number of answers.
            allow_no_answer: True to allow "no answer", which is an answer with an empty text.
            doc_stride: the number of tokens that neighbouring windows share. None means 128, or half of a shorter
                window.
            align_to_words: True to extend answers to whole words and to add the scores of equal texts, as the
                pipeline of transformers 4 did.
            batch_size: the maximum number of windows in a batch. None means a token budget.

        Raises:
            InputError: the model was not trained to answer, or a text or a number is out of range.
        """
        return answer(
            self.tree,
            self.tokenizer,
            self.task,
            question,
            context,
            top_k=top_k,
            allow_no_answer=allow_no_answer,
            doc_stride=doc_stride,
            align_to_words=align_to_words,
            batch_size=batch_size,
        )
