"""Training speed compared with other libraries: same sizes, batches, precision and threads, steps in turns.

    python benchmarks/train_speed.py translate --data ../shared/data/multi30k-bpe
    python benchmarks/train_speed.py 10.7M --nanogpt ../nanoGPT      # or 124M; a checkout of karpathy/nanoGPT

translate compares with torch.nn.Transformer: 4+4 layers, width 128, 4 heads, feed-forward 256, and one table for
source, target and output. It uses AdamW and dropout 0.3 on residuals and embeddings. There is no dropout on attention
weights (so that both sides can use the fused kernel) and none inside the feed-forward network. 10.7M and 124M compare
with nanoGPT on random text. 10.7M has 6 layers, width 384, rows of 256 and a vocabulary of 65. 124M has 12 layers,
width 768, rows of 512 and a vocabulary of 50,304.

Steps alternate between the sides, so that a change of the machine's load affects all of them. Printed are tokens per
second, and tokens per second of processor time, which other programs change less. Both have their share of the
machine's limit: products of 2048 x 2048 matrices in turns with the steps. For bf16 the products are in fp32 if the
processor has no bf16 instructions. A step has six operations for each weight and token, and those of attention. The
peak memory of each side is from its own process, with the libraries and the data.

    python benchmarks/train_speed.py translate --data ../shared/data/multi30k-bpe --command

measures the command `clearhead train` instead, in about 4 minutes. The tokens per second in its metrics.jsonl are
compared with those of the steps above on the same batches, in turns. The aim is 0.95 of that speed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pairing import Ratio, Spread
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.apps.bench.limits import fast_precisions
from clearhead.core.kernels.positions import sinusoidal_table
from clearhead.data.batches.base import Batch, count_batch
from clearhead.data.batches.plans import LengthSortedPlan
from clearhead.data.sources.pairs import parallel_files
from clearhead.data.stores.store import prepare_pairs
from clearhead.data.tokenize.tokenizers import load_or_train_tokenizers
from clearhead.fast.training.tree import training_tree
from clearhead.spec.cost import training_flops
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.tasks.train import token_loss
from clearhead.tasks.translate.train import collate_pairs
from clearhead.training.optim.optimizers import (
    build_optimizer,
    gradient_scale,
    scale_gradients,
    update_on_device,
    updates_on_device,
)

LAYERS, WIDTH, HEADS, INNER, DROPOUT, SMOOTHING, CLIP = 4, 128, 4, 256, 0.3, 0.1, 1.0
# layers, width, heads, rows, tokens of a row, vocabulary
DECODERS = {"10.7M": (6, 384, 6, 16, 256, 65), "124M": (12, 768, 12, 4, 512, 50304)}
MATRIX_SIZE, MEMORY_STEPS = 2048, 2
# For the command: warm-up steps and counted steps, both of whole lines of its metrics, and the number of runs.
WARM, COUNTED, TURNS = 10, 60, 3
TRAIN_TABLE = """
[train]
run = "{folder}/run"
steps = {steps}
batch_tokens = {batch_tokens}
learning_rate = 1e-3
schedule = "constant"
warmup = 0
clip = {clip}
precision = "{precision}"
validate_every = {steps}
"""
RUN_FILE = (
    """
[task]
kind = "translate"
[data]
train = {{ source = "{data}/train.en", target = "{data}/train.de" }}
valid = {{ source = "{data}/valid.en", target = "{data}/valid.de" }}
[tokenizer]
kind = "split"
vocab_size = 20000
joint = true
[model]
spec = "{folder}/spec.json"
"""
    + TRAIN_TABLE
    + """
label_smoothing = {smoothing}
threads = {threads}
bleu_sentences = 0
"""
)
Step = Callable[[Batch], None]


@dataclass(frozen=True)
class Work:
    """Batches for all sides, the function that makes the step of each side, and the spec of the model."""

    batches: list[Batch]
    sides: dict[str, Callable[[], Step]]
    spec: ch.spec.Model


class TorchPeer(nn.Module):
    """torch.nn.Transformer with tied tables, like typical user code."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, WIDTH)
        nn.init.normal_(self.table.weight, std=WIDTH**-0.5)
        self.transformer = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, INNER, DROPOUT, batch_first=True)
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout = nn.Identity()  # the dropout inside the feed-forward network
        self.register_buffer("positions", sinusoidal_table(512, WIDTH, ch.spec.Sinusoidal()), persistent=False)
        self.dropout = nn.Dropout(DROPOUT)

    def embed(self, ids: Tensor) -> Tensor:
        return self.dropout(self.table(ids) * math.sqrt(WIDTH) + self.positions[: ids.shape[1]])

    def forward(self, ids: Tensor, target_ids: Tensor, mask: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target_ids.shape[1], device=ids.device)
        hidden = self.transformer(
            self.embed(ids),
            self.embed(target_ids),
            tgt_mask=causal,
            src_key_padding_mask=~mask,
            memory_key_padding_mask=~mask,
            tgt_is_causal=True,
        )
        return F.linear(hidden, self.table.weight)


def sum_peer_loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    logits = module(batch.ids, batch.target_ids, batch.mask)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), label_smoothing=SMOOTHING, reduction="sum")
    return loss, batch.num_labels


def our_step(
    spec: ch.spec.Model,
    precision: str,
    smoothing: float,
    device: str = "cpu",
    *,
    compiles: bool = False,
    shape: tuple[int, int] | None = None,
    reads_loss: bool = False,
) -> Step:
    """Return the step of clearhead, which a run takes too.

    Args:
        spec: the spec of the model.
        precision: the precision of the matrix products.
        smoothing: the label smoothing.
        device: the device that computes.
        compiles: True to compile the stacks.
        shape: the rows and the tokens of every batch, for a graph of one shape. None compiles for all shapes.
        reads_loss: True if the host reads the loss before the backward pass.
    """
    module = training_tree(ch.build(spec).to(device), precision)
    if compiles:
        from clearhead.fast.training.compiled import FullBatch, compile_tree

        compile_tree(
            module,
            full=None if shape is None else FullBatch(*shape, has_mask=False),
            by_layer=False,
            recomputes_layers=False,
        )
    parameters = list(module.parameters())
    rule = build_optimizer(module, kind="adamw", learning_rate=1e-3, weight_decay=0.0, betas=(0.9, 0.98), eps=1e-9)
    on_device = updates_on_device(rule, parameters[0].device)

    def step(batch: Batch) -> None:
        rule.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, precision == "bf16"):
            loss, labels = token_loss(module, batch, label_smoothing=smoothing)
        if reads_loss:
            loss.item()
        loss.backward()
        if not on_device:
            scale_gradients(parameters, 1.0 / labels, max_norm=CLIP)
            rule.step()
            return
        norm, divisor = gradient_scale(parameters, 1.0 / labels, max_norm=CLIP)
        update_on_device(rule, divisor=divisor, has_failed=~norm.isfinite())

    return step


def plain_step(
    module: nn.Module, loss_of: Callable[[Batch], Tensor], *, in_bf16: bool, fused: bool, device: str = "cpu"
) -> Step:
    rule = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=fused)

    def step(batch: Batch) -> None:
        rule.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, in_bf16):
            loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        rule.step()

    return step


def translation(args: argparse.Namespace, layers: int = LAYERS) -> Work:
    source = parallel_files(args.data / "train.en", args.data / "train.de")
    tokenizers = load_or_train_tokenizers(source, kind="split", vocab_size=20_000, joint=True)
    store = prepare_pairs(source, tokenizers, max_length=128, max_ratio=None, training=True)
    plan = LengthSortedPlan(*store.input_lengths, batch_tokens=args.batch_tokens, seed=1).epoch(0)
    batches = [collate_pairs(store, rows, tokenizers) for rows in plan[: args.steps + 1]]
    vocab = tokenizers.source.vocab_size
    hparams = Hyperparameters(
        layers=layers, width=WIDTH, heads=HEADS, feedforward=INNER, dropout=DROPOUT, final_norm=True
    )
    spec = build_spec(hparams, source_vocab=vocab, target_vocab=vocab)
    sides = {f"clearhead {name}": partial(our_step, spec, name, SMOOTHING) for name in ("fp32", "bf16")}
    for name in ("fp32", "bf16"):
        sides[f"torch {name}"] = partial(torch_step, vocab, in_bf16=name == "bf16")
    return Work(batches, sides, spec)


def torch_step(vocab: int, *, in_bf16: bool) -> Step:
    peer = TorchPeer(vocab).train()

    def peer_loss(batch: Batch) -> Tensor:
        loss, labels = sum_peer_loss(peer, batch)
        return loss / labels

    return plain_step(peer, peer_loss, in_bf16=in_bf16, fused=True)


def decoder(args: argparse.Namespace) -> Work:
    layers, width, heads, rows, length, vocab = DECODERS[args.work]
    spec = decoder_spec(layers, width, heads, length, vocab)
    sides = {f"clearhead {name}": partial(our_step, spec, name, 0.0) for name in ("fp32", "bf16")}
    if args.nanogpt is not None:
        build_peer = load_nanogpt(args.nanogpt, layers, width, heads, length, vocab)
        for name in ("fp32", "bf16", "bf16 compiled"):
            sides[f"nanoGPT {name}"] = partial(nanogpt_step, build_peer, name)
    return Work([random_batch(rows, length, vocab) for _ in range(args.steps + 1)], sides, spec)


def decoder_spec(layers: int, width: int, heads: int, length: int, vocab: int) -> ch.spec.Model:
    """Return the spec of the decoder that nanoGPT's GPT without biases and dropout computes too."""
    hparams = Hyperparameters(
        family="decoder", layers=layers, width=width, heads=heads, activation="gelu", norm_place="pre", dropout=0.0,
        positions="learned", max_positions=length, bias=False, embedding_scale=1.0, initialization="normal",
    )  # fmt: skip
    return build_spec(hparams, source_vocab=vocab, target_vocab=vocab)


def random_batch(rows: int, length: int, vocab: int) -> Batch:
    """Return a batch of random text, on the CPU."""
    text = torch.randint(0, vocab, (rows, length + 1))
    return Batch(
        ids=text[:, :-1].contiguous(), mask=None, labels=text[:, 1:].contiguous(), rows=np.arange(rows),
        num_labels=rows * length, num_tokens=rows * length,
    )  # fmt: skip


def load_nanogpt(folder: Path, layers: int, width: int, heads: int, length: int, vocab: int) -> Callable[[], Any]:
    """Return a function that builds nanoGPT's model, from a checkout, in the sizes of `decoder_spec`."""
    sys.path.insert(0, str(folder))
    peer = importlib.import_module("model")
    config = peer.GPTConfig(
        block_size=length, vocab_size=vocab, n_layer=layers, n_head=heads, n_embd=width, dropout=0.0, bias=False
    )
    return partial(peer.GPT, config)


def nanogpt_step(build: Callable[[], Any], name: str, device: str = "cpu") -> Step:
    with contextlib.redirect_stdout(io.StringIO()):
        module = build().to(device)
    called = torch.compile(module) if name == "bf16 compiled" else module
    fused = name == "bf16 compiled" or device != "cpu"
    return plain_step(module, peer_of(called), in_bf16=name != "fp32", fused=fused, device=device)


def peer_of(module: Any) -> Callable[[Batch], Tensor]:
    def loss_of(batch: Batch) -> Tensor:
        loss: Tensor = module(batch.ids, batch.labels)[1]
        return loss

    return loss_of


class Rates:
    """Tokens per second, and per second of processor time, for each step of a side."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.processor: list[float] = []

    def run(self, work: Callable[[], object], amount: float) -> None:
        began, spent = time.perf_counter(), time.process_time()
        work()
        self.wall.append(amount / (time.perf_counter() - began))
        self.processor.append(amount / (time.process_time() - spent))

    def over(self, other: Rates) -> list[Ratio]:
        """Return the ratios to another side, by the clock and by processor time."""
        return [Ratio.of(self.wall, other.wall), Ratio.of(self.processor, other.processor)]


def measure_rates(work: Work, names: list[str]) -> tuple[dict[str, Rates], dict[str, Rates]]:
    """Return the token rates of each side, and the operation rates of matrix products by precision."""
    steps = {name: work.sides[name]() for name in names}
    for step in steps.values():
        step(work.batches[0])
    fast = fast_precisions(torch.device("cpu"))  # without bf16 instructions, PyTorch takes minutes for one product
    matrices = {
        name: torch.full((MATRIX_SIZE, MATRIX_SIZE), 1 / MATRIX_SIZE, dtype=dtype)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        if name in fast
    }
    rates, limits = {name: Rates() for name in names}, {name: Rates() for name in matrices}
    for batch in work.batches[1:]:
        for name, step in steps.items():
            rates[name].run(partial(step, batch), batch.num_tokens)
        for name, matrix in matrices.items():
            for _ in range(2):
                limits[name].run(partial(torch.mm, matrix, matrix), 2 * MATRIX_SIZE**3)
    return rates, limits


def peak_megabytes(side: str) -> float:
    """Return the peak memory of a few steps of a side, in a new process."""
    command = [sys.executable, *sys.argv, "--peak-of", side]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def rate_of_command(args: argparse.Namespace, work: Work, precision: str) -> float:
    """Return the tokens per second of `clearhead train` on the batches, without its first line of metrics.

    The work between two steps (metrics, progress) counts; validation does not.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "spec.json").write_text(work.spec.to_json(), encoding="utf-8")
        text = RUN_FILE.format(
            data=args.data.resolve(), folder=folder, steps=len(work.batches), batch_tokens=args.batch_tokens,
            smoothing=SMOOTHING, clip=CLIP, precision=precision, threads=args.threads,
        )  # fmt: skip
        (folder / "run.toml").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "clearhead", "train", str(folder / "run.toml")]
        subprocess.run(command, check=True, capture_output=True)
        lines = (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows[-1]["tokens"] == sum(batch.num_tokens for batch in work.batches), "the command used other batches"
    assert rows[0]["step"] == WARM
    pairs = list(itertools.pairwise(rows))
    tokens = [row["tokens"] - before["tokens"] for before, row in pairs]
    seconds = [count / row["tokens_per_second"] for count, (_, row) in zip(tokens, pairs, strict=True)]
    # The last line is written after validation.
    between = [
        row["seconds"] - before["seconds"] - step_seconds
        for (before, row), step_seconds in zip(pairs[:-1], seconds, strict=False)
    ]
    return sum(tokens) / (sum(seconds) + sum(between))


def rate_of_steps(work: Work, side: str) -> float:
    """Return the tokens per second of a side on the same batches."""
    step = work.sides[side]()
    for batch in work.batches[:WARM]:
        step(batch)
    rates, counted = Rates(), work.batches[WARM:]

    def steps() -> None:
        for batch in counted:
            step(batch)

    rates.run(steps, sum(batch.num_tokens for batch in counted))
    return rates.wall[0]


def report_command(args: argparse.Namespace, work: Work) -> None:
    for precision in ("fp32", "bf16"):
        side = f"clearhead {precision}"
        pairs = [(rate_of_command(args, work, precision), rate_of_steps(work, side)) for _ in range(TURNS)]
        command, steps = zip(*pairs, strict=True)
        text = f"clearhead train {precision:5} {Spread.of(command)} tokens/s, its steps alone {Spread.of(steps)}: "
        print(f"{text}{Ratio.of(command, steps)}", flush=True)


def report(args: argparse.Namespace, work: Work, names: list[str]) -> None:
    memory = {name: peak_megabytes(name) for name in names}
    rates, limits = measure_rates(work, names)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {args.threads} threads")
    for name, limit in limits.items():
        wall, processor = max(limit.wall) / 1e9, max(limit.processor) / 1e9
        print(f"products in {name}: {wall:,.0f} GFLOP/s, {processor:,.0f} for a processor second")
    print(f"{args.work}: medians of {args.steps} steps that alternate; ratios to each side of a peer, step by step")
    counts = [count_batch(batch) for batch in work.batches[1:]]
    operations = sum(training_flops(work.spec, count) for count in counts) / sum(count.tokens for count in counts)
    for name in names:
        limit = limits.get("fp32" if name.endswith("fp32") else "bf16", limits["fp32"])
        pairs = (rates[name].wall, limit.wall), (rates[name].processor, limit.processor)
        (wall, share), (processor, own_share) = (
            (statistics.median(rate), operations * statistics.median(rate) / max(most)) for rate, most in pairs
        )
        line = f"{name:22} {Spread.of(rates[name].wall)} tokens/s ({share:.0%} of the limit)"
        line += f" {processor:>8,.0f} for a processor second ({own_share:.0%}), peak {memory[name]:,.0f} MB"
        if name.startswith("clearhead"):
            for peer in (other for other in names if not other.startswith("clearhead")):
                line += f"; {peer} {' / '.join(str(ratio) for ratio in rates[name].over(rates[peer]))}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["translate", *DECODERS])
    parser.add_argument("--data", type=Path, help="the folder multi30k-bpe, for translate")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT, for the decoders")
    parser.add_argument("--only", help="comma-separated beginnings of the sides to run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=7, help="number of steps per side, after one that does not count")
    parser.add_argument("--command", action="store_true", help="measure `clearhead train`, for translate")
    parser.add_argument("--profile", metavar="SIDE", help="profile the steps of a side and stop")
    parser.add_argument(
        "--peak-of", metavar="SIDE", help="print the peak memory in MB of a few steps of a side and stop"
    )
    args = parser.parse_args()
    if args.command:
        if args.work != "translate":
            parser.error("--command needs the work translate")
        args.steps = WARM + COUNTED - 1
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    work = translation(args) if args.work == "translate" else decoder(args)
    if args.peak_of or args.profile:
        step = work.sides[args.peak_of or args.profile]()
        step(work.batches[0])
        with contextlib.nullcontext() if args.peak_of else torch.profiler.profile() as profile:
            for batch in work.batches[1:][: MEMORY_STEPS if args.peak_of else None]:
                step(batch)
        if profile is None:
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        else:
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))
        return
    if args.command:
        report_command(args, work)
        return
    chosen = tuple((args.only or "").split(","))
    report(args, work, [name for name in work.sides if name.startswith(chosen)])


if __name__ == "__main__":
    main()
