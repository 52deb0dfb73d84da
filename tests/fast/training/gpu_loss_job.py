"""Compare the compiled loss of a GPU with the eager one, by Inductor on this CPU; the output is a JSON object.

- differences: the largest relative difference of loss and gradients for each case, as defined by house rule 8.
- graphs: the number of graphs after each case; the cases of one setting have different numbers of rows.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from clearhead.core.head import Projection
from clearhead.core.kernels.linear_cross_entropy import NO_LABEL
from clearhead.fast.training.gpu_loss import gpu_cross_entropy

CASES = [(67, 0.1, None), (200, 0.1, None), (3, 0.1, None), (67, 0.0, 2.0), (300, 0.0, 2.0)]
"""Rows, label smoothing and soft cap."""


def loss_and_gradients(rows: int, smoothing: float, cap: float | None, *, compiles: bool) -> list[Tensor]:
    torch.manual_seed(rows)
    states = torch.randn(rows, 16).requires_grad_()
    weight, bias = torch.randn(53, 16).requires_grad_(), torch.randn(53, requires_grad=True)
    labels = torch.randint(53, (rows,))
    labels[1::5] = NO_LABEL
    projection = Projection(weight, bias, 0.5, cap)
    loss = gpu_cross_entropy(states, projection, labels, label_smoothing=smoothing, compiles=compiles)
    return [loss.detach(), *torch.autograd.grad(loss, [states, weight, bias])]


def main() -> None:
    torch.set_num_threads(1)
    differences, graphs = [], []
    for rows, smoothing, cap in CASES:
        eager, compiled = (loss_and_gradients(rows, smoothing, cap, compiles=compiles) for compiles in (False, True))
        pairs = zip(compiled, eager, strict=True)
        differences.append(max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs))
        graphs.append(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    print(json.dumps({"differences": differences, "graphs": graphs}))


if __name__ == "__main__":
    main()
