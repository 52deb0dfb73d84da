"""Token roles (padding, unknown, start, end, mask): their ids, and the search for them in a tokenizer's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clearhead.base.errors import InputError, did_you_mean
from clearhead.text.backend import Backend

# Well-known tokens of each role, in the order of the search.
WELL_KNOWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
        "unk": ("<unk>", "[UNK]", "<|unk|>"),
        "bos": ("<s>", "<bos>", "[BOS]", "<|startoftext|>", "<|begin_of_text|>", "[CLS]"),
        "eos": ("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "[SEP]"),
        "mask": ("<mask>", "[MASK]", "<|mask|>"),
    }
)
# Roles whose token replaces a missing start or end token of a configuration.
_STAND_INS: Mapping[str, str] = MappingProxyType({"bos": "cls", "eos": "sep"})


@dataclass(frozen=True)
class TokenRoles:
    """Ids of the tokens with a role.

    Args:
        pad: id of the padding token; masks are never derived from it.
        unk: id for text outside the vocabulary. None means that every text can be encoded.
        bos: id of the token that starts the input of a decoder.
        eos: id of the token that ends a sequence.
        mask: id of the mask token. None means that the vocabulary has none.
        sentinels: ids of the sentinel tokens of masked spans, in order of the spans.
    """

    pad: int
    unk: int | None
    bos: int
    eos: int
    mask: int | None = None
    sentinels: tuple[int, ...] = ()


def sentinel(number: int) -> str:
    """Return the sentinel token of a masked span; spans are counted from 0."""
    return f"<extra_id_{number}>"


def find_roles(path: Path, backend: Backend, config: Mapping[str, Any], names: Mapping[str, str]) -> TokenRoles:
    """Find the token of each role: from `names`, otherwise from the configuration, otherwise among well-known tokens.

    Args:
        path: file of the tokenizer, for messages.
        backend: backend of the tokenizer.
        config: content of `tokenizer_config.json`; empty if the file is missing.
        names: role -> token text, for some of the roles.

    Raises:
        InputError: a role does not exist, a token is not in the vocabulary, or there is no end token.
    """
    unknown = [role for role in names if role not in WELL_KNOWN]
    if unknown:
        raise InputError(
            f"'{unknown[0]}' is not a role, expected one of {', '.join(WELL_KNOWN)}"
            f"{did_you_mean(unknown[0], WELL_KNOWN)}"
        )
    added, entries = backend.added_tokens(), backend.vocabulary()
    ids: dict[str, int | None] = {}
    for role in WELL_KNOWN:
        token = names.get(role) or content_of(config.get(f"{role}_token"))
        if token is None:
            ids[role] = next((added[usual] for usual in _usual_tokens(role, config) if usual in added), None)
        else:
            ids[role] = _find_id(path, entries, role, token)
    eos = ids["eos"]
    if eos is None:
        raise InputError(f"{path}: no end token among {sorted(added) or 'no added tokens'}: name it as the eos role")
    pad = eos if ids["pad"] is None else ids["pad"]
    # Without a start token (T5, Marian), the decoder starts with the padding token.
    bos = pad if ids["bos"] is None else ids["bos"]
    unk = ids["unk"] if ids["unk"] != eos else None
    sentinels: list[int] = []
    while sentinel(len(sentinels)) in added:
        sentinels.append(added[sentinel(len(sentinels))])
    return TokenRoles(pad, unk, bos, eos, ids["mask"], tuple(sentinels))


def _usual_tokens(role: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return candidate tokens for a role that is not configured, the most likely first."""
    stand_in = content_of(config.get(f"{_STAND_INS[role]}_token")) if role in _STAND_INS else None
    return WELL_KNOWN[role] if stand_in is None else (stand_in, *WELL_KNOWN[role])


def _find_id(path: Path, entries: Mapping[str, int], role: str, token: str) -> int:
    if token not in entries:
        raise InputError(f"{path}: the {role} token '{token}' is not in the vocabulary{did_you_mean(token, entries)}")
    return entries[token]


def content_of(entry: object) -> str | None:
    """Return the text of a token entry in a configuration (a string or an object); None if it is neither."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None
