"""Language modelling: a decoder predicts the next token of a text, or the rest of a text after its prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from clearhead.data.batches.base import Batch
from clearhead.data.batches.plans import EpochBatches
from clearhead.data.batches.text import View, causal_epoch, causal_view, window_epoch, window_view
from clearhead.data.objectives.prefix import PrefixLM, PrefixSplit
from clearhead.data.stores.corpus import Corpus
from clearhead.data.stores.documents import Documents
from clearhead.errors import InputError
from clearhead.evaluate.result import Validation
from clearhead.spec import Model, Prefix, walk
from clearhead.task import TaskRecord
from clearhead.tasks.generate.data import GenerateData
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.losses.tokens import mean_token_loss
from clearhead.training.runfile.sections import RunFile
from clearhead.training.tasks.base import DataSide, TaskParts, TaskSetup, one_sided
from clearhead.training.tasks.text import (
    prepare_corpora,
    prepare_part,
    stream_text,
    text_side,
    train_text_tokenizer,
)


def parts(setup: TaskSetup) -> TaskParts[Batch]:
    """Prepare text, tokenizer and model of a language model.

    Raises:
        InputError: the data, the tokenizer or the sizes cannot be used.
    """
    run_file = setup.run_file
    tokenizer = setup.find_tokenizer(lambda: train_text_tokenizer(run_file))
    spec = setup.build_spec(source_vocab=tokenizer.vocab_size)
    if spec.decoder is None:
        raise InputError("the task 'generate' needs a model with a decoder; this one has only an encoder")
    views = _Views(run_file, tokenizer, spec)
    text = _text(setup, tokenizer, views)

    def validate(module: nn.Module) -> Validation:
        return Validation(loss=mean_token_loss(module, views.held_out(text.valid), setup.device))

    return TaskParts(
        tokenizers=one_sided(tokenizer),
        spec=spec,
        batches=text.batches,
        loss=setup.token_loss,
        validate=validate,
        sides=[text.side],
        widest=text.batches.peek(),
        mean_tokens=text.num_tokens / text.batches.batches_per_epoch,
        valid_share=text.valid.num_tokens / text.num_tokens,
        record=TaskRecord(kind="generate", max_length=views.block),
        valid_data=text.valid.identity,
        reading_seconds=text.reading_seconds,
    )


@dataclass(frozen=True)
class _Text:
    """The text of a run: of the training data, or of the part of them that is shuffled together, batches and tokens."""

    batches: EpochBatches[Batch]
    num_tokens: int
    valid: Corpus
    side: DataSide
    reading_seconds: float = 0.0


def _text(setup: TaskSetup, tokenizer: Tokenizer, views: _Views) -> _Text:
    """Prepare the text, or its first part where it is streamed."""
    if not setup.run_file.data.stream:
        corpora = prepare_corpora(setup, tokenizer)
        found = corpora.train.num_tokens
        _check_block(found, views.block)
        batches = views.of(corpora.train).batches(corpora.train.identity)
        return _Text(batches, found, corpora.valid, text_side("source", tokenizer, corpora, longest=views.block))
    streamed = stream_text(setup, tokenizer, views.of)
    _check_block(streamed.pool.num_tokens, views.block)
    valid = prepare_part(setup, tokenizer, "valid")
    side = DataSide("source", tokenizer, tokenizer.vocab_size - 1, views.block)
    seconds = streamed.reading_seconds / streamed.batches_per_epoch
    return _Text(streamed, streamed.pool.num_tokens, valid, side, seconds)


def _check_block(found: int, block: int) -> None:
    """Refuse a training text shorter than one block: the model would never train on its full length."""
    if found < block:
        raise InputError(
            f"[data] train: the whole text has {found:,} tokens, which is less than one block of max_length {block:,}; "
            f"take more text, or lower max_length to at most {found:,}"
        )


class _Views:
    """Batches of text: causal blocks, or windows split into prefix and rest."""

    def __init__(self, run_file: RunFile, tokenizer: Tokenizer, spec: Model) -> None:
        train, data = run_file.train, run_file.data
        self.block = data.max_length
        self.budget = max(train.batch_tokens, data.max_length)
        self.seed = train.seed
        assert isinstance(data, GenerateData), "the run file is that of its task"
        self.pack = data.pack
        shows_prefix = any(isinstance(node, Prefix) for _, node in walk(spec))
        self.split: PrefixSplit | PrefixLM | None = None
        if spec.encoder is not None:
            self.split = PrefixSplit(tokenizer)
        elif shows_prefix:
            self.split = PrefixLM(tokenizer)

    def of(self, documents: Documents) -> View:
        """Return documents as training batches."""
        if self.split is None:
            return causal_view(documents, block=self.block, batch_tokens=self.budget, pack=self.pack, seed=self.seed)
        return window_view(documents, self.split, length=self.block, batch_tokens=self.budget, seed=self.seed)

    def held_out(self, corpus: Corpus) -> Iterator[Batch]:
        """Return the batches of one pass over the text, always the same."""
        if self.split is None:
            return causal_epoch(corpus, block=self.block, batch_tokens=self.budget)
        return window_epoch(corpus, self.split, length=self.block)
