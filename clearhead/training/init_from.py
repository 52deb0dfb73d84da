"""The initial model of a run ([task] init): a trained run or a Hugging Face checkpoint, and what the task can reuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from clearhead.base.errors import InputError, key, within
from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.checkpoint import HFCheckpoint, label_config
from clearhead.checkpoints.hf.loading import bind_rules
from clearhead.checkpoints.hf.mapping import config as configs
from clearhead.checkpoints.hf.mapping.family import Variant
from clearhead.checkpoints.hf.mapping.tensor_rules import BoundRule
from clearhead.checkpoints.reference import SPEC_FILE, ModelReference
from clearhead.checkpoints.runs.directory import ModelFiles, find_files, origin_of, read_task
from clearhead.checkpoints.weights.files import load_merged, load_module_from
from clearhead.core import Transformer, build
from clearhead.spec import Head, Model, validate
from clearhead.spec.tasks.record import Repeats, TaskRecord
from clearhead.spec.tasks.registry import find_task, tasks_with_outputs
from clearhead.text.pair import TokenizerPair
from clearhead.training.progress.reports import TrainingProgress

HEAD = "head."


@dataclass(frozen=True)
class InitialModel:
    """A trained model whose weights a run starts from.

    Attributes:
        name: for messages.
        spec: of the model.
        tokenizers: that it was trained with.
        record: of the task that it was trained for.
        tensors: loads its weights, by address.
        hf_checkpoint: the Hugging Face checkpoint that it is or was fine-tuned from; None if there is none.
    """

    name: str
    spec: Model
    tokenizers: TokenizerPair
    record: TaskRecord
    tensors: Callable[[], Mapping[str, Tensor]]
    hf_checkpoint: HFCheckpoint | None = None

    def has_labels_of(self, record: TaskRecord) -> bool:
        """Return whether the model was trained for the same task with the same labels."""
        fields = ("kind", "labels", "label_kind", "number_mean", "number_scale")
        return all(getattr(self.record, name) == getattr(record, name) for name in fields)

    def match_labels(self, kind: str, labels: Sequence[str]) -> tuple[str, ...] | None:
        """Return the labels of the model, in its order, if they are those of the data; else None."""
        if self.record.kind != kind or not self.record.labels or sorted(self.record.labels) != sorted(labels):
            return None
        return self.record.labels

    @property
    def has_vocabulary_head(self) -> bool:
        """Whether the head returns scores over the vocabulary."""
        return self.spec.head is not None and find_task(self.record.kind).outputs == "vocabulary"

    def vocabulary_head(self, kind: str) -> Head | None:
        """Return the vocabulary head of the checkpoint's family, for a checkpoint saved without one."""
        for task_kind in dict.fromkeys((kind, *(task.kind for task in tasks_with_outputs("vocabulary")))):
            head_and_repeats = self.family_head(TaskRecord(kind=task_kind))
            if head_and_repeats is not None:
                return head_and_repeats[0]
        return None

    def family_head(self, record: TaskRecord) -> tuple[Head, Repeats | None] | None:
        """Return the head that the checkpoint's family has for a task, and its decoder's input.

        Args:
            record: of the task; it has one output for each label.

        Returns:
            None if the family has none: the trained model could not be saved as a checkpoint of that family.
        """
        if self.hf_checkpoint is None:
            return None
        family = registry.find_family(self.hf_checkpoint.config)
        config = {key: value for key, value in self.hf_checkpoint.config.items() if key != "architectures"}
        parsed = configs.parse(family, {**config, **label_config(record)})
        for variant in self._variants(record.kind):
            head = variant.head(parsed.values)
            if head is None:
                continue
            try:
                validate(self.spec.model_copy(update={"head": head}))
            except InputError:
                continue
            return head, variant.repeats
        return None

    def _variants(self, kind: str) -> list[Variant]:
        assert self.hf_checkpoint is not None
        variants = registry.find_family(self.hf_checkpoint.config).variants
        has_two = self.spec.encoder is not None and self.spec.decoder is not None
        return [variant for variant in variants if variant.task == kind and (variant.has_decoder or not has_two)]

    def head_tensors(self, module: Transformer, kind: str) -> dict[str, Tensor]:
        """Return tensors of a new head that are in the checkpoint though its own class does not use them.

        Args:
            module: with the new head.
            kind: of the task.
        """
        if self.hf_checkpoint is None or self.hf_checkpoint.loaded is None:
            return {}
        family, spare = self.hf_checkpoint.loaded.family, self.hf_checkpoint.loaded.unused
        tensors: dict[str, Tensor] = {}
        for variant in self._variants(kind):
            for rule in bind_rules(family, variant, family.prefix_of(variant), module)[0]:
                if rule.ours[0].startswith(HEAD) and tensors.keys().isdisjoint(rule.ours):
                    tensors |= _spare_tensors(rule, spare, family.prefix)
        return tensors


def _spare_tensors(rule: BoundRule, spare: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a rule, by their addresses; none if one is missing or has another shape."""
    theirs = []
    for group in rule.theirs:
        # A class without a head saves its tensors without the prefix.
        spellings = [spelling for name in group for spelling in (name, name.removeprefix(prefix))]
        theirs += [spare[name] for name in spellings if name in spare][:1]
    if len(theirs) < len(rule.theirs):
        return {}
    ours = rule.load(theirs)
    if [tensor.shape for tensor in ours] != [*rule.slots.shapes]:
        return {}
    return dict(zip(rule.ours, ours, strict=True))


def find_initial_model(reference: str, source: str | None, target: str | None) -> InitialModel | None:
    """Return the trained model that [task] init names; None if the run starts from scratch.

    Args:
        reference: a run directory, a saved model, a checkpoint folder or a name on the hub; empty: from scratch.
        source, target: language codes of the task, for a multilingual checkpoint.

    Raises:
        InputError: there is no such model; or a language code is missing, unknown or not supported by the model.
    """
    if not reference:
        return None
    with within(key("task.init")):
        located = ModelReference.locate(reference)
        folder = located.checkpoint_folder()
        initial = _load_run_model(find_files(located)) if folder is None else _load_checkpoint_model(reference, folder)
        return _select_languages(initial, source, target)


def load_resumed_model(run: Path) -> InitialModel:
    """Return the model of a resumed run; the model that it started from is not needed.

    Raises:
        InputError: a file of the run is missing.
    """
    return _load_folder_model(str(run), run, dict)


def _load_checkpoint_model(reference: str, folder: Path) -> InitialModel:
    hf_checkpoint = HFCheckpoint.load(folder)
    pretrained = hf_checkpoint.loaded
    assert pretrained is not None, "a checkpoint is of the family that it came in"
    tokenizers = hf_checkpoint.tokenizers.pair
    tokenizers.check_rows(pretrained.module.num_source_ids, pretrained.module.num_target_ids, reference)
    return InitialModel(
        name=reference,
        spec=pretrained.module.spec,
        tokenizers=tokenizers,
        record=pretrained.task,
        tensors=pretrained.module.state_dict,
        hf_checkpoint=hf_checkpoint,
    )


def _load_run_model(files: ModelFiles) -> InitialModel:
    return _load_folder_model(str(files.weights), files.folder, lambda: _load_tensors(files))


def _load_tensors(files: ModelFiles) -> Mapping[str, Tensor]:
    model = Model.from_file(files.folder / SPEC_FILE)
    return load_module_from(model, load_merged(files.weights), source=str(files.weights)).state_dict()


def _load_folder_model(name: str, folder: Path, tensors: Callable[[], Mapping[str, Tensor]]) -> InitialModel:
    model = Model.from_file(folder / SPEC_FILE)
    tokenizers, record, origin = TokenizerPair.load(folder), read_task(folder), origin_of(folder)
    hf_checkpoint = None
    if origin is not None:
        hf_checkpoint = HFCheckpoint.from_origin(origin, build(model, device="meta"), record, tokenizers)
    return InitialModel(name, model, tokenizers, record, tensors, hf_checkpoint)


def _select_languages(initial: InitialModel, source: str | None, target: str | None) -> InitialModel:
    """Return the model for one pair of languages, if its checkpoint has several languages."""
    if initial.hf_checkpoint is None or not initial.hf_checkpoint.tokenizers.languages:
        if source is not None or target is not None:
            raise InputError("the model has no language codes: remove from_language and to_language")
        return initial
    if initial.spec.encoder is None or initial.spec.decoder is None:
        return initial
    hf_checkpoint = initial.hf_checkpoint.for_languages(source, target)
    return replace(initial, tokenizers=hf_checkpoint.tokenizers.pair, hf_checkpoint=hf_checkpoint)


def take_weights(
    module: Transformer, initial: InitialModel, record: TaskRecord, progress: TrainingProgress
) -> list[str]:
    """Copy the weights of an initial model into a module, except those of a head that the task replaces.

    Args:
        module: with the stacks of the initial model.
        initial: the model to copy from.
        record: of the task to train.
        progress: receives a message about copied, new and unused tensors.

    Returns:
        The addresses of the new tensors.

    Raises:
        InputError: a tensor is missing.
    """
    tensors, wanted = dict(initial.tensors()), module.state_dict()
    same_head = module.spec.head == initial.spec.head
    if find_task(record.kind).learns_head:
        same_head &= initial.has_labels_of(record)
    copied = {
        name: tensor for name, tensor in tensors.items() if name in wanted and (same_head or not _is_head_tensor(name))
    }
    copied |= {} if same_head else initial.head_tensors(module, record.kind)
    new = [name for name in wanted if name not in copied]
    lost = [name for name in new if same_head or not _is_head_tensor(name)]
    if lost:
        raise InputError(f"[task] init: the weights of {initial.name} lack {', '.join(lost)}")
    with torch.no_grad():
        for name, tensor in copied.items():
            wanted[name].copy_(tensor)
    dropped = len(tensors.keys() - copied.keys())
    progress.message(
        f"from {initial.name}: {len(copied)} tensors copied, {len(new)} new ({', '.join(new) or 'none'}), "
        f"{dropped} not used"
    )
    return new


def _is_head_tensor(name: str) -> bool:
    return name.startswith(HEAD)
