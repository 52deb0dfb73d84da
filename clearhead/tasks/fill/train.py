"""The training of masked language modelling: an encoder predicts the masked tokens of a text."""

from __future__ import annotations

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.spec.tasks.record import Noise
from clearhead.tasks.fill.data import FillTask
from clearhead.tasks.train import NoisedTraining
from clearhead.text.tokenizer import Tokenizer


class Training(NoisedTraining):
    """The training of a masked model."""

    def train_noise_tokenizer(self) -> Tokenizer:
        """As of `NoisedTraining`."""
        return self.train_tokenizer(mask=True)

    def noise(self, tokenizer: Tokenizer) -> Noise:
        """As of `NoisedTraining`."""
        task = self.task_table(FillTask)
        return Noise(kind="mask", share=task.mask_share, whole_words=task.whole_words)

    def check(self, model: spec.Model) -> None:
        """As of `NoisedTraining`."""
        if model.encoder is None or model.decoder is not None:
            raise InputError(
                "the task 'fill' needs a model with only an encoder, which attends to both sides of a blank"
            )
