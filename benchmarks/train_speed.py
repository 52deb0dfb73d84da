"""Training speed beside peers: same sizes, batches, precision and threads, steps taken in turn.

    python benchmarks/train_speed.py translate --data ../shared/data/multi30k-bpe
    python benchmarks/train_speed.py 10.7M --nanogpt ../nanoGPT      # or 124M; a checkout of karpathy/nanoGPT

translate: 4+4 layers, width 128, 4 heads, feed-forward 256, one table for source, target and output, dropout 0.3 on
residuals and embeddings, none on attention weights (so that the fused kernel can be used on both sides) and none
inside the feed-forward network, beside torch.nn.Transformer; AdamW. 10.7M and 124M: decoders of 6 layers, width 384,
rows of 256 and a vocabulary of 65, and of 12 layers, width 768, rows of 512 and a vocabulary of 50,304, random text,
beside nanoGPT. Steps alternate between the sides, so that a change of the machine's load hits all of them. Beside
tokens a second there are tokens for a second of the processor, which other programs change less.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.data.batches.base import Batch
from clearhead.data.batches.collate import collate_pairs
from clearhead.data.batches.plans import LengthSortedPlan
from clearhead.data.sources.pairs import parse_pair_source
from clearhead.data.stores.pairs import prepare_pairs
from clearhead.data.stores.tokenizers import cached_tokenizers
from clearhead.kernels.positions import sinusoidal_table
from clearhead.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.training.fast import fast_training
from clearhead.training.losses.tokens import token_loss
from clearhead.training.optim.gradients import scale_gradients
from clearhead.training.optim.optimizers import build_optimizer

LAYERS, WIDTH, HEADS, INNER, DROPOUT, SMOOTHING, CLIP = 4, 128, 4, 256, 0.3, 0.1, 1.0
# layers, width, heads, rows, tokens of a row, vocabulary
DECODERS = {"10.7M": (6, 384, 6, 16, 256, 65), "124M": (12, 768, 12, 4, 512, 50304)}
Step = Callable[[Batch], None]


class TorchPeer(nn.Module):
    """torch.nn.Transformer with tied tables, as its users write it."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, WIDTH)
        nn.init.normal_(self.table.weight, std=WIDTH**-0.5)
        self.transformer = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, INNER, DROPOUT, batch_first=True)
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout = nn.Identity()  # the one inside the feed-forward network
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


def summed_peer_loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    logits = module(batch.ids, batch.target_ids, batch.mask)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), label_smoothing=SMOOTHING, reduction="sum")
    return loss, batch.num_labels


def our_step(module: nn.Module, precision: str, smoothing: float) -> Step:
    rule = build_optimizer(module, kind="adamw", learning_rate=1e-3, weight_decay=0.0, betas=(0.9, 0.98), eps=1e-9)

    def step(batch: Batch) -> None:
        rule.zero_grad(set_to_none=True)
        with fast_training(module, precision):
            with torch.autocast("cpu", torch.bfloat16, precision == "bf16"):
                loss, labels = token_loss(module, batch, label_smoothing=smoothing)
            loss.backward()
        scale_gradients(module.parameters(), 1.0 / labels, max_norm=CLIP)
        rule.step()

    return step


def plain_step(module: nn.Module, loss_of: Callable[[Batch], Tensor], *, in_bf16: bool, fused: bool) -> Step:
    rule = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=fused)

    def step(batch: Batch) -> None:
        rule.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, in_bf16):
            loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        rule.step()

    return step


def translation(args: argparse.Namespace) -> tuple[list[Batch], dict[str, Step]]:
    source = parse_pair_source({"source": str(args.data / "train.en"), "target": str(args.data / "train.de")})
    tokenizers = cached_tokenizers(source, kind="split", vocab_size=20_000, joint=True)
    store = prepare_pairs(source, tokenizers, max_length=128, max_ratio=None, training=True)
    plan = LengthSortedPlan(*store.input_lengths, batch_tokens=args.batch_tokens, seed=1).epoch(0)
    batches = [collate_pairs(store, rows) for rows in plan[: args.steps + 1]]
    vocab = tokenizers.source.vocab_size
    hparams = Hyperparameters(
        layers=LAYERS, width=WIDTH, heads=HEADS, feedforward=INNER, dropout=DROPOUT, final_norm=True
    )
    spec = build_spec(hparams, source_vocab=vocab, target_vocab=vocab)
    sides = {f"clearhead {name}": our_step(ch.build(spec).train(), name, SMOOTHING) for name in ("fp32", "bf16")}
    peer = TorchPeer(vocab).train()

    def peer_loss(batch: Batch) -> Tensor:
        loss, labels = summed_peer_loss(peer, batch)
        return loss / labels

    for name, in_bf16 in (("fp32", False), ("bf16", True)):
        sides[f"torch {name}"] = plain_step(peer, peer_loss, in_bf16=in_bf16, fused=True)
    return batches, sides


def decoder(args: argparse.Namespace) -> tuple[list[Batch], dict[str, Step]]:
    layers, width, heads, rows, length, vocab = DECODERS[args.work]
    hparams = Hyperparameters(
        family="decoder", layers=layers, width=width, heads=heads, activation="gelu", norm_place="pre", dropout=0.0,
        positions="learned", max_positions=length, bias=False, embedding_scale=1.0, initialization="normal",
    )  # fmt: skip
    spec = build_spec(hparams, source_vocab=vocab, target_vocab=vocab)
    sides = {f"clearhead {name}": our_step(ch.build(spec).train(), name, 0.0) for name in ("fp32", "bf16")}
    if args.nanogpt is not None:
        sys.path.insert(0, str(args.nanogpt))
        peer: Any = importlib.import_module("model")
        config = peer.GPTConfig(
            block_size=length, vocab_size=vocab, n_layer=layers, n_head=heads, n_embd=width, dropout=0.0, bias=False
        )
        for name in ("fp32", "bf16", "bf16 compiled"):
            with contextlib.redirect_stdout(io.StringIO()):
                module = peer.GPT(config)
            called = torch.compile(module) if name == "bf16 compiled" else module
            sides[f"nanoGPT {name}"] = plain_step(
                module, peer_of(called), in_bf16=name != "fp32", fused=name == "bf16 compiled"
            )
    batches = []
    for _ in range(args.steps + 1):
        text = torch.randint(0, vocab, (rows, length + 1))
        batches.append(
            Batch(
                ids=text[:, :-1].contiguous(), mask=None, labels=text[:, 1:].contiguous(), rows=np.arange(rows),
                num_labels=rows * length, num_tokens=rows * length,
            )
        )  # fmt: skip
    return batches, sides


def peer_of(module: Any) -> Callable[[Batch], Tensor]:
    def loss_of(batch: Batch) -> Tensor:
        loss: Tensor = module(batch.ids, batch.labels)[1]
        return loss

    return loss_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["translate", *DECODERS])
    parser.add_argument("--data", type=Path, help="the folder multi30k-bpe, for translate")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT, for the decoders")
    parser.add_argument("--only", help="comma-separated beginnings of the sides to run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=7, help="of each side, after one that is not counted")
    parser.add_argument("--profile", metavar="SIDE", help="profile the steps of a side and stop")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    batches, sides = translation(args) if args.work == "translate" else decoder(args)
    chosen = tuple((args.profile or args.only or "").split(","))
    sides = {name: step for name, step in sides.items() if name.startswith(chosen)}
    for step in sides.values():
        step(batches[0])
    if args.profile:
        with torch.profiler.profile() as profile:
            for batch in batches[1:]:
                sides[args.profile](batch)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))
        return
    wall: dict[str, list[float]] = {name: [] for name in sides}
    processor: dict[str, list[float]] = {name: [] for name in sides}
    for batch in batches[1:]:
        for name, step in sides.items():
            began, spent = time.perf_counter(), time.process_time()
            step(batch)
            wall[name].append(batch.num_tokens / (time.perf_counter() - began))
            processor[name].append(batch.num_tokens / (time.process_time() - spent))
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {args.threads} threads")
    print(f"{args.work}: medians of {args.steps} steps that alternate; ratios to each side of a peer, step by step")
    for name in sides:
        line = f"{name:22} {statistics.median(wall[name]):>8,.0f} tokens/s"
        line += f" {statistics.median(processor[name]):>8,.0f} for a processor second"
        if name.startswith("clearhead"):
            for peer in (other for other in sides if not other.startswith("clearhead")):
                ratios = (
                    statistics.median(mine / theirs for mine, theirs in zip(taken[name], taken[peer], strict=True))
                    for taken in (wall, processor)
                )
                line += f"; {peer} {' / '.join(f'{ratio:.2f}' for ratio in ratios)}"
        print(line)


if __name__ == "__main__":
    main()
