"""The training tree: a replica of a module whose submodules are computed by faster functions during training."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clearhead.base.machine import keep_freed_memory
from clearhead.core.attention import Attention, MemoryAttention, norm_heads, repeat_heads
from clearhead.core.context import Context
from clearhead.core.feedforward import FeedForward
from clearhead.core.kernels.positions import rotate
from clearhead.core.norm import Norm, RMSNorm, Vectors
from clearhead.core.shapes import Keys, Queries, States
from clearhead.core.stack import Branch, Layer, Stack, Step
from clearhead.fast.native.load import uses_kernels
from clearhead.fast.probe import has_fast_bf16
from clearhead.fast.replica import override, plain_type, replica
from clearhead.fast.stack import is_altered
from clearhead.fast.stored import Stored
from clearhead.fast.training.attention import attention, needs_weights, rotation
from clearhead.fast.training.dropout import RandomBitDropout, SeededDropout
from clearhead.fast.training.float_linear import has_faster_products, linear, multiplies
from clearhead.fast.training.frozen import freeze_stored
from clearhead.fast.training.linear import feed_forward, has_products, is_served, linears, serves_network
from clearhead.fast.training.norm import normalize, normalizes
from clearhead.fast.training.stream import FusedStream, dropout, stream_branches

if TYPE_CHECKING:
    from clearhead.fast.training.compiled import FullBatch

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def training_tree(
    module: ModuleT,
    precision: str,
    *,
    recomputes_layers: bool = False,
    compiles: bool = False,
    full: FullBatch | None = None,
    by_layer: bool = False,
) -> ModuleT:
    """Return the tree that a run trains: it shares the parameters of the module, which stays unchanged.

    Losses equal those of the module up to the order of sums, and gradients up to rounding in the precision of the
    products. The tree keeps the current hooks of the module; submodules with hooks compute with their plain code. With
    kernels, the process from now on keeps freed memory for reuse.

    Args:
        module: the module to train.
        precision: precision of the matrix products, "fp32" or "bf16".
        recomputes_layers: True keeps only the inputs of the layers for the backward pass; the gradients stay the same.
        compiles: True compiles the plain layers with torch.compile, in place of the CPU's kernels.
        full, by_layer: arguments of `compile_tree`.

    Source for the recomputation: arXiv 1604.06174.
    """
    tree = replica(module, is_training=True)
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    if device.type == "cpu" and not compiles:
        for submodule in tree.modules():
            if plain_type(submodule) is nn.Dropout:
                override(submodule, RandomBitDropout)
        if uses_kernels():
            keep_freed_memory()
            _fuse(tree, precision, recomputes_layers)
    elif device.type != "cpu":
        if device.type != "mps":
            from clearhead.fast.training.gpu_attention import fuse_attention  # most machines have no GPU

            fuse_attention(tree)
        if precision == "bf16" and not compiles:  # the compiler fuses the casts
            _round_outputs(tree)
    if any(isinstance(submodule, Stored) for submodule in tree.modules()):
        freeze_stored(tree)
    for submodule in tree.modules():
        if recomputes_layers and isinstance(submodule, Layer):
            override(submodule, RecomputedLayer)
    if compiles:
        from clearhead.fast.training.compiled import compile_tree  # imports PyTorch's compiler

        compile_tree(tree, full=full, by_layer=by_layer, recomputes_layers=recomputes_layers)
    return tree


def _fuse(tree: nn.Module, precision: str, recomputes_layers: bool) -> None:
    modules = [module for module in tree.modules() if not is_altered(module)]
    for module in modules:
        if isinstance(module, RMSNorm):
            override(module, FusedRMSNorm)
        if precision == "fp32" and _is_linear(module) and has_faster_products():
            override(module, FloatLinear)
    if precision != "bf16" or not has_fast_bf16(torch.device("cpu")):
        return
    _round_outputs(tree)
    stacks: list[Stack | None] = [getattr(tree, name, None) for name in ("encoder", "decoder")]
    encoder, decoder = stacks
    if has_products():
        for module in modules:
            if isinstance(module, MemoryAttention):
                override(module, FusedMemoryAttention)
            elif isinstance(module, Attention):
                has_own_forward = plain_type(module).forward is not Attention.forward
                override(module, FusedAttention if has_own_forward else FusedSelfAttention)
            elif _is_linear(module):
                override(module, FusedLinear)
            elif plain_type(module) is FeedForward:
                override(module, FusedFeedForward)
            elif plain_type(module) is nn.Dropout:
                override(module, FusedDropout)
        for stack in stacks:
            branches = None if stack is None or recomputes_layers else stream_branches(stack)
            if stack is not None and branches is not None:
                fused = override(stack, FusedStream)
                fused.branches, fused.is_memory = branches, stack is encoder and decoder is not None
                fused.watched_modules = *stack.layers.modules(), stack.final_norm


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer whose weight is a parameter."""
    return plain_type(module) is nn.Linear and not isinstance(module, Stored)


def _round_outputs(tree: nn.Module) -> None:
    """Let the input of several linear layers be rounded once, in place of once by each of them."""
    for module in tree.modules():
        # Without a norm in front, only branches may round: the stream itself must keep its precision.
        if not isinstance(module, Branch | Step) or is_altered(module):
            continue
        if isinstance(module, Branch) or isinstance(module.pre, Norm):
            override(module.pre, RoundedOutput)
    encoder, decoder = (getattr(tree, name, None) for name in ("encoder", "decoder"))
    if encoder is not None and decoder is not None:
        override(encoder.final_norm, RoundedOutput)


def _is_trained(x: Tensor) -> bool:
    """Return whether an input is computed in bf16 (autocast) and with gradients."""
    is_plain = torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()
    return is_plain and torch.is_grad_enabled() and x.numel() > 0


class FusedRMSNorm(RMSNorm):
    """RMSNorm with fewer passes over its input."""

    def forward(self, x_D: Vectors) -> Vectors:
        """Normalize; the results equal those of the plain norm up to the order of sums."""
        if self.is_by_head or self.weight is None or not normalizes(x_D, self.weight):
            return super().forward(x_D)
        return normalize(x_D, self.weight + 1.0 if self.has_unit_offset else self.weight, self.eps)


class RoundedOutput(nn.Module):
    """A norm or identity that rounds its output once for several linear layers, each of which would round it."""

    def forward(self, x_D: Vectors) -> Vectors:
        """Return the output; if gradients are computed under autocast, it is rounded to bf16."""
        normed_D: Tensor = super().forward(x_D)
        is_rounded = torch.is_autocast_enabled("cpu" if x_D.is_cpu else "cuda") and torch.is_grad_enabled()
        return normed_D.to(torch.bfloat16) if is_rounded else normed_D


class FloatLinear(nn.Linear):
    """Linear layer in fp32 by oneDNN."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x weight^T + bias."""
        return linear(x, self.weight, self.bias) if multiplies(x, self.weight) else super().forward(x)


class FusedLinear(nn.Linear):
    """Linear layer in bf16 by kernels."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x weight^T + bias."""
        return linears(x, [self])[0] if _is_trained(x) and is_served(self) else super().forward(x)


class FusedDropout(RandomBitDropout):
    """Dropout in one pass, without a stored mask."""

    def forward(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Drop elements with the same probability as the plain module, but with other random numbers."""
        is_fast = _is_trained(values) and values.dtype == torch.float32 and self.training and 0.0 < self.p < 1.0
        return dropout(values, self.p) if is_fast else super().forward(values)


class FusedFeedForward(FeedForward):
    """Feed-forward network in bf16 by kernels, which store the derivative of the activation."""

    def forward(self, x_BTD: States, context: object = None) -> States:
        """Compute the network; the results equal those of the plain network up to rounding."""
        return feed_forward(self, x_BTD) if _is_trained(x_BTD) and serves_network(self) else super().forward(x_BTD)


class FusedAttention(Attention):
    """Attention in bf16 by kernels, which rotate in one pass and attend one head at a time."""

    def prepare(self, query: Queries, key: Keys, context: Context) -> tuple[Tensor, Tensor]:
        """Normalize and rotate queries and keys like the plain attention."""
        rotary, choice = self.spec.position, self.spec.query_key_norm
        if rotary is None or not _is_trained(query):
            return super().prepare(query, key, context)
        is_late = choice is not None and choice.after_rotation
        if not is_late:
            query, key = norm_heads(self.query_norm, query, choice), norm_heads(self.key_norm, key, choice)
        cos, sin = self.angles(rotary, context)
        query, key = ((rotation if x.dtype == torch.bfloat16 else rotate)(x, cos, sin) for x in (query, key))
        if is_late:
            query, key = norm_heads(self.query_norm, query, choice), norm_heads(self.key_norm, key, choice)
        return query, key

    def attend(self, query: Queries, key: Keys, value: Keys, context: Context) -> Queries:
        """Attend by the kernel, unless attention weights are needed or query heads share keys and values."""
        p = self.dropout.p if self.training else 0.0
        if p > 0.0:  # PyTorch's kernel for shared keys has no dropout
            key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        is_plain = query.shape[1] == key.shape[1] and value.dtype == torch.bfloat16 and not needs_weights(self)
        if not is_plain or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().attend(query, key, value, context)
        bias, is_causal = self.bias(query, key, context), context.masking.is_only_causal(self.spec.mask)
        mask = None if is_causal else self.mask(context)
        dropout = SeededDropout.draw(p)
        return attention(query, key, value, mask, bias, scale=self.scale, is_causal=is_causal, dropout=dropout)


class FusedSelfAttention(FusedAttention):
    """Self-attention that computes query, key and value in one kernel call, in bf16."""

    def forward(self, x_BTD: States, context: Context) -> States:
        """Attend; the results equal those of the plain attention up to rounding."""
        layers = self.query, self.key, self.value
        if context.cache is not None or not _is_trained(x_BTD) or not all(map(is_served, layers)):
            return super().forward(x_BTD, context)
        query, key, value = map(self.split, linears(x_BTD, layers))
        query, key = self.prepare(query, key, context)
        query, key, value = self.point("queries", query), self.point("keys", key), self.point("values", value)
        return self.merge(self.attend(query, key, value, context))


class FusedMemoryAttention(FusedAttention, MemoryAttention):
    """Cross-attention in bf16 by kernels that compute key and value in one pass over the encoder memory."""

    def memory_keys_values(self, context: Context) -> tuple[Keys, Keys]:
        """Return the keys and values of the encoder memory."""
        layers, memory = (self.key, self.value), context.memory
        if context.cache is not None or memory is None or not _is_trained(memory) or not all(map(is_served, layers)):
            return super().memory_keys_values(context)
        key, value = map(self.split, linears(memory, layers))
        return self.point("keys", norm_heads(self.key_norm, key, self.spec.query_key_norm)), self.point("values", value)


class RecomputedLayer(Layer):
    """Layer that computes its activations again in the backward pass."""

    recomputes: bool = True

    def forward(self, x_BTD: States, context: Context) -> States:
        """Compute the layer; the results equal those of a layer that stores its activations."""
        if not self.recomputes:
            return super().forward(x_BTD, context)
        y_BTD: Tensor = checkpoint(super().forward, x_BTD, context, use_reentrant=False)
        return y_BTD
