"""Attention flow: attention weights times the length of the projected values, and rollout through all layers.

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

    A token with a large weight adds little if its value vector is short.

    Args:
        record: recorded attention.
        head: number of the head.

    Source: arXiv 2004.10102, eq. 3-4; the value has its bias, and the bias of the output projection belongs to no key.
    """
    size = record.attention.spec.head_size
    out_DE = record.attention.out.weight[:, head * size : (head + 1) * size]
    moved_SD = record.value_BKSE[0, record.kv_head(head)].float() @ out_DE.float().T
    weighted_QS: Tensor = record.weights([head])[0, 0] * moved_SD.norm(dim=-1)
    return weighted_QS.cpu()


def rollout(records: Sequence[AttentionRecord], stack: str) -> Float32[Tensor, "layers queries keys"]:
    """Return attention rollout: the share of each input token in the residual stream, by position and layer.

    Each layer is assumed to keep one half of the stream and to take the other half from attention. With the mean
    weights W of all heads: R <- (R + W R) / 2, starting from R = I. In a model with encoder and decoder, the decoder's
    stream comes from both texts. Cross-attention halves the share R of the target. It adds a share of the source:
    C <- (C + W E) / 2, where E is the rollout of the whole encoder. The rows of R and C together sum to one, or to
    less if heads have a sink.

    Args:
        records: recorded attentions of one run, all of them.
        stack: "encoder.self"; "decoder.self" for the share R of the target; "decoder.memory" for the share C of the
            source.

    Returns:
        One matrix per layer that has this attention.

    Raises:
        InputError: the model has no such attention.

    Source: arXiv 2005.00928, section 3, eq. 1 (one stack).
    """
    known = dict.fromkeys(record.stack for record in records)
    if stack not in known:
        raise InputError(f"this model has no attention '{stack}'; it has {', '.join(known)}")
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
