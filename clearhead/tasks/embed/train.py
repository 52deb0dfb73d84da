"""Training of text embedding: contrastive training of a bi-encoder on pairs of texts.

Shape suffixes: N pairs of a batch, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.data.arrays import Indices
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.plans import training_batches
from clearhead.data.feed import compute_each
from clearhead.data.stores.store import Store
from clearhead.generate.scoring.result import Validation
from clearhead.spec import Model
from clearhead.spec.presets.task_heads import default_pool, vector_head, with_head
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks.embed.batches import ContrastiveBatch, collate_contrastive, contrastive_plan, store_groups
from clearhead.tasks.embed.data import EmbedTask
from clearhead.tasks.evaluate.retrieval import recall_at
from clearhead.tasks.train import PairTraining, Stores, evenly_spaced
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.task_setup import PreparedTask, one_sided

# Recall depends on the number of candidates, so validation uses at most this number of pairs.
_MOST_CHOICES = 2_000


class Training(PairTraining):
    """Contrastive training of a model that embeds texts."""

    @property
    def temperature(self) -> float:
        """The temperature, which divides the cosines."""
        return self.task_table(EmbedTask).temperature

    def parts(self) -> PreparedTask[ContrastiveBatch]:
        """Return the prepared task of the run: its data, tokenizers and spec."""
        setup, train = self.setup, self.run_file.train
        tokenizer = setup.find_tokenizer(lambda: self.train_tokenizers(joint=True).source)
        stores = self._stores(tokenizer)
        store = stores.train
        model = self._spec(tokenizer)
        collator = InputCollator.of(model, tokenizer)
        plan = contrastive_plan(store, collator, batch_tokens=train.batch_tokens, seed=train.seed)
        groups = store_groups(store)
        batches = training_batches(store, plan, lambda rows: collate_contrastive(store, rows, groups, collator))
        setup.progress.message(
            f"{len(store) / batches.batches_per_epoch:.0f} pairs in a batch, each compared with all others; "
            f"padding: {100 * plan.padding_waste(0):.1f} % of the positions"
        )

        def loss(module: nn.Module, batch: ContrastiveBatch) -> tuple[Tensor, int]:
            return batch_loss(module, batch.to(setup.device), temperature=self.temperature, start=collator.start)[0]

        return PreparedTask(
            tokenizers=one_sided(tokenizer),
            spec=model,
            batches=batches,
            loss=loss,
            validate=self._validator(stores.valid, collator),
            sides=self.sides(stores, one_sided(tokenizer)),
            largest=collate_contrastive(store, plan.widest(), groups, collator),
            mean_tokens=plan.num_tokens / batches.batches_per_epoch,
            valid_share=stores.valid_share,
            record=TaskRecord(kind="embed", max_length=self.run_file.data.max_length),
            valid_data=stores.valid.identity,
            best_by="score",
            compares_rows=True,
        )

    def _stores(self, tokenizer: Tokenizer) -> Stores[Store]:
        """Return the tokenized training and validation pairs; each text has the special tokens of a single text."""
        length, extra = self.run_file.data.max_length, tokenizer.special_tokens.num_added()
        if length < extra + 1:
            raise InputError(
                f"[data] max_length is {length}; a text with its start and end token needs at least {extra + 1}"
            )
        stores = self.pairs(one_sided(tokenizer), extra=(extra, extra))
        if len(stores.valid) < 2:
            raise InputError("[data] valid: got 1 pair; recall needs at least 2 pairs")
        return stores

    def _spec(self, tokenizer: Tokenizer) -> Model:
        initial, pool = self.setup.initial, self.task_table(EmbedTask).pool
        if pool is None and initial is not None and initial.record.kind == "embed" and initial.spec.head is not None:
            return self.setup.build_spec(source_vocab=tokenizer.vocab_size, head=initial.spec.head)
        # The default pooling depends on the stacks, so the spec is first built with a placeholder head.
        model = self.setup.build_spec(source_vocab=tokenizer.vocab_size, head=vector_head(pool="mean"))
        return with_head(model, vector_head(pool=pool or default_pool(model)))

    def _validator(self, store: Store, collator: InputCollator) -> Callable[[nn.Module], Validation]:
        """Return the validation function: loss per pair, and mean recall@1 of both directions, on validation pairs."""
        groups = store_groups(store)
        budget = max(self.run_file.train.batch_tokens, 2 * self.run_file.data.max_length)
        plan = contrastive_plan(store, collator, batch_tokens=budget, seed=0)

        def validate(module: nn.Module) -> Validation:
            total, count = 0.0, 0
            rows, firsts, seconds = [], [], []

            def run(pairs: Indices, batch: ContrastiveBatch) -> tuple[Tensor, Tensor, Tensor]:
                (loss, _), first_ND, second_ND = batch_loss(
                    module, batch, temperature=self.temperature, start=collator.start
                )
                return loss, first_ND.float(), second_ND.float()

            batches = (collate_contrastive(store, pairs, groups, collator) for pairs in plan.epoch(0))
            keyed = ((batch.rows, batch) for batch in batches)
            for pairs, (loss, first_ND, second_ND) in compute_each(keyed, run, self.setup.device):
                total += float(loss)
                count += len(pairs)
                rows.append(pairs)
                firsts.append(first_ND.numpy())
                seconds.append(second_ND.numpy())
            all_rows = np.concatenate(rows)
            chosen = np.argsort(all_rows)[evenly_spaced(len(store), _MOST_CHOICES)]
            chosen_firsts, chosen_seconds = np.concatenate(firsts)[chosen], np.concatenate(seconds)[chosen]
            recall = recall_at(chosen_firsts, chosen_seconds, groups=groups[all_rows[chosen]])
            return Validation(loss=total / count, score=100 * recall.mean)

        return validate


def batch_loss(
    module: nn.Module, batch: ContrastiveBatch, *, temperature: float, start: int | None
) -> tuple[tuple[Float[Tensor, ""], int], Float[Tensor, "pairs width"], Float[Tensor, "pairs width"]]:
    """Return the summed loss of a batch with its number of pairs, and the vectors of both sides.

    Args:
        module: a Transformer whose head pools each text into one vector.
        batch: the batch, on the device of the module.
        temperature: the number that divides the cosines.
        start: the id that the decoder of a model with two stacks reads, attending to the encoder's output. None means
            a model with one stack.
    """
    assert isinstance(module, Transformer), "a model that embeds texts is a Transformer"
    vectors = []
    for ids_NT, mask_NT in ((batch.ids, batch.mask), (batch.other_ids, batch.other_mask)):
        start_N1 = None if start is None else ids_NT.new_full((len(ids_NT), 1), start)
        vectors.append(module(ids_NT, start_N1, mask=mask_NT).logits)
    first_ND, second_ND = vectors
    return contrastive_loss(first_ND, second_ND, batch.groups, temperature=temperature), first_ND, second_ND


def contrastive_loss(
    vectors_ND: Float[Tensor, "pairs width"],
    other_ND: Float[Tensor, "pairs width"],
    groups_N: Int64[Tensor, " pairs"],
    *,
    temperature: float,
) -> tuple[Float[Tensor, ""], int]:
    """Return the summed contrastive loss: cross-entropy of each text's partner among all texts of the other side.

    The loss is the mean of both directions. All other pairs of the batch are negatives, except those of the same group.

    Args:
        vectors_ND: the vectors of the first texts; their lengths are ignored.
        other_ND: the vectors of the second texts, in the order of `vectors_ND`.
        groups_N: the group number of each pair; pairs of one group have the same meaning and are no negatives.
        temperature: the positive number that divides the cosines.

    Returns:
        The sum over the pairs in nats, as a float32 scalar, and the number of pairs.

    Raises:
        InputError: the temperature is not positive.

    Source: arXiv 1705.00652, section 4.4 (in-batch negatives); arXiv 1807.03748, equation 4;
        arXiv 2103.00020, figure 3 (both directions).
    """
    if not temperature > 0:
        raise InputError(f"temperature is {temperature}; expected a positive number, such as 0.05")
    # In fp32, since a small temperature would enlarge the rounding errors of 16 bits.
    with torch.autocast(vectors_ND.device.type, enabled=False):
        first_ND, second_ND = F.normalize(vectors_ND.float(), dim=1), F.normalize(other_ND.float(), dim=1)
        logits_NN = first_ND @ second_ND.T / temperature
        own_N = torch.arange(len(logits_NN), device=logits_NN.device)
        same_NN = groups_N[:, None] == groups_N
        logits_NN = logits_NN.masked_fill(same_NN & (own_N[:, None] != own_N), float("-inf"))
        forward, backward = (F.cross_entropy(logits, own_N, reduction="sum") for logits in (logits_NN, logits_NN.T))
        return (forward + backward) / 2, len(own_N)
