"""A gated linear recurrence in place of self-attention, after arXiv 2404.07904 (HGRN2) and arXiv 2402.19427 (Griffin).

    state_t = decay_t * state_{t-1} + (1 - decay_t) * value_t,    output = W_out(state * silu(gate))

Legend: B batch, T tokens, D width, N size of the state, L tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.core.context import Context

CHUNK = 16


@dataclass(frozen=True)
class GatedRecurrence:
    """Spec: size of the state, and the least share of the state that each step keeps."""

    size: int
    least_decay: float = 0.5

    def __post_init__(self) -> None:
        """Refuse a least_decay outside of 0 to 1."""
        if not 0.0 < self.least_decay < 1.0:
            raise ValueError(f"least_decay must lie between 0 and 1, got {self.least_decay}")


@ch.register(GatedRecurrence)
class GatedRecurrenceLayer(ch.HookPoints):
    """The recurrence; padding does not change the state, and a new document starts with an empty state."""

    points = ("decay", "state")
    keeps = ("state",)

    def __init__(self, width: int, part: GatedRecurrence) -> None:
        super().__init__()
        self.least_decay = part.least_decay
        self.value, self.decay, self.gate = (nn.Linear(width, part.size) for _ in range(3))
        self.out = nn.Linear(part.size, width)

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        """Return the outputs for the tokens of this call; the cache holds the state of earlier calls."""
        exact = torch.promote_types(x_BTD.dtype, torch.float32)  # rounding errors here would stay in the state
        decay = self.least_decay + (1 - self.least_decay) * torch.sigmoid(self.decay(x_BTD).to(exact))
        decay = self.point("decay", decay)
        added = (1 - decay) * self.value(x_BTD).to(exact)
        mask, documents = context.masking.key_mask, context.masking.documents
        if mask is not None:
            is_padding = ~mask[:, -x_BTD.shape[1] :, None]
            decay, added = decay.masked_fill(is_padding, 1.0), added.masked_fill(is_padding, 0.0)
        if documents is not None:
            is_new = F.pad(documents.diff(dim=1) != 0, (1, 0))
            decay = decay.masked_fill(is_new[..., None], 1e-30)
        kept = context.cached_tensors(self)
        before = kept["state"] if "state" in kept else torch.zeros_like(added[:, 0])
        state = self.point("state", scan(decay, added, before))
        kept["state"] = state[:, -1]
        return self.out(state.to(x_BTD.dtype) * F.silu(self.gate(x_BTD)))


def scan(decay_BTN: Tensor, added_BTN: Tensor, state_BN: Tensor) -> Tensor:
    """Return state_t = decay_t * state_{t-1} + added_t for all t, in chunks that are matrix products."""
    states = []
    for decay, added in zip(decay_BTN.split(CHUNK, 1), added_BTN.split(CHUNK, 1), strict=True):
        total_BLN = decay.log().cumsum(1)
        # share[t, s]: the share of token s that is left at token t; zero above the diagonal.
        hidden = torch.ones(decay.shape[1], decay.shape[1], dtype=torch.bool, device=decay.device).triu(1)
        share_BLLN = (total_BLN[:, :, None] - total_BLN[:, None]).masked_fill(hidden[..., None], -torch.inf).exp()
        inside_BLN = torch.einsum("btsn,bsn->btn", share_BLLN, added)
        states.append(inside_BLN + total_BLN.exp() * state_BN[:, None])
        state_BN = states[-1][:, -1]
    return torch.cat(states, 1)
