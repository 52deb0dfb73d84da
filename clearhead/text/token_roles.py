"""The ids of tokens with a role, and how they are found in the files of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clearhead.base.errors import InputError, did_you_mean
from clearhead.text.backend import Backend

# Usual tokens of each role, in the order in which they are tried.
WELL_KNOWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
        "unk": ("<unk>", "[UNK]", "<|unk|>"),
        "bos": ("<s>", "<bos>", "[BOS]", "<|startoftext|>", "<|begin_of_text|>", "[CLS]"),
        "eos": ("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "[SEP]"),
        "mask": ("<mask>", "[MASK]", "<|mask|>"),
    }
)
# Roles that a configuration may name in place of a start or an end token.
_STAND_INS: Mapping[str, str] = MappingProxyType({"bos": "cls", "eos": "sep"})


@dataclass(frozen=True)
class TokenRoles:
    """The ids of tokens with a role.

    Args:
        pad: fills batches; never read as a mask.
        unk: for text outside the vocabulary; None: every text has an encoding.
        bos: starts the input of a decoder.
        eos: ends a sequence.
        mask: for a masked token; None: the vocabulary has no such entry.
        sentinels: for masked spans, that of the first span first.
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
    """Find the roles of a tokenizer: by the caller's names, else by its configuration, else by usual tokens.

    Args:
        path: the file that the tokenizer came from, for messages.
        backend: the tokenizer.
        config: the content of `tokenizer_config.json`, empty where there is none.
        given: token texts for some of the roles.

    Raises:
        InputError: a role that does not exist, a token that is not in the vocabulary, or no end token.
    """
    unknown = [role for role in names if role not in WELL_KNOWN]
    if unknown:
        raise InputError(
            f"'{unknown[0]}' is not a role; expected one of {', '.join(WELL_KNOWN)}{did_you_mean(unknown[0], WELL_KNOWN)}"
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
        raise InputError(f"{path}: no end token among {sorted(added) or 'no added tokens'}; name it as the eos role")
    pad = eos if ids["pad"] is None else ids["pad"]
    # The decoder of checkpoints without a start token (T5, Marian) starts with the padding token.
    bos = pad if ids["bos"] is None else ids["bos"]
    unk = ids["unk"] if ids["unk"] != eos else None
    sentinels: list[int] = []
    while sentinel(len(sentinels)) in added:
        sentinels.append(added[sentinel(len(sentinels))])
    return TokenRoles(pad, unk, bos, eos, ids["mask"], tuple(sentinels))


def _usual_tokens(role: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what may be the token of a role that nobody names, the likeliest first."""
    stand_in = content_of(config.get(f"{_STAND_INS[role]}_token")) if role in _STAND_INS else None
    return WELL_KNOWN[role] if stand_in is None else (stand_in, *WELL_KNOWN[role])


def _find_id(path: Path, entries: Mapping[str, int], role: str, token: str) -> int:
    if token not in entries:
        raise InputError(f"{path}: the {role} token '{token}' is not in the vocabulary{did_you_mean(token, entries)}")
    return entries[token]


def content_of(entry: object) -> str | None:
    """Return the text of a token in a configuration, which is a string or an object."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None
