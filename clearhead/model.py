"""A model ready to use: its module, its tokenizers and what they do together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import torch
from jaxtyping import Float32
from numpy import ndarray

from clearhead.core import Transformer, build
from clearhead.errors import InputError
from clearhead.generate.candidate import Generation, Hypothesis
from clearhead.generate.engine import translate_ids
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.scoring import PairScore, score_pairs
from clearhead.generate.text import generate_texts, score_texts, stream_text
from clearhead.machine import choose_device, choose_precision
from clearhead.predict.classify import Classification, classify
from clearhead.predict.embed import embed
from clearhead.predict.fill import Filled
from clearhead.predict.fill import fill as fill_blanks
from clearhead.predict.tag import Entity, tag
from clearhead.spec import Model as ModelSpec
from clearhead.task import TaskRecord
from clearhead.text import Tokenizer, TokenizerPair
from clearhead.train.checkpoint import writing_folder
from clearhead.train.run_directory import SPEC_FILE, TASK_FILE, WEIGHTS_FILE, model_files, read_task
from clearhead.weights import fill, load_tensors, save_tensors


class Model:
    """A trained model with its tokenizers.

    Args:
        module: the network, in evaluation mode.
        tokenizers: of the two sides; one for both where it reads and writes one language.
        task: what it was trained for.
    """

    def __init__(self, module: Transformer, tokenizers: TokenizerPair, task: TaskRecord) -> None:
        self.module = module
        self.tokenizers = tokenizers
        self.task = task

    @property
    def spec(self) -> ModelSpec:
        """What the model is."""
        return self.module.spec

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of what the model reads."""
        return self.tokenizers.source

    def translate(
        self,
        texts: Sequence[str],
        *,
        beam_size: int = 5,
        length_penalty: float = 1.0,
        max_length: int | None = None,
        batch_size: int | None = None,
    ) -> list[str]:
        """Return the best translation of each text; an empty text gives an empty one.

        Args:
            texts: one sentence each.
            beam_size: unfinished hypotheses kept for each sentence; 1 is greedy.
            length_penalty: exponent alpha in score = log-probability / length ** alpha.
            max_length: longest translation in tokens, with the end token; None: follows the source.
            batch_size: most sentences decoded together; None: as many as a token budget allows.

        Raises:
            InputError: options out of range, or a text longer than the model's positions.
        """
        options = SearchOptions(beam_size, length_penalty, 1, max_length, batch_size=batch_size)
        return [found[0].text for found in self._search(texts, options)]

    def translate_n_best(
        self,
        texts: Sequence[str],
        *,
        n: int = 5,
        beam_size: int | None = None,
        length_penalty: float = 1.0,
        max_length: int | None = None,
        batch_size: int | None = None,
    ) -> list[list[Hypothesis]]:
        """Return the n best translations of each text, best first, with score and log-probability.

        Args:
            texts, length_penalty, max_length, batch_size: as in `translate`.
            n: hypotheses for each text.
            beam_size: at least n; None: n, but not below 5.
        """
        options = SearchOptions(beam_size or max(n, 5), length_penalty, n, max_length, batch_size=batch_size)
        return self._search(texts, options)

    @overload
    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 100,
        min_new_tokens: int = 0,
        temperature: float | int | None = None,
        top_k: int = 0,
        top_p: float | int = 1.0,
        min_p: float | int = 0.0,
        repetition_penalty: float | int = 1.0,
        no_repeat_ngram_size: int = 0,
        num_return_sequences: int = 1,
        beam_size: int = 1,
        length_penalty: float | int = 1.0,
        penalty_alpha: float | int = 0.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        batch_size: int | None = None,
    ) -> list[Generation]: ...
    @overload
    def generate(
        self,
        prompt: list[str],
        *,
        max_new_tokens: int = 100,
        min_new_tokens: int = 0,
        temperature: float | int | None = None,
        top_k: int = 0,
        top_p: float | int = 1.0,
        min_p: float | int = 0.0,
        repetition_penalty: float | int = 1.0,
        no_repeat_ngram_size: int = 0,
        num_return_sequences: int = 1,
        beam_size: int = 1,
        length_penalty: float | int = 1.0,
        penalty_alpha: float | int = 0.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        batch_size: int | None = None,
    ) -> list[list[Generation]]: ...

    def generate(
        self,
        prompt: str | list[str],
        *,
        max_new_tokens: int = 100,
        min_new_tokens: int = 0,
        temperature: float | int | None = None,
        top_k: int = 0,
        top_p: float | int = 1.0,
        min_p: float | int = 0.0,
        repetition_penalty: float | int = 1.0,
        no_repeat_ngram_size: int = 0,
        num_return_sequences: int = 1,
        beam_size: int = 1,
        length_penalty: float | int = 1.0,
        penalty_alpha: float | int = 0.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        batch_size: int | None = None,
    ) -> list[Generation] | list[list[Generation]]:
        """Continue a text; a list of texts gives one list for each.

        Args:
            prompt: one text, or a list of them; an empty one is the start of a text.
            max_new_tokens, min_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size,
                num_return_sequences, beam_size, length_penalty, penalty_alpha, stop, seed, batch_size: see
                `GenerateOptions`, which says what follows from them; every filter is off as long as it is not given.

        Returns:
            The sequences asked for, whose text excludes the prompt.

        Raises:
            InputError: options out of range or without effect, or a prompt that the model cannot read.
            RunFailure: the model's output is not a number, or the options ban every token.
        """
        options = GenerateOptions(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            no_repeat_ngram_size=no_repeat_ngram_size,
            num_return_sequences=num_return_sequences,
            beam_size=beam_size,
            length_penalty=length_penalty,
            penalty_alpha=penalty_alpha,
            stop=stop,
            seed=seed,
            batch_size=batch_size,
        )
        prompts = [prompt] if isinstance(prompt, str) else prompt
        found = generate_texts(self.module, self.tokenizers, prompts, options, continues=self._continues)
        return found[0] if isinstance(prompt, str) else found

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 100,
        min_new_tokens: int = 0,
        temperature: float | int | None = None,
        top_k: int = 0,
        top_p: float | int = 1.0,
        min_p: float | int = 0.0,
        repetition_penalty: float | int = 1.0,
        no_repeat_ngram_size: int = 0,
        penalty_alpha: float | int = 0.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
    ) -> Iterator[str]:
        """Continue a text and yield what comes as soon as it is certain; the pieces together are the text.

        Args:
            prompt: one text.
            max_new_tokens, min_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size,
                penalty_alpha, stop, seed: as for `generate`.

        Raises:
            InputError: as for `generate`.
            RunFailure: as for `generate`.
        """
        options = GenerateOptions(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            no_repeat_ngram_size=no_repeat_ngram_size,
            penalty_alpha=penalty_alpha,
            stop=stop,
            seed=seed,
        )
        return stream_text(self.module, self.tokenizers, prompt, options, continues=self._continues)

    def fill(self, texts: Sequence[str], *, top_k: int = 5) -> list[list[list[Filled]]]:
        """Return what may stand in the blanks of each text.

        Args:
            texts: each with blanks written "___" or as the tokenizer's own mask token; a blank is one token.
            top_k: candidates for each blank.

        Returns:
            For each text and each of its blanks the candidates, most probable first.

        Raises:
            InputError: a text without a blank or too long, or a model that was not trained to fill blanks.
        """
        return fill_blanks(self.module, self.tokenizer, texts, top_k=top_k, max_length=self.task.max_length)

    def classify(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], *, batch_size: int | None = None
    ) -> list[Classification]:
        """Return the label of each text, or of each pair of texts where the model was trained on pairs.

        Raises:
            InputError: the model was not trained to classify, or a text is empty, or not paired as in training.
        """
        return classify(self.module, self.tokenizer, self.task, texts, batch_size=batch_size)

    def tag(
        self, texts: Sequence[str] | Sequence[Sequence[str]], *, batch_size: int | None = None
    ) -> list[list[Entity]]:
        """Return the entities of each text, or of each list of words, with the characters they stand at.

        Raises:
            InputError: the model was not trained to tag.
        """
        return tag(self.module, self.tokenizer, self.task, texts, batch_size=batch_size)

    def embed(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> Float32[ndarray, "texts width"]:
        """Return one vector for each text, pooled and normalised as the model's head says.

        Raises:
            InputError: the model has no head that makes vectors, or a text is longer than its positions.
        """
        return embed(self.module, self.tokenizer, texts)

    @overload
    def score(self, source: str, target: str | None = None, *, length_penalty: float = 1.0) -> PairScore: ...
    @overload
    def score(
        self, source: list[str], target: list[str] | None = None, *, length_penalty: float = 1.0
    ) -> list[PairScore]: ...

    def score(
        self, source: str | list[str], target: str | list[str] | None = None, *, length_penalty: float = 1.0
    ) -> PairScore | list[PairScore]:
        """Return how probable the model finds each target given its source: the score that search reports.

        Args:
            source: one text, or a list of them.
            target: as many; None: a decoder alone scores the sources themselves.
            length_penalty: exponent alpha of the score.

        Raises:
            InputError: the counts differ, a target is missing or not wanted, or a text is longer than the model's
                positions.
        """
        sources = [source] if isinstance(source, str) else source
        if target is None:
            scored = score_texts(self.module, self.tokenizer, sources, length_penalty=length_penalty)
            return scored[0] if isinstance(source, str) else scored
        targets = [target] if isinstance(target, str) else target
        pair = self.tokenizers
        scores = score_pairs(
            self.module,
            self._encode(sources),
            pair.target.encode_batch(targets),
            bos_id=pair.target.bos_id,
            eos_id=pair.target.eos_id,
            pad_id=pair.source.pad_id,
            length_penalty=length_penalty,
        )
        return scores[0] if isinstance(source, str) else scores

    def save(self, path: str | Path, *, format: str = "clearhead") -> None:
        """Write spec, tokenizers and weights into a new folder that `load` reads.

        Raises:
            InputError: the folder exists, or the format is not known.
        """
        if format != "clearhead":
            raise InputError(f"format '{format}' cannot be written by this version; use format='clearhead'")
        folder = Path(path)
        if folder.exists():
            raise InputError(f"{folder} exists already; give a new folder")
        with writing_folder(folder) as temporary:
            (temporary / SPEC_FILE).write_text(self.spec.to_json(), encoding="utf-8")
            (temporary / TASK_FILE).write_text(self.task.to_json(), encoding="utf-8")
            self.tokenizers.save(temporary)
            save_tensors(temporary / WEIGHTS_FILE, self.module.state_dict())

    @property
    def _continues(self) -> bool:
        """Whether generated text stands behind its prompt, as language models were trained to write it."""
        return self.task.kind == "generate"

    def _search(self, texts: Sequence[str], options: SearchOptions) -> list[list[Hypothesis]]:
        if isinstance(texts, str):
            raise InputError("translate() takes a list of texts; put the single text into a list")
        filled = [text for text in texts if text.strip()]
        pair = self.tokenizers
        found = iter(
            translate_ids(
                self.module,
                self._encode(filled),
                bos_id=pair.target.bos_id,
                eos_id=pair.target.eos_id,
                pad_id=pair.source.pad_id,
                options=options,
            )
        )
        nothing = Hypothesis("", [], 0.0, 0.0)
        return [
            [
                Hypothesis(pair.target.decode(one.ids), pair.target.tokens(one.ids), one.score, one.log_probability)
                for one in next(found)
            ]
            if text.strip()
            else [nothing]
            for text in texts
        ]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self.spec.encoder is None or self.spec.decoder is None:
            raise InputError("translation needs a model with encoder and decoder; this one has a single stack")
        end = self.tokenizers.source.eos_id
        return [[*ids, end] for ids in self.tokenizers.source.encode_batch(list(texts))]


def load(ref: str | Path, *, device: str = "auto", precision: str = "auto") -> Model:
    """Load a trained model.

    Args:
        ref: a run directory, optionally with @best, @last, @averaged or @step-N, or a folder that `save` wrote.
        device: auto, cpu, cuda or cuda:N.
        precision: auto, fp32 or bf16.

    Raises:
        InputError: nothing usable is there; the sentence says what was expected.
    """
    where = choose_device(device)
    folder, weights = model_files(str(ref))
    task = read_task(folder)
    if task.kind in ("classify", "tag") and weights.parent.name == "step-0":
        raise InputError(
            f"{weights.parent} is the beginning of a run, whose head is untrained and would only guess; train further"
        )
    module = build(ModelSpec.from_json((folder / SPEC_FILE).read_text(encoding="utf-8")), device="meta")
    fill(module, load_tensors(weights), source=str(weights))
    module.to(where, torch.bfloat16 if choose_precision(precision, where) == "bf16" else torch.float32)
    tokenizers = TokenizerPair.load(folder)
    _check_vocabulary(module, tokenizers, folder)
    return Model(module.eval(), tokenizers, task)


def _check_vocabulary(module: Transformer, tokenizers: TokenizerPair, folder: Path) -> None:
    for side, size, rows in (
        ("source", tokenizers.source.vocab_size, module.num_source_ids),
        ("target", tokenizers.target.vocab_size, module.num_target_ids),
    ):
        if size > rows:
            raise InputError(
                f"{folder}: the {side} tokenizer has {size} entries, but the model has {rows} rows for them; "
                "restore the tokenizer that the model was trained with"
            )
