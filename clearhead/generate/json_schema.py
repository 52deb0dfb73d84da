"""Text that follows a JSON schema: llguidance says which bytes may follow, and so which tokens.

Shapes: V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from os import PathLike
from pathlib import Path
from queue import LifoQueue
from threading import Event
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Bool
from torch import Tensor

from clearhead.base.child_process import ChildProcess
from clearhead.base.commands import make_install_command
from clearhead.base.errors import InputError, argument
from clearhead.base.files import read_json_object
from clearhead.generate.continuation import GenerateRequest
from clearhead.generate.results import Constraint
from clearhead.generate.schema_worker import compile_grammar, make_tokenizer, read_error
from clearhead.text.token_bytes import token_bytes
from clearhead.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Schema = Mapping[str, Any] | str | PathLike[str]
"""A JSON schema, or the file with one."""
SECONDS: Final = 5.0
"""Processor time of a child process for one schema; the same work is done once more in this process."""
MOST_AT_ONCE: Final = 2
"""Schemas that are compiled at the same time."""
# A keyword that is not honoured is refused, whatever the schema itself says about that.
_OPTIONS: Final = {"lenient": False, "item_separator": ",", "key_separator": ":"}
# Words of many vocabularies begin with a space, which JSON permits in front of a value: one is allowed there.
_GRAMMAR: Final = 'start: " "? json\njson: %json '


def with_schema(
    request: GenerateRequest,
    schema: Schema,
    tokenizer: Tokenizer,
    num_outputs: int | None,
    abandoned: Event | None = None,
) -> GenerateRequest:
    """Return a request whose sequences are JSON under a schema where they end, else the start of such a text.

    Args:
        request: greedy search or sampling.
        schema: a JSON schema. No white space stands between the parts of a text, where small models would write it
            without an end, unless the schema has {"x-guidance": {"whitespace_flexible": true}}.
        tokenizer: of the generated text.
        num_outputs: of the model's head.
        abandoned: an event that ends the compilation of the schema when it is set; None: it runs to its end.

    Raises:
        InputError: llguidance is missing, or refuses the schema or the vocabulary; the schema takes more than 10
            seconds of processor time or 512 MB; the request searches, or its checkpoint forces a token.
    """
    if request.options.is_search:
        raise InputError(argument("schema") + " goes with greedy search and sampling, not with beam search")
    forced = {"forced_bos_token_id": request.config.forced_bos_id, "forced_eos_token_id": request.config.forced_eos_id}
    for key, index in forced.items():
        if index is not None:
            raise InputError(f"the checkpoint's {key} forces a token, which a text under a schema has no place for")
    assert num_outputs is not None, "a model that predicts tokens has a head"
    content = schema if isinstance(schema, Mapping) else read_json_object(Path(schema), what="a JSON schema")
    try:
        import llguidance  # noqa: F401 - only whether it is installed
    except ImportError:
        raise InputError(
            argument("schema") + f" needs llguidance: install it with {make_install_command(extra='schema')}"
        ) from None
    guidance = content.get("x-guidance")
    is_flexible = isinstance(guidance, Mapping) and guidance.get("whitespace_flexible") is True
    options = {**_OPTIONS, "whitespace_flexible": is_flexible}
    try:
        written = json.dumps({**content, "x-guidance": options}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the schema is not JSON: {error}") from None
    library_tokenizer, vocabulary = _vocabulary(tokenizer, request.end_ids, num_outputs)
    _try_grammar(vocabulary, _GRAMMAR + written, abandoned or Event())
    # The work is the same, so that it ends within the same bounds.
    matcher = compile_grammar(library_tokenizer, _GRAMMAR + written)
    first_V = _SchemaConstraint(matcher.deep_copy()).allowed_tokens()
    if not any(library_tokenizer.decode_bytes([index]).strip() for index in first_V.nonzero()[:, 0].tolist()):
        raise InputError(
            f"no token of this vocabulary ({tokenizer.kind}) begins a text under the schema, as where none writes a "
            "brace: take another schema, or another model"
        )
    return replace(request, constraint=lambda: _SchemaConstraint(matcher.deep_copy()))


class _SchemaConstraint(Constraint):
    """The state of one text under a schema; see `Constraint`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed_tokens(self) -> Bool[Tensor, " vocab"]:
        """Return which tokens may be next: none after a failure, which would let the text end."""
        allowed_V = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        return torch.zeros_like(allowed_V) if self._matcher.is_error() else allowed_V

    def take(self, token: int) -> None:
        """Advance by one token."""
        self._matcher.consume_token(token)

    @property
    def failure(self) -> InputError | None:
        """Refusal of a schema that exceeds llguidance's limits while a text follows it."""
        error = read_error(self._matcher)
        return _refusal(error) if error else None


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer, end_ids: tuple[int, ...], num_outputs: int) -> tuple[LLTokenizer, dict[str, Any]]:
    """Return llguidance's tokenizer of a vocabulary, and the request that makes it known to a child process."""
    tokens = [*token_bytes(tokenizer), *[b""] * num_outputs][:num_outputs]
    special = [index for index, token in enumerate(tokens) if not token or index in end_ids]
    content = {"tokens": [token.decode("latin-1") for token in tokens], "special": special, "end": [*end_ids]}
    name = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    try:
        return make_tokenizer(tokens, special, [*end_ids]), {"vocabulary": name, **content}
    except ValueError as error:
        raise InputError(f"a schema cannot be followed in this vocabulary: {_sentence(str(error))}") from None


@cache
def _children() -> LifoQueue[ChildProcess]:
    """Return the child processes that compile schemas and are free at this moment."""
    children: LifoQueue[ChildProcess] = LifoQueue()
    for _ in range(MOST_AT_ONCE):
        children.put(ChildProcess(Path(__file__).with_name("schema_worker.py"), ("llguidance",)))
    return children


def _try_grammar(vocabulary: dict[str, Any], grammar: str, abandoned: Event) -> None:
    """Compile a grammar in a child process with bounds.

    Raises:
        InputError: it exceeds a bound, or llguidance refuses it.
    """
    subject, child = "the JSON schema", _children().get()
    try:
        request = {"vocabulary": vocabulary["vocabulary"], "grammar": grammar}
        answer = child.ask(request, subject, SECONDS, abandoned.is_set)
        if not answer["is_known"]:
            child.ask(vocabulary, "the vocabulary", SECONDS, abandoned.is_set)
            answer = child.ask(request, subject, SECONDS, abandoned.is_set)
    finally:
        _children().put(child)
    if answer["error"]:
        raise _refusal(answer["error"])


def _refusal(error: str) -> InputError:
    return InputError(f"the JSON schema is not one that can be followed: {_sentence(error)}")


def _sentence(text: str) -> str:
    """Return what a library says in one line, without the grammar that it repeats."""
    fault = " ".join(text.split()).partition(" 1 | start:")[0].removesuffix("<non-verbose/>").strip()
    return re.sub(r"^at \d+\(\d+\): ", "", fault)[:300]
