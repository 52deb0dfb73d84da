"""A noise is made from its description, in training and in every later evaluation alike."""

from __future__ import annotations

import numpy as np
import pytest

from clearhead.base.errors import InputError
from clearhead.data.objectives.build import build_objective
from clearhead.data.objectives.masking import MaskedLM
from clearhead.data.objectives.spans import SpanCorruption, TextInfilling
from clearhead.spec.tasks.record import Noise, TaskRecord
from clearhead.text.tokenizer_training import train_tokenizer
from tests.data.objectives.noisy import pieces, stream, tokenizer

MADE = [
    (Noise(kind="mask", share=0.4, whole_words=True), lambda trained: MaskedLM(trained, 0.4, True)),
    (Noise(kind="spans", share=0.31, mean_span=2.0), lambda trained: SpanCorruption(trained, 0.31, 2.0)),
    (Noise(kind="infill", share=0.23, mean_span=5.0), lambda trained: TextInfilling(trained, 0.23, 5.0)),
]


@pytest.mark.parametrize(("noise", "same"), MADE)
def test_a_description_read_back_from_a_record_makes_the_same_noise(noise: Noise, same: object) -> None:
    trained = tokenizer("bpe")
    record = TaskRecord.from_json(TaskRecord(kind="fill", noise=noise).to_json(), "task.json")
    assert record.noise == noise
    batch, expected = (make(pieces("bpe"), stream(3)) for make in (build_objective(noise, trained), same(trained)))  # type: ignore[operator]
    np.testing.assert_array_equal(batch.ids, expected.ids)
    np.testing.assert_array_equal(batch.labels, expected.labels)


def test_what_the_noise_needs_is_checked() -> None:
    with pytest.raises(InputError, match="mask"):
        build_objective(Noise(kind="mask", share=0.2), train_tokenizer("character", ["ab"], vocab_size=29))
    with pytest.raises(InputError, match="share"):
        build_objective(Noise(kind="mask", share=1.5), tokenizer("bpe"))
