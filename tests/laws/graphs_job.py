"""Compile the first case of each file of architectures into one graph, forward and backward, in a separate process.

Run as python -m tests.laws.graphs_job, it prints a JSON object: the number of graph breaks by file; 0 is one graph.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path

import torch
import transformers

from clearhead import spec
from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.mapping import config as configs
from clearhead.core import build
from tests.parity.architectures.harness import Case, class_of

CASES = Path(__file__).parents[1] / "parity" / "architectures" / "cases"
ROWS, TOKENS = 2, 13


def spec_of(case: Case) -> spec.Model:
    """Return the spec of a case, from the config that transformers would save."""
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    values = json.loads(config.to_json_string(use_diff=True))
    family = registry.find_family(values)
    variant = next(candidate for candidate in family.variants if class_of(case) in candidate.classes)
    return family.spec_of(configs.parse(family, values).values, variant)


def graph_breaks(model: spec.Model) -> int:
    """Return 0 if forward and backward pass compile to one graph, otherwise the number of graph breaks."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = build(model).train()
    ids = torch.randint(2, min(module.num_source_ids, module.num_target_ids), (ROWS, TOKENS))
    inputs = (ids,) if model.encoder is None or model.decoder is None else (ids, ids[:, :7])
    mask = torch.arange(TOKENS) < torch.tensor([[TOKENS], [5]])
    try:
        output = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=False)(*inputs, mask=mask)
        (output.hidden if output.logits is None else output.logits).float().square().mean().backward()
    except Exception:  # noqa: BLE001 - whatever keeps it from one graph
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.compile(module, backend="eager", dynamic=False)(*inputs, mask=mask)
        return max(1, sum(torch._dynamo.utils.counters["graph_break"].values()))
    assert all(parameter.grad is not None for parameter in module.parameters() if parameter.dim() > 1)
    return 0


def main() -> None:
    """Print the graph breaks by file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = sys.argv[1:] or [path.stem for path in sorted(CASES.glob("*.py")) if path.stem != "__init__"]
    breaks = {}
    for name in names:
        cases: list[Case] = importlib.import_module(f"tests.parity.architectures.cases.{name}").CASES
        breaks[name] = graph_breaks(spec_of(cases[0]))
        print(name, breaks[name], file=sys.stderr, flush=True)
    print(json.dumps(breaks))


if __name__ == "__main__":
    main()
