"""The training of masked language modelling: an encoder predicts the masked tokens of a text."""

from __future__ import annotations

from clearhead import spec
from clearhead.errors import InputError
from clearhead.task import Noise
from clearhead.tasks.train import NoisedTraining
from clearhead.text.tokenizer import Tokenizer


class Training(NoisedTraining):
    """The training of a masked model."""

    def noised_tokenizer(self) -> Tokenizer:
        """As of `NoisedTraining`."""
        return self.train_tokenizer(mask=True)

    def noise(self, tokenizer: Tokenizer) -> Noise:
        """As of `NoisedTraining`."""
        share, whole_words = self.run_file.task.mask_share, self.run_file.task.whole_words
        assert share is not None and whole_words is not None, "the run file fills its defaults"
        return Noise(kind="mask", share=share, whole_words=whole_words)

    def check(self, model: spec.Model) -> None:
        """As of `NoisedTraining`."""
        if model.encoder is None or model.decoder is not None:
            raise InputError(
                "the task 'fill' needs a model with only an encoder, which attends to both sides of a blank"
            )
