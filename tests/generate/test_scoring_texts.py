"""Loss of text by windows: every token once, with the context that is promised, and equal to one plain pass."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.base.errors import InputError
from clearhead.generate.scoring import texts as scoring_texts
from clearhead.generate.scoring.texts import score_sequences, windows
from clearhead.tasks.evaluate.text_loss import sequence_loss
from tests.generate.tiny import BOS, EOS, PAD, some_prompts, tiny_decoder, tiny_model


def plain(module: torch.nn.Module, ids: list[int]) -> list[float]:
    """Log-probabilities of ids[1:] from one pass over the whole."""
    with torch.no_grad():
        logits = module(torch.tensor([ids[:-1]])).logits[0]
    return logits.double().log_softmax(1)[range(len(ids) - 1), ids[1:]].tolist()


def sequences() -> list[list[int]]:
    return [[*ids, EOS] for ids in some_prompts(7, longest=29)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(length=st.integers(2, 40), window=st.integers(1, 23), share=st.floats(0.01, 1.0))
def test_windows_score_every_token_once_with_enough_context(length: int, window: int, share: float) -> None:
    stride = max(1, int(window * share))
    parts = list(windows(3, length, window=window, stride=stride))
    scored = [position for span in parts for position in range(span.first, span.stop + 1)]
    assert scored == list(range(1, length))
    assert all(0 <= span.stop - span.start <= window and span.sequence == 3 for span in parts)
    for span in parts[1:]:
        assert span.first - span.start > window - stride, "less context than window - stride"


@pytest.mark.parametrize("kind", ["original", "modern"])
@pytest.mark.parametrize("window", [None, 31, 64])
def test_a_window_that_holds_the_text_is_one_plain_pass(
    kind: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of all lengths share batches, and the logits are made in parts."""
    module = tiny_decoder(kind, seed=3)
    monkeypatch.setattr(scoring_texts, "MOST_LOGITS", 13 * 71)
    for ids, actual in zip(
        sequences(), score_sequences(module, sequences(), pad_id=PAD, window=window, length_penalty=0.6), strict=True
    ):
        expected = plain(module, ids)
        assert actual.ids == tuple(ids[1:])
        assert actual.token_log_probabilities == pytest.approx(expected, abs=1e-5)
        assert actual.log_probability == pytest.approx(sum(expected), abs=1e-4)
        assert actual.score == pytest.approx(sum(expected) / len(expected) ** 0.6, abs=1e-4)


@pytest.mark.parametrize(("window", "stride"), [(7, 7), (7, 3), (7, 1), (1, 1)])
def test_each_token_is_scored_behind_its_own_window(window: int, stride: int) -> None:
    module = tiny_decoder("modern", seed=4)
    some = sequences()[1:5]
    scores = score_sequences(module, some, pad_id=PAD, window=window, stride=stride, batch_size=2)
    for ids, actual in zip(some, scores, strict=True):
        expected = []
        for span in windows(0, len(ids), window=window, stride=stride):
            expected += plain(module, ids[span.start : span.stop + 1])[span.first - 1 - span.start :]
        assert actual.token_log_probabilities == pytest.approx(expected, abs=1e-5)


def test_loss_is_in_nats_per_token_and_bits_per_byte() -> None:
    module = tiny_decoder("original", seed=5).train()
    arrays = [np.array(ids, dtype=np.uint16) for ids in sequences()]
    actual = sequence_loss(module, arrays, pad_id=PAD, num_bytes=211, window=11, stride=5)
    assert module.training
    scores = score_sequences(module.eval(), sequences(), pad_id=PAD, window=11, stride=5)
    nats = -sum(score.log_probability for score in scores)
    assert actual.num_tokens == sum(len(ids) - 1 for ids in sequences())
    assert actual.nats == pytest.approx(nats, rel=1e-6)
    assert actual.loss == pytest.approx(nats / actual.num_tokens) and actual.perplexity == pytest.approx(
        math.exp(actual.loss)
    )
    assert actual.bits_per_byte == pytest.approx(nats / math.log(2) / 211)
    assert sequence_loss(module, arrays, pad_id=PAD).bits_per_byte is None


def test_a_text_that_is_too_long_to_be_read_at_once_needs_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_texts, "LONGEST_PROMPT", 11)
    module, long = tiny_decoder("modern", seed=8), [BOS, *[3] * 11, EOS]
    assert module.max_positions is None
    assert len(score_sequences(module, [long[1:]], pad_id=PAD)[0].ids) == 11
    with pytest.raises(InputError, match="text 2 has 12 tokens, but at most 11 are read at once: split it, or"):
        score_sequences(module, [long[1:], long], pad_id=PAD)
    assert len(score_sequences(module, [long], pad_id=PAD, window=5)[0].ids) == 12


def test_faults_are_named_together() -> None:
    module = tiny_decoder("original", seed=6, positions=17)
    with pytest.raises(InputError) as caught:
        score_sequences(module, [[BOS, 3], [BOS]], pad_id=PAD, window=19)
    assert all(
        phrase in str(caught.value) for phrase in ("2 faults", "text 2 has 1 tokens", "the model's 17 positions")
    )
    with pytest.raises(InputError, match="stride must be from 1 to the window of 7 tokens, not 8"):
        score_sequences(module, [[BOS, 3]], pad_id=PAD, window=7, stride=8)
    with pytest.raises(InputError, match="nothing to score"):
        sequence_loss(module, [], pad_id=PAD)
    with pytest.raises(InputError, match="score targets given their sources"):
        score_sequences(tiny_model("original", seed=7), [[BOS, 3]], pad_id=PAD)
