"""Contrastive search: of the most probable tokens, one whose hidden state differs from those before it.

    x_t = argmax over the k most probable v of  (1 - alpha) * p(v | x_<t)  -  alpha * max_{j<t} cos(h_v, h_{x_j})

where h are the decoder's last hidden states. Every candidate is read once, in its own row; the row of the chosen one is
kept, with its logits and hidden states for the next step.

Shapes: R rows (sequences still in the batch), C candidates, T tokens so far, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from clearhead.core import Transformer
from clearhead.generate.prefill import Prefill
from clearhead.generate.processors import NO_ID, Processor, apply, select
from clearhead.generate.search.sampling import fetch


class ContrastiveSearch:
    """Contrastive search over the rows of a batch.

    Args:
        module: in evaluation mode.
        prefill: one prompt for each sequence.
        chain: logits processors.
        count: k, the number of candidates.
        alpha: weight of the similarity, from 0 to 1.

    Source: arXiv 2202.06417, eq. 5.
    """

    def __init__(
        self, module: Transformer, prefill: Prefill, chain: Sequence[Processor], *, count: int, alpha: float
    ) -> None:
        self._module, self._chain, self._alpha, self._cache = module, chain, alpha, prefill.cache
        self.count: int = min(count, prefill.logits.shape[1])
        self._ids_RT, self._logits_RV = prefill.ids, prefill.logits
        self._is_real_RT = prefill.ids != NO_ID
        self._past_RSD = functional.normalize(prefill.hidden.float(), dim=-1)
        self._cached_R = torch.arange(len(prefill.ids), device=prefill.ids.device)
        self._sentences_R: Int[Tensor, " rows"] | None = None

    def step(self) -> tuple[list[int], list[float]]:
        """Return the next token of each row and its log-probability: -inf where every token is banned."""
        count = self.count
        changed_RV = apply(self._chain, self._logits_RV, self._ids_RT)
        best_RC, tokens_RC = changed_RV.topk(count, dim=1)
        self._cache.select(self._cached_R.repeat_interleave(count), memory_rows=self._sentences_R)
        out = self._module.decode(tokens_RC.reshape(-1, 1), cache=self._cache)
        assert out.logits is not None
        states_RCD = functional.normalize(out.hidden[:, -1].float(), dim=-1).unflatten(0, (-1, count))
        scores_RC = (1 - self._alpha) * changed_RV.softmax(1).gather(1, tokens_RC)
        scores_RC = scores_RC - self._alpha * self._similarity(states_RCD)
        chosen_R = scores_RC.masked_fill(best_RC == -torch.inf, -torch.inf).argmax(1)
        tokens_R = tokens_RC.gather(1, chosen_R[:, None])[:, 0]
        log_probs_R = self._logits_RV.gather(1, tokens_R[:, None])[:, 0] - self._logits_RV.logsumexp(1)
        log_probs_R = torch.where(best_RC[:, 0] == -torch.inf, best_RC[:, 0], log_probs_R)
        rows_R = torch.arange(len(chosen_R), device=chosen_R.device)
        self._cached_R, self._sentences_R = rows_R * count + chosen_R, None
        self._logits_RV = out.logits[self._cached_R, -1].float()
        self._remember(tokens_R, states_RCD[rows_R, chosen_R])
        return fetch(tokens_R, log_probs_R)

    def keep(self, rows_K: Int[Tensor, " kept"]) -> None:
        """Keep these rows only; called after a step."""
        self._cached_R, self._sentences_R = self._cached_R[rows_K], rows_K
        self._logits_RV, self._ids_RT = self._logits_RV[rows_K], self._ids_RT[rows_K]
        self._is_real_RT, self._past_RSD = self._is_real_RT[rows_K], self._past_RSD[rows_K]
        self._chain = select(self._chain, rows_K)

    def _similarity(self, states_RCD: Float[Tensor, "rows candidates width"]) -> Float[Tensor, "rows candidates"]:
        """Return the largest cosine of each candidate's hidden state with those of the tokens before it."""
        past_RTD = self._past_RSD[:, : self._is_real_RT.shape[1]]
        cosine_RCT = states_RCD @ past_RTD.transpose(1, 2)
        return cosine_RCT.masked_fill(~self._is_real_RT[:, None], -torch.inf).amax(2)

    def _remember(self, tokens_R: Int[Tensor, " rows"], states_RD: Float[Tensor, "rows width"]) -> None:
        """Append the chosen tokens and their hidden states; the buffer doubles when it is full."""
        length = self._is_real_RT.shape[1]
        if length == self._past_RSD.shape[1]:
            self._past_RSD = torch.cat([self._past_RSD, torch.empty_like(self._past_RSD)], 1)
        self._past_RSD[:, length] = states_RD
        self._ids_RT = torch.cat([self._ids_RT, tokens_R[:, None]], 1)
        self._is_real_RT = functional.pad(self._is_real_RT, (0, 1), value=True)
