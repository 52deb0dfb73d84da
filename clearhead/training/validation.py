"""What is measured while a translation model trains: the loss of held-out pairs, and greedy BLEU of a part of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from clearhead.core import Transformer
from clearhead.data.batches.pairs import epoch_batches
from clearhead.data.stores.pairs import PairStore
from clearhead.evaluate.translations import bleu_chrf
from clearhead.generate.options import SearchOptions
from clearhead.generate.translation import translate_ids
from clearhead.text.pair import TokenizerPair
from clearhead.training.losses.cross_entropy import token_loss
from clearhead.training.settings import Validation


@dataclass(frozen=True)
class ValidateTranslation:
    """Measures a module on held-out pairs.

    Args:
        store: the held-out pairs as ids.
        tokenizers: turn the translated ids back to text.
        references: the target texts of the pairs in `scored`, joined to words.
        scored: indices of the pairs whose translation is scored; empty: no score.
        batch_tokens: padded tokens of one batch.
        device: where the module is.
    """

    store: PairStore
    tokenizers: TokenizerPair
    references: Sequence[str]
    scored: Sequence[int]
    batch_tokens: int
    device: torch.device

    def __call__(self, module: nn.Module) -> Validation:
        """Return the mean loss of a target token in nats, without label smoothing, and BLEU where pairs are scored."""
        assert isinstance(module, Transformer), "translation needs the module that was built for it"
        return Validation(loss=self.loss(module), score=self.bleu(module) if self.scored else None)

    def loss(self, module: Transformer) -> float:
        """Return the mean loss of a target token."""
        total, count = 0.0, 0
        for batch in epoch_batches(self.store, batch_tokens=self.batch_tokens):
            loss, labels = token_loss(module, batch.to(self.device), label_smoothing=0.0)
            total += float(loss)
            count += labels
        return total / max(1, count)

    def bleu(self, module: Transformer) -> float:
        """Return BLEU of greedy translations."""
        source, target = self.tokenizers.source, self.tokenizers.target
        said = target.frame.said
        found = translate_ids(
            module,
            [source.frame.read(self.store.source(row).tolist()) for row in self.scored],
            bos_id=said.front[0],
            eos_id=said.behind[-1],
            pad_id=target.pad_id,
            options=SearchOptions(beam_size=1),
        )
        texts = [target.decode(candidates[0].ids) for candidates in found]
        return bleu_chrf(texts, self.references, tokenize="none" if target.kind == "split" else "13a").bleu


def joined(text: str) -> str:
    """Return segmented text as whole words: its "@@ " marks say which pieces belong together."""
    return re.sub(r"@@(?: |$)", "", text)


def spread(count: int, wanted: int) -> list[int]:
    """Return up to `wanted` indices below `count`, evenly spread."""
    wanted = min(wanted, count)
    return [index * count // wanted for index in range(wanted)]
