"""`Model`: a module with its tokenizers, and methods to use, inspect and save them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Unpack, overload

from clearhead.base.arguments import answer_each, check_types
from clearhead.base.errors import InputError, at_text, within
from clearhead.base.printing import block, module_summary
from clearhead.base.progress import Notify, counter
from clearhead.checkpoints.hf.checkpoint import HFCheckpoint
from clearhead.core import Transformer
from clearhead.fast.runner import Runner
from clearhead.generate.decoder import Decoder, check_two_stacks
from clearhead.generate.generation_config import GenerationConfig
from clearhead.generate.json_schema import Schema
from clearhead.generate.options import (
    GenerateKwargs,
    GenerateOptions,
    OptionsT,
    SearchOptions,
    StreamKwargs,
    TranslateKwargs,
    drop_unset_options,
    resolve_options,
)
from clearhead.generate.results import Generation, Hypothesis
from clearhead.generate.scoring.result import Measures
from clearhead.generate.scoring.texts import PairScore, score_texts
from clearhead.interpret.maps.attention_maps import AttentionMaps, attend, in_precision
from clearhead.interpret.maps.head_statistics import HeadStatistics, heads_over_texts
from clearhead.interpret.maps.hook_points import Captured, Edit, capture, edit
from clearhead.interpret.maps.map_inputs import (
    MapInputs,
    ReadKwargs,
    ReadOptions,
    check_read_options,
    predicts_text,
    read_input,
    read_prompt,
    read_translation,
)
from clearhead.interpret.maps.recording import AttentionRecord, record_run
from clearhead.interpret.maps.word_links import Alignments, WordAligner
from clearhead.model.predictions import Predictions
from clearhead.model.saving import Saving
from clearhead.spec import Model as ModelSpec
from clearhead.spec.describe import model_summary
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find_task
from clearhead.tasks.evaluate.evaluation import evaluate_model
from clearhead.tasks.evaluate.options import EvaluateKwargs, EvaluateOptions
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import SpecialTokens


@check_types
class Model(Predictions, Saving):
    """A trained model with its tokenizers.

    Args:
        module: the network in evaluation mode.
        tokenizers: the tokenizers of source and target; the same for both if they share a vocabulary.
        task: the task that the model was trained for.
        checkpoint: the Hugging Face checkpoint that the model came from. None means that it was trained with clearhead.
        runner: the object that chooses the fastest form of the module for each request. None means a runner that
            multiplies in the precision of the weights.
        weights_file: the weights file of the run or saved model, which contains facts about the training. None means
            that the model was not loaded from one.
    """

    def __init__(
        self,
        module: Transformer,
        tokenizers: TokenizerPair,
        task: TaskRecord,
        checkpoint: HFCheckpoint | None = None,
        runner: Runner | None = None,
        weights_file: Path | None = None,
    ) -> None:
        self.module = module
        self.runner: Runner = Runner(module) if runner is None else runner
        self.tokenizers = tokenizers
        self.task = task
        self.hf_checkpoint = checkpoint
        self.weights_file = weights_file

    def __repr__(self) -> str:
        lines = [f"Model for the task {self.task.kind}: {module_summary(self.module)}", *model_summary(self.spec)]
        return block([*lines, *self.tokenizers.lines(), "print(model.spec) shows the whole architecture"])

    @property
    def exact(self) -> Model:
        """Model that multiplies in the precision of its weights, so that results do not depend on the processor."""
        return Model(self.module, self.tokenizers, self.task, self.hf_checkpoint, self.runner.exact, self.weights_file)

    @property
    def is_batch_invariant(self) -> bool:
        """True if a result is the same, bit for bit, whatever other requests are in its batch."""
        return self.runner.is_batch_invariant

    @property
    def special_tokens(self) -> SpecialTokens:
        """Special tokens of the model's input and output.

        Raises:
            InputError: the model has several languages.
        """
        return self.languages(None, None)[0]

    @property
    def spec(self) -> ModelSpec:
        """Spec of the module."""
        return self.module.spec

    @overload
    def translate(self, texts: str, **options: Unpack[TranslateKwargs]) -> str: ...
    @overload
    def translate(self, texts: list[str], **options: Unpack[TranslateKwargs]) -> list[str]: ...
    @overload
    def translate(self, texts: Iterator[str], **options: Unpack[TranslateKwargs]) -> Iterator[str]: ...

    def translate(self, texts: object, **options: Unpack[TranslateKwargs]) -> str | list[str] | Iterator[str]:
        """Return the best translation of a text, or of each of several texts; an empty text gives an empty translation.

        The settings of the checkpoint are the defaults of beam size (else 5) and length penalty (else 1).

        Args:
            texts: one sentence, a list of sentences, or an iterator. An iterator gives an iterator of translations,
                which begins after a few texts. Long texts are truncated.
            options: `beam_size`: the number of unfinished hypotheses per sentence; 1 is greedy. `length_penalty`: the
                exponent alpha in score = log-probability / length ** alpha. `max_length`: the longest translation in
                tokens, with the end token; the default follows the source. `batch_size`: the maximum number of
                sentences that are decoded together; the default is a token budget. `from_language`, `to_language`:
                language codes for a multilingual checkpoint.

        Raises:
            InputError: an option is out of range, or a language is missing, not known or without effect.
        """
        translator, search_options = self._prepare_translation(options, 1)
        translate = partial(translator.translate_best, options=search_options)
        return answer_each(texts, translate, batch_size=search_options.batch_size)

    @overload
    def translate_n_best(
        self, texts: str, *, n: int = 5, alignments: Alignments = False, **options: Unpack[TranslateKwargs]
    ) -> list[Hypothesis]: ...
    @overload
    def translate_n_best(
        self, texts: list[str], *, n: int = 5, alignments: Alignments = False, **options: Unpack[TranslateKwargs]
    ) -> list[list[Hypothesis]]: ...
    @overload
    def translate_n_best(
        self, texts: Iterator[str], *, n: int = 5, alignments: Alignments = False, **options: Unpack[TranslateKwargs]
    ) -> Iterator[list[Hypothesis]]: ...

    def translate_n_best(
        self, texts: object, *, n: int = 5, alignments: Alignments = False, **options: Unpack[TranslateKwargs]
    ) -> list[Hypothesis] | list[list[Hypothesis]] | Iterator[list[Hypothesis]]:
        """Return the n best translations of a text, or of each of several texts, best first, with their scores.

        Args:
            texts: same as in `translate`.
            n: the number of hypotheses for each text.
            alignments: True to add the `alignment` of words in translation and text, or the heads to use, as
                (layer, head). True uses the heads that align best in the first texts of this call: see `WordAligner`.
            options: same as in `translate`. `beam_size` is at least n; its default is n or that of `translate`,
                whichever is larger.

        Raises:
            InputError: same cases as in `translate`, or the attention to the source has no such head.
        """
        languages = options.get("from_language"), options.get("to_language")
        aligner = None if alignments is False else self.word_aligner(alignments, *languages)
        translator, search_options = self._prepare_translation(options, n)

        def search(texts: Sequence[str]) -> list[list[Hypothesis]]:
            hypotheses = translator.translate(texts, search_options)
            return hypotheses if aligner is None else aligner.add_to(texts, hypotheses)

        return answer_each(texts, search, batch_size=search_options.batch_size)

    @overload
    def generate(
        self, prompt: str, *, chat: bool = False, schema: Schema | None = None, **options: Unpack[GenerateKwargs]
    ) -> list[Generation]: ...
    @overload
    def generate(
        self, prompt: list[str], *, chat: bool = False, schema: Schema | None = None, **options: Unpack[GenerateKwargs]
    ) -> list[list[Generation]]: ...

    def generate(
        self, prompt: object, *, chat: bool = False, schema: Schema | None = None, **options: Unpack[GenerateKwargs]
    ) -> list[Generation] | list[list[Generation]] | Iterator[list[Generation]]:
        """Generate continuations of a prompt; a list or an iterator of prompts gives a list of continuations for each.

        Args:
            prompt: one text, or a list of texts. An empty prompt starts a new text.
            chat: True if the prompt is a message, which the checkpoint's chat template formats.
            schema: a JSON schema, or the path of its file. A text with the stop reason "end" is JSON under the schema;
                "length" means an incomplete JSON text. None means no schema.
            options: the options of `GenerateOptions` by name, which choose the decoding method. The settings of the
                checkpoint are the defaults. If they choose no method, text is sampled: see `GenerateOptions.usual`.
                temperature=0 is greedy. The same `seed` gives the same text.

        Returns:
            The generated sequences, without the prompt.

        Raises:
            InputError: an option is out of range or has no effect, or the model cannot follow the prompt or the schema.
            RunFailure: the model's output is NaN, or the options ban every token.
        """
        chosen = drop_unset_options(options, GenerateKwargs)
        writer = make_writer(self, self.runner.tree(), chosen, chat=chat)
        return answer_each(
            prompt, partial(writer.generate, options=self._resolve_options(GenerateOptions, chosen), schema=schema)
        )

    def stream(
        self, prompt: str, *, chat: bool = False, schema: Schema | None = None, **options: Unpack[StreamKwargs]
    ) -> Iterator[str]:
        """Generate a continuation of a prompt, and yield each piece of text once it is final.

        Args:
            prompt: one text.
            chat, schema, options: same as in `generate`, without options for several sequences and beam search.

        Raises:
            InputError: same cases as in `generate`.
            RunFailure: same cases as in `generate`.
        """
        chosen = drop_unset_options(options, StreamKwargs)
        writer = make_writer(self, self.runner.tree(), chosen, chat=chat)
        return writer.stream(prompt, self._resolve_options(GenerateOptions, chosen), schema)

    def generate_options(self, **options: Unpack[GenerateKwargs]) -> GenerateOptions:
        """Return all options of a call of `generate`: from the arguments, else the checkpoint, else the defaults.

        Args:
            options: same as in `generate`. Without a seed, sampling gets a new one.

        Raises:
            InputError: an option is out of range or has no effect.
        """
        return self._resolve_options(GenerateOptions, drop_unset_options(options, GenerateKwargs))

    def search_options(self, **options: Any) -> SearchOptions:
        """Return all options of a search for translations: from the arguments, else the checkpoint, else the defaults.

        Args:
            options: the options of `SearchOptions` by name.

        Raises:
            InputError: an option is out of range, or options contradict each other.
        """
        return self._resolve_options(SearchOptions, options)

    def _resolve_options(self, kind: type[OptionsT], options: Mapping[str, Any]) -> OptionsT:
        """Return all options of a call, with the checkpoint's settings as defaults."""
        if self.hf_checkpoint is None:
            return resolve_options(kind, options, {})
        has_encoder, config = self.module.encoder is not None, self.hf_checkpoint.generation_config
        settings = config.settings(has_encoder=has_encoder, max_positions=self.spec.position_limit)
        return resolve_options(kind, options, settings)

    def languages(self, source: str | None, target: str | None) -> tuple[SpecialTokens, GenerationConfig | None]:
        """Return the special tokens of two languages, and the checkpoint's generation settings for them."""
        if self.hf_checkpoint is not None:
            return self.hf_checkpoint.language_settings(source, target)
        if source is not None or target is not None:
            raise InputError("the model was trained with clearhead on one pair of languages: leave the languages out")
        special_tokens = self.tokenizers.source.special_tokens
        return special_tokens.with_target(self.tokenizers.target.special_tokens.for_target), None

    def word_aligner(
        self, heads: Alignments = True, from_language: str | None = None, to_language: str | None = None
    ) -> WordAligner:
        """Return an object that aligns words of translations with words of their sources, in several calls.

        Args:
            heads: the heads to use, as (layer, head). True means the heads that align best in the first translations.
            from_language, to_language: same as in `translate`.

        Raises:
            InputError: the model does not translate, or the attention to the source has no such head.
        """
        check_two_stacks(self.module)
        translator = make_translator(self, self.module, from_language, to_language)
        return WordAligner(translator, None if isinstance(heads, bool) else heads)

    def for_task(self, task: str) -> tuple[Model, str]:
        """Return the model with its checkpoint's settings for a task, and the prefix of prompts for this task."""
        if self.hf_checkpoint is None:
            raise InputError("the model was trained with clearhead and lists no tasks: leave the task out")
        hf_checkpoint, prefix = self.hf_checkpoint.for_task(task, self.module)
        return Model(self.module, self.tokenizers, self.task, hf_checkpoint, self.runner, self.weights_file), prefix

    def for_languages(self, from_language: str | None, to_language: str | None) -> Model:
        """Return the model with fixed source and target languages.

        Args:
            from_language, to_language: the language codes. None means the language that the checkpoint's files name.

        Raises:
            InputError: a language is missing, not known or without effect.
        """
        if self.hf_checkpoint is None:
            raise InputError("the model was trained with clearhead on one pair of languages: leave the languages out")
        hf_checkpoint = self.hf_checkpoint.for_languages(from_language, to_language)
        pair = hf_checkpoint.tokenizers.pair
        return Model(self.module, pair, self.task, hf_checkpoint, self.runner, self.weights_file)

    @overload
    def score(
        self, source: str, target: str | None = None, *, length_penalty: float = 1.0, batch_size: int | None = None
    ) -> PairScore: ...
    @overload
    def score(
        self,
        source: list[str],
        target: list[str] | None = None,
        *,
        length_penalty: float = 1.0,
        batch_size: int | None = None,
    ) -> list[PairScore]: ...

    def score(
        self, source: object, target: object = None, *, length_penalty: float = 1.0, batch_size: int | None = None
    ) -> PairScore | list[PairScore]:
        """Return the log-probability of each target given its source, and its score as beam search computes it.

        Args:
            source: one text, or a list of texts.
            target: one target per source. None means that a decoder-only model scores the sources.
            length_penalty: the exponent alpha of the length in the score.
            batch_size: the maximum number of texts or pairs in a batch. None means a token budget.

        Raises:
            InputError: the numbers of sources and targets differ, a target is missing or without effect, or a text is
                longer than the model's positions.
        """
        source, target = (list(texts) if isinstance(texts, Iterator) else texts for texts in (source, target))
        tree = self.runner.exact.tree()
        if target is None:
            score = partial(score_texts, tree, self.tokenizer, length_penalty=length_penalty, batch_size=batch_size)
            return answer_each(source, score)
        translator = make_translator(self, tree)
        targets: list[str] = answer_each([target] if isinstance(target, str) else target, list)
        return answer_each(
            source,
            partial(translator.score, targets=targets, length_penalty=length_penalty, batch_size=batch_size),
        )

    def evaluate(
        self,
        data: Mapping[str, Any] | Sequence[Any],
        **options: Unpack[EvaluateKwargs],
    ) -> Measures:
        """Return the metrics that `clearhead evaluate` computes on data with known answers, by name.

        Args:
            data: an entry of a run file's [data], such as {"source": "test.de", "target": "test.en"}, or a list of
                examples. Examples are (source, target) for translate and embed. They are texts for generate, fill and
                denoise, (text, label) or (text, second text, label) for classify, and (words, tags) for tag. For
                answer they are (question, context, answer, start), with None for answer and start if the context has
                no answer.
            options: the options of `EvaluateOptions` by name. `from_language`, `to_language`: language codes for a
                multilingual checkpoint.

        Raises:
            InputError: the data cannot be used, or an option is out of range or has no effect on this task.
        """
        chosen = drop_unset_options(options, EvaluateKwargs)
        languages = chosen.pop("from_language", None), chosen.pop("to_language", None)
        model = self.for_languages(*languages) if any(languages) else self
        return evaluate_model(model.exact, data, EvaluateOptions(**chosen))

    def attention(
        self,
        text: str | tuple[str, str],
        target: str | None = None,
        generate: int = 0,
        *,
        precision: str = "fp32",
        **options: Unpack[ReadKwargs],
    ) -> AttentionMaps:
        """Return the attention weights of every head while the model reads a text.

        The model reads the text in the same form as for predictions. Special tokens are added, blanks become mask
        tokens, and a prompt is formatted as in `generate`. Encoder and decoder read text and target together, as in
        training.

        Args:
            text: one text, or a pair of texts if the model reads pairs.
            target: the text that the decoder of an encoder-decoder reads. None means the text that the model generates.
            generate: the maximum number of new tokens. For a decoder-only model 0 generates nothing; for an
                encoder-decoder 0 means the limit of `translate`.
            precision: fp32, so that results do not depend on the machine; bf16; or auto for that of the loaded weights.
            options: `beam_size`: the beam size of the generation; 1 is greedy. `chat`: True if the text is a message,
                which the checkpoint's chat template formats. `from_language`, `to_language`: language codes for a
                multilingual checkpoint.

        Raises:
            InputError: the text is empty or longer than the model's positions, or an argument is out of range or has no
                effect for this model.
        """
        read_options = ReadOptions(target=target, generate=generate, **drop_unset_options(options, ReadKwargs))
        module = in_precision(self.module, precision)
        return attend(module, self.tokenizers, self.task, self._read(Runner(module).tree(), text, read_options))

    def heads(
        self,
        texts: str | Sequence[str] | Sequence[tuple[str, str]],
        targets: Sequence[str] | None = None,
        *,
        precision: str = "fp32",
        seed: int = 0,
        notify: Notify | None = None,
        **options: Unpack[ReadKwargs],
    ) -> list[HeadStatistics]:
        """Return statistics of each head over many texts, with their spread: see `HeadStatistics`.

        Args:
            texts: at least one text; each is read alone, as in `attention`.
            targets: one target per text for an encoder-decoder. None means the texts that the model generates.
            precision, options: same as in `attention`.
            seed: the seed of the random tokens on which induction and duplicate tokens are scored.
            notify: the function that gets the number of finished texts and of all texts. None means a progress line.

        Raises:
            InputError: there is no text, the numbers of texts and targets differ, or a text cannot be read. The message
                has the number of this text.
        """
        every: Sequence[str | tuple[str, str]] = [texts] if isinstance(texts, str) else texts
        if not every:
            raise InputError("there is no text; expected at least one")
        if targets is not None and (isinstance(targets, str) or len(targets) != len(every)):
            raise InputError(f"`targets` must be a list with as many targets as texts, {len(every)}")
        module, chosen = in_precision(self.module, precision), drop_unset_options(options, ReadKwargs)
        tree, tell = Runner(module).tree(), counter("texts", notify)

        def runs() -> Iterator[tuple[MapInputs, list[AttentionRecord]]]:
            for number, text in enumerate(every, start=1):
                target = None if targets is None else targets[number - 1]
                with within(at_text(number)):
                    reading = self._read(tree, text, ReadOptions(target=target, **chosen))
                yield reading, record_run(module, reading.source, reading.target)
                tell(number, len(every))

        return heads_over_texts(module, self.tokenizers, runs(), seed=seed)

    def capture(self, patterns: str | Sequence[str]) -> AbstractContextManager[Captured]:
        """Collect activations while a `with` block is open: see `clearhead.capture`."""
        return capture(self.module, patterns)

    def edit(self, edits: Mapping[str, Edit]) -> AbstractContextManager[None]:
        """Replace activations while a `with` block is open: see `clearhead.edit`."""
        return edit(self.module, edits)

    def with_module(
        self, module: Transformer, *, tokenizers: TokenizerPair | None = None, task: TaskRecord | None = None
    ) -> Model:
        """Return the model with another module, and with the settings of its checkpoint.

        Args:
            module: the new module.
            tokenizers: the tokenizers of the new module. None means those of the model.
            task: the task of the new module. None means that of the model.
        """
        record = self.task if task is None else task
        hf_checkpoint = (
            None if self.hf_checkpoint is None else self.hf_checkpoint.with_module(module, record, tokenizers)
        )
        return Model(module, self.tokenizers if tokenizers is None else tokenizers, record, hf_checkpoint)

    def read(
        self, text: str | tuple[str, str], target: str | None = None, generate: int = 0, **options: Unpack[ReadKwargs]
    ) -> MapInputs:
        """Return the inputs of the model's stacks for a text; the arguments are those of `attention`."""
        read_options = ReadOptions(target=target, generate=generate, **drop_unset_options(options, ReadKwargs))
        return self._read(Runner(self.module).tree(), text, read_options)

    def _read(self, module: Transformer, text: str | tuple[str, str], read_options: ReadOptions) -> MapInputs:
        """Return the inputs of a module's stacks for a text; the module has the architecture of this model."""
        check_read_options(module, self.task, text, read_options)
        if not predicts_text(module, self.task) or not isinstance(text, str):
            return read_input(module, self.tokenizer, self.task, text)
        if module.encoder is None:
            options = self._resolve_options(GenerateOptions, read_options.generation) if read_options.generate else None
            writer = make_writer(
                self, module, read_options.generation if read_options.generate else (), chat=read_options.chat
            )
            return read_prompt(writer, text, options)
        translator = make_translator(self, module, read_options.from_language, read_options.to_language)
        target = (
            self._resolve_options(SearchOptions, read_options.search)
            if read_options.target is None
            else read_options.target
        )
        return read_translation(translator, text, target)

    def _prepare_translation(self, options: TranslateKwargs, n: int) -> tuple[Decoder, SearchOptions]:
        """Return the `Decoder` for the languages of a call, and the search options for n translations."""
        chosen = drop_unset_options(options, TranslateKwargs)
        languages = chosen.pop("from_language", None), chosen.pop("to_language", None)
        translator = make_translator(self, self.runner.tree(), *languages)
        return translator, self._resolve_options(SearchOptions, {**chosen, "n_best": n})


def make_translator(
    model: Model, module: Transformer, from_language: str | None = None, to_language: str | None = None
) -> Decoder:
    """Return the `Decoder` that translates between two languages.

    Args:
        model: the model.
        module: the module that runs, with the architecture of the model.
        from_language, to_language: same as in `Model.translate`.

    Raises:
        InputError: a language is missing, not known or without effect.
    """
    special_tokens, config = model.languages(from_language, to_language)
    return Decoder(module, model.tokenizers, special_tokens, config, model.task.max_length)


def make_writer(model: Model, module: Transformer, options: Collection[str], *, chat: bool = False) -> Decoder:
    """Return the `Decoder` that continues prompts.

    Args:
        model: the model.
        module: the module that runs, with the architecture of the model.
        options: the names of the options of a call; a length among them replaces that of the checkpoint.
        chat: True if a prompt is a message, which the checkpoint's chat template formats.

    Raises:
        InputError: there is no chat template.
    """
    checkpoint = model.hf_checkpoint
    if chat and checkpoint is None:
        raise InputError("the model was trained with clearhead and has no chat template: leave chat out")
    return Decoder(
        module,
        model.tokenizers,
        model.tokenizers.target.special_tokens,
        None if checkpoint is None else checkpoint.prompt_config(options),
        model.task.max_length,
        checkpoint.chat_template() if checkpoint is not None and chat else None,
        find_task(model.task.kind).continues,
    )
