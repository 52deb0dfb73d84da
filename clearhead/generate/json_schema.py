"""Generate text that follows a JSON schema: llguidance decides which bytes, and so which tokens, may follow.

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
"""A JSON schema, or the path of a file that contains it."""
SECONDS: Final = 5.0
"""Maximum processor time of a child process for one schema; this process then repeats the same work."""
MOST_AT_ONCE: Final = 2
"""Maximum number of schemas that are compiled at the same time."""
# An unsupported keyword is refused, even if the schema asks for leniency.
_OPTIONS: Final = {"lenient": False, "item_separator": ",", "key_separator": ":"}
# Words of many vocabularies begin with a space. JSON permits a space before a value, so one is allowed there.
_GRAMMAR: Final = 'start: " "? json\njson: %json '


def with_schema(
    request: GenerateRequest,
    schema: Schema,
    tokenizer: Tokenizer,
    num_outputs: int | None,
    abandoned: Event | None = None,
) -> GenerateRequest:
    """Return a request whose sequences follow a JSON schema; a sequence that is cut off is the start of such a text.

    Args:
        request: request for greedy search or sampling.
        schema: JSON schema. The text has no white space between its tokens, because small models would write it without
            end. A schema with {"x-guidance": {"whitespace_flexible": true}} allows white space.
        tokenizer: tokenizer of the generated text.
        num_outputs: number of outputs of the model's head.
        abandoned: event that, once set, stops the compilation of the schema. None means that it runs to its end.

    Raises:
        InputError: llguidance is missing, or refuses the schema or the vocabulary. Also if the schema takes more than
            10 seconds of processor time or 512 MB. Also if the request is a beam search, or its checkpoint forces a
            token.
    """
    if request.options.is_search:
        raise InputError(argument("schema") + " needs greedy search or sampling, but the options ask for beam search")
    forced = {"forced_bos_token_id": request.config.forced_bos_id, "forced_eos_token_id": request.config.forced_eos_id}
    for key, index in forced.items():
        if index is not None:
            raise InputError(f"the checkpoint's {key} forces a token, but a schema allows no forced tokens")
    assert num_outputs is not None, "the model must have a head over a vocabulary"
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
    # This process does the same work as the child process, so it stays within the same bounds.
    matcher = compile_grammar(library_tokenizer, _GRAMMAR + written)
    first_V = _SchemaConstraint(matcher.deep_copy()).allowed_tokens()
    if not any(library_tokenizer.decode_bytes([index]).strip() for index in first_V.nonzero()[:, 0].tolist()):
        raise InputError(
            f"no token of this vocabulary ({tokenizer.kind}) can begin a text under the schema, such as a "
            "brace: use another schema or another model"
        )
    return replace(request, constraint=lambda: _SchemaConstraint(matcher.deep_copy()))


class _SchemaConstraint(Constraint):
    """State of one text under a schema; see `Constraint`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed_tokens(self) -> Bool[Tensor, " vocab"]:
        """Return the mask of tokens that may follow; all False after a failure, since any token would end the text."""
        allowed_V = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        return torch.zeros_like(allowed_V) if self._matcher.is_error() else allowed_V

    def take(self, token: int) -> None:
        """Advance by one token."""
        self._matcher.consume_token(token)

    @property
    def failure(self) -> InputError | None:
        """Error if the schema exceeds llguidance's limits while a text is generated under it; else None."""
        error = read_error(self._matcher)
        return _refusal(error) if error else None


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer, end_ids: tuple[int, ...], num_outputs: int) -> tuple[LLTokenizer, dict[str, Any]]:
    """Return llguidance's tokenizer of a vocabulary, and the request that sends the vocabulary to a child process."""
    tokens = [*token_bytes(tokenizer), *[b""] * num_outputs][:num_outputs]
    special = [index for index, token in enumerate(tokens) if not token or index in end_ids]
    content = {"tokens": [token.decode("latin-1") for token in tokens], "special": special, "end": [*end_ids]}
    name = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    try:
        return make_tokenizer(tokens, special, [*end_ids]), {"vocabulary": name, **content}
    except ValueError as error:
        raise InputError(f"texts of this vocabulary cannot follow a schema: {_sentence(str(error))}") from None


@cache
def _children() -> LifoQueue[ChildProcess]:
    """Return the queue of idle child processes that compile schemas."""
    children: LifoQueue[ChildProcess] = LifoQueue()
    for _ in range(MOST_AT_ONCE):
        children.put(ChildProcess(Path(__file__).with_name("schema_worker.py"), ("llguidance",)))
    return children


def _try_grammar(vocabulary: dict[str, Any], grammar: str, abandoned: Event) -> None:
    """Compile a grammar in a child process with limits on time and memory.

    Raises:
        InputError: the grammar exceeds a limit, or llguidance refuses it.
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
    return InputError(f"the JSON schema cannot be followed: {_sentence(error)}")


def _sentence(text: str) -> str:
    """Return an error of llguidance as one line, without the grammar that it repeats."""
    fault = " ".join(text.split()).partition(" 1 | start:")[0].removesuffix("<non-verbose/>").strip()
    return re.sub(r"^at \d+\(\d+\): ", "", fault)[:300]
