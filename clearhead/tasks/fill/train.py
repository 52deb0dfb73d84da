"""Training of masked language modelling: an encoder predicts the masked tokens of a text."""

from __future__ import annotations

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.spec.tasks.record import Noise
from clearhead.tasks.fill.data import FillTask
from clearhead.tasks.train import NoisedTraining
from clearhead.text.tokenizer import Tokenizer


class Training(NoisedTraining):
    """Training of a masked language model."""

    def train_noise_tokenizer(self) -> Tokenizer:
        """Train a tokenizer with the mask or sentinel tokens of the noise, or load it from the cache."""
        return self.train_tokenizer(mask=True)

    def noise(self, tokenizer: Tokenizer) -> Noise:
        """Return the noise settings of the run."""
        task = self.task_table(FillTask)
        return Noise(kind="mask", share=task.mask_share, whole_words=task.whole_words)

    def check(self, model: spec.Model) -> None:
        """Raise an error if the stacks of the model do not suit the task."""
        if model.encoder is None or model.decoder is not None:
            raise InputError("the task 'fill' needs a model with only an encoder, which reads both sides of a blank")
