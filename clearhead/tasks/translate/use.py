"""Predictions and metrics of translation: BLEU, chrF, and the loss of the references."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clearhead.base.progress import message
from clearhead.data.sources.pairs import equal_sides_warning
from clearhead.generate.decoder import longest_sentence
from clearhead.generate.scoring.result import Measures, align_columns
from clearhead.tasks.evaluate.options import EvaluatedModel, EvaluateOptions
from clearhead.tasks.evaluate.text_loss import TextLoss, target_loss
from clearhead.tasks.evaluate.translations import bleu_chrf, join_segments
from clearhead.tasks.use import finite_or_none, pairs_of
from clearhead.text.long_texts import encode_start, refuse_enormous, warn_of_long_texts


@dataclass(frozen=True, repr=False, eq=False)
class TranslationMeasures(Measures):
    """Metrics of translations.

    Args:
        bleu, chrf: the corpus scores, 0 to 100.
        signature, chrf_signature: the sacreBLEU signatures of BLEU and chrF.
        loss: the mean loss per token of the references, in nats.
        perplexity: exp(loss); None if it is too large.
        seconds: the time of the translations.
        sentences: the number of sentences.
        sentences_per_second: the speed, sentences / seconds.
        translations: the translations, in the order of the sources.
    """

    bleu: float
    chrf: float
    signature: str
    chrf_signature: str
    loss: float
    perplexity: float | None
    seconds: float
    sentences: int
    sentences_per_second: float
    translations: Sequence[str]

    def lines(self) -> list[str]:
        """Return the metrics as lines of text."""
        done = f"({self.sentences} in {self.seconds:.1f} s)"
        return align_columns(
            {
                "BLEU": f"{self.bleu:.2f}   {self.signature}",
                "chrF": f"{self.chrf:.2f}   {self.chrf_signature}",
                "loss": f"{self.loss:.4f} nats per token",
                "perplexity": f"{math.inf if self.perplexity is None else self.perplexity:.3f}",
                "speed": f"{self.sentences_per_second:.1f} sentences per second {done}",
            }
        )


def predict(model: Any, texts: Sequence[str], *, batch_size: int | None = None) -> list[str]:
    """Return the best translation of each text; see `Model.translate`."""
    translations: list[str] = model.translate(list(texts), batch_size=batch_size)
    return translations


def measure(model: EvaluatedModel, data: object, options: EvaluateOptions) -> TranslationMeasures:
    """Translate the sources, and return BLEU, chrF and the loss of the references."""
    table = pairs_of(data, "translate")
    sources, references = list(table["source"]), list(table["target"])
    # BLEU and chrF read a whole reference, even if the model reads only its start.
    refuse_enormous(references, None, "reference")
    message("; ".join(filter(None, [f"translating {len(sources)} lines", equal_sides_warning(table)])))
    started = time.perf_counter()
    translations = model.translate(
        sources, beam_size=options.beam_size, length_penalty=options.length_penalty, batch_size=options.batch_size
    )
    seconds = time.perf_counter() - started
    is_segmented = model.tokenizers.target.kind == "split"
    scores = bleu_chrf(
        translations,
        [join_segments(line) for line in references] if is_segmented else references,
        tokenize=options.tokenize or ("none" if is_segmented else "13a"),
        lowercase=options.lowercase,
    )
    loss = _reference_loss(model, sources, references, options.batch_size)
    return TranslationMeasures(
        bleu=scores.bleu,
        chrf=scores.chrf,
        signature=scores.bleu_signature,
        chrf_signature=scores.chrf_signature,
        loss=loss.loss,
        perplexity=finite_or_none(loss.perplexity),
        seconds=seconds,
        sentences=len(sources),
        sentences_per_second=len(sources) / seconds,
        translations=translations,
    )


def _reference_loss(
    model: EvaluatedModel, sources: Sequence[str], references: Sequence[str], batch_size: int | None
) -> TextLoss:
    """Return the loss of the references; pairs with an empty source are left out."""
    pairs = [pair for pair in zip(sources, references, strict=True) if pair[0].strip()]
    source, target, special = model.tokenizers.source, model.tokenizers.target, model.special_tokens
    most = longest_sentence(model.module, model.task.max_length)
    # `translate` has already warned about long sources.
    source_ids, _ = encode_start(source, [text for text, _ in pairs], most - len(special.for_source([])))
    target_ids, is_cut = encode_start(target, [text for _, text in pairs], most - len(special.for_target([])))
    warn_of_long_texts(sum(is_cut), most)
    return target_loss(
        model.tree,
        list(map(special.for_source, source_ids)),
        list(map(special.for_target, target_ids)),
        pad_id=target.pad_id,
        batch_size=batch_size,
    )
