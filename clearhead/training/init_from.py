"""The initial model of a run ([task] init): a trained run or a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from clearhead.checkpoints.weights.files import SavedTensors, open_merged
from clearhead.checkpoints.weights.lora import find_merged_dtypes
from clearhead.core import Transformer, build
from clearhead.fast.stored import widen_weights
from clearhead.spec import Head, Model, validate
from clearhead.spec.tasks.record import Repeats, TaskRecord
from clearhead.spec.tasks.registry import find_task, tasks_with_outputs
from clearhead.text.pair import TokenizerPair
from clearhead.training.progress.reports import TrainingProgress

HEAD = "head."


@dataclass(frozen=True)
class InitialModel:
    """The trained model from which a run starts.

    Attributes:
        name: the name of the model in messages.
        spec: the spec of the model.
        tokenizers: the tokenizers of the model.
        record: the record of the task for which the model was trained.
        tensors: a function that reads the weights one at a time, each with its address, in the dtype of its file;
            quantized weights become fp32.
        dtypes: a function that returns the dtypes of these weights by address.
        hf_checkpoint: the Hugging Face checkpoint of the model, or the one from which it was fine-tuned. None means
            that there is none.
    """

    name: str
    spec: Model
    tokenizers: TokenizerPair
    record: TaskRecord
    tensors: Callable[[], Iterable[tuple[str, Tensor]]]
    dtypes: Callable[[], Mapping[str, torch.dtype]]
    hf_checkpoint: HFCheckpoint | None = None

    def has_labels_of(self, record: TaskRecord) -> bool:
        """Return whether the model was trained for the same task with the same labels."""
        fields = ("kind", "labels", "label_kind", "number_mean", "number_scale")
        return all(getattr(self.record, name) == getattr(record, name) for name in fields)

    def match_labels(self, kind: str, labels: Sequence[str]) -> tuple[str, ...] | None:
        """Return the labels of the model, in its order, if they equal the labels of the data; else None."""
        if self.record.kind != kind or not self.record.labels or sorted(self.record.labels) != sorted(labels):
            return None
        return self.record.labels

    @property
    def has_vocabulary_head(self) -> bool:
        """True if the head returns scores over the vocabulary."""
        return self.spec.head is not None and find_task(self.record.kind).outputs == "vocabulary"

    def vocabulary_head(self, kind: str) -> Head | None:
        """Return the vocabulary head of the Hugging Face checkpoint's family; None if there is no such head."""
        for task_kind in dict.fromkeys((kind, *(task.kind for task in tasks_with_outputs("vocabulary")))):
            head_and_repeats = self.family_head(TaskRecord(kind=task_kind))
            if head_and_repeats is not None:
                return head_and_repeats[0]
        return None

    def family_head(self, record: TaskRecord) -> tuple[Head, Repeats | None] | None:
        """Return the head of the checkpoint's family for a task, and the decoder input that it needs.

        Args:
            record: the record of the task; the head has one output for each label.

        Returns:
            The head and `repeats` of its decoder input; None if the family has no head for the task. A model with
            another head cannot be saved as a checkpoint of this family.
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
        """Return the tensors of a new head that the checkpoint contains, although its model class does not use them.

        Args:
            module: the module with the new head.
            kind: the kind of the task.
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
    """Return the parameters that a rule makes of unused checkpoint tensors; empty if one is missing or misshapen."""
    theirs = []
    for group in rule.theirs:
        # Checkpoints of a class without a head have tensor names without the prefix.
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
        reference: a run directory, a saved model, a checkpoint folder or a name on the hub; empty means from scratch.
        source, target: the language codes of the task, for a multilingual checkpoint. None means no code.

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
    """Return the initial model of a resumed run, read from the run directory; the original model is not needed.

    Raises:
        InputError: a file of the run is missing.
    """
    return _load_folder_model(str(run), run)


def _load_checkpoint_model(reference: str, folder: Path) -> InitialModel:
    hf_checkpoint, opened = HFCheckpoint.read_headers(folder)
    pretrained = opened.loaded
    tokenizers = hf_checkpoint.tokenizers.pair
    tokenizers.check_rows(pretrained.module.num_source_ids, pretrained.module.num_target_ids, reference)
    return InitialModel(
        name=reference,
        spec=pretrained.module.spec,
        tokenizers=tokenizers,
        record=pretrained.task,
        tensors=opened.tensors,
        dtypes=opened.dtypes,
        hf_checkpoint=hf_checkpoint,
    )


def _load_run_model(files: ModelFiles) -> InitialModel:
    return _load_folder_model(str(files.weights), files.folder, files.weights)


def _load_folder_model(name: str, folder: Path, weights: Path | None = None) -> InitialModel:
    """Return the model of a folder; `weights` is the file of its weights, or None if they are not needed."""
    model = Model.from_file(folder / SPEC_FILE)
    tokenizers, record, origin = TokenizerPair.load(folder), read_task(folder), origin_of(folder)
    hf_checkpoint = None
    if origin is not None:
        hf_checkpoint = HFCheckpoint.from_origin(origin, build(model, device="meta"), record, tokenizers)

    def tensors() -> Iterable[tuple[str, Tensor]]:
        return () if weights is None else widen_weights(open_merged(model, weights)[0])

    def dtypes() -> Mapping[str, torch.dtype]:
        return {} if weights is None else find_merged_dtypes(SavedTensors(weights).outlines)

    return InitialModel(name, model, tokenizers, record, tensors, dtypes, hf_checkpoint)


def _select_languages(initial: InitialModel, source: str | None, target: str | None) -> InitialModel:
    """Return the initial model with the tokenizers of one language pair, if its checkpoint is multilingual."""
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
        module: the module to fill; it has the stacks of the initial model.
        initial: the initial model.
        record: the record of the task to train.
        progress: the display that receives a message about copied, new and unused tensors.

    Returns:
        The addresses of the new tensors.

    Raises:
        InputError: a tensor is missing.
    """
    wanted, copied, names = module.state_dict(), set[str](), set[str]()
    same_head = _keeps_head(module.spec, initial, record)
    with torch.no_grad():
        for name, tensor in initial.tensors():
            names.add(name)
            if name in wanted and is_copied(name, module.spec, initial, record):
                wanted[name].copy_(tensor)
                copied.add(name)
        for name, tensor in {} if same_head else initial.head_tensors(module, record.kind).items():
            wanted[name].copy_(tensor)
            copied.add(name)
    new = [name for name in wanted if name not in copied]
    lost = [name for name in new if same_head or not _is_head_tensor(name)]
    if lost:
        raise InputError(f"[task] init: {initial.name} lacks the tensors {', '.join(lost)}: use a complete model")
    progress.message(
        f"from {initial.name}: {len(copied)} tensors copied, {len(new)} new ({', '.join(new) or 'none'}), "
        f"{len(names - copied)} not used"
    )
    return new


def is_copied(name: str, model: Model, initial: InitialModel, record: TaskRecord) -> bool:
    """Return whether a run takes a tensor of this address from its initial model.

    Args:
        name: the address of the tensor.
        model: the spec of the model to train.
        initial: the initial model.
        record: the record of the task to train.
    """
    return not _is_head_tensor(name) or _keeps_head(model, initial, record)


def _keeps_head(model: Model, initial: InitialModel, record: TaskRecord) -> bool:
    is_same = model.head == initial.spec.head
    return is_same and (not find_task(record.kind).learns_head or initial.has_labels_of(record))


def _is_head_tensor(name: str) -> bool:
    return name.startswith(HEAD)
