"""Residual stream of one text at every depth, from which the model can run its remaining layers.

Legend: B rows of a batch, T tokens, D width, V outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.core import Sequence, Transformer
from clearhead.core.context import Context
from clearhead.core.stack import Stack
from clearhead.fast.replica import replica
from clearhead.interpret.maps.hook_points import capture


def repeat_rows(sequence: Sequence, rows: int) -> Sequence:
    """Expand a sequence of one row to several equal rows, without a copy."""
    named = {field.name: getattr(sequence, field.name) for field in fields(sequence)}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    return replace(sequence, **{name: value.expand(rows, *value.shape[1:]) for name, value in tensors.items()})


@dataclass(frozen=True)
class Streams:
    """Residual stream of one text at every depth of each stack.

    Args:
        module: model that ran.
        source: input of the first stack, one row.
        target: input of the decoder of a two-stack model. None means one stack.
        before: name of a stack -> its stream before each layer and after the last layer, each [1, tokens, width].
        memory: output of the encoder of a two-stack model. None means one stack.
        hidden: output of the last stack.
    """

    module: Transformer
    source: Sequence
    target: Sequence | None
    before: dict[str, list[Tensor]]
    memory: Float[Tensor, "1 keys memory_width"] | None
    hidden: Float[Tensor, "1 tokens width"]

    @classmethod
    def of(cls, module: Transformer, source: Sequence, target: Sequence | None = None) -> Streams:
        """Run a model on one text, and capture its residual stream.

        Args:
            module: model, of which a replica runs in evaluation mode.
            source: input of the first stack, one row.
            target: input of the decoder of a two-stack model. None means one stack.

        Raises:
            InputError: same as `Transformer.forward`.
        """
        module = replica(module)
        after: dict[str, list[str]] = {}
        for name, stack in (("encoder", module.encoder), ("decoder", module.decoder)):
            if stack is not None:
                after[name] = [f"{name}.layers.{index}.after" for index in stack.order]
        points = [point for name, addresses in after.items() for point in (f"{name}.embedded", *addresses)]
        with torch.no_grad(), capture(module, points) as seen:
            output = module(source, target, head=False)
        before = {}
        for name, addresses in after.items():
            before[name] = [seen.tensor(f"{name}.embedded")]
            for depth, address in enumerate(addresses):
                at_depth = {record.depth: record.tensor for record in seen[address]}
                before[name].append(at_depth[depth])
        return cls(module, source, target, before, output.memory, output.hidden)

    @property
    def top(self) -> str:
        """Name of the last stack, below the head."""
        return "encoder" if self.module.decoder is None else "decoder"

    @property
    def last(self) -> Sequence:
        """Input of the last stack."""
        return self.target or self.source

    @torch.no_grad()
    def continue_from(
        self, stack: str, depth: int, rows: int, x_BTD: Float[Tensor, "rows own_tokens own_width"] | None = None
    ) -> Float[Tensor, "rows tokens width"]:
        """Run the model from a depth on with a batch of equal rows, and return the output of the last stack.

        Args:
            stack: "encoder" or "decoder".
            depth: first layer of the stack to run. Lower layers do not run, nor does the encoder if it is a decoder.
            rows: number of batch rows; edits of activations make them differ.
            x_BTD: stream at this depth. None means the recorded stream in every row.
        """
        memory = self.memory if stack == "decoder" else None
        x_BTD = self._run_on(stack, depth, rows, memory, x_BTD)
        if stack == self.top:
            return x_BTD
        return self._run_on("decoder", 0, rows, x_BTD)

    @torch.no_grad()
    def logits(
        self, hidden_BTD: Float[Tensor, "rows tokens width"], position: int | None
    ) -> Float[Tensor, "rows outputs"]:
        """Return the head's outputs at one position, in float32.

        Args:
            hidden_BTD: outputs of the last stack.
            position: position in the last stack. None means that the head has one output for the whole text.
        """
        assert self.module.head is not None
        if position is None:
            logits_BV: Tensor = self.module.head(hidden_BTD, repeat_rows(self.last, len(hidden_BTD)).mask)
        else:
            logits_BV = self.module.head(hidden_BTD[:, position : position + 1])[:, 0]
        return logits_BV.float()

    def _run_on(self, name: str, depth: int, rows: int, memory: Tensor | None, x_BTD: Tensor | None = None) -> Tensor:
        stack: Stack = getattr(self.module, name)
        is_top = name == self.top
        sequence = repeat_rows(self.last if is_top else self.source, rows)
        mask = None if memory is None else repeat_rows(self.source, len(memory)).mask
        context = Context.of(sequence, memory, mask, None)
        if x_BTD is None:
            x_BTD = self.before[name][depth].expand(rows, -1, -1)
        return stack.continue_from(depth, x_BTD, context)
