"""`Model`: a module with its tokenizers, and everything they do together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, overload

from clearhead.base.arguments import checked
from clearhead.base.errors import InputError, at_text, within
from clearhead.base.printing import block, module_summary
from clearhead.base.progress import Notify, counter
from clearhead.checkpoints.hf.checkpoint import HFCheckpoint
from clearhead.core import Transformer
from clearhead.fast.runner import Runner
from clearhead.generate.json_schema import Schema
from clearhead.generate.options import (
    GenerateKwargs,
    GenerateOptions,
    OptionsT,
    SearchOptions,
    StreamKwargs,
    TranslateKwargs,
    given_options,
    resolved,
)
from clearhead.generate.prompts import PromptFormat, generate_texts, score_texts, stream_text
from clearhead.generate.results import Generation, Hypothesis
from clearhead.generate.scoring.result import Measures
from clearhead.generate.scoring.targets import PairScore
from clearhead.generate.translation import score_translations, translate_texts
from clearhead.interpret.maps.attention_maps import AttentionMaps, attend, in_precision
from clearhead.interpret.maps.head_statistics import HeadStatistics, heads_over_texts
from clearhead.interpret.maps.hook_points import Captured, Edit, capture, edit
from clearhead.interpret.maps.reading import (
    Reading,
    ReadKwargs,
    ReadOptions,
    check_read_options,
    predicts_text,
    read_input,
    read_prompt,
    read_translation,
)
from clearhead.interpret.maps.recording import AttentionRecord, record_run
from clearhead.interpret.maps.word_links import Alignments
from clearhead.model.predictions import Predictions
from clearhead.model.saving import Saving
from clearhead.model.texts import answer_each
from clearhead.spec import Model as ModelSpec
from clearhead.spec.describe import model_summary
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find
from clearhead.tasks.evaluate.evaluation import evaluate_model
from clearhead.tasks.evaluate.options import EvaluateKwargs, EvaluateOptions
from clearhead.text.pair import TokenizerPair


@checked
class Model(Predictions, Saving):
    """A trained model with its tokenizers.

    Args:
        module: the network, in evaluation mode.
        tokenizers: of source and target; the same for both if they share a vocabulary.
        task: the task it was trained for.
        checkpoint: the Hugging Face checkpoint that it came from; None: it was trained here.
        runner: gives each request the tree that computes it fastest; None: one that multiplies as the weights are.
        weights_file: of the run or the saved model that it was loaded from, which knows how it was trained; or None.
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
        """The model with products in the precision of its weights: for numbers that depend on no processor."""
        return Model(self.module, self.tokenizers, self.task, self.hf_checkpoint, self.runner.exact, self.weights_file)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a result depends, to the last bit, on its own request alone: not on what shares its batch."""
        return self.runner.is_batch_invariant

    @property
    def spec(self) -> ModelSpec:
        """The specification of the module."""
        return self.module.spec

    @overload
    def translate(self, texts: str, **options: Unpack[TranslateKwargs]) -> str: ...
    @overload
    def translate(self, texts: list[str], **options: Unpack[TranslateKwargs]) -> list[str]: ...
    @overload
    def translate(self, texts: Iterator[str], **options: Unpack[TranslateKwargs]) -> Iterator[str]: ...

    def translate(self, texts: object, **options: Unpack[TranslateKwargs]) -> str | list[str] | Iterator[str]:
        """Return the best translation of a text, or of each of several texts; an empty text gives an empty one.

        Args:
            texts: one sentence, or a list of them; or an iterator, which gives an iterator of translations: the first
                are there after a few texts. Long texts are truncated.
            options: `beam_size`: unfinished hypotheses kept for each sentence; 1 is greedy. `length_penalty`: exponent
                alpha in score = log-probability / length ** alpha. `max_length`: longest translation in tokens with the
                end token; by default it follows the source. `batch_size`: most sentences decoded together; by default
                a token budget decides. `from_language`, `to_language`: codes, for a multilingual checkpoint. The
                checkpoint's own settings are the defaults of beam size (else 5) and length penalty (else 1).

        Raises:
            InputError: options out of range, or a language that is missing, not known or not wanted.
        """
        tree = self.tree
        return answer_each(
            texts,
            lambda texts: [found[0].text for found in self._search(tree, texts, 1, options)],
            batch_size=options.get("batch_size"),
        )

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
        """Return the n best translations of a text, or of each of several, best first, with their scores.

        Args:
            texts: as for `translate`.
            n: hypotheses for each text.
            alignments: whether each has the `alignment` of its words to those of the text: by the heads that align best
                in the first texts of this call, see `WordAligner`, or by those named here, as (layer, head).
            options: as for `translate`; `beam_size` is at least n, and by default n, but not below that of `translate`.

        Raises:
            InputError: as for `translate`, or the attention to the source has no such head.
        """
        languages = options.get("from_language"), options.get("to_language")
        aligner = None if alignments is False else self.word_aligner(alignments, *languages)
        tree, batch_size = self.tree, options.get("batch_size")

        def search(texts: Sequence[str]) -> list[list[Hypothesis]]:
            found = self._search(tree, texts, n, options)
            return found if aligner is None else aligner.add_to(texts, found)

        return answer_each(texts, search, batch_size=batch_size)

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
        """Continue a text; a list of texts gives one list for each, and an iterator an iterator of them.

        Args:
            prompt: one text, or a list of them; an empty one starts a text.
            chat: the prompt is a message, which the checkpoint's chat template formats.
            schema: a JSON schema, or its file: a text that ended ("end") is JSON under it; "length": the start of one.
            options: those of `GenerateOptions`, by name; its docstring says which method follows from them. The
                checkpoint's own settings are the defaults; where they do not say how, text is sampled: see
                `GenerateOptions.usual`. temperature=0 is greedy; a `seed` gives the same text again.

        Returns:
            The generated sequences, without the prompt.

        Raises:
            InputError: options out of range or without effect, or a prompt or a schema that the model cannot follow.
            RunFailure: the model's output is not a number, or the options ban every token.
        """
        given, tree = given_options(options, GenerateKwargs), self.tree
        return answer_each(
            prompt,
            lambda prompts: generate_texts(
                tree,
                self.tokenizers,
                prompts,
                self._resolved(GenerateOptions, given),
                continues=self._continues,
                prompt_format=self._prompt_format(chat, given),
                schema=schema,
            ),
        )

    def stream(
        self, prompt: str, *, chat: bool = False, schema: Schema | None = None, **options: Unpack[StreamKwargs]
    ) -> Iterator[str]:
        """Continue a text and yield its parts as soon as they are final; together they are the text.

        Args:
            prompt: one text.
            chat, schema, options: as for `generate`, without the options of several sequences and of beam search.

        Raises:
            InputError: as for `generate`.
            RunFailure: as for `generate`.
        """
        given = given_options(options, StreamKwargs)
        return stream_text(
            self.tree,
            self.tokenizers,
            prompt,
            self._resolved(GenerateOptions, given),
            continues=self._continues,
            prompt_format=self._prompt_format(chat, given),
            schema=schema,
        )

    def generate_options(self, **options: Unpack[GenerateKwargs]) -> GenerateOptions:
        """Return all options of a call of `generate`: those given, the checkpoint's settings, and the defaults.

        Args:
            options: as for `generate`; without a seed, sampling has a new one.

        Raises:
            InputError: options out of range or without effect.
        """
        return self._resolved(GenerateOptions, given_options(options, GenerateKwargs))

    def search_options(self, **options: Any) -> SearchOptions:
        """Return all options of a search for translations: those given, the checkpoint's settings, and the defaults.

        Args:
            options: those of `SearchOptions`, by name.

        Raises:
            InputError: options out of range or in conflict.
        """
        return self._resolved(SearchOptions, options)

    def _resolved(self, kind: type[OptionsT], given: Mapping[str, Any]) -> OptionsT:
        """Return all options of a call; the checkpoint's settings are the defaults."""
        if self.hf_checkpoint is None:
            return resolved(kind, given, {})
        has_encoder, config = self.module.encoder is not None, self.hf_checkpoint.generation_config
        settings = config.settings(has_encoder=has_encoder, max_positions=self.spec.position_limit)
        return resolved(kind, given, settings)

    def for_task(self, task: str) -> tuple[Model, str]:
        """Return the model with its checkpoint's settings for a listed task, and the prefix of that task's prompts."""
        if self.hf_checkpoint is None:
            raise InputError("the model was trained here and lists no tasks: leave the task out")
        hf_checkpoint, prefix = self.hf_checkpoint.for_task(task, self.module)
        return Model(self.module, self.tokenizers, self.task, hf_checkpoint, self.runner, self.weights_file), prefix

    def for_languages(self, from_language: str | None, to_language: str | None) -> Model:
        """Return the model with fixed source and target languages.

        Args:
            from_language, to_language: codes; None: the one that the checkpoint's files name.

        Raises:
            InputError: a language that is missing, not known or not wanted.
        """
        if self.hf_checkpoint is None:
            raise InputError("the model was trained here on one pair of languages: leave the languages out")
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
        """Return the log-probability of each target given its source, with the score that search reports.

        Args:
            source: one text, or a list of them.
            target: as many; None: a decoder-only model scores the sources themselves.
            length_penalty: exponent alpha of the score.
            batch_size: most texts, or pairs, of a batch; None: a token budget decides.

        Raises:
            InputError: the counts differ, a target is missing or not wanted, or a text is longer than the model's
                positions.
        """
        source, target = (list(texts) if isinstance(texts, Iterator) else texts for texts in (source, target))
        tree = self.runner.exact.tree()
        if target is None:
            return answer_each(
                source,
                lambda texts: score_texts(
                    tree, self.tokenizer, texts, length_penalty=length_penalty, batch_size=batch_size
                ),
            )
        parts = self.languages(None, None)
        targets: list[str] = answer_each([target] if isinstance(target, str) else target, list)

        def scored(sources: list[str]) -> list[PairScore]:
            given = tree, self.tokenizers, sources, targets, *parts
            return score_translations(*given, length_penalty=length_penalty, batch_size=batch_size)

        return answer_each(source, scored)

    def evaluate(
        self,
        data: Mapping[str, Any] | Sequence[Any],
        **options: Unpack[EvaluateKwargs],
    ) -> Measures:
        """Return the numbers that `clearhead evaluate` gives for data with known answers, by name.

        Args:
            data: the entry of a run file's [data], such as {"source": "test.de", "target": "test.en"}; or a list of
                examples: (source, target) for translate and embed; a text for generate, fill and denoise;
                (text, label) or (text, second text, label) for classify; (words, tags) for tag; (question, context,
                answer, start) for answer, both None where the context holds none.
            options: those of `EvaluateOptions`, by name; `from_language`, `to_language`: codes, for a multilingual
                checkpoint.

        Raises:
            InputError: the data cannot be used, or an option is out of range or has no effect on this task.
        """
        given = given_options(options, EvaluateKwargs)
        languages = given.pop("from_language", None), given.pop("to_language", None)
        model = self.for_languages(*languages) if any(languages) else self
        return evaluate_model(model.exact, data, EvaluateOptions(**given))

    def attention(
        self,
        text: str | tuple[str, str],
        target: str | None = None,
        generate: int = 0,
        *,
        precision: str = "fp32",
        **options: Unpack[ReadKwargs],
    ) -> AttentionMaps:
        """Return what every head attends to while the model reads a text.

        The text is read as for the model's predictions: with its special tokens, blanks as mask tokens, a prompt as for
        `generate`. Two stacks read text and target together, as in training.

        Args:
            text: one text, or a pair where the model reads pairs.
            target: what the decoder of a two-stack model reads; None: what the model generates from the text.
            generate: most new tokens that are generated; for a decoder-only model 0 generates nothing, for two stacks 0
                is the limit of `translate`.
            precision: of the run: fp32, so that its numbers do not depend on the machine, bf16, or auto for that of the
                loaded weights.
            options: `beam_size`: of the generation; 1 is greedy. `chat`: the text is a message, which the checkpoint's
                chat template formats. `from_language`, `to_language`: codes, for a multilingual checkpoint.

        Raises:
            InputError: the text is empty or longer than the model's positions, or an argument is out of range or has no
                effect for this model.
        """
        given = ReadOptions(target=target, generate=generate, **given_options(options, ReadKwargs))
        module = in_precision(self.module, precision)
        return attend(module, self.tokenizers, self.task, self._read(Runner(module).tree(), text, given))

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
        """Return what each head does over many texts, with the spread over them: see `HeadStatistics`.

        Args:
            texts: at least one; read one by one, as by `attention`.
            targets: as many, for two stacks; None: what the model generates.
            precision, options: as for `attention`.
            seed: of the random tokens on which induction and duplicate tokens are scored.
            notify: called with the numbers of texts that are done, and of all.

        Raises:
            InputError: there is no text, the counts differ, or a text cannot be read; its number is named.
        """
        every: Sequence[str | tuple[str, str]] = [texts] if isinstance(texts, str) else texts
        if not every:
            raise InputError("there is no text; expected at least one")
        if targets is not None and (isinstance(targets, str) or len(targets) != len(every)):
            raise InputError(f"expected as many targets as texts, {len(every)}, in a list: give one for each text")
        module, given = in_precision(self.module, precision), given_options(options, ReadKwargs)
        tree, tell = Runner(module).tree(), counter("texts", notify)

        def runs() -> Iterator[tuple[Reading, list[AttentionRecord]]]:
            for number, text in enumerate(every, start=1):
                target = None if targets is None else targets[number - 1]
                with within(at_text(number)):
                    reading = self._read(tree, text, ReadOptions(target=target, **given))
                yield reading, record_run(module, reading.source, reading.target)
                tell(number, len(every))

        return heads_over_texts(module, self.tokenizers, runs(), seed=seed)

    def capture(self, patterns: str | Sequence[str]) -> AbstractContextManager[Captured]:
        """Collect activations while a `with` block is open: see `clearhead.capture`."""
        return capture(self.module, patterns)

    def edit(self, edits: Mapping[str, Edit]) -> AbstractContextManager[None]:
        """Put something else in the place of activations while a `with` block is open: see `clearhead.edit`."""
        return edit(self.module, edits)

    def replaced(
        self, module: Transformer, *, tokenizers: TokenizerPair | None = None, task: TaskRecord | None = None
    ) -> Model:
        """Return the model with another module, and the settings of its checkpoint.

        Args:
            module: the module.
            tokenizers: of the module; None: the same.
            task: of the module; None: the same.
        """
        record = self.task if task is None else task
        hf_checkpoint = None if self.hf_checkpoint is None else self.hf_checkpoint.replaced(module, record, tokenizers)
        return Model(module, self.tokenizers if tokenizers is None else tokenizers, record, hf_checkpoint)

    @property
    def _continues(self) -> bool:
        """Whether generated text continues its prompt, as that of a language model does."""
        return find(self.task.kind).continues

    def _prompt_format(self, chat: bool, given: Mapping[str, Any]) -> PromptFormat | None:
        """Return how the checkpoint reads prompts; the lengths of a call replace those of the checkpoint."""
        if self.hf_checkpoint is not None:
            return self.hf_checkpoint.prompt_format(chat=chat, given=given)
        if chat:
            raise InputError("the model was trained here and has no chat template: leave chat out")
        return None

    def read(
        self, text: str | tuple[str, str], target: str | None = None, generate: int = 0, **options: Unpack[ReadKwargs]
    ) -> Reading:
        """Return what the stacks of the model read for a text; the arguments are those of `attention`."""
        given = ReadOptions(target=target, generate=generate, **given_options(options, ReadKwargs))
        return self._read(Runner(self.module).tree(), text, given)

    def _read(self, module: Transformer, text: str | tuple[str, str], given: ReadOptions) -> Reading:
        """Return what the stacks of a module with this model's architecture read for a text."""
        check_read_options(module, self.task, text, given)
        if not predicts_text(module, self.task) or not isinstance(text, str):
            return read_input(module, self.tokenizer, self.task, text)
        if module.encoder is None:
            options = self._resolved(GenerateOptions, given.generation) if given.generate else None
            if options is not None:
                # A view stops at the last position, and shows also what happens beyond the declared length.
                computed = self.spec.declared_length is not None
                options = replace(options, must_fit=False, beyond_positions=computed)
            prompt_format = self._prompt_format(given.chat, given.generation if given.generate else {})
            return read_prompt(module, self.tokenizers, text, options, prompt_format)
        special_tokens, config = self.languages(given.from_language, given.to_language)
        target = self._resolved(SearchOptions, given.search) if given.target is None else given.target
        return read_translation(module, self.tokenizers, text, target, special_tokens, config)

    def _search(
        self, tree: Transformer, texts: Sequence[str], n: int, options: TranslateKwargs
    ) -> list[list[Hypothesis]]:
        """Search for the n best translations of each text."""
        given = given_options(options, TranslateKwargs)
        special_tokens, config = self.languages(given.pop("from_language", None), given.pop("to_language", None))
        search_options = self._resolved(SearchOptions, {**given, "n_best": n})
        given_parts = tree, self.tokenizers, texts, search_options, special_tokens, config
        return translate_texts(*given_parts, max_length=self.task.max_length)
