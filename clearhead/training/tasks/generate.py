"""Language modelling: a decoder predicts the next token of a text, or the rest of a text after its prefix."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from clearhead.data.batches.base import Batch
from clearhead.data.batches.plans import EpochBatches
from clearhead.data.batches.text import causal_batches, causal_epoch, window_batches, window_epoch
from clearhead.data.objectives.prefix import PrefixLM, PrefixSplit
from clearhead.data.stores.corpus import Corpus
from clearhead.errors import InputError
from clearhead.evaluate.result import Validation
from clearhead.spec import Model, Prefix, walk
from clearhead.task import TaskRecord
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.losses.tokens import mean_token_loss
from clearhead.training.runfile.sections import RunFile
from clearhead.training.tasks.base import Stores, TaskParts, TaskSetup, one_sided
from clearhead.training.tasks.text import prepare_corpora, text_side, train_text_tokenizer


def parts(setup: TaskSetup) -> TaskParts[Batch]:
    """Prepare text, tokenizer and model of a language model.

    Raises:
        InputError: the data, the tokenizer or the sizes cannot be used.
    """
    run_file = setup.run_file
    tokenizer = setup.find_tokenizer(lambda: train_text_tokenizer(run_file))
    corpora = prepare_corpora(setup, tokenizer)
    spec = setup.build_spec(source_vocab=tokenizer.vocab_size)
    if spec.decoder is None:
        raise InputError("the task 'generate' needs a model with a decoder; this one has only an encoder")
    _check_block(corpora, run_file.data.max_length)
    views = _Views(run_file, tokenizer, spec)
    batches = views.training(corpora.train)

    def validate(module: nn.Module) -> Validation:
        return Validation(loss=mean_token_loss(module, views.held_out(corpora.valid), setup.device))

    return TaskParts(
        tokenizers=one_sided(tokenizer),
        spec=spec,
        batches=batches,
        loss=setup.token_loss,
        validate=validate,
        sides=[text_side("source", tokenizer, corpora, longest=views.block)],
        widest=batches.peek(),
        mean_tokens=corpora.train.num_tokens / batches.batches_per_epoch,
        valid_share=corpora.valid_share,
        record=TaskRecord(kind="generate", max_length=views.block),
        valid_data=corpora.valid.identity,
    )


def _check_block(corpora: Stores[Corpus], block: int) -> None:
    """Refuse a training text shorter than one block: the model would never train on its full length."""
    found = corpora.train.num_tokens
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
        self.pack = data.pack is not False
        shows_prefix = any(isinstance(node, Prefix) for _, node in walk(spec))
        self.split: PrefixSplit | PrefixLM | None = None
        if spec.encoder is not None:
            self.split = PrefixSplit(tokenizer)
        elif shows_prefix:
            self.split = PrefixLM(tokenizer)

    def training(self, corpus: Corpus) -> EpochBatches[Batch]:
        """Return endless training batches."""
        if self.split is None:
            return causal_batches(corpus, block=self.block, batch_tokens=self.budget, pack=self.pack, seed=self.seed)
        return window_batches(corpus, self.split, length=self.block, batch_tokens=self.budget, seed=self.seed)

    def held_out(self, corpus: Corpus) -> Iterator[Batch]:
        """Return the batches of one pass over the text, always the same."""
        if self.split is None:
            return causal_epoch(corpus, block=self.block, batch_tokens=self.budget)
        return window_epoch(corpus, self.split, length=self.block)
