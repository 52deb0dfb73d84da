"""Compare a compiled step with an eager one in a separate process, without the import hook that checks shapes.

Prints the largest difference, in the sense of house rule 8, of outputs and gradients. The model is one graph: a step
that is cut in pieces compiles for minutes and runs no faster. Its source takes the fused kernel, its target the eager
one.
"""

from __future__ import annotations

import torch

from clearhead.core import build
from clearhead.kernels.attention import SHORT_ON_CPU
from clearhead.presets.hyperparameters import Hyperparameters, build_spec

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hparams = Hyperparameters(
        layers=1,
        width=14,
        heads=4,
        kv_heads=2,
        head_size=6,
        feedforward=17,
        dropout=0.0,
        norm_place="pre",
        norm="rms",
        gated=True,
        activation="silu",
        positions="rotary",
    )
    module = build(build_spec(hparams, source_vocab=29, target_vocab=29)).train()
    length = SHORT_ON_CPU + 3
    mask = torch.arange(length) < torch.tensor([length, 5, 3])[:, None]
    ids, target_ids = torch.randint(29, (3, length)), torch.randint(29, (3, 7))
    results = []
    for call in (module, torch.compile(module, fullgraph=True)):
        module.zero_grad()
        logits = call(ids, target_ids, mask=mask, target_mask=mask[:, :7]).logits
        logits[mask[:, :7]].square().mean().backward()
        gradients = [p.grad for p in module.parameters() if p.dim() > 1]
        assert len(gradients) > 10
        results.append([logits.detach(), *gradients])
    eager, compiled = results
    print(max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(compiled, eager, strict=True)))
