"""Measures of a model by the task it was trained for; each returns its numbers as a JSON object."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float32
from numpy import ndarray

from clearhead.core import Transformer
from clearhead.data.batches.contrastive import positive_groups
from clearhead.data.batches.text import Objective, window_epoch
from clearhead.data.objectives.build import build_objective
from clearhead.data.objectives.prefix import PrefixLM, PrefixSplit
from clearhead.data.sources.answers import AnswerRows
from clearhead.data.sources.pairs import parse_pair_source, read_pairs, same_sides
from clearhead.data.sources.reading import read_alike
from clearhead.data.sources.tables import Examples, Table
from clearhead.data.sources.tagged import TaggedRows
from clearhead.data.sources.texts import TextRows, parse_text_source
from clearhead.data.stores.corpus import Corpus, prepare_corpus
from clearhead.errors import InputError
from clearhead.evaluate.answers import evaluate_answers
from clearhead.evaluate.labels import RegressionScores, SingleLabelScores, evaluate_labels
from clearhead.evaluate.metrics import F1Counts, MultiLabelScores, pearson, spearman
from clearhead.evaluate.result import Measures
from clearhead.evaluate.retrieval import recall_at
from clearhead.evaluate.tags import evaluate_tags
from clearhead.evaluate.text_loss import sequence_loss, target_loss
from clearhead.evaluate.token_accuracy import score_tokens
from clearhead.evaluate.translations import bleu_chrf, join_segments, tokenize_faults
from clearhead.generate.batching import device_of
from clearhead.generate.options import SearchOptions, TranslateKwargs
from clearhead.generate.prefill import has_prefix_mask
from clearhead.generate.translation import longest_sentence
from clearhead.predict.embed import similarity
from clearhead.spec.describe import number_of
from clearhead.task import Noise, Reading, TaskRecord
from clearhead.tasks.answer.data import parse_answer_source
from clearhead.tasks.classify.data import parse_labelled_source
from clearhead.tasks.data import data_of
from clearhead.tasks.registry import find
from clearhead.tasks.tag.data import parse_tagged_source
from clearhead.text.long_texts import encode_start, refuse_enormous, warn_of_long_texts
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import SpecialTokens

Record = dict[str, Any]
Notify = Callable[[str], None]
SourceT = TypeVar("SourceT")


@runtime_checkable
class Evaluated(Protocol):
    """What is measured: a module with its tokenizers and its task, and what it answers.

    Attributes:
        module, tokenizers, task: as in `Model`.
    """

    module: Transformer
    tokenizers: TokenizerPair
    task: TaskRecord

    @property
    def tree(self) -> Transformer:
        """The tree of modules that computes."""

    @property
    def hf_checkpoint(self) -> object | None:
        """The Hugging Face checkpoint that it came from; None: it was trained here."""

    @property
    def special_tokens(self) -> SpecialTokens:
        """The special tokens of input and output."""

    def translate(self, texts: list[str], **options: Unpack[TranslateKwargs]) -> list[str]:
        """Return the translation of each text."""

    def embed(self, texts: list[str], *, batch_size: int | None) -> Float32[ndarray, "texts width"]:
        """Return the vector of each text."""


class EvaluateKwargs(TypedDict, total=False):
    """Options of an evaluation, as keyword arguments; see `EvaluateOptions`. None: not given."""

    window: int | None
    stride: int | None
    tokenize: str | None
    lowercase: bool | None
    beam_size: int | None
    length_penalty: float | int | None
    batch_size: int | None
    similarities: Sequence[float | int] | None
    from_language: str | None
    to_language: str | None


@dataclass(frozen=True)
class EvaluateOptions:
    """How a model is measured.

    Args:
        window, stride: tokens that a language model reads at once, and from one window to the next.
        tokenize, lowercase: sacreBLEU's settings; None: no tokenization for segmented text, else 13a.
        beam_size, length_penalty: of the search for translations.
        batch_size: most texts, windows or chunks of a batch; None: a token budget decides.
        similarities: the expected similarity of each pair of texts; None: recall is measured.

    Raises:
        InputError: a number out of range; one report names all of them.
    """

    window: int | None = None
    stride: int | None = None
    tokenize: str | None = None
    lowercase: bool = False
    beam_size: int | None = None
    length_penalty: float | int | None = None
    batch_size: int | None = None
    similarities: Sequence[float | int] | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        values = {name: getattr(self, name) for name in ("window", "stride", "batch_size")}
        faults = [
            f"{name} must be a whole number of at least 1, not {value!r}."
            for name, value in values.items()
            if value is not None and not (type(value) is int and value >= 1)
        ]
        numbers: Sequence[object] = () if self.similarities is None else self.similarities
        if not all(isinstance(number, int | float | np.floating) and math.isfinite(number) for number in numbers):
            faults.append("every similarity must be a finite number.")
        faults += [] if self.tokenize is None else tokenize_faults(self.tokenize)
        if faults:
            raise InputError.from_faults(faults, subject="the options")
        penalty = 1.0 if self.length_penalty is None else float(self.length_penalty)
        SearchOptions(beam_size=1 if self.beam_size is None else self.beam_size, length_penalty=penalty)

    def refuse_unused(self, kind: str) -> None:
        """Refuse options without effect on a kind of task.

        Raises:
            InputError: one sentence that names all of them.
        """
        used = [name for name in find(kind).evaluate.optional if name in vars(self)]
        unused = [
            name for name, value in vars(self).items() if name not in used and value is not None and value is not False
        ]
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            raise InputError(
                f"{', '.join(unused)} {verb} no effect on a model trained to '{kind}'; its options are "
                + ", ".join(used)
            )


def evaluate_model(model: Evaluated, data: object, options: EvaluateOptions, *, notify: Notify) -> Record:
    """Measure a model by the task it was trained for.

    Args:
        model: the model.
        data: names the evaluation data, as under [data] in a run file, and is read as the training data was where it is
            the same kind of file; or a list of examples, as for `clearhead.train`.
        options: those of this task.
        notify: called with messages about the data.

    Returns:
        The numbers; for translations also the `translations` themselves.

    Raises:
        InputError: the data is unusable, an option has no effect on this model, or a result is not a finite number.
    """
    kind = model.task.kind
    # A denoising model with sources and targets, such as one for summaries, is measured as a translation model.
    if kind == "denoise" and _are_pairs(data):
        kind = "translate"
    options.refuse_unused(kind)
    if isinstance(data, Mapping):
        data, notify = _as_in_training(data, model.task.reading, notify)
    record = _measured(model, kind, data, options, notify)
    unusable = [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
    if unusable:
        raise InputError(
            f"{' and '.join(unusable)} {'is' if len(unusable) == 1 else 'are'} not a finite number: the outputs of the "
            "model overflow; take an earlier checkpoint, or compute with the precision fp32"
        )
    return Measures(record)


def _as_in_training(
    data: Mapping[str, Any], reading: Reading | None, notify: Notify
) -> tuple[Mapping[str, Any], Notify]:
    """Return a [data] table that is read as the training data was, and what adds that to the first message."""
    found = read_alike(data, reading)
    added = [f"{key} = {json.dumps(value)}" for key, value in found.items() if key not in data]
    said = [f"read as in training: {', '.join(added)}"] if added else []

    def tell(message: str) -> None:
        notify("; ".join([message, *said]))
        said.clear()

    return found, tell


def _measured(model: Evaluated, kind: str, data: object, options: EvaluateOptions, notify: Notify) -> Record:
    match kind:
        case "translate":
            return _translations(model, data, options, notify)
        case "classify":
            return _labels(model, data, options, notify)
        case "tag":
            return _tags(model, data, options, notify)
        case "answer":
            return _answers(model, data, options, notify)
        case "embed":
            return _vectors(model, data, options)
        case _:
            return _text(model, data, options, notify)


def _are_pairs(data: object) -> bool:
    if isinstance(data, Mapping):
        return not {"source", "tsv", "jsonl"}.isdisjoint(data)
    return isinstance(data, Sequence) and len(data) > 0 and not isinstance(data[0], str)


def _source(data: object, kind: str, parse: Callable[[Mapping[str, Any]], SourceT]) -> SourceT | Examples:
    return parse(dict(data)) if isinstance(data, Mapping) else data_of(kind).parse_examples(data)


def _pairs(data: object) -> Table:
    return read_pairs(_source(data, "translate", parse_pair_source))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _translations(model: Evaluated, data: object, options: EvaluateOptions, notify: Notify) -> Record:
    """Compare a model's translations with references, and measure the loss of the references."""
    table = _pairs(data)
    sources, references = list(table["source"]), list(table["target"])
    # BLEU and chrF read a reference whole, whatever the model reads.
    refuse_enormous(references, None, "reference")
    notify("; ".join(filter(None, [f"translating {len(sources)} lines", same_sides(table)])))
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
    source, target, special = model.tokenizers.source, model.tokenizers.target, model.special_tokens
    most = longest_sentence(model.module, model.task.max_length)
    # Of sources that are too long, `translate` warned.
    source_ids, _ = encode_start(source, [pair[0] for pair in pairs], most - len(special.for_source([])))
    target_ids, is_cut = encode_start(target, [pair[1] for pair in pairs], most - len(special.for_target([])))
    warn_of_long_texts(sum(is_cut), most)
    loss = target_loss(
        model.tree,
        [special.for_source(ids) for ids in source_ids],
        [special.for_target(ids) for ids in target_ids],
        pad_id=target.pad_id,
        batch_size=options.batch_size,
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


def _text(model: Evaluated, data: object, options: EvaluateOptions, notify: Notify) -> Record:
    """Measure how well a model predicts the next, or the hidden, tokens of a text."""
    source = _source(data, "generate", parse_text_source)
    corpus = prepare_corpus(TextRows(source) if isinstance(source, Examples) else source, model.tokenizers.source)
    notify(f"{corpus.num_tokens:,} tokens in {number_of(len(corpus), 'document')}")
    objective = _objective(model)
    if objective is None:
        return _next_tokens(model, corpus, options)
    for option in ("window", "stride"):
        if getattr(options, option) is not None:
            raise InputError(
                f"{option} has no effect here: this model predicts the rest of a text from its beginning, not each "
                "next token"
            )
    return _hidden_tokens(model, corpus, objective, options.batch_size)


def _next_tokens(model: Evaluated, corpus: Corpus, options: EvaluateOptions) -> Record:
    found = sequence_loss(
        model.tree,
        [corpus.sequence(row, 0, int(length) + 2) for row, length in enumerate(corpus.documents.lengths)],
        pad_id=model.tokenizers.source.pad_id,
        num_bytes=corpus.text_bytes,
        window=options.window or model.task.max_length,
        stride=options.stride,
        batch_size=options.batch_size,
    )
    return {
        "loss": found.loss,
        "perplexity": _finite(found.perplexity),
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.num_tokens,
        "bytes": corpus.text_bytes,
        "seconds": found.seconds,
    }


def _objective(model: Evaluated) -> Objective | None:
    """Return the denoising or prefix objective of a model; None for a causal language model."""
    tokenizer = model.tokenizers.source
    if model.task.kind in ("fill", "denoise"):
        if model.task.noise is None and model.hf_checkpoint is None:
            raise InputError("the record of this model does not say how the text was damaged that it learned to mend")
        return build_objective(model.task.noise or _usual_noise(model), tokenizer)
    if model.module.spec.encoder is not None:
        return PrefixSplit(tokenizer)
    return PrefixLM(tokenizer) if has_prefix_mask(model.module) else None


def _usual_noise(model: Evaluated) -> Noise:
    """Return the noise that Hugging Face checkpoints of this kind are trained with; their files do not name it."""
    if model.module.spec.decoder is None:
        return Noise(kind="mask", share=0.15)
    if model.tokenizers.source.sentinel_ids:
        return Noise(kind="spans", share=0.15, mean_span=3.0)
    return Noise(kind="infill", share=0.3, mean_span=3.0)


def _hidden_tokens(model: Evaluated, corpus: Corpus, objective: Objective, batch_size: int | None) -> Record:
    """Measure the loss of the tokens that the objective hides; the same ones are hidden for every size of batches."""
    length = model.task.max_length or model.module.max_positions
    if length is None:
        raise InputError("the record of this model does not say how long the texts were that it was trained on")
    batches = window_epoch(corpus, objective, length=length)
    parts = (part for batch in batches for part in batch.parts(batch_size))
    with torch.inference_mode():
        found = score_tokens(model.tree, parts, device_of(model.module))
    assert found.score is not None, "tokens have a score"
    return {"loss": found.loss, "perplexity": math.exp(min(found.loss, 700.0)), "accuracy": found.score / 100}


def _labels(model: Evaluated, data: object, options: EvaluateOptions, notify: Notify) -> Record:
    """Measure how well a model predicts labels or numbers."""
    source = _source(data, "classify", parse_labelled_source)
    parts = model.tree, model.tokenizers.source, model.task
    found = evaluate_labels(*parts, source, batch_size=options.batch_size)
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


def _tags(model: Evaluated, data: object, options: EvaluateOptions, notify: Notify) -> Record:
    """Count entities as conlleval does."""
    source = _source(data, "tag", parse_tagged_source)
    rows = TaggedRows(source) if isinstance(source, Examples) else source
    parts = model.tree, model.tokenizers.source, model.task
    found = evaluate_tags(*parts, rows, batch_size=options.batch_size)
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


def _answers(model: Evaluated, data: object, options: EvaluateOptions, notify: Notify) -> Record:
    """Compare a model's answers with the right ones, as the SQuAD evaluation does."""
    source = _source(data, "answer", parse_answer_source)
    rows = AnswerRows(source) if isinstance(source, Examples) else source
    parts = model.tree, model.tokenizers.source, model.task
    found = evaluate_answers(*parts, rows, batch_size=options.batch_size)
    notify(found.report)
    kinds = {"has_answer": found.has_answer, "no_answer": found.no_answer}
    return {
        **found.scores.record(),
        "loss": _finite(found.loss),
        **{name: scores.record() for name, scores in kinds.items() if scores is not None},
    }


def _vectors(model: Evaluated, data: object, options: EvaluateOptions) -> Record:
    """Measure whether each text finds its partner, or whether similarities follow the expected ones."""
    table = _pairs(data)
    firsts, seconds = list(table["source"]), list(table["target"])
    for index, pair in enumerate(zip(firsts, seconds, strict=True)):
        if not all(map(str.strip, pair)):
            raise InputError(f"{table.place(index)}: one side of the pair is empty; every pair needs both texts")
    if options.similarities is not None:
        if len(options.similarities) != len(firsts):
            given = len(options.similarities)
            raise InputError(f"there are {given} similarities, but {len(firsts)} pairs; expected one for each")
        expected = np.array(options.similarities, dtype=np.float64)
        parts = model.tree, model.tokenizers.source, firsts, seconds
        cosines = similarity(*parts, max_length=model.task.max_length, batch_size=options.batch_size)
        return {"spearman": spearman(cosines, expected), "pearson": pearson(cosines, expected), "pairs": len(firsts)}
    if len(firsts) < 2:
        raise InputError("there is 1 pair, whose texts find each other in any case: give at least 2 pairs")
    first_ND, second_ND = (model.embed(side, batch_size=options.batch_size) for side in (firsts, seconds))
    # Pairs that share a text are right answers to each other, as in training.
    found = recall_at(first_ND, second_ND, groups=positive_groups(zip(firsts, seconds, strict=True)))
    return {"recall_at_1": found.mean, "forward": found.forward, "backward": found.backward, "pairs": len(firsts)}
