"""Loading of a Hugging Face checkpoint into a module, or one report of all faults of its config and tensors.

A slot is an entry of the module's state dict. Tensor names of the files are converted to the family's spelling.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead import spec
from clearhead.base.errors import LONGEST_LINE, MOST_FAULTS, InputError, did_you_mean, shorten
from clearhead.base.mapped_files import MappedFile, refuse_altered_files, set_mapped_files
from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.files.quantization import PackedFiles, find_quantization, is_packed
from clearhead.checkpoints.hf.files.tensor_files import FLOATS, TensorFiles, read_config
from clearhead.checkpoints.hf.mapping import config as configs
from clearhead.checkpoints.hf.mapping.family import Family, Values, Variant
from clearhead.checkpoints.hf.mapping.tensor_rules import BoundRule, bind
from clearhead.checkpoints.hf.pooling import Pooling, has_pooling, read_pooling, with_head
from clearhead.core import Transformer, build
from clearhead.fast.memory import refuse_load
from clearhead.fast.stored import WeightForm, store
from clearhead.spec.tasks.record import LabelKind, TaskRecord
from clearhead.spec.tasks.registry import find_task

# Most rows of a table that is computed again for comparison.
MOST_ROWS = 2**16
KeepMapped = Callable[[str, torch.dtype], bool]


@dataclass(frozen=True)
class LoadedModule:
    """A module that was loaded from a checkpoint.

    Args:
        module: the module in evaluation mode.
        task: the task of the module's outputs.
        config: the content of config.json.
        family, variant: the family of the checkpoint, and the transformers class.
        prefix: the prefix of the stacks' tensors in the file.
        notes: remarks for the user that are not faults.
        unused: tensors that files of the class may hold and the class does not use; they are saved again.
        pooling: the head and settings of sentence-transformers. None means that the checkpoint has none.
    """

    module: Transformer
    task: TaskRecord
    config: dict[str, Any]
    family: Family
    variant: Variant
    prefix: str = ""
    notes: tuple[str, ...] = ()
    unused: Mapping[str, Tensor] = field(default_factory=dict)
    pooling: Pooling | None = None


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose headers were read and checked, and from which tensors are read one at a time.

    Args:
        loaded: the checkpoint, with its module on the meta device.
        file_tensors: the tensors of the files.
        sources: the source of each entry of the module's state dict.
    """

    loaded: LoadedModule
    file_tensors: _FileTensors
    sources: tuple[_SlotSource, ...]

    @property
    def files(self) -> tuple[MappedFile, ...]:
        """The mapped files, in the state in which their headers were read."""
        return tuple(self.file_tensors.files.mapped.values())

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype in the files for each entry of the module's state dict, by address."""
        pooled = {} if self.loaded.pooling is None else self.loaded.pooling.tensors
        return {
            **{address: self.file_tensors.dtype(source) for source in self.sources for address in source.bound.ours},
            **{address: tensor.dtype for address, tensor in pooled.items()},
        }

    def tensors(self, keep: KeepMapped = lambda *_: False) -> Iterator[tuple[str, Tensor]]:
        """Yield the address and the tensor of each entry of the module's state dict, in the dtype of the file.

        Each tensor is a new tensor or has a separate memory mapping, whose pages are freed with the tensor.

        Args:
            keep: function that returns True if the caller keeps the tensor of an address in its dtype. Such a tensor
                stays in the mapping of the whole file, if its rule moves no bytes.

        Raises:
            InputError: a file was changed on disk meanwhile.
        """
        for source in self.sources:
            dtype = self.file_tensors.dtype(source)
            is_kept = source.bound.is_view and any(keep(address, dtype) for address in source.bound.ours)
            yield from zip(source.bound.ours, self.file_tensors.read(source, is_kept=is_kept), strict=True)
        if self.loaded.pooling is not None:
            yield from self.loaded.pooling.tensors.items()
        refuse_altered_files(self.files)


def open_checkpoint(directory: Path, *, config: Mapping[str, Any] | None = None) -> OpenCheckpoint:
    """Read the headers of a checkpoint, and find the tensors for the state dict of its module.

    Args:
        directory: the folder with config.json and safetensors.
        config: the content of config.json. None means that the file is read.

    Raises:
        InputError: a config key is not supported, the module has no place for a tensor or lacks one, or shapes differ.
            All faults are in one report.
    """
    config = dict(config or read_config(directory))
    family = registry.find_family(config)
    files = TensorFiles(directory)
    if is_packed(config):
        # Tensors are dequantized while they are read, and saved dequantized.
        files, config = PackedFiles(directory), {key: config[key] for key in config if key != "quantization_config"}
    parsed = configs.parse(family, config)
    _refuse_quantized(directory, config, files)
    # The modules of sentence-transformers replace the head of the class.
    is_pooled = has_pooling(directory)
    variant = (
        registry.headless_variant(family) if is_pooled else registry.choose_variant(family, config, frozenset(files))
    )
    family = family.with_layout(files)
    file_tensors = _FileTensors.of(family, variant, files)
    values = _decide_tying(file_tensors, parsed.values)
    faults = list(parsed.faults)
    module = None
    if not faults:
        try:
            module = build(family.spec_of(values, variant), device="meta")
        except InputError as error:
            faults.append(error.as_fault)
        except (RuntimeError, OverflowError, ArithmeticError) as error:
            faults.append(f"config.json: no model can have these sizes: {str(error).splitlines()[0]}")
    if module is None:
        raise InputError.from_faults(faults, subject=str(directory))
    sources = file_tensors.sources(module, is_tied=bool(values.get("tie_word_embeddings")), faults=faults)
    unused = file_tensors.account_for_unused(module.spec, faults)
    if faults:
        raise InputError.from_faults(faults, subject=str(directory))
    task = _read_task(variant, config, module.spec.num_outputs or 0)
    loaded = LoadedModule(
        module.eval(), task, config, family, variant, file_tensors.prefix, tuple(file_tensors.notes), unused
    )
    return OpenCheckpoint(_with_pooling(loaded, directory) if is_pooled else loaded, file_tensors, tuple(sources))


def load_module(
    directory: Path, *, config: Mapping[str, Any] | None = None, form: WeightForm | None = None
) -> LoadedModule:
    """Load a module with its weights from a Hugging Face checkpoint, one tensor at a time.

    Args:
        directory: the folder with config.json and safetensors.
        config: the content of config.json. None means that the file is read.
        form: the form in which the module holds its weights. None means float32, whatever the dtype of the files.

    Raises:
        InputError: same cases as in `open_checkpoint`, or the weights do not fit into memory.
    """
    checkpoint = open_checkpoint(directory, config=config)
    module = checkpoint.loaded.module
    plan = (form or WeightForm()).plan(module, checkpoint.dtypes())
    is_mapped = not isinstance(checkpoint.file_tensors.files, PackedFiles)
    refuse_load(module, plan, checkpoint.dtypes(), directory, is_mapped=is_mapped)
    store(module, plan.formats)
    state: dict[str, Tensor] = {}
    for address, tensor in checkpoint.tensors(plan.keeps):
        state |= plan.hold(address, tensor)
    module.load_state_dict(state, strict=True, assign=True)
    if is_mapped and any(plan.keeps(*each) for each in checkpoint.dtypes().items()):
        set_mapped_files(module, checkpoint.files)
    return checkpoint.loaded


def _refuse_quantized(directory: Path, config: Mapping[str, Any], files: TensorFiles) -> None:
    kind = find_quantization(config, {name: header.dtype for name, header in files.headers.items()})
    if kind is not None:
        raise InputError(
            f"{directory}: the weights are quantized as {kind}, which is not supported; "
            "use the original checkpoint without quantization"
        )


def _with_pooling(loaded: LoadedModule, directory: Path) -> LoadedModule:
    model = loaded.module.spec
    top = model.encoder or model.decoder
    assert top is not None, "a validated model has a stack"
    if model.encoder is not None and model.decoder is not None:
        raise InputError(f"{directory}: pooling needs a model with one stack, got an encoder and a decoder")
    positions = loaded.config.get("max_position_embeddings", loaded.config.get("n_positions"))
    pooling = read_pooling(directory, width=top.width, positions=positions)
    task = TaskRecord(kind="embed", max_length=pooling.max_length, prompt=pooling.prompt)
    slots = {address: torch.empty(tensor.shape, device="meta") for address, tensor in pooling.tensors.items()}
    return replace(loaded, module=with_head(loaded.module, pooling.head, slots), task=task, pooling=pooling)


def bind_rules(family: Family, variant: Variant, prefix: str, module: Transformer) -> tuple[list[BoundRule], list[str]]:
    """Return the tensor rules that a family applies to a module, and the module's addresses without a rule."""
    stacks = (replace(rule, theirs=tuple(prefix + name for name in rule.theirs)) for rule in family.rules)
    return bind((*stacks, *variant.rules), module.state_dict(), module.spec)


@dataclass(frozen=True)
class _SlotSource:
    """A tensor rule, and the names of the tensors in the files that it converts; without names it makes zeros."""

    bound: BoundRule
    names: tuple[str, ...]


@dataclass(frozen=True)
class _FileTensors:
    """Tensors of a checkpoint's files by the names that the family uses; `used` records the names that were read."""

    family: Family
    variant: Variant
    files: TensorFiles
    prefix: str
    names: dict[str, str]
    used: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    overruled: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(family: Family, variant: Variant, files: TensorFiles) -> _FileTensors:
        """Return the tensors of files; detect the family's prefix in their names, and map old names of norms."""
        prefix = family.prefix_of(variant)
        prefixed = bool(prefix) and any(name.startswith(prefix) for name in files)
        spelled = {re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name): name for name in files}
        spelled = {re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", new): name for new, name in spelled.items()}
        return _FileTensors(family, variant, files, prefix if prefixed else "", spelled)

    def __getitem__(self, name: str) -> Tensor:
        return self.files[self.names[name]]

    def are_equal(self, first: str, second: str) -> bool:
        """Return whether two tensors of the files are equal bit for bit."""
        return self.files.is_same(self.names[first], self.names[second])

    def table_names(self, is_tied: bool) -> list[str]:
        """Return all names that the token embedding may have."""
        names = [self.prefix + name for name in (self.family.table, *self.family.table_copies)]
        return [*names, self.variant.output] if is_tied and self.variant.output else names

    def sources(self, module: Transformer, *, is_tied: bool, faults: list[str]) -> list[_SlotSource]:
        """Return the source of each entry of a module's state dict, and append faults to the list."""
        bounds, without_rule = bind_rules(self.family, self.variant, self.prefix, module)
        assert not without_rule, f"{self.family.model_type} has no rule for {without_rule}"
        sources = []
        for bound in bounds:
            groups = [self._alternatives(group, is_tied) for group in bound.theirs]
            missing = [group[0] for group, names in zip(bound.theirs, groups, strict=True) if not names]
            if not missing:
                sources.append(_SlotSource(bound, tuple(self._take(names, faults) for names in groups)))
                self._check_shapes(sources[-1], groups[0][-1], faults)
            elif bound.zeros:
                sources.append(_SlotSource(bound, ()))
            else:
                faults += [f"'{name}' is missing" for name in missing]
        return sources

    def _check_shapes(self, source: _SlotSource, shown: str, faults: list[str]) -> None:
        """Append a fault if the tensors of a rule do not have the shapes that its slots need."""
        theirs = [torch.empty(self._shape(name), device="meta") for name in source.names]
        try:
            tensors = source.bound.load(theirs)
        except ValueError as error:
            faults.append(f"'{shown}' has the shape {self._shape(shown)}; {error}")
            return
        if any(tensor.shape != shape for tensor, shape in zip(tensors, source.bound.slots.shapes, strict=True)):
            needs = list(source.bound.save_shape())
            faults.append(f"'{shown}' has the shape {self._shape(shown)}, the config needs {needs}")

    def dtype(self, source: _SlotSource) -> torch.dtype:
        """Return the dtype of the module tensors that a rule makes from the files."""
        dtypes = [FLOATS[self.files.headers[self.names[name]].dtype] for name in source.names]
        return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32

    def read(self, source: _SlotSource, *, is_kept: bool) -> list[Tensor]:
        """Return the module tensors that a tensor rule makes from the files.

        If `is_kept`, tensors that need no conversion are views into the mapping of the whole file.
        """
        dtype, bound = self.dtype(source), source.bound
        if not source.names:
            return list(map(torch.zeros, bound.slots.shapes))
        read = self.files.__getitem__ if is_kept else self.files.read
        tensors = bound.load([read(self.names[name]).to(dtype) for name in source.names])
        # Kernels read matrices row by row. Views stay in the mapped file, whatever their strides.
        return tensors if bound.is_view else [tensor.contiguous() for tensor in tensors]

    def _shape(self, name: str) -> list[int]:
        return list(self.files.headers[self.names[name]].shape)

    def _alternatives(self, group: tuple[str, ...], is_tied: bool) -> list[str]:
        tables = self.table_names(is_tied)
        wanted: Sequence[str] = tables if group[0] == tables[0] else group
        # If the stacks have separate token embeddings, the output may be tied to the last one.
        if (
            is_tied
            and self.variant.output
            and self.family.table_copies
            and group[0] == self.prefix + self.family.table_copies[-1]
        ):
            wanted = (*group, self.variant.output)
        return [name for name in wanted if name in self.names]

    def _take(self, names: Sequence[str], faults: list[str]) -> str:
        """Choose one of the names of a tensor in the files: the last, but of equal token embeddings the family's."""
        self.used.update(names)
        chosen = names[0] if names[0] == self.prefix + self.family.table else names[-1]
        for name in names:
            if name != chosen and not self.are_equal(chosen, name):
                if name in self.table_names(True):
                    faults.append(f"'{name}' and '{chosen}' must be the same token embedding, but differ")
                else:
                    self.notes.append(f"'{name}' differs from '{chosen}' and is not used")
                    self.overruled[name] = self[name]
        dtype = self.files.headers[self.names[chosen]].dtype
        if dtype not in FLOATS:
            faults.append(f"'{chosen}' holds {dtype}, not floating-point numbers; quantized weights are not supported")
        return chosen

    def account_for_unused(self, model: spec.Model, faults: list[str]) -> dict[str, Tensor]:
        """Append faults for tensors without a slot; return the unused tensors that files of the class may hold."""
        unused, computed = dict(self.overruled), dict[str, Tensor]()
        known = [name for name in self.used if name in self.names]
        constants = {constant.name: constant for constant in self.family.constants}
        for name in self.names.keys() - self.used:
            stem = name.removeprefix(self.prefix)
            if any(re.fullmatch(pattern, stem) for pattern in self.family.ignored):
                continue
            if stem in constants:
                shape = self._shape(name)
                has_rows = len(shape) == 2 and shape[0] <= MOST_ROWS
                table = constants[stem].compute(model, shape[0] if has_rows else 0)
                if table.shape != self[name].shape or not torch.allclose(
                    table, self[name].float(), rtol=0.0, atol=1e-6
                ):
                    faults.append(f"'{name}' differs from the table that clearhead computes")
                computed[name] = self[name]
            elif self.variant.leaves_unused(name):
                unused[name] = self[name]
            else:
                # Searching for the nearest name is slow: skip names that the report leaves out.
                hint = did_you_mean(name, known) if len(faults) < MOST_FAULTS else ""
                faults.append(f"'{name}' is not a tensor of {self.variant.classes[0]}{hint}")
        if unused:
            names = shorten(", ".join(sorted(unused)), LONGEST_LINE)
            self.notes.append(f"tensors that are kept for saving, but not used by {self.variant.classes[0]}: {names}")
        return unused | computed


def _decide_tying(file_tensors: _FileTensors, values: Values) -> Values:
    """Return the config values, with `tie_word_embeddings` corrected where the tensors contradict it."""
    output = file_tensors.variant.output
    tables = [
        file_tensors.prefix + name for name in (file_tensors.family.table, *reversed(file_tensors.family.table_copies))
    ]
    table = next((name for name in tables if name in file_tensors.names), tables[0])
    if output is None or "tie_word_embeddings" not in values:
        return values
    is_tied, has_output = values["tie_word_embeddings"], output in file_tensors.names
    if is_tied and has_output and table in file_tensors.names and not file_tensors.are_equal(table, output):
        file_tensors.notes.append(f"'{output}' and '{table}' differ, so they are not tied, although the config says so")
        return values.with_values(tie_word_embeddings=False)
    if file_tensors.family.is_tied_by_file and not has_output:
        return values.with_values(tie_word_embeddings=True)
    return values


def _read_task(variant: Variant, config: Mapping[str, Any], count: int) -> TaskRecord:
    if not find_task(variant.task).has_labels:
        return TaskRecord(kind=variant.task, repeats=variant.repeats)
    names = config.get("id2label") or {}
    labels = tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(count))
    kind: LabelKind = "regression" if count == 1 else "single_label"
    if config.get("problem_type") == "multi_label_classification":
        kind = "multi_label"
    labels = () if kind == "regression" else labels
    return TaskRecord(kind=variant.task, labels=labels, label_kind=kind, is_paired=None, repeats=variant.repeats)


def hf_tensors(bounds: Sequence[BoundRule], tensors: Mapping[str, Tensor]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Convert a module's tensors to checkpoint tensors; yield each with the names under which it may be saved."""
    for bound in bounds:
        yield from zip(bound.theirs, bound.save([tensors[address] for address in bound.ours]), strict=True)
