"""`clearhead evaluate`: BLEU, chrF, loss and perplexity of a model on parallel text."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.console import (
    BatchSize,
    Device,
    Json,
    Precision,
    Seed,
    Threads,
    prepare_machine,
    read_parallel,
    say,
    show,
    show_json,
    write_lines,
)

if TYPE_CHECKING:
    from clearhead import Model
    from clearhead.generate.evaluate import CorpusLoss, TranslationScores


def evaluate(
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="A run directory, optionally with @best, @last, @averaged, @step-N.")
    ],
    source: Annotated[Path, typer.Option("--source", help="Text in the source language, one sentence in a line.")],
    target: Annotated[Path, typer.Option("--target", help="Its translation, line by line.")],
    tokenize: Annotated[
        str | None,
        typer.Option("--tokenize", help="sacreBLEU's tokenisation; by default none for segmented text, else 13a."),
    ] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Compare without case.")] = False,
    beam_size: Annotated[int, typer.Option("--beam-size", min=1, help="Hypotheses kept; 1 is greedy search.")] = 5,
    length_penalty: Annotated[
        float, typer.Option("--length-penalty", help="Exponent A of the length in the score; by default 1.0.")
    ] = 1.0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Keep the translations in this file.")] = None,
    as_json: Json = False,
    device: Device = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
) -> None:
    """Score a model's translations against references.

    \b
    Example:
      clearhead evaluate runs/de-en --source test.de --target test.en
      clearhead evaluate runs/de-en@averaged --source test.de --target test.en --lowercase --json

    The score that search maximises is the sum of log-probabilities / length ** A, where A is the length penalty, by
    default 1.0. A sentence is finished early once no unfinished hypothesis can still beat the best finished one. Loss
    is the mean cross-entropy of a reference token in nats, end tokens counted. Segmented text ("@@ ") is scored on
    its joined words. --json ends with {"bleu", "chrf", "signature", "loss", "perplexity", "seconds"} and a few more.
    """
    import clearhead

    sources, references = read_parallel(source, target)
    prepare_machine(threads, seed)
    model = clearhead.load(ref, device=device, precision=precision)
    started = time.perf_counter()
    say(f"translating {len(sources)} lines")
    translations = model.translate(sources, beam_size=beam_size, length_penalty=length_penalty, batch_size=batch_size)
    seconds = time.perf_counter() - started
    scores = _scores(model, translations, references, tokenize, lowercase)
    corpus = _corpus_loss(model, sources, references)
    if output is not None:
        write_lines(output, translations)
    _report(scores, corpus, len(sources), seconds, as_json)


def _report(scores: TranslationScores, corpus: CorpusLoss, sentences: int, seconds: float, as_json: bool) -> None:
    """Show what was measured; `seconds` is the time that translating took."""
    if as_json:
        show_json(
            {
                "bleu": scores.bleu,
                "chrf": scores.chrf,
                "signature": scores.bleu_signature,
                "chrf_signature": scores.chrf_signature,
                "loss": corpus.loss,
                "perplexity": corpus.perplexity if math.isfinite(corpus.perplexity) else None,
                "seconds": seconds,
                "sentences": sentences,
                "sentences_per_second": sentences / seconds,
            }
        )
        return
    show(f"BLEU        {scores.bleu:.2f}   {scores.bleu_signature}")
    show(f"chrF        {scores.chrf:.2f}   {scores.chrf_signature}")
    show(f"loss        {corpus.loss:.4f} nats per token")
    show(f"perplexity  {corpus.perplexity:.3f}")
    show(f"speed       {sentences / seconds:.1f} sentences per second ({sentences} in {seconds:.1f} s)")


def _scores(
    model: Model, translations: Sequence[str], references: Sequence[str], tokenize: str | None, lowercase: bool
) -> TranslationScores:
    """Compare with the references, which a model of segmented text has in pieces."""
    from clearhead.generate import bleu_chrf
    from clearhead.train.validation import joined

    is_segmented = model.tokenizers.target.kind == "split"
    words = [joined(line) for line in references] if is_segmented else list(references)
    return bleu_chrf(translations, words, tokenize=tokenize or ("none" if is_segmented else "13a"), lowercase=lowercase)


def _corpus_loss(model: Model, sources: Sequence[str], references: Sequence[str]) -> CorpusLoss:
    """Measure the loss of the references; a pair whose source is empty has none."""
    from clearhead.generate.evaluate import evaluate_pairs

    pairs = [pair for pair in zip(sources, references, strict=True) if pair[0].strip()]
    source, target = model.tokenizers.source, model.tokenizers.target
    return evaluate_pairs(
        model.module,
        [[*ids, source.eos_id] for ids in source.encode_batch([pair[0] for pair in pairs])],
        target.encode_batch([pair[1] for pair in pairs]),
        bos_id=target.bos_id,
        eos_id=target.eos_id,
        pad_id=target.pad_id,
    )
