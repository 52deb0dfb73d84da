"""Training speed beside torch.nn.Transformer: same sizes, batches, optimizer, precision and threads, in one run.

    python benchmarks/train_speed.py --data ../shared/data/multi30k-bpe

Both models have 4+4 layers, width 128, 4 heads, feed-forward 256, one table for source, target and output, dropout 0.3
on residuals and embeddings, none on attention weights (so that the fused kernel can be used on both sides) and none
inside the feed-forward network. Blocks of steps alternate between the two, so that a change of the machine's load hits
both.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

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
from clearhead.training.losses.tokens import token_loss
from clearhead.training.optim.optimizers import build_optimizer

LAYERS, WIDTH, HEADS, INNER, DROPOUT, SMOOTHING, CLIP = 4, 128, 4, 256, 0.3, 0.1, 1.0


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


def peer_loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    logits = module(batch.ids, batch.target_ids, batch.mask)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), label_smoothing=SMOOTHING, reduction="sum")
    return loss, batch.num_labels


def our_loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return token_loss(module, batch, label_smoothing=SMOOTHING)


def stepper(
    module: nn.Module, loss_of: Callable[[nn.Module, Batch], tuple[Tensor, int]], optimizer: str
) -> Callable[[Batch], None]:
    rule = build_optimizer(module, kind=optimizer, learning_rate=1e-3, weight_decay=0.0, betas=(0.9, 0.98), eps=1e-9)

    def step(batch: Batch) -> None:
        rule.zero_grad(set_to_none=True)
        loss, labels = loss_of(module, batch)
        (loss / labels).backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        rule.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder multi30k-bpe")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6, help="steps in a block")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--optimizer", default="adamw", choices=["adam", "adamw"])
    parser.add_argument("--profile", action="store_true", help="profile our step and stop")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    source = parse_pair_source({"source": str(args.data / "train.en"), "target": str(args.data / "train.de")})
    tokenizers = cached_tokenizers(source, kind="split", vocab_size=20_000, joint=True)
    store = prepare_pairs(source, tokenizers, max_length=128, max_ratio=None, training=True)
    plan = LengthSortedPlan(*store.input_lengths, batch_tokens=args.batch_tokens, seed=1).epoch(0)
    batches = [collate_pairs(store, rows) for rows in plan[: args.steps * args.blocks]]
    vocab = tokenizers.source.vocab_size
    hparams = Hyperparameters(
        layers=LAYERS, width=WIDTH, heads=HEADS, feedforward=INNER, dropout=DROPOUT, final_norm=True
    )
    ours = ch.build(build_spec(hparams, source_vocab=vocab, target_vocab=vocab)).train()
    peer = TorchPeer(vocab).train()
    sides = {"clearhead": stepper(ours, our_loss, args.optimizer), "torch": stepper(peer, peer_loss, args.optimizer)}
    for step in sides.values():
        step(batches[0])
    if args.profile:
        with torch.profiler.profile() as profile:
            for batch in batches[: args.steps]:
                sides["clearhead"](batch)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))
        return
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for block in range(args.blocks):
        chosen = batches[block * args.steps : (block + 1) * args.steps]
        for name, step in sides.items():
            start = time.perf_counter()
            for batch in chosen:
                step(batch)
            speeds[name].append(sum(batch.num_tokens for batch in chosen) / (time.perf_counter() - start))
    sizes = {"clearhead": ours, "torch": peer}
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {args.threads} threads, fp32")
    print(f"batches of up to {args.batch_tokens} tokens a side, {args.optimizer}, median of {args.blocks} blocks")
    for name, measured in speeds.items():
        parameters = sum(parameter.numel() for parameter in sizes[name].parameters())
        print(f"{name:10} {parameters:>9,} parameters {statistics.median(measured):>9,.0f} source+target tokens/s")
    ratios = [mine / theirs for mine, theirs in zip(speeds["clearhead"], speeds["torch"], strict=True)]
    print(f"ratio {statistics.median(ratios):.2f} (blocks: {', '.join(f'{ratio:.2f}' for ratio in ratios)})")


if __name__ == "__main__":
    main()
