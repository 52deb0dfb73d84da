"""Student's path: the modules of clearhead that a process imports to build, train and run small models.

python -m tests.house.student_path
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.house.code_lines import code_lines
from tests.house.source import ROOT

SCRIPT = """
import json, sys
import torch
import clearhead as ch

from clearhead import spec

ROWS, WIDTH = 17, 16
NORM = spec.LayerNorm()
FEED = spec.FeedForward(size=32, activation="gelu", dropout=0.1)


def attention(mask=spec.Full(), source="self"):
    return spec.Attention(source=source, num_heads=2, num_kv_heads=2, head_size=8, mask=mask)


def stack(table, position, functions, is_pre):
    steps = []
    for function in functions:
        branch = spec.Branch(function=function, pre=NORM if is_pre else None, dropout=0.1)
        steps.append(spec.Step(branches=(branch,), out=None if is_pre else NORM))
    embedding = spec.Embedding(table=table, position=position, dropout=0.1)
    layers = (spec.Layer(steps=tuple(steps)),) * 2
    return spec.Stack(width=WIDTH, embedding=embedding, layers=layers, final_norm=NORM if is_pre else None)


def head(path):
    return spec.Head(layers=(spec.Linear(size=ROWS, weight=spec.Reference(path=path), bias=False),))


OWN, SHARED, CAUSAL = spec.Table(rows=ROWS), "encoder.embedding.table", spec.Causal()
SINUSOIDS, LEARNED = spec.Sinusoidal(), spec.Learned(rows=32)
transformer = spec.Model(
    encoder=stack(OWN, SINUSOIDS, [attention(), FEED], False),
    decoder=stack(
        spec.Reference(path=SHARED), SINUSOIDS, [attention(CAUSAL), attention(source="memory"), FEED], False
    ),
    head=head(SHARED),
)
gpt2 = spec.Model(decoder=stack(OWN, LEARNED, [attention(CAUSAL), FEED], True), head=head("decoder.embedding.table"))
bert = spec.Model(encoder=stack(OWN, LEARNED, [attention(), FEED], False), head=head(SHARED))
ids = torch.arange(14).view(2, 7)
for model in (transformer, gpt2, bert):
    module = ch.build(model)
    output = module(ids, ids) if model is transformer else module(ids)
    output.logits.square().mean().backward()
    module.eval()
    if model.decoder is not None:
        with torch.no_grad():
            memory = module.encode(ids).memory if model is transformer else None
            cache = ch.Cache()
            for step in range(10):
                output = module.decode(ids[:, :1], memory, cache=cache)
                memory = None
modules = [module for name, module in sorted(sys.modules.items()) if name.split(".")[0] == "clearhead"]
print(json.dumps([module.__file__ for module in modules]))
"""


def student_path() -> dict[str, int]:
    """Return the code lines of each module that a fresh process imports for three small models."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    files = [Path(file) for file in json.loads(done.stdout.splitlines()[-1])]
    return {str(file.relative_to(ROOT)): code_lines(file.read_text("utf-8")) for file in files}


def main() -> None:
    """Print the modules, the longest first, and the sum of their code lines."""
    lines = student_path()
    for path, count in sorted(lines.items(), key=lambda item: -item[1]):
        print(f"{count:6,}  {path}")
    print(f"{sum(lines.values()):6,}  in {len(lines)} modules")


if __name__ == "__main__":
    main()
