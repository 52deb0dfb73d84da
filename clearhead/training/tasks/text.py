"""What the tasks on plain text share: the prepared text, its tokenizer, and the loss of held-out tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from clearhead.data.sources.texts import parse_text_source
from clearhead.data.stores.corpus import Corpus, prepare_corpus
from clearhead.data.stores.tokenizers import cached_text_tokenizer
from clearhead.errors import InputError
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.preflight import TokenSide
from clearhead.training.runfile.read import RunFile
from clearhead.training.tasks.base import TaskSetup, part_of, vocabulary_size


@dataclass(frozen=True)
class Corpora:
    """The prepared text of a run."""

    train: Corpus
    valid: Corpus


def train_text_tokenizer(run_file: RunFile, *, mask: bool = False, sentinels: int = 0) -> Tokenizer:
    """Train the tokenizer of a run on its training text, or find it again.

    Args:
        run_file: the checked run file.
        mask: whether the vocabulary has a mask token.
        sentinels: how many sentinel tokens it has.

    Raises:
        InputError: the text is unusable, or does not support the vocabulary.
    """
    section = run_file.tokenizer
    assert section.kind is not None, "the rules of the run file want kind or path"
    source, share = part_of(run_file, "train", parse_text_source)
    return cached_text_tokenizer(
        source, kind=section.kind, vocab_size=vocabulary_size(run_file), share=share, mask=mask, sentinels=sentinels
    )


def prepare_corpora(setup: TaskSetup, tokenizer: Tokenizer) -> Corpora:
    """Return the prepared text of training and validation, and say how much it is.

    Raises:
        InputError: a source is unusable.
    """
    stores = []
    for name in ("train", "valid"):
        source, share = part_of(setup.run_file, name, parse_text_source)
        try:
            store = prepare_corpus(source, tokenizer, share=share)
        except InputError as error:
            raise InputError(f"[data] {name}: {error}") from None
        setup.progress.message(f"{name}: {store.num_tokens:,} tokens in {len(store):,} documents")
        stores.append(store)
    return Corpora(*stores)


def one_sided(tokenizer: Tokenizer) -> TokenizerPair:
    """Return one tokenizer as the pair that a run keeps."""
    return TokenizerPair(source=tokenizer, target=tokenizer, joint=True)


def text_sides(
    setup: TaskSetup, tokenizer: Tokenizer, corpora: Corpora, module: nn.Module, *, longest: int
) -> list[TokenSide]:
    """Describe the text as the module will see it."""
    largest = max(corpora.train.largest_id, corpora.valid.largest_id)
    return [setup.side("source", tokenizer, module, largest_id=largest, longest=longest)]
