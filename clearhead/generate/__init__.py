"""Search and generation: translations and continuations, their scores, and how good a model is at either."""

from clearhead.generate.beam import beam_search
from clearhead.generate.candidate import Candidate, Continuation, Generation, Hypothesis, length_normalised
from clearhead.generate.engine import translate_ids
from clearhead.generate.evaluate import CorpusLoss, TranslationScores, bleu_chrf, evaluate_pairs
from clearhead.generate.generation import Request, generate_ids, stream_ids
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.perplexity import TextLoss, score_sequences, text_loss
from clearhead.generate.scoring import PairScore, score_pairs
from clearhead.generate.text import generate_texts, score_texts, stream_text, texts_loss

__all__ = [
    "Candidate",
    "Continuation",
    "CorpusLoss",
    "GenerateOptions",
    "Generation",
    "Hypothesis",
    "PairScore",
    "Request",
    "SearchOptions",
    "TextLoss",
    "TranslationScores",
    "beam_search",
    "bleu_chrf",
    "evaluate_pairs",
    "generate_ids",
    "generate_texts",
    "length_normalised",
    "score_pairs",
    "score_sequences",
    "score_texts",
    "stream_ids",
    "stream_text",
    "text_loss",
    "texts_loss",
    "translate_ids",
]
