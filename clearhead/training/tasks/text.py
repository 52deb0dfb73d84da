"""The prepared text and the tokenizer of tasks on plain text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from clearhead.data.batches.streamed import StreamedBatches
from clearhead.data.batches.text import View
from clearhead.data.sources.texts import parse_text_source
from clearhead.data.stores.corpus import Corpus, prepare_corpus
from clearhead.data.stores.documents import Documents
from clearhead.data.stores.text_stream import TextStream, sample
from clearhead.data.stores.tokenizers import cached_text_tokenizer, excerpts
from clearhead.errors import InputError
from clearhead.machine import size
from clearhead.spec.describe import number_of
from clearhead.tasks.generate.data import GenerateData
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from clearhead.training.data_files import streamed_shards
from clearhead.training.runfile.sections import RunFile
from clearhead.training.tasks.base import DataSide, LazyTexts, Stores, TaskSetup, part_of, prepare_store, vocabulary

SAMPLE_CHARACTERS: Final = 1 << 25
"""So much of a streamed text a tokenizer is trained on, from the beginnings of its files."""


def train_text_tokenizer(run_file: RunFile, *, mask: bool = False, sentinels: int = 0) -> Tokenizer:
    """Train the tokenizer of a run on its training text, or load it from the cache; on a sample of a streamed text.

    Args:
        run_file: the checked run file.
        mask: whether the vocabulary has a mask token.
        sentinels: how many sentinel tokens it has.

    Raises:
        InputError: the text is unusable, or does not support the vocabulary.
    """
    kind, vocab_size = vocabulary(run_file)
    if run_file.data.stream:
        shards = streamed_shards(run_file)
        return train_tokenizer(
            kind, LazyTexts(lambda: excerpts(sample(shards, SAMPLE_CHARACTERS))), vocab_size=vocab_size
        )
    source, share = part_of(run_file, "train", parse_text_source)
    return cached_text_tokenizer(source, kind=kind, vocab_size=vocab_size, share=share, mask=mask, sentinels=sentinels)


def stream_text(setup: TaskSetup, tokenizer: Tokenizer, view: Callable[[Documents], View]) -> StreamedBatches:
    """Return the batches of a training text that is read while the run goes on.

    Args:
        setup: of the run.
        tokenizer: of the text.
        view: gives a pool of documents as batches.

    Raises:
        InputError: a file is unusable.
    """
    data, train = setup.run_file.data, setup.run_file.train
    assert isinstance(data, GenerateData) and data.shuffle_buffer is not None, "the run file fills its defaults"
    shards = streamed_shards(setup.run_file)
    setup.progress.message("train: reading and tokenizing the first part")
    try:
        batches = StreamedBatches(TextStream(shards, tokenizer, data.shuffle_buffer, train.seed), view)
    except InputError as error:
        raise error.within("[data] train") from None
    num_bytes = sum(shard.path.stat().st_size for shard in shards)
    files = f"{size(num_bytes)} in {len(shards):,} file{'s' * (len(shards) > 1)}"
    one_pass = "compressed"
    if all(shard.path.suffix != ".gz" for shard in shards):
        steps = num_bytes / batches.pool.text_bytes * batches.batches_per_epoch / train.accumulate
        one_pass = f"a pass is about {max(1, round(steps)):,} steps"
    setup.progress.message(
        f"train: streamed, {files}, {one_pass}; {batches.pool.num_tokens:,} tokens are shuffled at a time"
    )
    return batches


def prepare_corpora(setup: TaskSetup, tokenizer: Tokenizer) -> Stores[Corpus]:
    """Return the prepared text of training and validation.

    Raises:
        InputError: a source is unusable.
    """
    return Stores(prepare_part(setup, tokenizer, "train"), prepare_part(setup, tokenizer, "valid"))


def prepare_part(setup: TaskSetup, tokenizer: Tokenizer, name: str) -> Corpus:
    """Return the prepared text of "train" or "valid".

    Raises:
        InputError: the source is unusable.
    """

    def prepare(name: str) -> Corpus:
        source, share = part_of(setup.run_file, name, parse_text_source)
        return prepare_corpus(source, tokenizer, share=share)

    def found(corpus: Corpus) -> str:
        return f"{corpus.num_tokens:,} tokens in {number_of(len(corpus), 'document')}"

    return prepare_store(setup.progress, name, prepare, found)


def text_side(name: str, tokenizer: Tokenizer, corpora: Stores[Corpus], *, longest: int) -> DataSide:
    """Return one side of a model that reads windows of text."""
    return DataSide(name, tokenizer, max(corpus.largest_id for corpus in corpora), longest)
