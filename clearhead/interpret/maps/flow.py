"""How much attention moves: weights times the norm of what they weigh, and attention through all layers.

Legend: H heads, K key/value heads, Q queries, S keys, E head size, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float32
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.interpret.maps.recording import AttentionRecord


@torch.no_grad()
def norm_weighted(record: AttentionRecord, head: int) -> Float32[Tensor, "queries keys"]:
    """Return the length of the vector that each key adds to each query: weight * |value * output projection|.

    A token with a large weight can add little, if its value is short.

    Args:
        record: of an attention.
        head: its number.

    Source: arXiv 2004.10102, eq. 3-4; the value has its bias, and the bias of the output projection belongs to no key.
    """
    size = record.attention.spec.head_size
    out_DE = record.attention.out.weight[:, head * size : (head + 1) * size]
    moved_SD = record.value_BKSE[0, record.kv_head(head)].float() @ out_DE.float().T
    weighted_QS: Tensor = record.weights([head])[0, 0] * moved_SD.norm(dim=-1)
    return weighted_QS.cpu()


def rollout(records: Sequence[AttentionRecord], stack: str) -> Float32[Tensor, "layers queries keys"]:
    """Return how much of the stream at each position comes from each token, after each layer, by attention alone.

    The stream is taken to be one half what it was and one half what attention brings, by the mean weights W of all
    heads: R <- (R + W R) / 2, from R = I. In a decoder behind an encoder the stream comes from both texts: attention
    to the memory halves the share R of the target, and brings C <- (C + W E) / 2 of the source, where E is the rollout
    of the whole encoder. The rows of R and C together sum to one (to less, where heads have a sink).

    Args:
        records: of all attentions of one run.
        stack: "encoder.self"; "decoder.self": the share R of the target; "decoder.memory": the share C of the source.

    Returns:
        one matrix for each layer that has this attention.

    Raises:
        InputError: the model has no such attention.

    Source: arXiv 2005.00928, section 3, eq. 1 (one stack).
    """
    known = dict.fromkeys(record.stack for record in records)
    if stack not in known:
        raise InputError(f"the model has no attention '{stack}'; it has {', '.join(known)}")
    in_stack = [record for record in records if record.stack.startswith(stack.partition(".")[0])]
    memory_SS = torch.zeros(0, 0)
    if any(record.attention.spec.source == "memory" for record in in_stack):
        memory_SS = rollout(records, "encoder.self")[-1]
    target_QQ = torch.eye(in_stack[0].query_BHTE.shape[2])
    source_QS = torch.zeros(len(target_QQ), len(memory_SS))
    shares: dict[int, tuple[Tensor, Tensor]] = {}
    for record in sorted(in_stack, key=lambda record: (record.layer, record.address)):
        weight = record.weights()[0].mean(0).cpu()
        if record.attention.spec.source == "memory":
            target_QQ, source_QS = target_QQ / 2, (source_QS + weight @ memory_SS) / 2
        else:
            target_QQ, source_QS = (target_QQ + weight @ target_QQ) / 2, (source_QS + weight @ source_QS) / 2
        shares[record.layer] = (target_QQ, source_QS)
    return torch.stack([shares[record.layer][stack.endswith("memory")] for record in in_stack if record.stack == stack])
