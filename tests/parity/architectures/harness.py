"""The same tiny model here and in transformers: how it is made, run and compared.

Legend: B batch, T tokens, U target tokens, V outputs.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.loading import LoadedModule, bind_rules, load_module
from clearhead.checkpoints.hf.mapping.family import Variant
from clearhead.checkpoints.hf.saving import module_to_hf_tensors
from clearhead.core import Output, Transformer
from clearhead.data.batches.inputs import shift_right
from clearhead.spec.tasks.record import Repeats

B, T, U = 3, 13, 7
transformers.logging.disable_progress_bar()


@dataclass(frozen=True)
class Case:
    """One tiny model of a family.

    Args:
        name: of the family, and what is special.
        model_type: of its config.
        config: sizes and choices; distinct primes where the family allows.
        cls: the class of transformers; None: the record's first.
        pad: the id at padded places, and nowhere else.
        reads_ids: whether the class counts positions off the ids, in place of the mask.
        buffers: names of buffers that hold something learned.
        attention: which of its forms of attention transformers takes.
        is_head: another head on stacks that the family's first case has tried.
    """

    name: str
    model_type: str
    config: Mapping[str, Any]
    cls: str | None = None
    pad: int = 0
    reads_ids: bool = False
    buffers: tuple[str, ...] = ()
    vocab: int = 37
    attention: str = "eager"
    is_head: bool = False

    @property
    def variant(self) -> Variant:
        variants = registry.all_families()[self.model_type].variants
        return next(variant for variant in variants if class_of(self) in variant.classes)


def all_cases() -> list[Case]:
    """Every case of every module beside this one: the settings as they are, and each class with the first of them."""
    cases: list[Case] = []
    for path in sorted((Path(__file__).parent / "cases").glob("*.py")):
        module = importlib.import_module(f"tests.parity.architectures.cases.{path.stem}")
        cases += module.CASES
    first: dict[str, Case] = {}
    for case in cases:
        first.setdefault(case.model_type, case)
    for model_type, case in first.items():
        for variant in registry.all_families()[model_type].variants:
            for cls in variant.classes:
                if cls != case.cls and cls != class_of(case):
                    # An answer has a first and a last token, which their classes count as labels.
                    labels = {"num_labels": 2} if variant.task == "answer" else {}
                    config = {**case.config, **labels}
                    cases.append(replace(case, name=f"{case.name}/{cls}", cls=cls, config=config, is_head=True))
    return cases


def class_of(case: Case) -> str:
    return case.cls or registry.all_families()[case.model_type].variants[0].classes[0]


def theirs_of(case: Case) -> nn.Module:
    """Build the model of transformers with weights that show what is lost: no norm is one, no bias is zero."""
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    config._attn_implementation = case.attention
    model = getattr(transformers, class_of(case))(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        computed = tuple(constant.name for constant in registry.all_families()[case.model_type].constants)
        for name, parameter in model.named_parameters():
            if computed and name.endswith(computed):
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * (0.7 if "embed" in name else parameter.shape[-1] ** -0.5))
        buffers = dict(model.named_buffers())
        for buffer in (buffers[name] for name in case.buffers if name in buffers):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return model


@dataclass
class Pair:
    """Both models, and how each is called."""

    case: Case
    theirs: Any
    loaded: LoadedModule
    folder: Path

    @staticmethod
    def of(case: Case, folder: Path) -> Pair:
        theirs = theirs_of(case)
        theirs.save_pretrained(folder)
        return Pair(case, theirs, load_module(folder), folder)

    @property
    def ours(self) -> Transformer:
        return self.loaded.module

    @property
    def has_memory(self) -> bool:
        return self.ours.encoder is not None and self.ours.decoder is not None

    @property
    def is_pooled(self) -> bool:
        return self.ours.head is not None and self.ours.head.is_pooled

    @property
    def repeats(self) -> Repeats | None:
        return self.loaded.task.repeats

    @property
    def takes_positions(self) -> bool:
        return "position_ids" in inspect.signature(self.theirs.forward).parameters

    def ids(self, rows: int = B, length: int = T, mask: Tensor | None = None) -> Tensor:
        """Ids that never are the padding's; a text that is read twice ends with the id that ends texts."""
        ids = torch.randint(self.case.vocab - 1, (rows, length))
        ids = ids + (ids >= self.case.pad)
        if self.repeats is None:
            return ids
        end = self.theirs.config.eos_token_id
        ids[ids == end] = self.case.vocab - 1
        last = length - 1 if mask is None else last_real(mask)
        ids[torch.arange(rows), last] = end
        return ids

    def targets(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """What our decoder reads: a text of its own, or the same once more."""
        if not self.has_memory:
            return {}
        if self.repeats is None:
            return {"target_ids": self.ids(rows=len(ids), length=U)}
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        start = self.theirs.config.decoder_start_token_id
        again = {"target_ids": shift_right(ids, real, start=None if self.repeats == "last" else start)}
        return again if mask is None else again | {"target_mask": mask}

    def run_theirs(self, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        arguments: dict[str, Any] = {"input_ids": ids, "output_hidden_states": True, **more}
        if mask is not None:
            arguments["input_ids"] = ids.masked_fill(~mask, self.case.pad)
            arguments["attention_mask"] = mask.long()
        return self.theirs(**arguments)

    def run_ours(self, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Output:
        return self.ours(ids, mask=mask, **more)


def last_real(mask: Tensor) -> Tensor:
    """The place of the last real token of each row."""
    return torch.where(mask.expand(B, -1), torch.arange(mask.shape[-1]), -1).argmax(1)


def outputs_of(theirs: Any) -> Tensor:
    """What their class gives: scores, or the last states where it has no head."""
    if "start_logits" in theirs:
        return torch.stack([theirs.start_logits, theirs.end_logits], dim=-1)
    names = ("logits", "prediction_logits", "last_hidden_state")
    return next(theirs[name] for name in names if name in theirs)


def outputs(ours: Output) -> Tensor:
    """What we give in the same shape: a single score of each token has no axis of its own there."""
    if ours.logits is None:
        return ours.hidden
    return ours.logits[..., 0] if ours.logits.shape[-1] == 1 else ours.logits


@contextmanager
def layers_seen(stack: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what the embedding and each layer of a stack give, in the order in which they run."""
    seen: list[Tensor] = []
    modules = [stack.embedding, *stack.layers]
    handles = [module.register_forward_hook(lambda *call: seen.append(call[2])) for module in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def their_gradients(original: Any, folder: Path) -> dict[str, Tensor]:
    """Their gradients in the layout of their files: saved as if they were the weights."""
    theirs = copy.deepcopy(original)
    with torch.no_grad():
        for parameter, source in zip(theirs.parameters(), original.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(parameter) if source.grad is None else source.grad)
    theirs.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def our_gradients(loaded: LoadedModule) -> dict[str, Tensor]:
    """Our gradients under their names; of a tensor with several names the last is what their classes use."""
    module = loaded.module
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in module.named_parameters()
    }
    named = module_to_hf_tensors(module, loaded.family, loaded.variant, loaded.prefix, gradients)
    for names in (
        names for bound in bind_rules(loaded.family, loaded.variant, "", module)[0] for names in bound.theirs
    ):
        if set(names) <= named.keys():
            named |= {name: torch.zeros_like(named[name]) for name in names[:-1]}
    return named


@contextmanager
def no_complaints(*, unless: bool = False) -> Iterator[None]:
    """Fail where transformers logs a warning, unless one is due."""
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert unless or not records, records
