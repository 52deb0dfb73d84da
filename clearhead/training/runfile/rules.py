"""Rules between the keys of a run file, and the defaults that depend on other keys.

The rules check the valid values, so a fault in one key does not hide a fault between others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

from clearhead.base.errors import InputError
from clearhead.data.sources.run_file_tables import Form, Section
from clearhead.data.task_tables import data_of
from clearhead.spec.tasks.base import Family
from clearhead.spec.tasks.registry import find, kinds
from clearhead.training.optim.schedules import SCHEDULES_WITH_AN_END, SCHEDULES_WITH_WARMUP
from clearhead.training.runfile.faults import Address, Fault, name_of, only_for
from clearhead.training.runfile.sections import SUBWORD_KINDS, RunFile, Train

LENGTHS = ("steps", "epochs")
_DEVICES = ("auto", "cpu", "cuda", "mps")
Kind = TypeVar("Kind", bound=Section)


# The keys of [model] that are allowed with [task] init: they change the training, not the architecture.
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


def check_rules(run: RunFile, faulty: Collection[Address] = ()) -> list[Fault]:
    """Return every fault between keys with valid values.

    Args:
        run: the run file, with placeholders for keys that have a fault of their own.
        faulty: the addresses of these keys; a rule that depends on a placeholder would report what is not there.
    """
    of_any_task = (_lora, _sizes, _positions, _length, _schedule, _snapshots, _device)
    of_the_task = (_task, _data, _tokenizer, _model, _validation)
    rules = of_any_task if has_fault(faulty, "task", "kind") else of_the_task + of_any_task
    faults = [fault for rule in rules for fault in rule(run)]
    return [fault for fault in faults if not (fault.address[0] == "data" and has_fault(faulty, *fault.address[:2]))]


def has_fault(faulty: Collection[Address], table: str, key: str) -> bool:
    """Return whether a key, something inside it, or its whole table has a fault."""
    return any(address[:2] in ((table,), (table, key)) for address in faulty)


def _fault(address: str, sentence: str) -> Fault:
    """Return a fault; its message starts with the name of the key."""
    parts: Address = tuple(address.split("."))
    return Fault(parts, f"{name_of(parts)} {sentence}")


def _without_effect(table: str, keys: Sequence[str], why: str) -> Iterator[Fault]:
    """Yield one fault for all keys of a table that have no effect."""
    if len(keys) == 1:
        yield _fault(f"{table}.{keys[0]}", f"has no effect {why}; remove it")
    elif keys:
        yield _fault(f"{table}.{keys[0]}", f"and {', '.join(keys[1:])} have no effect {why}; remove them")


def _task(run: RunFile) -> Iterator[Fault]:
    for key, sentence in run.task.faults(family_of(run)):
        yield _fault(f"task.{key}", sentence)


def _data(run: RunFile) -> Iterator[Fault]:
    data = run.data
    for name, table in (("train", data.train), ("valid", data.valid)):
        try:
            if isinstance(table, Form):
                table.as_source()
        except InputError as error:
            yield _fault(f"data.{name}", f"is not usable: {error}")
    for key, sentence in data.faults():
        yield _fault(f"data.{key}", sentence)
    if data.stream and not data_of(run.task.kind).streams:
        yield _fault("data.stream", only_for(run.task.kind, [kind for kind in kinds() if data_of(kind).streams]))
    elif data.stream and run.train.epochs is not None:
        yield _fault(
            "train.epochs",
            "counts passes, and how many steps a pass over a streamed text has is known at its end only: give 'steps' "
            "or 'seconds'; the beginning of the run says about how many steps a pass has",
        )


def family_of(run: RunFile) -> Family:
    """Return the family of the model."""
    return run.model.family or find(run.task.kind).families[0]


def _tokenizer(run: RunFile) -> Iterator[Fault]:
    tokenizer = run.tokenizer
    if run.task.init:
        yield from _without_effect("tokenizer", _given(tokenizer), "with [task] init, which has its own tokenizer")
        return
    if tokenizer.kind is None and tokenizer.path is None:
        yield _fault("tokenizer", "needs 'kind' (train one on the training text) or 'path' (use an existing one)")
    if tokenizer.path is not None:
        yield from _without_effect("tokenizer", [key for key in _given(tokenizer) if key != "path"], "with 'path'")
    elif tokenizer.joint is not None and not find(run.task.kind).has_two_vocabularies:
        yield _fault("tokenizer.joint", f"has no effect for the task '{run.task.kind}', which has one tokenizer")
    elif tokenizer.kind == "byte" and tokenizer.vocab_size is not None:
        yield _fault("tokenizer.vocab_size", "has no effect for kind 'byte', which always has the 256 bytes; remove it")


def _model(run: RunFile) -> Iterator[Fault]:
    model = run.model
    kind, allowed = run.task.kind, find(run.task.kind).families
    if run.task.init:
        keys = [key for key in _given(model) if key not in (*DROPOUTS, "parts")]
        yield from _without_effect("model", keys, "with [task] init, which has its own model")
        return
    if model.family is not None and model.family not in allowed:
        families = " or ".join(f"'{family}'" for family in allowed)
        yield _fault("model.family", f"must be {families} for the task '{kind}', received '{model.family}'")
    if model.spec is not None:
        others = [key for key in _given(model) if key not in ("spec", "family", "parts")]
        yield from _without_effect("model", others, "with 'spec', which describes the whole model")
    one_stack = [key for key in ("encoder_layers", "decoder_layers") if getattr(model, key) is not None]
    if one_stack and family_of(run) != "encoder-decoder":
        yield _fault(
            f"model.{one_stack[0]}", f"is for two stacks; a model with only one ({family_of(run)}) takes 'layers'"
        )
    if model.layers is not None and model.encoder_layers is not None and model.decoder_layers is not None:
        yield _fault("model.layers", "has no effect with 'encoder_layers' and 'decoder_layers'; remove it")
    if model.tie == "all" and run.tokenizer.joint is False:
        yield _fault("model.tie", "= 'all' shares one table between both sides, which needs [tokenizer] joint = true")


def _lora(run: RunFile) -> Iterator[Fault]:
    if run.lora is None:
        return
    if not run.task.init:
        yield _fault("lora", "adapts a trained model, so it needs one: name it as [task] init")
    if run.train.optimizer == "muon":
        yield _fault("train.optimizer", "= 'muon' makes updates orthogonal, which does not suit low-rank matrices")


def _sizes(run: RunFile) -> Iterator[Fault]:
    model = run.model
    if model.width and model.heads and model.head_size is None and model.width % model.heads:
        yield _fault("model.heads", f"must divide the width: {model.width} is not a multiple of {model.heads}")
    if model.heads and model.kv_heads and model.heads % model.kv_heads:
        yield _fault("model.kv_heads", f"must divide the heads: {model.heads} is not a multiple of {model.kv_heads}")


def _positions(run: RunFile) -> Iterator[Fault]:
    limit = run.model.max_positions
    if limit is not None and limit < run.data.max_length:
        yield _fault(
            "model.max_positions",
            f"= {limit} is less than [data] max_length = {run.data.max_length}: longer sequences have no positions",
        )


def _length(run: RunFile) -> Iterator[Fault]:
    train = run.train
    if not _has_known_end(train) and train.seconds is None:
        yield _fault("train", "must say how long to train: steps, epochs or seconds")
    if train.steps is not None and train.epochs is not None:
        yield _fault("train.epochs", "conflicts with 'steps': give one of both; 'seconds' may end either early")


def _has_known_end(train: Train) -> bool:
    """Whether the number of steps is planned, so that schedules and shares have a meaning."""
    return train.steps is not None or train.epochs is not None


def _schedule(run: RunFile) -> Iterator[Fault]:
    train = run.train
    only_time = train.seconds is not None and not _has_known_end(train)
    if train.schedule in SCHEDULES_WITH_AN_END and only_time:
        yield _fault(
            "train.schedule",
            f"= '{train.schedule}' ends at a known step, so it needs 'steps' or 'epochs', not only 'seconds'",
        )
    if train.schedule in SCHEDULES_WITH_WARMUP and train.warmup == 0:
        yield _fault("train.warmup", f"must be at least 1 for the schedule '{train.schedule}', received the number 0")
    if train.schedule in SCHEDULES_WITH_AN_END and train.steps is not None and (train.warmup or 0) >= train.steps:
        yield _fault("train.warmup", f"= {train.warmup} must be less than the {train.steps} steps of the run")
    if train.planned_minutes is not None and train.steps is None:
        yield _fault("train.planned_minutes", "has no effect without 'steps', which it was planned for; remove it")
    for key in ("warmup", "validate_every"):
        if only_time and isinstance(share := getattr(train, key), float):
            yield _fault(
                f"train.{key}",
                f"= {share} is a share of all steps, which 'seconds' alone leaves open: give a number of steps",
            )


def _snapshots(run: RunFile) -> Iterator[Fault]:
    if not run.train.snapshots:
        keys = [key for key in _given(run.train) if key == "snapshot_megabytes"]
        yield from _without_effect("train", keys, "with 'snapshots' = 0, which keeps none")


def _validation(run: RunFile) -> Iterator[Fault]:
    train, task = run.train, find(run.task.kind)
    if train.label_smoothing and not task.smooths_labels:
        yield _fault("train.label_smoothing", f"has no effect for the task '{task.kind}'; remove it")
    if not task.scores_translations:
        if train.bleu_sentences is not None:
            yield _fault("train.bleu_sentences", f"has no effect for the task '{run.task.kind}'; remove it")
        if train.early_stop is not None and train.early_stop.metric == "bleu":
            yield _fault("train.early_stop.metric", "= 'bleu' is for the task 'translate'; use 'score' or 'loss'")
    if train.early_stop is not None and train.early_stop.metric == "bleu" and train.bleu_sentences == 0:
        yield _fault(
            "train.bleu_sentences", "= 0 conflicts with early_stop metric 'bleu', which needs sentences to translate"
        )


def _device(run: RunFile) -> Iterator[Fault]:
    if run.train.device.split(":")[0] not in _DEVICES:
        yield _fault(
            "train.device", f"must be one of {', '.join(_DEVICES)} or cuda:N, received the text '{run.train.device}'"
        )
    if run.train.threads is not None:
        # Only now: it loads torch, for which a fault in the run file should not wait.
        from clearhead.base.machine import too_many_threads

        fault = too_many_threads(run.train.threads)
        if fault is not None:
            yield _fault("train.threads", f"= {fault}")


def _given(section: Section) -> list[str]:
    """Return the keys of a table whose values are not the defaults."""
    return [name for name, info in type(section).model_fields.items() if getattr(section, name) != info.default]


def fill_defaults(run: RunFile) -> RunFile:
    """Fill every key whose default depends on other keys; filling twice changes nothing."""
    return run.model_copy(
        update={
            "task": _filled(run.task, run.task.defaults(family_of(run))),
            "data": _filled(run.data, run.data.defaults()),
            "tokenizer": _filled(run.tokenizer, _tokenizer_defaults(run)),
            "model": _filled(run.model, _model_defaults(run)),
            "train": _filled(run.train, _train_defaults(run)),
        }
    )


def _filled(section: Kind, defaults: dict[str, object]) -> Kind:
    return section.model_copy(update={key: value for key, value in defaults.items() if getattr(section, key) is None})


def _tokenizer_defaults(run: RunFile) -> dict[str, object]:
    if run.tokenizer.kind is None:
        return {}
    defaults: dict[str, object] = {"joint": True} if find(run.task.kind).has_two_vocabularies else {}
    if run.tokenizer.kind in SUBWORD_KINDS:
        defaults["vocab_size"] = 8000
    return defaults


def _model_defaults(run: RunFile) -> dict[str, object]:
    if run.model.spec is not None or run.task.init:
        return {}
    two_vocabularies = run.tokenizer.joint is False
    tie = {"tie": "decoder"} if two_vocabularies else {}
    return {"family": family_of(run), "preset": "transformer", **tie}


def _train_defaults(run: RunFile) -> dict[str, object]:
    train = run.train
    defaults: dict[str, object] = {"learning_rate": _learning_rate(train), "warmup": _warmup(train)}
    if find(run.task.kind).scores_translations:
        stops_by_bleu = train.early_stop is not None and train.early_stop.metric == "bleu"
        defaults["bleu_sentences"] = 500 if stops_by_bleu else 100
    return defaults


def _learning_rate(train: Train) -> float:
    return 1.0 if train.schedule == "paper" else 1e-3


def _warmup(train: Train) -> int | float:
    if train.schedule in ("constant", "plateau"):
        return 0
    if train.schedule in SCHEDULES_WITH_AN_END:
        return 0.1
    return max(1, min(2000, train.steps // 5)) if train.steps is not None else 1000
