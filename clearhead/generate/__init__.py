"""Search: from sources and a model to translations, their scores, and how good they are."""

from clearhead.generate.beam import beam_search
from clearhead.generate.candidate import Candidate, Hypothesis, length_normalised
from clearhead.generate.engine import translate_ids
from clearhead.generate.evaluate import CorpusLoss, TranslationScores, bleu_chrf, evaluate_pairs
from clearhead.generate.options import SearchOptions
from clearhead.generate.scoring import PairScore, score_pairs

__all__ = [
    "Candidate",
    "CorpusLoss",
    "Hypothesis",
    "PairScore",
    "SearchOptions",
    "TranslationScores",
    "beam_search",
    "bleu_chrf",
    "evaluate_pairs",
    "length_normalised",
    "score_pairs",
    "translate_ids",
]
