"""Compile JSON schemas with llguidance; the same functions run in a child process first, then in this process.

`json_schema.py` starts the child process with the limits of `child_process.py`; the child imports only llguidance.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_STATES: Final = 50_000
"""Maximum number of lexer states of one schema, of 1 to 2 kB each, for any length of text."""
MOST_VOCABULARIES: Final = 4


class Vocabulary:
    """The attributes and the method that llguidance needs of a vocabulary.

    Args:
        tokens: bytes of each token.
        special_ids: ids that never occur in a text.
        end_ids: ids that end a text.
    """

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], end_ids: list[int]) -> None:
        special = {index: f"<{index}>".encode() for index in special_ids}
        self.eos_token_id: int = end_ids[0]
        self.special_token_ids: list[int] = special_ids
        self.tokens: list[bytes] = [special.get(index, token) for index, token in enumerate(tokens)]

        self._ids: dict[bytes, int] = {token: index for index, token in enumerate(tokens) if index not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize a text by the longest token at each position, up to the first byte that no token starts with."""
        content, ids, start = text if isinstance(text, bytes) else text.encode(), list[int](), 0
        while start < len(content):
            stops = range(min(len(content), start + self._longest), start, -1)
            stop = next((stop for stop in stops if content[start:stop] in self._ids), None)
            if stop is None:
                break
            ids.append(self._ids[content[start:stop]])
            start = stop
        return ids


def make_tokenizer(tokens: list[bytes], special_ids: list[int], end_ids: list[int]) -> LLTokenizer:
    """Return llguidance's tokenizer of a vocabulary; see `Vocabulary` for the arguments.

    Raises:
        ValueError: llguidance refuses the vocabulary.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = Vocabulary(tokens, special_ids, end_ids)
    return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=end_ids, slices=LLTokenizer.json_slices())


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return the matcher of a grammar; the matcher may be in an error state."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def read_error(matcher: LLMatcher) -> str:
    """Return the reason why a grammar cannot be followed, or an empty string if it can."""
    error = matcher.get_error()[:10_000]
    return "" if error.startswith("NoExtension") else error


@cache
def _tokenizers() -> dict[str, LLTokenizer]:
    """Return the tokenizers of the child process, by the name of their vocabulary."""
    return {}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of the child process to a request.

    Args:
        request: "vocabulary" is the name of a vocabulary. With "tokens" (in Latin-1), "special" and "end",
            the vocabulary becomes known. With "grammar", the grammar is compiled and its first token mask computed.

    Returns:
        Dictionary with "is_known", whether the vocabulary is known, and "error", llguidance's refusal or empty.
    """
    name, tokenizers = request["vocabulary"], _tokenizers()
    if "tokens" in request:
        tokens = [token.encode("latin-1") for token in request["tokens"]]
        tokenizers[name] = make_tokenizer(tokens, request["special"], request["end"])
        for oldest in list(tokenizers)[:-MOST_VOCABULARIES]:
            del tokenizers[oldest]
    if name not in tokenizers or "grammar" not in request:
        return {"is_known": name in tokenizers, "error": ""}
    matcher = compile_grammar(tokenizers[name], request["grammar"])
    matcher.compute_logit_bias()
    return {"is_known": True, "error": read_error(matcher)}
