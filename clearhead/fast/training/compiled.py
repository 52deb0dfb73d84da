"""Compiled stacks and layers of a training tree: one graph per stack, for one shape or for all shapes.

Calls without gradients, such as validations, run the plain layers, so they add no graph.

Legend: B batch, T tokens, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._dynamo import config, exc
from torch.fx.experimental import _config as shapes

from clearhead.base.errors import InputError
from clearhead.base.hooks import is_watching
from clearhead.base.progress import message
from clearhead.core.attention import Attention
from clearhead.core.context import Context
from clearhead.core.head import Head
from clearhead.core.shapes import States
from clearhead.core.stack import Layer, Stack
from clearhead.fast.replica import override, plain_type
from clearhead.fast.training.gpu_loss import CompiledHead


class NotCompiled(InputError):
    """PyTorch cannot compile a model.

    Args:
        reason: the reason, in words that follow "off:".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"[train] compile = true is impossible: {reason}; set compile = false")
        self.reason = reason


MOST_GRAPHS: Final = 64
"""Maximum number of graphs of one method, for all models of a process; PyTorch raises an error beyond it."""
LEAST_ROWS: Final = 2
"""Minimum number of rows: PyTorch compiles another graph for a size of 1."""


class CompiledMethod:
    """The compiled form of a method, which several stacks or layers share.

    Args:
        method: a method with the arguments of `Stack.continue_from` or `Layer.forward`.
        has_one_shape: True compiles for the shape of the first call; False compiles once for all shapes.

    Attributes:
        is_warm: True after the first pass of a run; a later compilation is reported.
        has_run: True after the first call.
        is_on: False while calls run the plain method.
    """

    def __init__(self, method: Callable[..., Tensor], *, has_one_shape: bool) -> None:
        self.is_warm: bool = False
        self.has_run: bool = False
        self.is_on: bool = True
        # Deterministic: kernels are chosen without timing them, so that a resumed run chooses the same.
        self._run: Callable[..., Tensor] = torch.compile(  # type: ignore[call-overload]
            method,
            fullgraph=True,
            dynamic=not has_one_shape,
            options={"deterministic": True},
            recompile_limit=MOST_GRAPHS,
        )

    def __call__(self, module: nn.Module, *arguments: Any) -> States:
        """Run the method; report a compilation after the first pass."""
        before = count_graphs()
        # Sizes that are equal in the first call, such as rows and tokens, may differ later.
        with shapes.patch(use_duck_shape=False), config.patch(optimize_ddp=False):  # type: ignore[attr-defined]
            try:
                y_BTD = self._run(module, *arguments)
            except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
                raise NotCompiled(_describe(error)) from error
        self.has_run = True
        if self.is_warm and count_graphs() > before:
            rows, tokens, _ = y_BTD.shape
            name = plain_type(module).__name__
            message(f"compiled    {name} again, for {rows} rows of {tokens} tokens: other shapes make other graphs")
        return y_BTD

    def serves(self) -> bool:
        """Return whether a call uses the compiled form: with gradients, and without captures or edits."""
        return self.is_on and torch.is_grad_enabled() and not is_watching()

    @contextlib.contextmanager
    def turn_off(self) -> Iterator[None]:
        """Return a context manager in which all calls run the plain method."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


@dataclass(frozen=True)
class FullBatch:
    """The shape of a full batch of a run whose batches all have the same length.

    Attributes:
        rows: the number of rows.
        tokens: the number of tokens in each row.
        has_mask: True if the batch has a mask of real tokens.
    """

    rows: int
    tokens: int
    has_mask: bool


class CompiledStack(Stack):
    """Stack whose layers run as one graph while gradients are computed."""

    run: CompiledMethod

    def continue_from(self, depth: int, x_BTD: States, context: Context) -> States:
        """Run the layers; the results equal those of the plain stack up to the order of sums."""
        return (
            self.run(self, depth, x_BTD, context) if self.run.serves() else super().continue_from(depth, x_BTD, context)
        )


class CompiledLayer(Layer):
    """Layer that runs as one graph while gradients are computed, so that several processes send them meanwhile."""

    run: CompiledMethod

    def forward(self, x_BTD: States, context: Context) -> States:
        """Run the layer; the results equal those of the plain layer up to the order of sums."""
        return self.run(self, x_BTD, context) if self.run.serves() else super().forward(x_BTD, context)


class UniformStack(Stack):
    """Stack that gives all its calls the form of one graph, by rows of padding and by masks of True.

    Attributes:
        run: the compiled method of the stack or of its layers.
        full: the shape of a full batch. Shorter rows, and rows with a mask that full batches lack, run plain. None
            means that the graph serves all shapes.
        attentions: the attentions whose masks and rotations are computed before the layers, because a recomputed or
            separately compiled layer cannot share them with the others.
    """

    run: CompiledMethod
    full: FullBatch | None
    attentions: tuple[Attention, ...]

    def continue_from(self, depth: int, x_BTD: States, context: Context) -> States:
        """Run the layers, and return the states of the rows without the padding, whose gradients are 0."""
        if not self.run.serves():
            return super().continue_from(depth, x_BTD, context)
        (batch, tokens, _), full = x_BTD.shape, self.full
        if full is None:
            context, rows = fill_masks(context, batch), max(batch, LEAST_ROWS)
        elif batch > full.rows or tokens != full.tokens or full.has_mask != (context.masking.key_mask is not None):
            with self.run.turn_off():
                return super().continue_from(depth, x_BTD, context)
        else:
            rows = max(full.rows, LEAST_ROWS)
        context = pad_context(context, batch, rows)
        for attention in self.attentions:
            if not context.masking.is_only_causal(attention.spec.mask):
                attention.mask(context)
            if attention.spec.position is not None:
                attention.angles(attention.spec.position, context)
        if rows == batch:
            return super().continue_from(depth, x_BTD, context)
        return super().continue_from(depth, _pad_rows(x_BTD, rows), context)[:batch]


def fill_masks(context: Context, batch: int) -> Context:
    """Return the context with masks of True in place of missing ones, and with positions for each row."""
    masking, memory, memory_mask = context.masking, context.memory, context.memory_mask
    positions = context.query_position, context.key_position
    query_position, key_position = (tensor.expand(batch, -1) for tensor in positions)
    if masking.key_mask is None:
        masking = replace(masking, key_mask=key_position.new_ones(key_position.shape, dtype=torch.bool))
    if memory is not None and memory_mask is None:
        memory_mask = torch.ones(memory.shape[:2], dtype=torch.bool, device=memory.device)
    return replace(
        context,
        masking=masking,
        query_position=query_position,
        key_position=key_position,
        memory_mask=memory_mask,
    )


def pad_context(context: Context, batch: int, rows: int) -> Context:
    """Return the context of a batch that has been padded to `rows` rows by copies of its first row.

    Tensors are copied even if no row is added: a graph for views of other tensors does not fit copies.

    Args:
        context: the context before the first layer; without a mask and documents, all rows share their positions.
        batch: the number of rows of the batch.
        rows: the number of rows after padding.
    """
    masking = context.masking

    def pad(tensor: Any) -> Any:
        return _pad_rows(tensor, rows) if isinstance(tensor, Tensor) and len(tensor) == batch else tensor

    key_mask, documents, allowed = (pad(tensor) for tensor in (masking.key_mask, masking.documents, masking.allowed))
    positions = context.query_position, context.key_position
    is_by_row = batch > 1 or key_mask is not None or documents is not None
    query_position, key_position = (pad(tensor) if is_by_row else tensor.clone() for tensor in positions)
    return replace(
        context,
        masking=replace(masking, key_mask=key_mask, documents=documents, allowed=allowed),
        query_position=query_position,
        key_position=key_position,
        memory=pad(context.memory),
        memory_mask=pad(context.memory_mask),
        total_length=pad(context.total_length),
    )


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor[:1].expand(rows - len(tensor), *tensor.shape[1:])])


def compile_tree(tree: nn.Module, *, full: FullBatch | None, by_layer: bool, recomputes_layers: bool) -> None:
    """Compile the stacks of a training tree or their layers, and its loss on a GPU, at their first call with gradients.

    Args:
        tree: the training tree, with recomputed layers in place, before its weights are sharded.
        full: the shape of a full batch if all batches have the same length. None compiles for all shapes.
        by_layer: True compiles the layers one by one: several processes then exchange the gradients of one layer
            during the backward pass of another.
        recomputes_layers: True if the tree recomputes the activations of its layers in the backward pass.
    """
    for head in [module for module in tree.modules() if isinstance(module, Head)]:
        override(head, CompiledHead)
    for stack in [module for module in tree.modules() if isinstance(module, Stack)]:
        if by_layer:
            # All layers of a stack have the same method; equal layers share its graphs.
            run = CompiledMethod(type(stack.layers[0]).forward, has_one_shape=full is not None)
            for layer in stack.layers:
                override(layer, CompiledLayer).run = run
        else:
            run = CompiledMethod(type(stack).continue_from, has_one_shape=full is not None)
            override(stack, CompiledStack).run = run
        uniform = override(stack, UniformStack)
        uniform.run, uniform.full = run, full
        attentions = [module for module in stack.layers.modules() if isinstance(module, Attention)]
        uniform.attentions = tuple(attentions) if by_layer or recomputes_layers else ()


def is_ready(tree: nn.Module) -> bool:
    """Return whether all graphs of a compiled training tree have run."""
    return all(module.run.has_run for module in tree.modules() if isinstance(module, UniformStack))


def end_warm_up(tree: nn.Module) -> None:
    """Report every later compilation of a training tree."""
    for module in tree.modules():
        if isinstance(module, UniformStack):
            module.run.is_warm = True


def _describe(error: Exception) -> str:
    """Return the first line of an error of the compiler, and the line of code that it names."""
    lines = [line.strip() for line in f"{error}".splitlines() if line.strip()]
    calls = getattr(error, "real_stack", None)
    where = f" at {Path(calls[-1].filename).name}, line {calls[-1].lineno}" if calls else ""
    return f"the model does not compile to one graph{where} ({lines[0] if lines else type(error).__name__})"


def count_graphs() -> int:
    """Return the number of graphs that this process has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
