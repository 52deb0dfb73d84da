"""Training of language modelling: a decoder predicts each next token of a text, or the rest after a prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from torch import nn

from clearhead.base.errors import InputError, within
from clearhead.base.printing import human_bytes
from clearhead.data.batches.base import Batch
from clearhead.data.batches.plans import EpochBatches
from clearhead.data.batches.text import View, causal_epoch, causal_view, window_epoch, window_view
from clearhead.data.batches.text_stream import StreamedBatches, TextStream, sample
from clearhead.data.objectives.prefix import PrefixSplit
from clearhead.data.stores.corpus import Corpus, Documents
from clearhead.data.tokenize.tokenizers import LazyTexts, excerpts
from clearhead.generate.scoring.result import Validation
from clearhead.spec import Model
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks.generate.data import GenerateData
from clearhead.tasks.train import TextTraining, mean_token_loss
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from clearhead.training.data_files import list_stream_shards
from clearhead.training.runfile.sections import Train
from clearhead.training.task_setup import DataSide, PreparedTask, one_sided

SAMPLE_CHARACTERS: Final = 1 << 25
"""The number of characters of a streamed text on which a tokenizer is trained, from the beginnings of its files."""


@dataclass(frozen=True)
class _TrainingText:
    """Training batches and validation text of a run; token counts are those of the first buffer of a streamed text."""

    batches: EpochBatches[Batch]
    num_tokens: int
    largest_id: int
    valid: Corpus
    reading_seconds: float = 0.0


class Training(TextTraining):
    """Training of a language model."""

    def parts(self) -> PreparedTask[Batch]:
        """Return the prepared task of the run: its data, tokenizers and spec."""
        setup = self.setup
        tokenizer = setup.find_tokenizer(self._train_tokenizer)
        spec = setup.build_spec(source_vocab=tokenizer.vocab_size)
        if spec.decoder is None:
            raise InputError("the task 'generate' needs a model with a decoder; this one has only an encoder")
        views = _BatchViews(self.data_table(GenerateData), self.run_file.train, tokenizer, spec)
        text = (self._stream_text if self.run_file.data.stream else self._tokenize_text)(tokenizer, views)

        def validate(module: nn.Module) -> Validation:
            return Validation(loss=mean_token_loss(module, views.validation_batches(text.valid), setup.device))

        return PreparedTask(
            tokenizers=one_sided(tokenizer),
            spec=spec,
            batches=text.batches,
            loss=self.loss,
            validate=validate,
            sides=[DataSide.of("source", tokenizer, largest_id=text.largest_id, longest=views.block)],
            largest=text.batches.peek(),
            mean_tokens=text.num_tokens / text.batches.batches_per_epoch,
            valid_share=text.valid.num_tokens / text.num_tokens,
            record=TaskRecord(kind="generate", max_length=views.block),
            valid_data=text.valid.identity,
            reading_seconds=text.reading_seconds,
        )

    def _train_tokenizer(self) -> Tokenizer:
        """Train the tokenizer on the training text, or on a sample of a streamed text."""
        if not self.run_file.data.stream:
            return self.train_tokenizer()
        kind, vocab_size = self.vocabulary()
        shards = list_stream_shards(self.run_file)
        texts = LazyTexts(lambda: excerpts(sample(shards, SAMPLE_CHARACTERS)))
        return train_tokenizer(kind, texts, vocab_size=vocab_size)

    def _tokenize_text(self, tokenizer: Tokenizer, views: _BatchViews) -> _TrainingText:
        """Tokenize the whole training text, and return its batches with the validation text."""
        corpora = self.corpora(tokenizer)
        train = corpora.train
        _check_block(train.num_tokens, views.block)
        largest_id = max(corpus.largest_id for corpus in corpora)
        return _TrainingText(
            views.training_view(train).batches(train.identity), train.num_tokens, largest_id, corpora.valid
        )

    def _stream_text(self, tokenizer: Tokenizer, views: _BatchViews) -> _TrainingText:
        """Read the first buffer of a streamed text, and return its batches; training reads the rest."""
        data, train, progress = self.data_table(GenerateData), self.run_file.train, self.setup.progress
        assert data.shuffle_buffer is not None, "a checked run file has a shuffle_buffer"
        shards = list_stream_shards(self.run_file)
        progress.message("train: reading and tokenizing the first part")
        with within("[data] train"):
            batches = StreamedBatches(
                TextStream(shards, tokenizer, data.shuffle_buffer, train.seed), views.training_view
            )
        pool, num_bytes = batches.pool, sum(shard.path.stat().st_size for shard in shards)
        files = f"{human_bytes(num_bytes)} in {len(shards):,} file{'s' * (len(shards) > 1)}"
        one_pass = "compressed"
        if all(shard.path.suffix != ".gz" for shard in shards):
            steps = num_bytes / pool.text_bytes * batches.batches_per_epoch / train.accumulate
            one_pass = f"one pass takes about {max(1, round(steps)):,} steps"
        progress.message(f"train: streamed, {files}, {one_pass}; {pool.num_tokens:,} tokens are shuffled at a time")
        _check_block(pool.num_tokens, views.block)
        seconds = batches.reading_seconds / batches.batches_per_epoch
        return _TrainingText(
            batches, pool.num_tokens, tokenizer.vocab_size - 1, self.corpus("valid", tokenizer), seconds
        )


def _check_block(num_tokens: int, block: int) -> None:
    """Raise an error if the training text is shorter than one block, since no sequence would have the full length."""
    if num_tokens < block:
        raise InputError(
            f"[data] train: the whole text has {num_tokens:,} tokens, less than one block of max_length "
            f"{block:,}; add text, or lower max_length to at most {num_tokens:,}"
        )


class _BatchViews:
    """Makes the batches of text: causal blocks, or windows split into prefix and rest for an encoder-decoder."""

    def __init__(self, data: GenerateData, train: Train, tokenizer: Tokenizer, spec: Model) -> None:
        self.block = data.max_length
        self.budget = max(train.batch_tokens, data.max_length)
        self.seed = train.seed
        self.pack = data.pack
        self.split = None if spec.encoder is None else PrefixSplit(tokenizer)

    def training_view(self, documents: Documents) -> View:
        """Return the batch plan and the function that makes training batches from documents."""
        if self.split is None:
            return causal_view(documents, block=self.block, batch_tokens=self.budget, pack=self.pack, seed=self.seed)
        return window_view(documents, self.split, length=self.block, batch_tokens=self.budget, seed=self.seed)

    def validation_batches(self, corpus: Corpus) -> Iterator[Batch]:
        """Return an iterator over the batches of the validation text, which are the same in every call."""
        if self.split is None:
            return causal_epoch(corpus, block=self.block, batch_tokens=self.budget)
        return window_epoch(corpus, self.split, length=self.block)
