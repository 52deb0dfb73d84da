"""How good translations are: BLEU and chrF with their signatures, and the loss of reference targets."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from clearhead.core import Transformer
from clearhead.errors import InputError, nearest
from clearhead.generate.scoring.targets import score_framed

# sacreBLEU's other tokenisations need packages or downloads of their own.
TOKENIZATIONS = ("13a", "none", "intl", "zh", "char")


@dataclass(frozen=True)
class TranslationScores:
    """Corpus scores, 0 to 100, each with the signature that makes it comparable."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


@dataclass(frozen=True)
class CorpusLoss:
    """How well a model predicts the targets of a corpus.

    Args:
        loss: mean cross-entropy of a target token in nats, end tokens counted, without label smoothing.
        perplexity: exp(loss).
        num_tokens: target tokens with the end tokens.
        seconds: wall time of the pass.
        tokens_per_second: `num_tokens` / `seconds`.
    """

    loss: float
    perplexity: float
    num_tokens: int
    seconds: float
    tokens_per_second: float


def join_segments(text: str) -> str:
    """Return segmented text as whole words: "@@ " marks the end of each segment that the next one continues."""
    return re.sub(r"@@(?: |$)", "", text)


def bleu_chrf(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a", lowercase: bool = False
) -> TranslationScores:
    """Return sacreBLEU's corpus BLEU and chrF for one reference each.

    Args:
        hypotheses: translations, one line each.
        references: the lines they are compared with.
        tokenize: sacreBLEU tokenisation of BLEU; "none" for text that is tokenised already. chrF never tokenises.
        lowercase: compare without case, in both scores.

    Raises:
        InputError: no lines, unequal counts, or an unknown tokenisation.

    Source: Post 2018 (BLEU); Popovic 2015 (chrF).
    """
    faults = []
    if tokenize not in TOKENIZATIONS:
        valid = ", ".join(TOKENIZATIONS)
        faults.append(f"tokenize must be one of {valid}, not '{tokenize}'{nearest(tokenize, TOKENIZATIONS)}.")
    if len(hypotheses) != len(references):
        faults.append(f"there are {len(hypotheses)} translations but {len(references)} references: give one for each.")
    elif not references:
        faults.append("there is nothing to score: give at least one translation and its reference.")
    if faults:
        raise InputError.from_faults(faults, subject="the evaluation")
    # force only silences sacreBLEU's warning about tokenised text; with "none" such text is what the user announced.
    bleu = BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none")
    chrf = CHRF(lowercase=lowercase)
    bleu_score = bleu.corpus_score(list(hypotheses), [list(references)]).score
    chrf_score = chrf.corpus_score(list(hypotheses), [list(references)]).score
    return TranslationScores(float(bleu_score), float(chrf_score), str(bleu.get_signature()), str(chrf.get_signature()))


def evaluate_pairs(
    module: Transformer,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    batch_tokens: int = 8192,
) -> CorpusLoss:
    """Return loss and perplexity of the targets, given their sources.

    Args:
        module: an encoder-decoder model; run in evaluation mode, its own mode is restored.
        sources: ids as the encoder reads them, none empty.
        targets: ids without start and end token.
        bos_id: id the decoder starts from.
        eos_id: id that ends a target.
        pad_id: padding id.
        batch_tokens: most padded source + target tokens in one pass.

    Raises:
        InputError: no pairs, unequal counts, an empty source, or a sequence beyond the model's positions.
    """
    framed = [[bos_id, *target, eos_id] for target in targets]
    return evaluate_framed(module, sources, framed, pad_id=pad_id, batch_tokens=batch_tokens)


def evaluate_framed(
    module: Transformer,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    pad_id: int,
    batch_tokens: int = 8192,
) -> CorpusLoss:
    """Return loss and perplexity of the targets, given their sources.

    Args:
        module: an encoder-decoder model; run in evaluation mode, its own mode is restored.
        sources: ids as the encoder reads them, none empty.
        targets: ids of which the decoder reads all but the last and says all but the first.
        pad_id: padding id.
        batch_tokens: most padded source + target tokens in one pass.

    Raises:
        InputError: no pairs, unequal counts, an empty source, or a sequence beyond the model's positions.
    """
    if not targets:
        raise InputError("there is nothing to evaluate: give at least one sentence pair.")
    started = time.perf_counter()
    scores = score_framed(module, sources, targets, pad_id=pad_id, length_penalty=0.0, batch_tokens=batch_tokens)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(score.ids) for score in scores)
    loss = -math.fsum(score.log_probability for score in scores) / num_tokens
    perplexity = math.exp(loss) if loss < math.log(1e300) else math.inf
    return CorpusLoss(loss, perplexity, num_tokens, seconds, num_tokens / max(seconds, 1e-9))
