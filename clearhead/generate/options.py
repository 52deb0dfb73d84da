"""What a user may choose about the search, checked whole before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from clearhead.errors import InputError

DEFAULT_TARGET_PER_SOURCE = 2
DEFAULT_TARGET_EXTRA = 10
GREATEST_LENGTH_PENALTY = 10.0


@dataclass(frozen=True)
class SearchOptions:
    """The settings of greedy (`beam_size` 1) and beam search.

    Every length is counted in target tokens and includes the end token.

    Args:
        beam_size: unfinished hypotheses kept for each sentence, at least 1.
        length_penalty: exponent alpha, 0 to 10, in score = sum of log-probabilities / length ** alpha.
        n_best: hypotheses returned for each sentence, from 1 to `beam_size`.
        max_length: longest hypothesis, at least 1; None: twice the sentence's own source tokens plus ten.
        min_length: shortest hypothesis, from 0 to `max_length`; the end token is banned before it.
        batch_size: most sentences decoded together, at least 1; None: only `batch_tokens` limits them.
        batch_tokens: most padded source tokens decoded together, each counted once for every beam; at least 1.

    Raises:
        InputError: values outside these ranges; one report names all of them.
    """

    beam_size: int = 5
    length_penalty: float = 1.0
    n_best: int = 1
    max_length: int | None = None
    min_length: int = 0
    batch_size: int | None = None
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        """Refuse what the search cannot do."""
        faults = _range_faults(self)
        if not faults:
            faults = _relation_faults(self)
        if faults:
            raise InputError.from_faults(faults, subject="the search options")

    def target_limit(self, source_length: int, max_positions: int | None) -> int:
        """Return the longest hypothesis allowed for one sentence, in tokens with the end token.

        Args:
            source_length: tokens of the sentence as the encoder reads it.
            max_positions: positions the decoder has; None: unlimited.
        """
        if self.max_length is not None:
            return self.max_length
        limit = max(DEFAULT_TARGET_PER_SOURCE * source_length + DEFAULT_TARGET_EXTRA, self.min_length)
        return limit if max_positions is None else min(limit, max_positions)


def _range_faults(options: SearchOptions) -> list[str]:
    """Return one sentence for each value of the wrong type or outside its own range."""
    faults = []
    optional = ("max_length", "batch_size")
    lowest = {"beam_size": 1, "n_best": 1, "max_length": 1, "min_length": 0, "batch_size": 1, "batch_tokens": 1}
    for name, bound in lowest.items():
        value = getattr(options, name)
        if value is None and name in optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < bound:
            faults.append(f"{name} must be a whole number of at least {bound}, not {value!r}.")
    alpha: object = options.length_penalty
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= GREATEST_LENGTH_PENALTY:
        faults.append(f"length_penalty must be a number from 0 to {GREATEST_LENGTH_PENALTY:g}, not {alpha!r}.")
    return faults


def _relation_faults(options: SearchOptions) -> list[str]:
    """Return one sentence for each pair of values that contradict each other."""
    faults = []
    if options.n_best > options.beam_size:
        faults.append(
            f"n_best is {options.n_best} but beam_size is {options.beam_size}: "
            f"raise beam_size to at least {options.n_best}, or ask for fewer hypotheses."
        )
    if options.max_length is not None and options.min_length > options.max_length:
        faults.append(f"min_length is {options.min_length}, which is above max_length {options.max_length}: lower it.")
    return faults
