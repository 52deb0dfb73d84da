"""Loss and accuracy of tokens equal those of all the logits, in every family."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from clearhead.core import build
from clearhead.data.batches.base import NO_LABEL
from clearhead.data.objectives.masking import MaskedLM
from clearhead.data.objectives.prefix import PrefixSplit
from clearhead.data.objectives.spans import SpanCorruption, TextInfilling
from clearhead.generate.scoring.token_accuracy import score_tokens
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from tests.data.objectives.noisy import pieces, stream, tokenizer

CASES = [
    ("encoder", MaskedLM(tokenizer("word"), 0.3)),
    ("encoder-decoder", SpanCorruption(tokenizer("word"))),
    ("encoder-decoder", TextInfilling(tokenizer("word"))),
    ("encoder-decoder", PrefixSplit(tokenizer("word"))),
]


@pytest.mark.parametrize(("family", "objective"), CASES, ids=lambda case: getattr(type(case), "__name__", case))
def test_scores_are_those_of_all_the_logits(family: str, objective: MaskedLM | SpanCorruption | TextInfilling) -> None:
    size = tokenizer("word").vocab_size
    hparams = Hyperparameters(family=family, layers=2, width=14, heads=2, feedforward=19, dropout=0.0, output_scale=1.7)
    module = build(build_spec(hparams, source_vocab=size, target_vocab=size)).eval()
    generator = stream(3)
    batches = [objective(pieces("word", count), generator) for count in (5, 7)]
    losses, hits = [], []
    for batch in batches:
        logits = module(batch.ids, batch.target_ids, mask=batch.mask, target_mask=batch.target_mask).logits
        is_labelled = batch.labels != NO_LABEL
        losses += F.cross_entropy(logits[is_labelled], batch.labels[is_labelled], reduction="none").tolist()
        hits += (logits[is_labelled].argmax(1) == batch.labels[is_labelled]).tolist()
    with torch.no_grad():
        validation = score_tokens(module, batches, torch.device("cpu"))
    assert validation.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert validation.score == pytest.approx(100 * np.mean(hits))
