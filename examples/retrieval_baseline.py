"""Compare the retrieval of translations by a run's embeddings with averaged word embeddings trained on the same pairs.

Usage: python examples/retrieval_baseline.py RUN SOURCE TARGET [--epochs N]

RUN is a run directory of the task "embed"; SOURCE and TARGET are two aligned files of lines. A baseline is an embedding
table, and the vector of a text is the mean of its word vectors. There are three baselines:

- co-occurrence embeddings: the usual kind of word embedding, not trained for retrieval.
- word embeddings trained with the run's loss.
- embeddings of the run's tokens, trained with the run's loss.

All use the run's training pairs and the width of its vectors. The trained baselines use its temperature, batches and
seed, and keep the epoch with the best recall on its validation pairs. The learning rate is the best of 3e-3, 1e-2 and
3e-2 on Multi30k's validation pairs.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.data.arrays import Ragged
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.sources.lines import read_lines
from clearhead.data.sources.pairs import parallel_files
from clearhead.data.sources.tables import TableSource
from clearhead.data.stores.store import Store, prepare_pairs
from clearhead.data.tokenize.tokenizers import load_or_train_tokenizers
from clearhead.tasks.embed.batches import collate_contrastive, contrastive_plan, positive_groups, store_groups
from clearhead.tasks.embed.train import contrastive_loss
from clearhead.tasks.evaluate.retrieval import Recall, recall_at
from clearhead.text.pair import TokenizerPair
from clearhead.training.runfile.read import load_run_file
from clearhead.training.runfile.sections import RunFile

WORDS = 16_000
LEARNING_RATE = 3e-2
NO_LIMIT = 10**6


class AveragedEmbeddings(nn.EmbeddingBag):
    """Embedding of texts as the mean of token vectors, which ignores the order of the tokens."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__(vocab_size, width, mode="mean")

    def of_batch(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the vectors of a padded batch."""
        lengths_B = mask_BT.sum(1)
        vectors: Tensor = self(ids_BT[mask_BT], lengths_B.cumsum(0) - lengths_B)
        return vectors

    def of_side(self, side: Ragged) -> np.ndarray:
        """Return the normalized vectors of all texts on one side of tokenized pairs."""
        ids = torch.from_numpy(side.ids.astype(np.int64))
        with torch.inference_mode():
            vectors = nn.functional.normalize(self(ids, torch.from_numpy(side.offsets[:-1].copy())), dim=1)
        return vectors.numpy()


def co_occurrence_embeddings(store: Store, vocab_size: int, width: int) -> AveragedEmbeddings:
    """Return word vectors from a truncated SVD of the positive pointwise mutual information of words in the same pair.

    Source: Levy and Goldberg 2014, "Neural word embedding as implicit matrix factorization", section 5.
    """
    pairs, sides = np.arange(len(store)), store.texts
    places = np.concatenate(
        [np.stack([np.repeat(pairs, side.lengths), side.ids.astype(np.int64)]) for side in sides], 1
    )
    rows, words = torch.from_numpy(np.unique(places, axis=1))
    size = (vocab_size, len(store))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the sparse format used inside the product "beta"
        stands_in = torch.sparse_coo_tensor(torch.stack([words, rows]), torch.ones(len(rows)), size)
        together = torch.sparse.mm(stands_in, stands_in.t()).coalesce()
    (first, second), counts = together.indices(), together.values()
    often = torch.bincount(words, minlength=vocab_size).float()
    # The diagonal is included: without it a word and its translation would be orthogonal.
    surprise = (counts * len(store) / (often[first] * often[second])).log().clamp(min=0)
    torch.manual_seed(0)
    matrix = torch.sparse_coo_tensor(together.indices(), surprise, together.shape, check_invariants=True)
    left, sizes, _ = torch.svd_lowrank(matrix, q=min(width, vocab_size), niter=4)
    module = AveragedEmbeddings(vocab_size, left.shape[1])
    module.weight.data = left * sizes.sqrt()
    return module


def train_baseline(run_file: RunFile, tokenizers: TokenizerPair, width: int, epochs: int) -> AveragedEmbeddings:
    """Train averaged embeddings on the pairs of a run, and return those of the epoch that validates best."""
    train, temperature = run_file.train, run_file.task.temperature
    assert temperature is not None, "the run file fills its defaults"
    store, valid = (prepare(section.as_source(), tokenizers) for section in (run_file.data.train, run_file.data.valid))
    groups, valid_groups = store_groups(store), store_groups(valid)
    torch.manual_seed(train.seed)
    module = AveragedEmbeddings(tokenizers.source.vocab_size, width)
    optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)
    collator = InputCollator(tokenizers.source.special_tokens, tokenizers.source.pad_id)
    plan = contrastive_plan(store, collator, batch_tokens=train.batch_tokens, seed=train.seed)
    best, best_recall = dict(module.state_dict()), -1.0
    for epoch in range(epochs):
        for rows in plan.epoch(epoch):
            batch = collate_contrastive(store, rows, groups, collator)
            first_BD, second_BD = (
                module.of_batch(batch.ids, batch.mask),
                module.of_batch(batch.other_ids, batch.other_mask),
            )
            loss, count = contrastive_loss(first_BD, second_BD, batch.groups, temperature=temperature)
            optimizer.zero_grad()
            (loss / count).backward()
            optimizer.step()
        recall = recall_at(*vectors_of(module, valid), groups=valid_groups).mean
        print(f"  epoch {epoch + 1:2}: validation recall@1 {100 * recall:.1f} %", flush=True)
        if recall > best_recall:
            best, best_recall = {name: value.clone() for name, value in module.state_dict().items()}, recall
    module.load_state_dict(best)
    return module


def prepare(source: TableSource, tokenizers: TokenizerPair) -> Store:
    """Return all pairs of a source as ids, except those with an empty side."""
    return prepare_pairs(source, tokenizers, max_length=NO_LIMIT, max_ratio=None, training=False)


def vectors_of(module: AveragedEmbeddings, store: Store) -> tuple[np.ndarray, np.ndarray]:
    """Return the vectors of both sides of tokenized pairs."""
    firsts, seconds = store.texts
    return module.of_side(firsts), module.of_side(seconds)


def compare(run: Path, source: Path, target: Path, epochs: int) -> dict[str, Recall]:
    """Return recall@1 on two aligned files: of a random guess, of the baselines, and of the run."""
    run_file, model = load_run_file(run / "run.toml"), ch.load(run)
    texts = read_lines(source), read_lines(target)
    groups = positive_groups(zip(*texts, strict=True))
    vectors = model.embed(texts[0]), model.embed(texts[1])
    width = vectors[0].shape[1]
    pairs = run_file.data.train.as_source()
    words = load_or_train_tokenizers(pairs, kind="word", vocab_size=WORDS, joint=True)
    baselines = {
        "averaged co-occurrence": (
            words,
            co_occurrence_embeddings(prepare(pairs, words), words.source.vocab_size, width),
        )
    }
    for name, tokenizers in (("averaged words", words), ("averaged tokens of the run", model.tokenizers)):
        print(f"{name}:")
        baselines[name] = (tokenizers, train_baseline(run_file, tokenizers, width, epochs))
    recalls = {"by chance": Recall(1 / len(groups), 1 / len(groups))}
    for name, (tokenizers, module) in baselines.items():
        # The baselines skip pairs with an empty line; the run embeds them too.
        store = prepare(parallel_files(source, target), tokenizers)
        recalls[name] = recall_at(*vectors_of(module, store), groups=groups[store.arrays["lines"]])
    return {**recalls, str(run): recall_at(*vectors, groups=groups)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run", "source", "target"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    recalls = compare(arguments.run, arguments.source, arguments.target, arguments.epochs)
    print(f"{'recall@1':<30}{'source to target':>18}{'target to source':>18}{'mean':>10}")
    for name, recall in recalls.items():
        print(f"{name:<30}{recall.forward:>17.1%} {recall.backward:>17.1%} {recall.mean:>9.1%}")
