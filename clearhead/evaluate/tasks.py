"""Measures of a model by the task it was trained for; each returns its numbers as a JSON object."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from clearhead.data.batches.contrastive import positive_groups
from clearhead.data.batches.text import Objective, window_epoch
from clearhead.data.objectives.build import build_objective
from clearhead.data.objectives.prefix import PrefixLM, PrefixSplit
from clearhead.data.sources.labelled import parse_labelled_source
from clearhead.data.sources.pairs import parallel_files, read_pairs
from clearhead.data.sources.tagged import parse_tagged_source
from clearhead.data.sources.texts import parse_text_source
from clearhead.data.stores.corpus import Corpus, prepare_corpus
from clearhead.errors import InputError
from clearhead.evaluate.labels import RegressionScores, SingleLabelScores, evaluate_labels
from clearhead.evaluate.metrics import F1Counts, MultiLabelScores, pearson, spearman
from clearhead.evaluate.retrieval import recall_at
from clearhead.evaluate.tags import evaluate_tags
from clearhead.evaluate.text_loss import sequence_loss, target_loss
from clearhead.evaluate.token_accuracy import score_tokens
from clearhead.evaluate.translations import bleu_chrf, join_segments
from clearhead.generate.batching import device_of
from clearhead.generate.prefill import has_prefix_mask
from clearhead.model.facade import Model
from clearhead.predict.embed import similarity
from clearhead.task import Noise

Record = dict[str, Any]
Notify = Callable[[str], None]
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class EvaluateOptions:
    """How a model is measured.

    Args:
        window, stride: tokens that a language model reads at once, and from one window to the next.
        tokenize, lowercase: sacreBLEU's settings; None: no tokenization for segmented text, else 13a.
        beam_size, length_penalty: of the search for translations.
        batch_size: texts computed together.
        similarities: the name of a file, and its lines with the expected similarity of each pair of texts; None: recall
            is measured.
    """

    window: int | None = None
    stride: int | None = None
    tokenize: str | None = None
    lowercase: bool = False
    beam_size: int | None = None
    length_penalty: float | None = None
    batch_size: int | None = None
    similarities: tuple[str, Iterable[str]] | None = None


def evaluate_model(model: Model, data: Mapping[str, Any], options: EvaluateOptions, *, notify: Notify) -> Record:
    """Measure a model by the task it was trained for.

    Args:
        model: the model.
        data: names the evaluation data, as under [data] in a run file.
        options: those of this task.
        notify: called with messages about the data.

    Returns:
        The numbers; for translations also the `translations` themselves.

    Raises:
        InputError: the data is unusable, or an option has no effect on this model.
    """
    match model.task.kind:
        case "translate":
            return _translations(model, data, options, notify)
        case "denoise" if "source" in data:
            return _translations(model, data, options, notify)
        case "classify":
            return _labels(model, data, notify)
        case "tag":
            return _tags(model, data, notify)
        case "embed":
            return _vectors(model, data, options)
        case _:
            return _text(model, data, options, notify)


def _pairs(data: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    pairs = read_pairs(parallel_files(Path(data["source"]), Path(data["target"])))
    return list(pairs["source"]), list(pairs["target"])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _translations(model: Model, data: Mapping[str, Any], options: EvaluateOptions, notify: Notify) -> Record:
    """Compare a model's translations with references, and measure the loss of the references."""
    sources, references = _pairs(data)
    notify(f"translating {len(sources)} lines")
    started = time.perf_counter()
    found = model.translate(
        sources, beam_size=options.beam_size, length_penalty=options.length_penalty, batch_size=options.batch_size
    )
    seconds = time.perf_counter() - started
    is_segmented = model.tokenizers.target.kind == "split"
    scores = bleu_chrf(
        found,
        [join_segments(line) for line in references] if is_segmented else references,
        tokenize=options.tokenize or ("none" if is_segmented else "13a"),
        lowercase=options.lowercase,
    )
    # An empty source is not translated, so that its reference has no loss.
    pairs = [pair for pair in zip(sources, references, strict=True) if pair[0].strip()]
    source, target = model.tokenizers.source, model.tokenizers.target
    loss = target_loss(
        model.module,
        [model.special_tokens.for_source(ids) for ids in source.encode_batch([pair[0] for pair in pairs])],
        [model.special_tokens.for_target(ids) for ids in target.encode_batch([pair[1] for pair in pairs])],
        pad_id=target.pad_id,
    )
    return {
        "bleu": scores.bleu,
        "chrf": scores.chrf,
        "signature": scores.bleu_signature,
        "chrf_signature": scores.chrf_signature,
        "loss": loss.loss,
        "perplexity": _finite(loss.perplexity),
        "seconds": seconds,
        "sentences": len(sources),
        "sentences_per_second": len(sources) / seconds,
        "translations": found,
    }


def _text(model: Model, data: Mapping[str, Any], options: EvaluateOptions, notify: Notify) -> Record:
    """Measure how well a model predicts the next, or the hidden, tokens of a text."""
    corpus = prepare_corpus(parse_text_source(dict(data)), model.tokenizer)
    notify(f"{corpus.num_tokens:,} tokens in {len(corpus):,} documents")
    objective = _objective(model)
    if objective is None:
        return _next_tokens(model, corpus, options)
    for option, value in (("--window", options.window), ("--stride", options.stride)):
        if value is not None:
            raise InputError(
                f"{option} has no effect here: this model predicts the rest of a text from its beginning, not each "
                "next token"
            )
    return _hidden_tokens(model, corpus, objective)


def _next_tokens(model: Model, corpus: Corpus, options: EvaluateOptions) -> Record:
    found = sequence_loss(
        model.module,
        [corpus.sequence(row, 0, int(length) + 2) for row, length in enumerate(corpus.documents.lengths)],
        pad_id=model.tokenizer.pad_id,
        num_bytes=corpus.text_bytes,
        window=options.window or model.task.max_length,
        stride=options.stride,
    )
    return {
        "loss": found.loss,
        "perplexity": _finite(found.perplexity),
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.num_tokens,
        "bytes": corpus.text_bytes,
        "seconds": found.seconds,
    }


def _objective(model: Model) -> Objective | None:
    """Return the denoising or prefix objective of a model; None for a causal language model."""
    tokenizer = model.tokenizer
    if model.task.kind in ("fill", "denoise"):
        if model.task.noise is None and model.hf_checkpoint is None:
            raise InputError("the record of this model does not say how the text was damaged that it learned to mend")
        return build_objective(model.task.noise or _usual_noise(model), tokenizer)
    if model.spec.encoder is not None:
        return PrefixSplit(tokenizer)
    return PrefixLM(tokenizer) if has_prefix_mask(model.module) else None


def _usual_noise(model: Model) -> Noise:
    """Return the noise that Hugging Face checkpoints of this kind are trained with; their files do not name it."""
    if model.spec.decoder is None:
        return Noise(kind="mask", share=0.15)
    if model.tokenizer.sentinel_ids:
        return Noise(kind="spans", share=0.15, mean_span=3.0)
    return Noise(kind="infill", share=0.3, mean_span=3.0)


def _hidden_tokens(model: Model, corpus: Corpus, objective: Objective) -> Record:
    """Measure the loss of the tokens that the objective hides; the same ones are hidden every time."""
    length = model.task.max_length or model.module.max_positions
    if length is None:
        raise InputError("the record of this model does not say how long the texts were that it was trained on")
    batches = window_epoch(corpus, objective, length=length, batch_tokens=max(BATCH_TOKENS, length))
    with torch.inference_mode():
        found = score_tokens(model.module, batches, device_of(model.module))
    assert found.score is not None, "tokens have a score"
    return {"loss": found.loss, "perplexity": math.exp(min(found.loss, 700.0)), "accuracy": found.score / 100}


def _labels(model: Model, data: Mapping[str, Any], notify: Notify) -> Record:
    """Measure how well a model predicts labels or numbers."""
    found = evaluate_labels(model.module, model.tokenizer, model.task, parse_labelled_source(dict(data)))
    notify(found.report)
    record: Record = {"texts": found.num_texts, "loss": found.loss}
    match found.scores:
        case SingleLabelScores(accuracy, macro_f1, confusion_LL):
            counts = np.stack([confusion_LL.sum(1), confusion_LL.sum(0), np.diag(confusion_LL)], 1).tolist()
            labels = zip(model.task.labels, counts, strict=True)
            return record | {
                "accuracy": accuracy,
                "macro_f1": macro_f1,
                "labels": {name: F1Counts(*count).record(undefined=None) for name, count in labels},
                "confusion": confusion_LL.tolist(),
            }
        case MultiLabelScores() | RegressionScores() as scores:
            return record | vars(scores)


def _tags(model: Model, data: Mapping[str, Any], notify: Notify) -> Record:
    """Count entities as conlleval does."""
    found = evaluate_tags(model.module, model.tokenizer, model.task, parse_tagged_source(dict(data)))
    notify(found.report)
    scores = found.scores
    return {
        "f1": scores.all.f1,
        "precision": scores.all.precision,
        "recall": scores.all.recall,
        "tag_accuracy": scores.tag_accuracy,
        "words": scores.num_words,
        "types": {kind: counts.record() for kind, counts in scores.by_type.items()},
    }


def _vectors(model: Model, data: Mapping[str, Any], options: EvaluateOptions) -> Record:
    """Measure whether each text finds its partner, or whether similarities follow the expected ones."""
    firsts, seconds = _pairs(data)
    for number, pair in enumerate(zip(firsts, seconds, strict=True), start=1):
        if not all(map(str.strip, pair)):
            raise InputError(f"{data['source']}:{number}: one side of the pair is empty; every pair needs both texts")
    size = options.batch_size or len(firsts)
    parts = [slice(start, start + size) for start in range(0, len(firsts), size)]
    if options.similarities is not None:
        expected = _numbers(*options.similarities, len(firsts))
        cosines = np.concatenate(
            [similarity(model.module, model.tokenizer, firsts[part], seconds[part]) for part in parts]
        )
        return {"spearman": spearman(cosines, expected), "pearson": pearson(cosines, expected), "pairs": len(firsts)}
    first_ND, second_ND = (np.concatenate([model.embed(side[part]) for part in parts]) for side in (firsts, seconds))
    # Pairs that share a text are right answers to each other, as in training.
    found = recall_at(first_ND, second_ND, groups=positive_groups(zip(firsts, seconds, strict=True)))
    return {"recall_at_1": found.mean, "forward": found.forward, "backward": found.backward, "pairs": len(firsts)}


def _numbers(name: str, lines: Iterable[str], count: int) -> Float[ndarray, " pairs"]:
    """Read the similarity of each pair, one number in a line."""
    numbers = []
    for number, line in enumerate(lines, start=1):
        try:
            numbers.append(float(line))
        except ValueError:
            raise InputError(f"{name}:{number}: expected a number, how alike the pair is, received {line!r}") from None
    if len(numbers) != count:
        raise InputError(f"{name} has {len(numbers)} lines, but there are {count} pairs; expected a number for each")
    if not all(map(math.isfinite, numbers)):
        raise InputError(f"{name}: every similarity must be a finite number")
    return np.array(numbers)
