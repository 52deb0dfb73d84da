"""From a run file to a training run: the one place where tokenizers, data, model, optimizer and loop meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from clearhead.core import Transformer, build
from clearhead.data import (
    Batch,
    PairBatches,
    PairSource,
    PairStore,
    cached_tokenizers,
    collate,
    parse_pair_source,
    prepare_pairs,
    read_pairs,
)
from clearhead.errors import InputError
from clearhead.machine import choose_device, choose_precision
from clearhead.spec import Model
from clearhead.text import Tokenizer, TokenizerPair
from clearhead.train.averaging import average_checkpoints
from clearhead.train.checkpoint import (
    checkpoint_damage,
    checkpoint_folder,
    checkpoint_steps,
    saved_choices,
)
from clearhead.train.loop import Trainer
from clearhead.train.loss import token_loss
from clearhead.train.optimizer import build_optimizer
from clearhead.train.preflight import TokenSide, preflight
from clearhead.train.progress import Progress, SeveralProgress, TensorBoardProgress
from clearhead.train.random_state import seed_everything
from clearhead.train.recipe import resolve_spec
from clearhead.train.ring import save_averaged
from clearhead.train.run_directory import RunDirectory, is_run_directory, measured_weights, open_run
from clearhead.train.runfile import RunFile, to_toml
from clearhead.train.runfile_sections import Section
from clearhead.train.schedule import KINDS_WITH_AN_END, build_schedule
from clearhead.train.settings import EarlyStop, TrainResult, TrainSettings, planned_steps
from clearhead.train.text_file import read_text_file
from clearhead.train.validation import ValidateTranslation, joined, spread
from clearhead.weights import load_tensors

# What may change when a run goes on: how long it takes and what it keeps, never what its next step computes.
MAY_DIFFER = (
    "train.run",
    "train.steps",
    "train.epochs",
    "train.seconds",
    "train.device",
    "train.threads",
    "train.save_every",
    "train.keep",
    "train.early_stop.patience",
    "train.tensorboard",
)

PLANNED_STEPS = "planned_steps"

# A vocabulary without a size of its own takes every entry of the text.
EVERY_ENTRY = 2**31 - 8
BYTE_ENTRIES = 260


def train_run(run_file: RunFile, *, resume: bool, progress: Progress) -> TrainResult:
    """Train what a run file describes.

    Args:
        run_file: the checked run file.
        resume: whether to continue from the newest sound checkpoint of its run directory.
        progress: told what happens.

    Raises:
        InputError: the data, the sizes or the run directory cannot be used; nothing is left behind.
        RunFailure: training itself failed; the last checkpoint is whole.
        Interrupted: a signal asked to stop; everything is saved.
    """
    run = Path(run_file.train.run)
    device = choose_device(run_file.train.device)
    with open_run(run, configuration=to_toml(run_file), resume=resume, may_differ=MAY_DIFFER) as directory:
        if run_file.train.tensorboard:
            progress = SeveralProgress([progress, TensorBoardProgress(run / "tensorboard")])
        choices = (saved_choices(run) or {}) if resume else {}
        tokenizers = _tokenizers(run_file, directory, choices)
        data = _prepare(run_file, tokenizers, progress)
        spec = _settle_spec(run_file, directory, tokenizers, resume)
        precision = choices.get("precision") or choose_precision(run_file.train.precision, device)
        settings = _settings(run_file, precision, tokenizers)
        seed_everything(settings.seed)
        module = build(spec, device=device)
        trainer = _trainer(run_file, settings, module, tokenizers, data, progress, directory)
        if resume:
            _mention_moved_schedule(run_file, choices, trainer.settings, progress)
        else:
            _preflight(trainer, data, tokenizers, module, run_file.train.batch_tokens)
        return trainer.run(resume=resume)


def average_run(run: Path, last: int) -> tuple[Path, list[int]]:
    """Average the weights of a run's newest checkpoints, members of its averaging ring included.

    Args:
        run: the run directory.
        last: how many, at least 1.

    Returns:
        The file of the averaged weights, and the steps averaged, in rising order.

    Raises:
        InputError: the folder is no run, is in use, or has fewer sound checkpoints.
    """
    if not is_run_directory(run):
        raise InputError(f"{run} is not a run directory")
    found = {step: weights for step, weights in _kept_weights(run).items() if step > 0}
    if last > len(found):
        kept = ", ".join(map(str, sorted(found))) or "none"
        raise InputError(
            f"{run} has {len(found)} sound checkpoints to average (steps: {kept}), but --last asks for {last}: ask for "
            "fewer, or train with a larger train.keep"
        )
    steps = sorted(found)[-last:]
    with open_run(run, resume=True):
        weights = average_checkpoints([load_tensors(found[step]) for step in steps])
        file = save_averaged(run, weights, {"steps": steps, "valid_loss": None, "valid_score": None})
    return file, steps


def _kept_weights(run: Path) -> dict[int, Path]:
    """Return the weights file of every step that has a sound one: in the averaging ring or in a checkpoint."""
    found: dict[int, Path] = {}
    ring = run / "checkpoints" / "ring"
    for folder in sorted(ring.glob("step-*")) + [checkpoint_folder(run, step) for step in checkpoint_steps(run)]:
        if checkpoint_damage(folder) is None:
            found[int(folder.name.removeprefix("step-"))] = measured_weights(folder)
    return found


@dataclass(frozen=True)
class _Data:
    """The prepared pairs of a run."""

    train: PairStore
    valid: PairStore
    valid_source: PairSource


def _tokenizers(run_file: RunFile, directory: RunDirectory, choices: dict[str, object]) -> TokenizerPair:
    """Train, load or find again the tokenizers, and refuse others than the checkpoint was trained with."""
    section = run_file.tokenizer
    remembered = choices.get("tokenizer")
    if section.path is not None:
        tokenizers = _load_tokenizers(Path(section.path))
    elif remembered is not None:
        tokenizers = TokenizerPair.load(directory.path)
    else:
        assert section.kind is not None, "the rules of the run file want kind or path"
        tokenizers = cached_tokenizers(
            _source(run_file.data.train),
            kind=section.kind,
            vocab_size=section.vocab_size or (BYTE_ENTRIES if section.kind == "byte" else EVERY_ENTRY),
            joint=section.joint is not False,
        )
    if remembered is not None and tokenizers.fingerprint != remembered:
        where = section.path or directory.path
        raise InputError(
            f"the checkpoints in {directory.path} were trained with another tokenizer than the one in {where} "
            f"(fingerprint {str(remembered)[:12]}, not {tokenizers.fingerprint[:12]}): restore that tokenizer, "
            "or start a new run directory"
        )
    tokenizers.save(directory.path)
    return tokenizers


def _load_tokenizers(path: Path) -> TokenizerPair:
    if path.is_dir():
        return TokenizerPair.load(path)
    one = Tokenizer.load(path)
    return TokenizerPair(source=one, target=one, joint=True)


def _source(table: Section) -> PairSource:
    return parse_pair_source(table.model_dump(exclude_none=True))


def _prepare(run_file: RunFile, tokenizers: TokenizerPair, progress: Progress) -> _Data:
    data = run_file.data
    stores = {}
    for name, table in (("train", data.train), ("valid", data.valid)):
        try:
            stores[name] = prepare_pairs(
                _source(table),
                tokenizers,
                max_length=data.max_length,
                max_ratio=data.max_ratio,
                training=name == "train",
            )
        except InputError as error:
            raise InputError(f"[data] {name}: {error}") from None
        progress.message(f"{name}: {stores[name].report}")
    return _Data(stores["train"], stores["valid"], _source(data.valid))


def _settle_spec(run_file: RunFile, directory: RunDirectory, tokenizers: TokenizerPair, resume: bool) -> Model:
    """Write the spec of a new run; a run that goes on must mean the same model."""
    spec = resolve_spec(
        run_file.model,
        source_vocab=tokenizers.source.vocab_size,
        target_vocab=tokenizers.target.vocab_size,
        joint=tokenizers.joint,
    )
    file = directory.path / "spec.json"
    if resume and file.exists() and Model.from_json(read_text_file(file, "spec file")) != spec:
        raise InputError(f"{file} describes another model than the run file: restore the one it was started with")
    directory.write_text("spec.json", spec.to_json())
    return spec


def _settings(run_file: RunFile, precision: Literal["fp32", "bf16"], tokenizers: TokenizerPair) -> TrainSettings:
    train = run_file.train
    early = train.early_stop
    assert train.validate_every is not None, "the run file fills its defaults"
    return TrainSettings(
        run=Path(train.run),
        steps=train.steps,
        epochs=train.epochs,
        seconds=train.seconds,
        accumulate=train.accumulate,
        clip=train.clip,
        validate_every=train.validate_every,
        save_every=train.save_every,
        keep=train.keep,
        average=train.average or 0,
        ema=train.ema,
        early_stop=EarlyStop("score" if early.metric == "bleu" else "loss", early.patience)
        if early is not None
        else None,
        seed=train.seed,
        precision=precision,
        threads=train.threads,
        score_name="BLEU",
        choices={"tokenizer": tokenizers.fingerprint},
    )


def _trainer(
    run_file: RunFile,
    settings: TrainSettings,
    module: Transformer,
    tokenizers: TokenizerPair,
    data: _Data,
    progress: Progress,
    directory: RunDirectory,
) -> Trainer[Batch]:
    """Put the parts of a training run together."""
    train = run_file.train
    device = next(module.parameters()).device
    batches = PairBatches(data.train, batch_tokens=train.batch_tokens, seed=train.seed)
    progress.message(f"padding: {100 * batches.plan.padding_waste(0):.1f} % of the positions in a batch")
    assert train.learning_rate is not None and train.warmup is not None and train.weight_decay is not None

    steps = planned_steps(settings, batches.batches_per_epoch)
    settings = replace(settings, choices={**settings.choices, PLANNED_STEPS: steps or 0})

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return token_loss(module, batch.to(device), label_smoothing=train.label_smoothing)

    return Trainer(
        module=module,
        optimizer=build_optimizer(
            module,
            kind=train.optimizer,
            learning_rate=train.learning_rate,
            weight_decay=train.weight_decay,
            betas=train.betas,
            eps=train.eps,
        ),
        schedule=build_schedule(
            train.schedule,
            learning_rate=train.learning_rate,
            warmup=train.warmup,
            steps=steps,
            width=_width(module.spec),
        ),
        batches=batches,
        loss=loss,
        validate=_validation(run_file, tokenizers, data, device),
        settings=settings,
        progress=progress,
        directory=directory,
    )


def _mention_moved_schedule(
    run_file: RunFile, choices: Mapping[str, object], settings: TrainSettings, progress: Progress
) -> None:
    """A run may go on for longer than it was planned, but then a schedule with an end is another schedule."""
    before, now = choices.get(PLANNED_STEPS), settings.choices[PLANNED_STEPS]
    if run_file.train.schedule in KINDS_WITH_AN_END and before is not None and before != now:
        progress.message(
            f"the {run_file.train.schedule} schedule now ends at step {now:,} instead of {before:,}: from here on the "
            "learning rates differ from those of the run as it was planned"
        )


def _validation(run_file: RunFile, tokenizers: TokenizerPair, data: _Data, device: torch.device) -> ValidateTranslation:
    scored = spread(len(data.valid), run_file.train.bleu_sentences or 0)
    texts = [pair[1] for pair in read_pairs(data.valid_source)] if scored else []
    references = [texts[data.valid.lines[row]] for row in scored]
    return ValidateTranslation(
        store=data.valid,
        tokenizers=tokenizers,
        references=[joined(text) for text in references] if tokenizers.target.kind == "split" else references,
        scored=scored,
        batch_tokens=max(run_file.train.batch_tokens, run_file.data.max_length),
        device=device,
    )


def _width(spec: Model) -> int:
    top = spec.decoder or spec.encoder
    assert top is not None, "a validated model has a stack"
    return top.width


def _preflight(
    trainer: Trainer[Batch], data: _Data, tokenizers: TokenizerPair, module: Transformer, batch_tokens: int
) -> None:
    """Check everything once more against the model that was built, and say what the run will cost."""
    store = data.train
    rows = PairBatches(store, batch_tokens=batch_tokens, seed=trainer.settings.seed).plan.epoch(0)
    widths = [len(part) * int(store.source_lengths[part].max() + store.target_lengths[part].max()) for part in rows]
    tokens = int(store.source_lengths.sum() + store.target_lengths.sum()) + 2 * len(store)
    report = preflight(
        module,
        trainer.loss,
        collate(store, rows[widths.index(max(widths))]),
        trainer.settings,
        sides=_sides(data, tokenizers, module),
        mean_tokens=tokens / len(rows),
        batches_per_epoch=len(rows),
    )
    for line in report.lines():
        trainer.progress.message(line)


def _sides(data: _Data, tokenizers: TokenizerPair, module: Transformer) -> list[TokenSide]:
    """Describe both sides of the data as the module will see them, the longest of training and validation."""
    stores = (data.train, data.valid)
    roles = ("pad", "bos", "eos")
    sides = []
    for name, tokenizer, rows in (
        ("source", tokenizers.source, module.num_source_ids),
        ("target", tokenizers.target, module.num_target_ids),
    ):
        parts = [store.source_side if name == "source" else store.target_side for store in stores]
        sides.append(
            TokenSide(
                name=name,
                largest_id=max(int(part.ids.max()) for part in parts),
                vocabulary_rows=rows,
                longest=max(int(part.lengths.max()) for part in parts) + 1,
                max_positions=module.max_positions,
                special_ids={role: getattr(tokenizer, f"{role}_id") for role in roles},
            )
        )
    return sides
