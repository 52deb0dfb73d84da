"""Compare a compiled step with an eager one in a separate process, without the import hook that checks shapes.

The model must compile to one graph: a step with graph breaks compiles for minutes and runs no faster. The encoder uses
the fused kernel, the decoder the eager one. The output is a JSON object:

- difference: the largest difference of outputs and gradients, as defined by house rule 8.
- by_family: the same for an encoder and for a decoder alone.
- graphs: the number of graphs compiled up to the first step, up to a step with captured activations, and in total.
- is_same: True if the graph equals that of a module without hook points.
- warnings: the warnings of both steps with watched activations.
- captured: the largest difference to the first step's logits while activations are captured.
- edited: the largest difference to twice these logits while an edit doubles the logits.
- after: the largest difference to these logits afterwards.
- num_captured: the number of captured activations.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

import clearhead as ch
from clearhead.base.hooks import HookPoints
from clearhead.core import build
from clearhead.core.kernels.attention import SHORT_ON_CPU
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec

LENGTH = SHORT_ON_CPU + 3
WATCHED = ("decoder.layers.0.steps.0.branches.0.function.weights", "encoder.layers.0.after", "logits")


def make_module() -> nn.Module:
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
    return build(build_spec(hparams, source_vocab=29, target_vocab=29)).train()


def logits_of(call: Callable[..., Any]) -> Tensor:
    torch.manual_seed(3)
    mask = torch.arange(LENGTH) < torch.tensor([LENGTH, 5, 3])[:, None]
    ids, target_ids = torch.randint(29, (3, LENGTH)), torch.randint(29, (3, 7))
    logits: Tensor = call(ids, target_ids, mask=mask, target_mask=mask[:, :7]).logits
    return logits[mask[:, :7]]


def gradients_of(module: nn.Module, logits: Tensor) -> list[Tensor]:
    module.zero_grad()
    logits.square().mean().backward()
    gradients = [p.grad for p in module.parameters() if p.dim() > 1 and p.grad is not None]
    assert len(gradients) > 5
    return gradients


def difference_of_stack(family: Literal["encoder", "decoder"]) -> float:
    """Return the difference that compiling a model of one stack makes to its logits and gradients."""
    sizes = Hyperparameters(family=family, layers=1, width=12, heads=3, feedforward=17, dropout=0.0)
    module = build(build_spec(sizes, source_vocab=29, target_vocab=29)).train()
    assert [module.encoder is not None, module.decoder is not None] == [family == "encoder", family == "decoder"]
    mask = torch.arange(LENGTH) < torch.tensor([LENGTH, 5, 3])[:, None]
    ids = torch.randint(29, (3, LENGTH))
    results = []
    for call in (module, torch.compile(module, fullgraph=True)):
        logits = call(ids, mask=mask).logits[mask]
        results.append([logits.detach(), *gradients_of(module, logits)])
    return max(map(difference, *results))


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def operations(graph: fx.GraphModule) -> list[tuple[str, str, str]]:
    return [(node.op, str(node.target), str(node.args)) for node in graph.graph.nodes]


def trace_operations(module: nn.Module) -> list[tuple[str, str, str]]:
    """Return the operations of the one graph of a step, without compiling it further."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    logits_of(torch.compile(module, fullgraph=True, backend=keep))
    (graph,) = graphs
    return operations(graph)


def count() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = make_module()
    compiled = torch.compile(module, fullgraph=True)
    eager_logits = logits_of(module)
    expected = [eager_logits.detach(), *gradients_of(module, eager_logits)]
    logits = logits_of(compiled)
    actual = [logits.detach(), *gradients_of(module, logits)]
    graphs = [count()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ch.capture(module, WATCHED) as seen:
            captured = logits_of(compiled)
        graphs.append(count())
        with ch.edit(module, {"logits": lambda tensor, at: 2 * tensor}):
            edited = logits_of(compiled)
    after = logits_of(compiled)
    graphs.append(count())
    by_family = {"encoder": difference_of_stack("encoder"), "decoder": difference_of_stack("decoder")}
    with_points = trace_operations(module)
    HookPoints.point = lambda self, name, x: x  # type: ignore[method-assign]
    print(
        json.dumps(
            {
                "difference": max(map(difference, actual, expected)),
                "by_family": by_family,
                "graphs": graphs,
                "is_same": trace_operations(make_module()) == with_points,
                "warnings": [str(warning.message) for warning in caught],
                "captured": difference(captured, logits),
                "edited": difference(edited, 2 * logits),
                "after": difference(after, logits),
                "num_captured": sum(map(len, seen.values())),
            }
        )
    )


if __name__ == "__main__":
    main()
