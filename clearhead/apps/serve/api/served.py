"""Models of a server with their engines, and the conversion of client requests to token ids."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from clearhead.apps.serve.api.engine import BatchEngine
from clearhead.apps.serve.page_computations import Runs
from clearhead.base.errors import ContextTooLong, InputError, did_you_mean
from clearhead.generate.batching import batches_by_cost, pad_ids, read_tokens
from clearhead.generate.continuation import GenerateRequest
from clearhead.generate.options import GenerateOptions
from clearhead.interpret.maps.map_inputs import ReadKwargs
from clearhead.interpret.maps.token_texts import TokenWriter, WrittenToken
from clearhead.model.facade import Model, make_translator, make_writer
from clearhead.spec.tasks.registry import find_task
from clearhead.text.long_texts import refuse_enormous
from clearhead.text.tokenizer import Tokenizer

Prompt = str | list[int]
_NAMELESS = (None, "dummy")
"""Names that clients send for the only model; huggingface_hub always sends one."""
LOGITS_TOKENS = 512
"""Tokens of a scored text whose logits are computed together."""


@dataclass(frozen=True)
class ScoredText:
    """Tokens of a text, each with its log-probability given the tokens before it; the first has none."""

    ids: tuple[int, ...]
    log_probabilities: tuple[float | None, ...]
    alternatives: tuple[tuple[tuple[int, float], ...] | None, ...]


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One model of the server, with its name and its engine.

    Args:
        name: the name of the model in requests.
        model: the model.
        shares_prefixes: True if prompts with an equal prefix share its keys and values.
        beyond_positions: True if requests may exceed the checkpoint's max_position_embeddings.
        created: the time of loading, in seconds since 1970.
    """

    name: str
    model: Model
    shares_prefixes: bool = True
    beyond_positions: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def engine(self) -> BatchEngine:
        """Engine of the model; the first use starts the engine."""
        return BatchEngine(self.model.tree, shares_prefixes=self.shares_prefixes)

    @cached_property
    def runs(self) -> Runs:
        """The model in float32 for attention maps, activations and edits, with a cache of its recent runs.

        If the served model has another precision, the first use makes a float32 copy.
        """
        return Runs(self.model, self.name, ReadKwargs())

    @property
    def writes(self) -> bool:
        """True if the model generates text."""
        return self.model.module.decoder is not None and find_task(self.model.task.kind).writes

    @property
    def position_limit(self) -> int | None:
        """Maximum number of tokens that the model may read and write in one sequence; None means no limit."""
        module = self.model.module
        return module.max_positions if self.beyond_positions else module.spec.position_limit

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the generated text."""
        return self.model.tokenizers.target

    def alternative_tokens(self, scored: Sequence[tuple[int, float]]) -> list[tuple[WrittenToken, float]]:
        """Return written tokens with their log-probabilities; drop ids for which the tokenizer has no entry.

        Args:
            scored: token ids with their log-probabilities.
        """
        writer, entries = TokenWriter(self.tokenizer), self._entries
        return [
            (writer.write_alone(index), value) for index, value in scored if index < len(entries) and entries[index]
        ]

    @cached_property
    def _entries(self) -> list[str]:
        return self.tokenizer.entries()

    def prompt_tokens(self, prompt: Prompt, ids: Sequence[int]) -> list[WrittenToken]:
        """Return the tokens of a prompt, with their character offsets in the echoed text.

        Args:
            prompt: the prompt as the client sent it.
            ids: the token ids of the prompt, with special tokens.
        """
        writer = TokenWriter(self.tokenizer)
        tokens = [writer.add(index) for index in ids]
        if not isinstance(prompt, str) or self.tokenizer.decode(ids) == prompt:
            return tokens
        # Decoding changes unknown words and normalized text. So the offsets refer to the text that the client sent.
        inner, spans = self.tokenizer.encode_with_spans(prompt)
        first = next((n for n in range(len(ids)) if list(ids[n : n + len(inner)]) == inner), 0)
        offsets, end = [0] * first, 0
        for start, stop in spans:
            # White space before a word belongs to its token. Tokens of one character begin where it begins.
            offsets.append(min(start, end))
            end = stop
        offsets += [end] * (len(ids) - len(offsets))
        return [replace(token, offset=offset) for token, offset in zip(tokens, offsets, strict=True)]

    def request(self, prompt: Prompt, options: GenerateOptions, *, is_chat: bool = False) -> GenerateRequest:
        """Return a request for one prompt.

        Args:
            prompt: a text, or token ids with special tokens.
            options: the options of generation.
            is_chat: True if the prompt is a whole chat, formatted by a template.

        Raises:
            InputError: the model generates no text, an id is outside the vocabulary, or the checkpoint's settings are
                not supported.
        """
        if not self.writes:
            raise InputError(
                f"the model '{self.name}' was trained to '{self.model.task.kind}' and generates no text: "
                "choose another model"
            )
        model = self.model
        # Every request has a limit.
        writer = make_writer(model, model.module, ["max_new_tokens"])
        request = writer.prompt_request(["" if isinstance(prompt, list) or is_chat else prompt], options)
        if isinstance(prompt, str) and not is_chat:
            return request
        if isinstance(prompt, str):
            refuse_enormous([prompt], self.position_limit, "chat")
        reader = model.tokenizers.source if model.module.encoder is not None else model.tokenizers.target
        if isinstance(prompt, list):
            is_source = request.sources is not None
            check_ids(prompt, model.module.num_source_ids if is_source else model.module.num_target_ids)
        ids = reader.encode_with_special(prompt) if isinstance(prompt, str) else prompt
        if request.sources is not None:
            return replace(request, sources=[ids])
        return replace(request, prompts=[ids], contexts=[ids])

    @property
    def translates(self) -> bool:
        """True if the model translates: it reads one text and writes another."""
        return self.writes and self.model.module.encoder is not None and not find_task(self.model.task.kind).continues

    def translation(
        self, text: str, options: dict[str, Any], source: str | None, target: str | None
    ) -> GenerateRequest:
        """Return the request for the translation of a text.

        Args:
            text: one sentence, not empty.
            options: the search options of the client.
            source, target: the languages, for a multilingual checkpoint. None means those of the checkpoint.

        Raises:
            InputError: an option or a language is not valid.
        """
        model = self.model if source is None and target is None else self.model.for_languages(source, target)
        translator = make_translator(model, self.engine.tree)
        return translator.translation_request([text], model.search_options(**options))

    def prompt_ids(self, request: GenerateRequest) -> Sequence[int]:
        """Return the token ids that the model reads for a request."""
        return request.prompts[0] if request.sources is None else request.sources[0]

    def score(self, prompts: list[tuple[int, ...]], alternatives: int) -> list[ScoredText]:
        """Return the log-probabilities of texts under a decoder-only model, short texts in batches.

        Args:
            prompts: the token ids of each text, none empty.
            alternatives: the number of the most probable ids that come with each token.

        Raises:
            ContextTooLong: a prompt is longer than the model's positions.
            InputError: the model has an encoder.
        """
        module = self.model.tree
        if module.encoder is not None:
            raise InputError("echo with logprobs needs a model without an encoder: leave out echo or logprobs")
        most = self.position_limit
        longest = max(map(len, prompts))
        if most is not None and longest > most:
            raise ContextTooLong(f"a prompt has {longest} tokens, but the model has {most} positions: shorten it")
        scored_texts: dict[int, ScoredText] = {}
        with torch.inference_mode():
            for batch in batches_by_cost([*map(len, prompts)], budget=read_tokens(module), most_rows=None):
                some = [prompts[number] for number in batch]
                ids, mask = pad_ids(some, self.tokenizer.pad_id, torch.device("cpu"))
                hidden = module(ids, mask=None if bool(mask.all()) else mask, head=False).hidden
                for row, number in enumerate(batch):
                    scored_texts[number] = self._score_text(prompts[number], hidden[row], alternatives)
        return [scored_texts[number] for number in range(len(prompts))]

    def _score_text(self, ids: tuple[int, ...], hidden: torch.Tensor, alternatives: int) -> ScoredText:
        head = self.model.tree.head
        assert head is not None
        log_probabilities: list[float | None] = [None]
        top_ids: list[tuple[tuple[int, float], ...] | None] = [None]
        for start in range(0, len(ids) - 1, LOGITS_TOKENS):
            stop = min(start + LOGITS_TOKENS, len(ids) - 1)
            logits = head(hidden[None, start:stop])[0].float().log_softmax(-1)
            following = torch.tensor(ids[start + 1 : stop + 1])
            log_probabilities += logits.gather(1, following[:, None])[:, 0].tolist()
            top = logits.topk(min(alternatives, logits.shape[1]), dim=-1)
            for row, places in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                top_ids.append(tuple(zip(places, row, strict=True)))
        return ScoredText(ids, tuple(log_probabilities), tuple(top_ids))


class Models:
    """Models of a server by name, and the models that could not be loaded.

    Args:
        served: the models that answer.
        failed: the reason for each model that could not be loaded, by name.
    """

    def __init__(self, served: Sequence[ServedModel], failed: Mapping[str, str]) -> None:
        self._served = {served_model.name: served_model for served_model in served}
        self.failed: dict[str, str] = dict(failed)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served.values())

    def get(self, name: str | None) -> ServedModel:
        """Return the served model with a given name.

        Args:
            name: the name of the model. None means the only one.

        Raises:
            UnknownModel: there is no such model.
        """
        if name in _NAMELESS and name not in self._served and len(self._served) == 1:
            return next(iter(self._served.values()))
        if name is None:
            raise UnknownModel(f"this server has {len(self._served)} models: set model to a name from /v1/models")
        if name in self.failed:
            raise UnknownModel(f"the model '{name}' could not be loaded: {self.failed[name]}")
        if name not in self._served:
            raise UnknownModel(f"there is no model '{name}'{did_you_mean(name, self._served)}; see /v1/models")
        return self._served[name]

    def join(self) -> None:
        """Stop the engines of all models."""
        for served_model in self:
            served_model.engine.join()


def check_ids(ids: Sequence[int], num_entries: int) -> None:
    """Refuse token ids that are outside the vocabulary.

    Args:
        ids: token ids from a client, none negative.
        num_entries: the size of the vocabulary.

    Raises:
        InputError: the largest id is outside the vocabulary.
    """
    if max(ids, default=0) >= num_entries:
        raise InputError(f"there is no token {max(ids)}: the vocabulary has {num_entries} entries, numbered from 0")


class UnknownModel(InputError):
    """Error: a request names a model that the server does not have."""


def drop_none(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}
