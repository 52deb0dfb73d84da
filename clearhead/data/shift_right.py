"""A text that the decoder reads once more behind the encoder, one place later. Legend: B texts, T tokens."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def repeated(
    ids_BT: Int[Tensor, "batch tokens"], mask_BT: Bool[Tensor, "batch tokens"], *, start: int | None
) -> Int[Tensor, "batch tokens"]:
    """Return the ids one place later: each real token stands where the next one was, and the last one is gone.

    So what a decoder computes at a token's place knows all that is before the token, and the memory of the whole.

    Args:
        ids_BT: what the encoder reads.
        mask_BT: True = a real token; where the real tokens stand in a row does not matter, if nothing is between them.
        start: the id in front; None: the last id of the text.

    Source: arXiv 1910.13461, section 3.1 and 3.2.
    """
    places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    first_B = mask_BT.int().argmax(1)
    last_B = torch.where(mask_BT, places_T, -1).argmax(1)
    rows_B = torch.arange(len(ids_BT), device=ids_BT.device)
    shifted_BT = ids_BT.roll(1, dims=1)
    shifted_BT[rows_B, first_B] = ids_BT[rows_B, last_B] if start is None else start
    return torch.where(mask_BT, shifted_BT, ids_BT)
