"""What `clearhead evaluate` measures: one function for each kind of task, and what it shows of the result."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clearhead.cli.console import print_message, read_lines, read_parallel, write_lines
from clearhead.cli.evaluate import Request
from clearhead.cli.labelled import labelled_table
from clearhead.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Float32
    from numpy import ndarray

    from clearhead import Model
    from clearhead.data.objectives.infilling import TextInfilling
    from clearhead.data.objectives.masking import MaskedLM
    from clearhead.data.objectives.prefix import PrefixLM, PrefixSplit
    from clearhead.data.objectives.spans import SpanCorruption
    from clearhead.data.stores.corpus import Corpus
    from clearhead.evaluate.labels import ClassScores
    from clearhead.evaluate.metrics import EntityScores
    from clearhead.evaluate.translations import CorpusLoss, TranslationScores
    from clearhead.task import Noise

Report = tuple[dict[str, Any], list[str]]
BATCH_TOKENS = 8192


def measure(model: Model, request: Request) -> Report:
    """Measure a model by what it was trained for.

    Args:
        model: the model.
        request: checked for this kind of task.

    Returns:
        What was measured as a JSON object, and as lines for a person.

    Raises:
        InputError: the data is unusable.
    """
    if request.from_language is not None or request.to_language is not None:
        model = model.for_languages(request.from_language, request.to_language)
    if model.task.kind == "denoise" and request.source is not None:
        return translations(model, request)
    measures = {"translate": translations, "classify": classes, "tag": tags, "embed": vectors}
    return measures.get(model.task.kind, running_text)(model, request)


# --- translation ----------------------------------------------------------------------------------------------


def translations(model: Model, request: Request) -> Report:
    """Compare a model's translations with references, and measure the loss of the references."""
    sources, references = _parallel(request)
    print_message(f"translating {len(sources)} lines")
    started = time.perf_counter()
    found = model.translate(
        sources,
        beam_size=request.beam_size,
        length_penalty=request.length_penalty,
        batch_size=request.batch_size,
    )
    seconds = time.perf_counter() - started
    scores = _translation_scores(model, found, references, request)
    loss = _translation_loss(model, sources, references)
    if request.output is not None:
        write_lines(request.output, found)
    record = {
        "bleu": scores.bleu,
        "chrf": scores.chrf,
        "signature": scores.bleu_signature,
        "chrf_signature": scores.chrf_signature,
        "loss": loss.loss,
        "perplexity": _finite(loss.perplexity),
        "seconds": seconds,
        "sentences": len(sources),
        "sentences_per_second": len(sources) / seconds,
    }
    return record, [
        f"BLEU        {scores.bleu:.2f}   {scores.bleu_signature}",
        f"chrF        {scores.chrf:.2f}   {scores.chrf_signature}",
        f"loss        {loss.loss:.4f} nats per token",
        f"perplexity  {loss.perplexity:.3f}",
        f"speed       {len(sources) / seconds:.1f} sentences per second ({len(sources)} in {seconds:.1f} s)",
    ]


def _parallel(request: Request) -> tuple[list[str], list[str]]:
    assert request.source is not None and request.target is not None, "the options were checked"
    return read_parallel(request.source, request.target)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _translation_scores(
    model: Model, found: Sequence[str], references: Sequence[str], request: Request
) -> TranslationScores:
    """Compare with the references, which a model of segmented text has in pieces."""
    from clearhead.evaluate.translations import bleu_chrf, join_segments

    is_segmented = model.tokenizers.target.kind == "split"
    words = [join_segments(line) for line in references] if is_segmented else list(references)
    tokenize = request.tokenize or ("none" if is_segmented else "13a")
    return bleu_chrf(found, words, tokenize=tokenize, lowercase=request.lowercase)


def _translation_loss(model: Model, sources: Sequence[str], references: Sequence[str]) -> CorpusLoss:
    """Measure the loss of the references; a pair whose source is empty has none."""
    from clearhead.evaluate.translations import evaluate_framed

    pairs = [pair for pair in zip(sources, references, strict=True) if pair[0].strip()]
    source, target = model.tokenizers.source, model.tokenizers.target
    return evaluate_framed(
        model.module,
        [model.special_tokens.for_source(ids) for ids in source.encode_batch([pair[0] for pair in pairs])],
        [model.special_tokens.for_target(ids) for ids in target.encode_batch([pair[1] for pair in pairs])],
        pad_id=target.pad_id,
    )


# --- running text ---------------------------------------------------------------------------------------------


def running_text(model: Model, request: Request) -> Report:
    """Measure how well a model says next tokens, or hidden ones, of a text."""
    from clearhead.data.sources.texts import parse_text_source
    from clearhead.data.stores.corpus import prepare_corpus

    form = {"text": str(request.text), "field": request.text_column, "document": request.document}
    source = parse_text_source({key: value for key, value in form.items() if value is not None})
    corpus = prepare_corpus(source, model.tokenizer)
    print_message(f"{corpus.num_tokens:,} tokens in {len(corpus):,} documents")
    noise = _noise(model)
    if noise is None:
        return _next_tokens(model, corpus, request)
    for option, value in (("--window", request.window), ("--stride", request.stride)):
        if value is not None:
            raise InputError(
                f"{option} has no effect here: this model says the rest of a text whose beginning it has read, "
                "not the next token of all"
            )
    return _hidden_tokens(model, corpus, noise)


def _next_tokens(model: Model, corpus: Corpus, request: Request) -> Report:
    from clearhead.generate.scoring.texts import text_loss

    found = text_loss(
        model.module,
        [corpus.sequence(row, 0, int(length) + 2) for row, length in enumerate(corpus.documents.lengths)],
        pad_id=model.tokenizer.pad_id,
        num_bytes=corpus.text_bytes,
        window=request.window or model.task.max_length,
        stride=request.stride,
    )
    speed = found.num_tokens / max(found.seconds, 1e-9)
    record = {
        "loss": found.loss,
        "perplexity": _finite(found.perplexity),
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.num_tokens,
        "bytes": corpus.text_bytes,
        "seconds": found.seconds,
    }
    return record, [
        f"loss           {found.loss:.4f} nats per token",
        f"perplexity     {found.perplexity:.3f}",
        f"bits per byte  {found.bits_per_byte:.4f}",
        f"speed          {speed:,.0f} tokens per second ({found.num_tokens:,} in {found.seconds:.1f} s)",
    ]


def _noise(model: Model) -> MaskedLM | SpanCorruption | TextInfilling | PrefixSplit | PrefixLM | None:
    """Return what a model was trained to see through; None where it was trained to say next tokens."""
    from clearhead.data.objectives.build import build_objective
    from clearhead.data.objectives.prefix import PrefixLM, PrefixSplit
    from clearhead.generate.prefill import has_prefix_mask

    tokenizer = model.tokenizer
    if model.task.kind in ("fill", "denoise"):
        if model.task.noise is None and model.hf_checkpoint is None:
            raise InputError("the record of this model does not say how the text was damaged that it learned to mend")
        return build_objective(model.task.noise or _usual_noise(model), tokenizer)
    if model.spec.encoder is not None:
        return PrefixSplit(tokenizer)
    return PrefixLM(tokenizer) if has_prefix_mask(model.module) else None


def _usual_noise(model: Model) -> Noise:
    """Return the noise that a published checkpoint of its kind is trained on; its files do not say it."""
    from clearhead.task import Noise

    if model.spec.decoder is None:
        return Noise(kind="mask", share=0.15)
    kind: Literal["spans", "infill"] = "spans" if model.tokenizer.sentinel_ids else "infill"
    return Noise(kind=kind, share=0.15 if kind == "spans" else 0.3, mean_span=3.0)


def _hidden_tokens(
    model: Model, corpus: Corpus, noise: MaskedLM | SpanCorruption | TextInfilling | PrefixSplit | PrefixLM
) -> Report:
    """Measure the loss of what the noise hides; the same is hidden every time."""
    from clearhead.data.batches.text import window_epoch
    from clearhead.evaluate.token_accuracy import score_tokens
    from clearhead.generate.batching import device_of

    length = model.task.max_length or model.module.max_positions
    if length is None:
        raise InputError("the record of this model does not say how long the texts were that it was trained on")
    batches = window_epoch(corpus, noise, length=length, batch_tokens=max(BATCH_TOKENS, length))
    import torch

    with torch.inference_mode():
        found = score_tokens(model.module, batches, device_of(model.module))
    assert found.score is not None, "tokens have a score"
    perplexity = math.exp(min(found.loss, 700.0))
    record = {"loss": found.loss, "perplexity": perplexity, "accuracy": found.score / 100}
    return record, [
        f"loss        {found.loss:.4f} nats per hidden token",
        f"perplexity  {perplexity:.3f}",
        f"accuracy    {found.score:.2f} % of the hidden tokens come first",
    ]


# --- labels ---------------------------------------------------------------------------------------------------


def classes(model: Model, request: Request) -> Report:
    """Measure how well a model meets labels: classes, sets of them, or numbers."""
    from clearhead.data.sources.labelled import parse_labelled_source
    from clearhead.evaluate.labels import ClassScores, NumberScores
    from clearhead.predict.classify import evaluate_labelled

    assert request.text is not None and request.labels is not None, "the options were checked"
    if request.plot is not None and model.task.label_kind != "single_label":
        raise InputError("--plot draws which class is taken for which, and this model gives no single class")
    table = labelled_table(request.text, request.labels, text_column=request.text_column, pair=request.pair)
    source = parse_labelled_source(table)
    judged, report = evaluate_labelled(model.module, model.tokenizer, model.task, source)
    print_message(report)
    record: dict[str, Any] = {"texts": len(judged.logits_NL), "loss": judged.loss}
    scores = judged.scores
    if isinstance(scores, ClassScores):
        if request.plot is not None:
            _draw(scores, model.task.labels, request.plot)
            record["picture"] = str(request.plot)
        return {**record, **_class_record(scores, model.task.labels)}, _class_lines(scores, model.task.labels)
    if isinstance(scores, NumberScores):
        found = {"spearman": scores.spearman, "pearson": scores.pearson}
        return {**record, **found, "mean_squared_error": scores.mean_squared_error}, [
            f"Spearman            {scores.spearman:.4f}",
            f"Pearson             {scores.pearson:.4f}",
            f"mean squared error  {scores.mean_squared_error:.6g}",
        ]
    found = {"micro_f1": scores.micro_f1, "macro_f1": scores.macro_f1, "exact": scores.exact}
    return {**record, **found}, [
        f"micro F1     {_percent(scores.micro_f1)}",
        f"macro F1     {_percent(scores.macro_f1)}",
        f"exact match  {_percent(scores.exact)} of the texts have exactly their labels",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _class_record(scores: ClassScores, names: Sequence[str]) -> dict[str, Any]:
    rows = _by_label(scores, names)
    return {
        "accuracy": scores.accuracy,
        "macro_f1": scores.macro_f1,
        "labels": {name: {"precision": p, "recall": r, "f1": f, "count": n} for name, p, r, f, n in rows},
        "confusion": scores.confusion_LL.tolist(),
    }


def _class_lines(scores: ClassScores, names: Sequence[str]) -> list[str]:
    width = max(len("label"), *map(len, names))
    lines = [
        f"accuracy  {_percent(scores.accuracy)}",
        f"macro F1  {_percent(scores.macro_f1)}",
        "",
        f"{'label':<{width}}  precision  recall      F1   texts",
    ]
    for name, precision, recall, f1, count in _by_label(scores, names):
        lines.append(f"{name:<{width}}  {_share(precision):>9}  {_share(recall):>6}  {_share(f1):>6}  {count:>6}")
    return lines


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _by_label(
    scores: ClassScores, names: Sequence[str]
) -> list[tuple[str, float | None, float | None, float | None, int]]:
    """Return precision, recall, F1 and count of each label; None where nothing was predicted or expected."""
    rows = []
    for index, name in enumerate(names):
        right = int(scores.confusion_LL[index, index])
        expected = int(scores.confusion_LL[index].sum())
        predicted = int(scores.confusion_LL[:, index].sum())
        rows.append(
            (
                name,
                right / predicted if predicted else None,
                right / expected if expected else None,
                2 * right / (predicted + expected) if predicted + expected else None,
                expected,
            )
        )
    return rows


def _draw(scores: ClassScores, names: Sequence[str], path: Path) -> None:
    from clearhead.view.confusion import draw_confusion

    draw_confusion(scores.confusion_LL, names, path, title=f"accuracy {_percent(scores.accuracy)}")
    print_message(f"confusion matrix: {path}")


# --- tags -----------------------------------------------------------------------------------------------------


def tags(model: Model, request: Request) -> Report:
    """Count entities as conlleval does."""
    from clearhead.data.sources.tagged import parse_tagged_source
    from clearhead.predict.tag import evaluate_tagged

    source = parse_tagged_source({"text": str(request.text)})
    judged, report = evaluate_tagged(model.module, model.tokenizer, model.task, source)
    print_message(report)
    return _entity_report(judged.scores)


def _entity_report(scores: EntityScores) -> Report:
    rows = {"all": scores.all, **scores.by_type}
    record = {
        kind: {"precision": one.precision, "recall": one.recall, "f1": one.f1, "count": one.expected}
        for kind, one in rows.items()
    }
    width = max(len("entities"), *map(len, rows))
    lines = [f"{'entities':<{width}}  precision  recall      F1   count"]
    for kind, one in rows.items():
        shares = (_share(value) for value in (one.precision, one.recall, one.f1))
        lines.append(f"{kind:<{width}}  {next(shares):>9}  {next(shares):>6}  {next(shares):>6}  {one.expected:>6}")
    lines += ["", f"accuracy of tags  {_percent(scores.tag_accuracy)} of {scores.num_words} words"]
    return {
        "f1": scores.all.f1,
        "precision": scores.all.precision,
        "recall": scores.all.recall,
        "tag_accuracy": scores.tag_accuracy,
        "words": scores.num_words,
        "types": {kind: record[kind] for kind in scores.by_type},
    }, lines


# --- vectors --------------------------------------------------------------------------------------------------


def vectors(model: Model, request: Request) -> Report:
    """Measure whether texts find what belongs to them, or whether their similarity follows given scores."""
    firsts, seconds = _parallel(request)
    for number, pair in enumerate(zip(firsts, seconds, strict=True), start=1):
        if not all(map(str.strip, pair)):
            raise InputError(f"{request.source}:{number}: one side of the pair is empty; every pair needs both texts")
    if request.labels is not None:
        return _similarities(model, firsts, seconds, request)
    from clearhead.data.batches.contrastive import positive_groups
    from clearhead.evaluate.retrieval import recall_at

    # Pairs that share a text are right answers to each other, as in training.
    groups = positive_groups(zip(firsts, seconds, strict=True))
    found = recall_at(_embedded(model, firsts, request), _embedded(model, seconds, request), groups=groups)
    record = {"recall_at_1": found.mean, "forward": found.forward, "backward": found.backward, "pairs": len(firsts)}
    return record, [
        f"recall@1  {_percent(found.forward)} of the sources find their target among {len(firsts)}",
        f"          {_percent(found.backward)} of the targets find their source",
        f"mean      {_percent(found.mean)}",
    ]


def _embedded(model: Model, texts: Sequence[str], request: Request) -> Float32[ndarray, "texts width"]:
    """Return the vectors of texts, as many computed together as asked for."""
    import numpy as np

    return np.concatenate([model.embed(texts[rows]) for rows in _chunks(len(texts), request)])


def _chunks(count: int, request: Request) -> list[slice]:
    size = request.batch_size or count
    return [slice(start, start + size) for start in range(0, count, size)]


def _similarities(model: Model, firsts: Sequence[str], seconds: Sequence[str], request: Request) -> Report:
    """Compare cosines with given scores."""
    import numpy as np

    from clearhead.evaluate.metrics import pearson, spearman
    from clearhead.predict.similarity import similarity

    assert request.labels is not None, "without labels there is nothing to compare"
    expected = _numbers(Path(request.labels), len(firsts))
    cosines = np.concatenate(
        [
            similarity(model.module, model.tokenizer, firsts[rows], seconds[rows])
            for rows in _chunks(len(firsts), request)
        ]
    )
    record = {"spearman": spearman(cosines, expected), "pearson": pearson(cosines, expected), "pairs": len(firsts)}
    return record, [f"Spearman  {record['spearman']:.4f}", f"Pearson   {record['pearson']:.4f}"]


def _numbers(file: Path, count: int) -> Float[ndarray, " pairs"]:
    """Read the similarity of each pair, one number in a line."""
    import numpy as np

    numbers = []
    for number, line in enumerate(read_lines(file), start=1):
        try:
            numbers.append(float(line))
        except ValueError:
            raise InputError(f"{file}:{number}: expected a number, how alike the pair is, received {line!r}") from None
    if len(numbers) != count:
        raise InputError(f"{file} has {len(numbers)} lines, but there are {count} pairs; expected a number for each")
    if not np.isfinite(numbers).all():
        raise InputError(f"{file}: every similarity must be a finite number")
    return np.array(numbers)
