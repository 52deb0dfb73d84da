"""The prepared text and the tokenizer of tasks on plain text."""

from __future__ import annotations

from clearhead.data.sources.texts import parse_text_source
from clearhead.data.stores.corpus import Corpus, prepare_corpus
from clearhead.data.stores.tokenizers import cached_text_tokenizer
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.runfile.sections import RunFile
from clearhead.training.tasks.base import DataSide, Stores, TaskSetup, part_of, prepare_stores, vocabulary


def train_text_tokenizer(run_file: RunFile, *, mask: bool = False, sentinels: int = 0) -> Tokenizer:
    """Train the tokenizer of a run on its training text, or load it from the cache.

    Args:
        run_file: the checked run file.
        mask: whether the vocabulary has a mask token.
        sentinels: how many sentinel tokens it has.

    Raises:
        InputError: the text is unusable, or does not support the vocabulary.
    """
    kind, size = vocabulary(run_file)
    source, share = part_of(run_file, "train", parse_text_source)
    return cached_text_tokenizer(source, kind=kind, vocab_size=size, share=share, mask=mask, sentinels=sentinels)


def prepare_corpora(setup: TaskSetup, tokenizer: Tokenizer) -> Stores[Corpus]:
    """Return the prepared text of training and validation.

    Raises:
        InputError: a source is unusable.
    """

    def prepare(name: str) -> Corpus:
        source, share = part_of(setup.run_file, name, parse_text_source)
        return prepare_corpus(source, tokenizer, share=share)

    return prepare_stores(
        setup.progress, prepare, lambda corpus: f"{corpus.num_tokens:,} tokens in {len(corpus):,} documents"
    )


def text_side(name: str, tokenizer: Tokenizer, corpora: Stores[Corpus], *, longest: int) -> DataSide:
    """Return one side of a model that reads windows of text."""
    return DataSide(name, tokenizer, max(corpus.largest_id for corpus in corpora), longest)
