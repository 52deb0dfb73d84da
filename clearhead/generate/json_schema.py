"""Text that follows a JSON schema: llguidance says which bytes may follow, and so which tokens.

Shapes: V vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Bool
from torch import Tensor

from clearhead.commands import make_install_command
from clearhead.errors import InputError, argument
from clearhead.files import read_json_object
from clearhead.generate.constraints import Constraint
from clearhead.generate.continuation import GenerateRequest
from clearhead.generate.options import METHODS
from clearhead.text.token_bytes import token_bytes
from clearhead.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Schema = Mapping[str, Any] | str | PathLike[str]
"""A JSON schema, or the file with one."""
# A keyword that is not honoured is refused, whatever the schema itself says about that.
_OPTIONS: Final = {"lenient": False, "whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}
# Words of many vocabularies begin with a space, which JSON permits in front of a value.
_GRAMMAR: Final = 'start: " "? json\njson: %json '


def with_schema(
    request: GenerateRequest, schema: Schema, tokenizer: Tokenizer, num_outputs: int | None
) -> GenerateRequest:
    """Return a request whose sequences are JSON under a schema where they end, else the start of such a text.

    Args:
        request: greedy search or sampling.
        schema: a JSON schema.
        tokenizer: of the generated text.
        num_outputs: of the model's head.

    Raises:
        InputError: llguidance is missing, or does not take the schema or the vocabulary; or the request searches, or
            its checkpoint forces a token.
    """
    if request.options.method not in ("greedy", "sample"):
        method = METHODS[request.options.method]
        raise InputError(argument("schema") + f" goes with greedy search and sampling, not with {method}")
    forced = {"forced_bos_token_id": request.config.forced_bos_id, "forced_eos_token_id": request.config.forced_eos_id}
    for key, index in forced.items():
        if index is not None:
            raise InputError(f"the checkpoint's {key} forces a token, which a text under a schema has no place for")
    assert num_outputs is not None, "a model that predicts tokens has a head"
    content = schema if isinstance(schema, Mapping) else read_json_object(Path(schema), what="a JSON schema")
    try:
        import llguidance
    except ImportError:
        raise InputError(
            argument("schema") + f" needs llguidance: install it with {make_install_command(extra='schema')}"
        ) from None
    try:
        written = json.dumps({**content, "x-guidance": _OPTIONS}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"the schema is not JSON: {error}") from None
    vocabulary = _vocabulary(tokenizer, request.end_ids, num_outputs)
    matcher = llguidance.LLMatcher(vocabulary, _GRAMMAR + written, log_level=0)
    if matcher.is_error():
        raise InputError(f"the JSON schema is not one that can be followed: {_sentence(matcher.get_error())}")
    first_V = _Followed(matcher.deep_copy()).allowed()
    if not any(vocabulary.decode_bytes([index]).strip() for index in first_V.nonzero()[:, 0].tolist()):
        raise InputError(
            f"no token of this vocabulary ({tokenizer.kind}) begins a text under the schema, as where none writes a "
            "brace: take another schema, or another model"
        )
    return replace(request, constraint=lambda: _Followed(matcher.deep_copy()))


class _Followed(Constraint):
    """The state of one text under a schema; see `Constraint`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> Bool[Tensor, " vocab"]:
        """Return which tokens may be next: none, where the schema became too complex to be followed."""
        allowed_V = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        # A matcher that fails would let the text end.
        return torch.zeros_like(allowed_V) if self._matcher.is_error() else allowed_V

    def take(self, token: int) -> None:
        """Go on behind a token."""
        self._matcher.consume_token(token)


class _Vocabulary:
    """What llguidance asks of a vocabulary."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end_ids: tuple[int, ...], num_outputs: int) -> None:
        written = [*token_bytes(tokenizer), *[b""] * num_outputs][:num_outputs]
        self.eos_token_id: int = end_ids[0]
        self.special_token_ids: list[int] = [
            index for index, token in enumerate(written) if not token or index in end_ids
        ]
        special = {index: f"<{index}>".encode() for index in self.special_token_ids}
        self.tokens: list[bytes] = [special.get(index, token) for index, token in enumerate(written)]

        self._ids: dict[bytes, int] = {token: index for index, token in enumerate(written) if index not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens of a text that must follow, the longest first, up to what none of them writes."""
        content, ids, start = text if isinstance(text, bytes) else text.encode(), list[int](), 0
        while start < len(content):
            stops = range(min(len(content), start + self._longest), start, -1)
            stop = next((stop for stop in stops if content[start:stop] in self._ids), None)
            if stop is None:
                break
            ids.append(self._ids[content[start:stop]])
            start = stop
        return ids


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer, end_ids: tuple[int, ...], num_outputs: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = _Vocabulary(tokenizer, end_ids, num_outputs)
    slices = LLTokenizer.json_slices()
    try:
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=list(end_ids), slices=slices)
    except ValueError as error:
        raise InputError(f"a schema cannot be followed in this vocabulary: {_sentence(str(error))}") from None


def _sentence(text: str) -> str:
    """Return what a library says in one line, without the grammar that it repeats."""
    fault = " ".join(text.split()).partition(" 1 | start:")[0]
    return re.sub(r"^at \d+\(\d+\): ", "", fault)[:300]
