"""Ids of tokens with a role that an encoder-decoder's class has where its config.json leaves them out, as data.

A library that writes a config leaves out what its class has anyway, so an absent key is not an absent token.

Source: the configuration classes of the transformers library 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _ids(start: int | None, pad: int, bos: int | None, eos: int, forced: int | None = None) -> Mapping[str, int]:
    found = {
        "decoder_start_token_id": start,
        "pad_token_id": pad,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "forced_eos_token_id": forced,
    }
    return MappingProxyType({key: index for key, index in found.items() if index is not None})


ROLE_IDS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "bart": _ids(2, 1, 0, 2, 2),
        "blenderbot": _ids(1, 0, 1, 2, 2),
        "m2m_100": _ids(2, 1, 0, 2),
        "marian": _ids(58100, 58100, None, 0, 0),
        "mbart": _ids(None, 1, 0, 2, 2),
        "mt5": _ids(0, 0, None, 1),
        "pegasus": _ids(0, 0, None, 1, 1),
        "t5": _ids(None, 0, None, 1),
        "umt5": _ids(0, 0, None, 1),
    }
)
