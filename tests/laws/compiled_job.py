"""Compare compiled steps with eager ones in a process of its own, without the import hook that types shapes.

Prints the largest difference, in the sense of house rule 8, of outputs and of gradients.
"""

from __future__ import annotations

import torch

from clearhead.core import attention, build
from clearhead.zoo import Recipe, resolve


def compare(recipe: Recipe) -> float:
    torch.manual_seed(0)
    module = build(resolve(recipe, source_vocab=29, target_vocab=29)).train()
    mask = torch.arange(11) < torch.tensor([11, 5, 3])[:, None]
    arguments = [torch.randint(29, (3, 11))] + [torch.randint(29, (3, 7))] * (module.encoder is not None)
    results = []
    for call in (module, torch.compile(module)):
        module.zero_grad()
        logits = call(*arguments, mask=mask).logits
        logits.square().mean().backward()
        gradients = [p.grad for p in module.parameters() if p.dim() > 1]
        results.append([logits.detach(), *(gradient for gradient in gradients if gradient is not None)])
    eager, compiled = results
    assert len(eager) == len(compiled) > 5
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(compiled, eager, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    small = Recipe(layers=1, width=14, heads=2, head_size=6, feedforward=17, dropout=0.0)
    print(compare(small))
    attention.SHORT_ON_CPU = 0
    print(
        compare(
            Recipe(
                family="decoder",
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
        )
    )
