"""Text embedding: contrastive training of a bi-encoder on pairs of texts.

Shape suffixes: N pairs, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.core import Transformer
from clearhead.data.batches.contrastive import (
    ContrastiveBatch,
    collate_contrastive,
    contrastive_plan,
    store_groups,
)
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.plans import training_batches
from clearhead.data.stores.pairs import PairStore
from clearhead.data.stores.tokenizers import cached_tokenizers
from clearhead.errors import InputError
from clearhead.evaluate.result import Validation
from clearhead.evaluate.retrieval import recall_at
from clearhead.presets.task_heads import vector_head, with_head
from clearhead.spec import Model
from clearhead.task import TaskRecord
from clearhead.tasks.embed.data import EmbedTask
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.losses.contrastive import contrastive_loss
from clearhead.training.progress.reports import Progress
from clearhead.training.runfile.sections import RunFile
from clearhead.training.tasks.base import DataSide, Stores, TaskParts, TaskSetup, evenly_spaced, one_sided, vocabulary
from clearhead.training.tasks.translate import pair_source, prepare_parallel

# Recall depends on the number of candidates, so that number is fixed.
_MOST_CHOICES = 2_000


def parts(setup: TaskSetup) -> TaskParts[ContrastiveBatch]:
    """Prepare pairs, tokenizer and model of a contrastive run.

    Raises:
        InputError: the data, the tokenizer or the sizes cannot be used.
    """
    run_file, train = setup.run_file, setup.run_file.train
    assert isinstance(run_file.task, EmbedTask), "the run file is that of its task"
    temperature = run_file.task.temperature
    if train.label_smoothing:
        raise InputError("[train] label_smoothing has no effect for the task 'embed'; remove it")
    tokenizer = setup.find_tokenizer(lambda: _train_tokenizer(run_file))
    stores = _prepare(run_file, tokenizer, setup.progress)
    store = stores.train
    model = _spec(setup, tokenizer)
    collator = InputCollator.of(model, tokenizer)
    plan = contrastive_plan(store, collator, batch_tokens=train.batch_tokens, seed=train.seed)
    groups = store_groups(store)
    batches = training_batches(store, plan, lambda rows: collate_contrastive(store, rows, groups, collator))
    setup.progress.message(
        f"{len(store) / batches.batches_per_epoch:.0f} pairs in a batch, each contrasted with all others; "
        f"padding: {100 * plan.padding_waste(0):.1f} % of the positions"
    )

    def loss(module: nn.Module, batch: ContrastiveBatch) -> tuple[Tensor, int]:
        return batch_loss(module, batch.to(setup.device), temperature=temperature, start=collator.start)[0]

    return TaskParts(
        tokenizers=one_sided(tokenizer),
        spec=model,
        batches=batches,
        loss=loss,
        validate=_validator(setup, stores.valid, collator, temperature),
        sides=[
            DataSide.of(name, tokenizer, texts, [part.lengths + tokenizer.special_tokens.num_added() for part in texts])
            for name, texts in (
                ("source", [store.sources for store in stores]),
                ("target", [store.targets for store in stores]),
            )
        ],
        widest=collate_contrastive(store, plan.widest(), groups, collator),
        mean_tokens=plan.num_tokens / batches.batches_per_epoch,
        valid_share=stores.valid_share,
        record=TaskRecord(kind="embed", max_length=run_file.data.max_length),
        valid_data=stores.valid.identity,
        score_name="recall@1",
        best_by="score",
    )


def _spec(setup: TaskSetup, tokenizer: Tokenizer) -> Model:
    initial, can_keep_head = setup.initial, setup.chosen_pool is None
    if can_keep_head and initial is not None and initial.record.kind == "embed" and initial.spec.head is not None:
        return setup.build_spec(source_vocab=tokenizer.vocab_size, head=initial.spec.head)
    # The usual pooling depends on the stacks of the spec, so the first spec has any head.
    model = setup.build_spec(source_vocab=tokenizer.vocab_size, head=vector_head(pool="mean"))
    return with_head(model, vector_head(pool=setup.pool(model)))


def _validator(
    setup: TaskSetup, store: PairStore, collator: InputCollator, temperature: float
) -> Callable[[nn.Module], Validation]:
    """Return the validation on held-out pairs: the loss of a pair in nats, and the mean recall@1 of both directions."""
    groups = store_groups(store)
    budget = max(setup.run_file.train.batch_tokens, 2 * setup.run_file.data.max_length)
    plan = contrastive_plan(store, collator, batch_tokens=budget, seed=0)

    def validate(module: nn.Module) -> Validation:
        total, count = 0.0, 0
        rows, firsts, seconds = [], [], []
        for batch in (collate_contrastive(store, part, groups, collator) for part in plan.epoch(0)):
            (loss, labels), first_ND, second_ND = batch_loss(
                module, batch.to(setup.device), temperature=temperature, start=collator.start
            )
            total += float(loss)
            count += labels
            rows.append(batch.rows)
            firsts.append(first_ND.float().cpu().numpy())
            seconds.append(second_ND.float().cpu().numpy())
        place = np.argsort(np.concatenate(rows))[evenly_spaced(len(store), _MOST_CHOICES)]
        chosen = np.concatenate(rows)[place]
        found = recall_at(np.concatenate(firsts)[place], np.concatenate(seconds)[place], groups=groups[chosen])
        return Validation(loss=total / count, score=100 * found.mean)

    return validate


def batch_loss(
    module: nn.Module, batch: ContrastiveBatch, *, temperature: float, start: int | None
) -> tuple[tuple[Float[Tensor, ""], int], Float[Tensor, "pairs width"], Float[Tensor, "pairs width"]]:
    """Return the summed loss of a batch with the count of its pairs, and the vectors of both sides.

    Args:
        module: a Transformer whose head pools.
        batch: on the module's device.
        temperature: divides the cosines.
        start: the input of the decoder of a two-stack model, which attends to the text through its memory.
    """
    assert isinstance(module, Transformer), "embedding needs the module that was built for it"
    vectors = []
    for ids_NT, mask_NT in ((batch.ids, batch.mask), (batch.other_ids, batch.other_mask)):
        start_N1 = None if start is None else ids_NT.new_full((len(ids_NT), 1), start)
        vectors.append(module(ids_NT, start_N1, mask=mask_NT).logits)
    first_ND, second_ND = vectors
    return contrastive_loss(first_ND, second_ND, batch.groups, temperature=temperature), first_ND, second_ND


def _train_tokenizer(run_file: RunFile) -> Tokenizer:
    kind, size = vocabulary(run_file)
    return cached_tokenizers(pair_source(run_file.data.train), kind=kind, vocab_size=size, joint=True).source


def _prepare(run_file: RunFile, tokenizer: Tokenizer, progress: Progress) -> Stores[PairStore]:
    """Return the prepared pairs; either text has the special tokens of a text by itself."""
    length, extra = run_file.data.max_length, tokenizer.special_tokens.num_added()
    if length < extra + 1:
        raise InputError(
            f"[data] max_length is {length}; a text between its start and end token needs at least {extra + 1}"
        )
    stores = prepare_parallel(run_file, one_sided(tokenizer), progress, extra=(extra, extra))
    if len(stores.valid) < 2:
        raise InputError("[data] valid: there is 1 pair; recall needs at least 2 to choose from")
    return stores
