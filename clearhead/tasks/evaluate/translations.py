"""Metrics of translations: BLEU and chrF with their signatures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from clearhead.base.errors import InputError, argument, did_you_mean

# sacreBLEU's other tokenizations need further packages or downloads.
TOKENIZATIONS = ("13a", "none", "intl", "zh", "char")


@dataclass(frozen=True)
class TranslationScores:
    """Corpus scores of translations, 0 to 100, with the sacreBLEU signatures needed to compare them."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


def join_segments(text: str) -> str:
    """Join subword segments to words, such as "trans@@ late" to "translate"."""
    return re.sub(r"@@(?: |$)", "", text)


def tokenize_faults(tokenize: str) -> list[str]:
    """Return a list with one sentence about what is wrong with the tokenization, or an empty list."""
    if tokenize in TOKENIZATIONS:
        return []
    valid = ", ".join(TOKENIZATIONS)
    return [argument("tokenize") + f" must be one of {valid}, got '{tokenize}'{did_you_mean(tokenize, TOKENIZATIONS)}"]


def bleu_chrf(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a", lowercase: bool = False
) -> TranslationScores:
    """Return the corpus BLEU and chrF of sacreBLEU, with one reference per translation.

    Args:
        hypotheses: the translations, one line per text.
        references: the reference of each translation.
        tokenize: the tokenization of sacreBLEU for BLEU; "none" for tokenized text. chrF does not tokenize.
        lowercase: True to ignore case in both scores.

    Raises:
        InputError: there are no lines, the counts differ, or the tokenization is unknown.

    Source: Post 2018 (BLEU); Popovic 2015 (chrF).
    """
    faults = tokenize_faults(tokenize)
    if len(hypotheses) != len(references):
        faults.append(f"there are {len(hypotheses)} translations but {len(references)} references: give one for each")
    elif not references:
        faults.append("there is nothing to score: give at least one translation and its reference")
    if faults:
        raise InputError.from_faults(faults, subject="the evaluation")
    # Imported late: every model imports this module, but few translate.
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    # `force` only silences sacreBLEU's warning about tokenized text.
    bleu = BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none")
    chrf = CHRF(lowercase=lowercase)
    bleu_score = bleu.corpus_score(list(hypotheses), [list(references)]).score
    chrf_score = chrf.corpus_score(list(hypotheses), [list(references)]).score
    return TranslationScores(float(bleu_score), float(chrf_score), str(bleu.get_signature()), str(chrf.get_signature()))
