"""Training of denoising: an encoder reads corrupted text, a decoder predicts the missing spans or the whole text."""

from __future__ import annotations

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.data.objectives.spans import num_sentinels
from clearhead.spec.tasks.record import Noise
from clearhead.tasks.denoise.data import DenoiseTask
from clearhead.tasks.train import NoisedTraining
from clearhead.text.tokenizer import Tokenizer


class Training(NoisedTraining):
    """Training of a model that restores text."""

    def train_noise_tokenizer(self) -> Tokenizer:
        """Train a tokenizer with the mask or sentinel tokens of the noise, or load it from the cache."""
        # A tokenizer trained by a run adds two special tokens to a text.
        noise = self.task_table(DenoiseTask).noise
        sentinels = self._sentinels_needed(2) if noise == "spans" else 0
        return self.train_tokenizer(mask=noise == "infill", sentinels=sentinels)

    def noise(self, tokenizer: Tokenizer) -> Noise:
        """Return the noise settings of the run; a tokenizer with too few sentinels is refused before reading text."""
        task = self.task_table(DenoiseTask)
        assert task.noise_share is not None, "a checked run file has a noise_share"
        if task.noise == "spans":
            needed, sentinels = self._sentinels_needed(tokenizer.special_tokens.num_added()), tokenizer.sentinel_ids
            if len(sentinels) < needed:
                raise InputError(
                    f"a text of max_length {self.run_file.data.max_length} can have {needed} spans, but the tokenizer "
                    f"has {len(sentinels)} sentinels: lower [data] max_length, or raise [task] mean_span"
                )
        return Noise(kind=task.noise, share=task.noise_share, mean_span=task.mean_span)

    def check(self, model: spec.Model) -> None:
        """Raise an error if the stacks of the model do not suit the task."""
        self.need_two_stacks(model)

    def _sentinels_needed(self, extra: int) -> int:
        task, length = self.task_table(DenoiseTask), max(1, self.run_file.data.max_length - extra)
        assert task.noise_share is not None, "a checked run file has a noise_share"
        return num_sentinels(length, share=task.noise_share, mean_span=task.mean_span)
