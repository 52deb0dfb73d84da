"""Forecast memory and communication of models of 1B, 7B and 70B parameters on 8 and 64 GPUs, from their specs alone.

    python benchmarks/scale.py

prints the table of docs/scale.md. Shapes: Llama 3.2 1B and Llama 3 70B (arXiv 2407.21783, table 3, and the released
configuration), Llama 2 7B (arXiv 2307.09288, appendix A.2.1).
"""

from __future__ import annotations

from dataclasses import replace

from clearhead.presets.hyperparameters import build_spec
from clearhead.presets.named import PRESETS
from clearhead.spec import Model
from clearhead.training.plan import Plan, Setting, plan_training

GB = 10**9
MEMORY, CONTEXT, GPUS = 80 * GB, 4096, (8, 64)


def llama(*, layers: int, width: int, heads: int, kv_heads: int, feedforward: int, vocab: int, tie: bool) -> Model:
    """Return the spec of a Llama."""
    hparams = replace(
        PRESETS["llama-tiny"], layers=layers, width=width, heads=heads, kv_heads=kv_heads, feedforward=feedforward,
        tie="all" if tie else "none",
    )  # fmt: skip
    return build_spec(hparams, source_vocab=vocab, target_vocab=vocab)


MODELS = {
    "1B": llama(layers=16, width=2048, heads=32, kv_heads=8, feedforward=8192, vocab=128_256, tie=True),
    "7B": llama(layers=32, width=4096, heads=32, kv_heads=32, feedforward=11_008, vocab=32_000, tie=False),
    "70B": llama(layers=80, width=8192, heads=64, kv_heads=8, feedforward=28_672, vocab=128_256, tie=False),
}


def row(name: str, plan: Plan) -> str:
    """Return a plan as a line of a table, in GB."""
    cells = [name, str(plan.setting.gpus)]
    for share in plan.shares:
        state = share.parameters + share.gradients + share.optimizer
        numbers = (
            state,
            share.weights,
            share.total(checkpointing=False),
            share.total(checkpointing=True),
            share.sent,
        )
        cells += [f"{number / GB:,.1f}" for number in numbers]
    best = plan.best
    cells.append("none" if best is None else f"{best[0].parallel}{', checkpointing' * best[1]}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    columns = ["state", "weights at work", "all", "checkpointed", "sent"]
    heads = ["model", "GPUs", *(f"{way}: {column}" for way in ("ddp", "fsdp") for column in columns), "fits"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name, spec in MODELS.items():
        for gpus in GPUS:
            setting = Setting(gpus, MEMORY, gpus * CONTEXT, CONTEXT, optimizer="adamw", precision="bf16")
            print(row(name, plan_training(spec, setting)))


if __name__ == "__main__":
    main()
