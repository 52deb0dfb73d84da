"""The training of denoising: an encoder reads a corrupted text, a decoder predicts the missing spans or all of it."""

from __future__ import annotations

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.data.objectives.spans import num_sentinels
from clearhead.spec.tasks.record import Noise
from clearhead.tasks.denoise.data import DenoiseTask
from clearhead.tasks.train import NoisedTraining
from clearhead.text.tokenizer import Tokenizer


class Training(NoisedTraining):
    """The training of a model that restores text."""

    def train_noise_tokenizer(self) -> Tokenizer:
        """As of `NoisedTraining`."""
        # A tokenizer that is trained here adds two special tokens to a text.
        noise = self.task_table(DenoiseTask).noise
        sentinels = self._sentinels_needed(2) if noise == "spans" else 0
        return self.train_tokenizer(mask=noise == "infill", sentinels=sentinels)

    def noise(self, tokenizer: Tokenizer) -> Noise:
        """As of `NoisedTraining`; too few sentinels are refused before any text is read."""
        task = self.task_table(DenoiseTask)
        assert task.noise_share is not None, "the run file fills its defaults"
        if task.noise == "spans":
            needed, sentinels = self._sentinels_needed(tokenizer.special_tokens.num_added()), tokenizer.sentinel_ids
            if len(sentinels) < needed:
                raise InputError(
                    f"a text of max_length {self.run_file.data.max_length} can have {needed} spans, but the tokenizer "
                    f"has {len(sentinels)} sentinels: shorten [data] max_length, raise [task] mean_span, or take a "
                    "tokenizer with more sentinels"
                )
        return Noise(kind=task.noise, share=task.noise_share, mean_span=task.mean_span)

    def check(self, model: spec.Model) -> None:
        """As of `NoisedTraining`."""
        self.need_two_stacks(model)

    def _sentinels_needed(self, extra: int) -> int:
        task, length = self.task_table(DenoiseTask), max(1, self.run_file.data.max_length - extra)
        assert task.noise_share is not None, "the run file fills its defaults"
        return num_sentinels(length, share=task.noise_share, mean_span=task.mean_span)
