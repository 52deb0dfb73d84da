"""Direct contributions of each head and feed-forward network to the logit of an output (direct logit attribution).

The residual stream below the head is a sum of the embedding and of the outputs of all branches. The mean and variance
of the norms are fixed at their values in this run. So the logit is linear in the stream: a sum of the same terms.

Legend: T positions that the logit depends on directly, D width, H heads, E head size, V outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from clearhead.base.printing import Printed
from clearhead.core.attention import Attention
from clearhead.core.feedforward import FeedForward
from clearhead.core.head import Linear, Pool
from clearhead.core.norm import LayerNorm, Norm
from clearhead.core.rare.mixture_of_experts import MixtureOfExperts
from clearhead.core.stack import Branch, Layer, Stack, Step
from clearhead.fast.stored import Stored
from clearhead.interpret.maps.hook_points import ActivationContext, edit
from clearhead.interpret.maps.outcome import ModelOutcome
from clearhead.interpret.maps.streams import Streams


@dataclass(frozen=True, repr=False)
class Contribution(Printed):
    """Term of a logit, or of the difference of two logits.

    Args:
        component: "embedding"; the stack of an attention, such as "decoder.self"; "feed-forward"; the class name of a
            custom module; or "bias". A bias term sums the output biases of a layer; without a layer, those of the
            modules after the layers.
        layer: number of the layer. None means before or after the layers.
        head: number of the head. None means that the component has no heads.
        value: value of the term.
    """

    component: str
    layer: int | None
    head: int | None
    value: float


def contributions(streams: Streams, outcome: ModelOutcome) -> list[Contribution]:
    """Return the terms that add up to the logit of an output, before a soft cap of the model's head.

    For an outcome with two outputs, the terms sum to the difference of the two logits. Without a soft cap, this is also
    the difference of their log-probabilities.

    Norms are linear while their mean and variance are fixed. A nonlinear layer of the head, such as an activation, is
    replaced by its tangent at the values of this run. The constant term of the tangent counts as a bias.
    The encoder of a two-stack model has no term: it acts on the logit only through cross-attention.

    Args:
        streams: residual streams of the text.
        outcome: output whose logit is decomposed.

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", direct paths.
    """
    with torch.no_grad():
        path = _LogitPath(streams, outcome.logits_position)
        gradient_TD = path.back_through_head(outcome)
        path.add_bias(0, None)
        stack: Stack = getattr(streams.module, streams.top)
        for depth in reversed(range(len(stack.order))):
            layer = stack.layers[stack.order[depth]]
            assert isinstance(layer, Layer)
            num_terms_above = len(path.terms)
            for number, step in reversed(list(enumerate(layer.steps))):
                assert isinstance(step, Step)
                step_key = (f"{streams.top}.layers.{stack.order[depth]}.steps.{number}", depth)
                gradient_TD = path.back_through_step(step, step_key, gradient_TD)
            path.add_bias(num_terms_above, depth)
        embedded_TD = path.select_positions(streams.before[streams.top][0])
        path.terms.append(Contribution("embedding", None, None, float((gradient_TD * embedded_TD).sum())))
    return path.terms[::-1]


class _LogitPath:
    """Backward pass from a logit to the writers of the residual stream; collects the terms in reverse order."""

    def __init__(self, streams: Streams, position: int | None) -> None:
        self.streams = streams
        self.positions = slice(None) if position is None else slice(position, position + 1)
        self.seen: dict[tuple[str, int], Tensor] = {}
        self.terms: list[Contribution] = []
        self.bias = 0.0
        layers = f"{streams.top}.layers"
        points = ("before", "branches.[0-9]", "function", "mixed")
        with edit(streams.module, {f"{layers}.**.{point}": self._keep for point in points}):
            streams.continue_from(streams.top, 0, 1)

    def _keep(self, tensor: Tensor, at: ActivationContext) -> Tensor:
        by_token = tensor.transpose(1, 2) if at.address.endswith(".mixed") else tensor
        self.seen[at.address, at.depth] = self.select_positions(by_token)
        return tensor

    def select_positions(self, x_BT: Float[Tensor, "1 tokens *axes"]) -> Float64[Tensor, "positions *axes"]:
        """Return, in float64, the rows of the positions from which the head computes the logit."""
        return x_BT[0, self.positions].double()

    def add_bias(self, index: int, layer: int | None) -> None:
        """Insert one term for the sum of the biases since the last call, at `index` of the list of terms."""
        self.terms.insert(index, Contribution("bias", layer, None, self.bias))
        self.bias = 0.0

    def back_through_head(self, outcome: ModelOutcome) -> Float64[Tensor, "positions width"]:
        """Return the gradient of the logit with respect to the stream after the last layer."""
        streams, head = self.streams, self.streams.module.head
        assert head is not None
        stack: Stack = getattr(streams.module, streams.top)
        projection, below = head.projection(), head.layers[: -1 if head.soft_cap is None else -2]
        x_TD = self.select_positions(streams.before[streams.top][-1])
        modules: list[nn.Module] = [stack.final_norm, *below]
        inputs: list[Tensor] = []
        for module in modules:
            inputs.append(x_TD)
            x_TD = self._run(module, x_TD)
        ids, signs = list(outcome.signs), x_TD.new_tensor(list(outcome.signs.values()))
        gradient = (signs @ projection.weight_VD[ids].double() * projection.scale).expand_as(x_TD)
        if projection.bias_V is not None:
            self.bias += float(signs @ projection.bias_V[ids].double())
        for module, x in zip(reversed(modules), reversed(inputs), strict=True):
            gradient = self._back(module, x, gradient)
        return gradient

    def back_through_step(
        self, step: Step, step_key: tuple[str, int], gradient_TD: Float64[Tensor, "positions width"]
    ) -> Float64[Tensor, "positions width"]:
        """Add the logit terms of a step's branches; return the gradient with respect to the stream before the step."""
        address, depth = step_key
        written_TD = [self.seen[f"{address}.branches.{number}", depth] for number in range(len(step.branches))]
        gradient_TD = self._back(step.out, sum(written_TD, self.seen[f"{address}.before", depth]), gradient_TD)
        for number, branch in reversed(list(enumerate(step.branches))):
            assert isinstance(branch, Branch)
            function = f"{address}.branches.{number}.function"
            output_TD = self.seen[function, depth]
            inner_TD = self._back(branch.post, output_TD, gradient_TD * branch.scale)
            if isinstance(branch.function, Attention):
                self._add_heads(branch.function, self.seen[f"{function}.mixed", depth], inner_TD, depth)
            else:
                name = getattr(type(branch.function), "plain", type(branch.function)).__name__
                name = "feed-forward" if isinstance(branch.function, FeedForward | MixtureOfExperts) else name
                self.terms.append(Contribution(name, depth, None, float((inner_TD * output_TD).sum())))
        return gradient_TD

    def _add_heads(self, attention: Attention, mixed_THE: Tensor, gradient_TD: Tensor, depth: int) -> None:
        gradient_THE = (gradient_TD @ attention.out.weight.double()).view_as(mixed_THE)
        values = (gradient_THE * mixed_THE).sum((0, 2)).tolist()
        stack = f"{self.streams.top}.{attention.spec.source}"
        self.terms += [Contribution(stack, depth, head, values[head]) for head in reversed(range(len(values)))]
        if attention.out.bias is not None:
            self.bias += float((gradient_TD * attention.out.bias).sum())

    def _run(self, module: nn.Module, x: Tensor) -> Tensor:
        """Run the final norm or a module of the head on the selected positions; in float64 if it has no weights."""
        dtypes = (
            [module.weight.dtype] if isinstance(module, Stored) else [weight.dtype for weight in module.parameters()]
        )
        y: Tensor
        if isinstance(module, Pool):
            y = module(x[None], self.streams.last.mask)[0]
        else:
            y = module(x.to(dtypes[0]) if dtypes else x)
        return y.double()

    def _back(self, module: nn.Module, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the logit's gradient with respect to a module's input; add the constant term to the bias."""
        if isinstance(module, nn.Identity):
            return gradient
        bias: Tensor | None
        if isinstance(module, Norm):
            bias, input_gradient = module.bias, _back_through_norm(module, x, gradient)
        elif isinstance(module, nn.Linear):
            bias, input_gradient = module.bias, gradient @ module.weight.double()
        elif isinstance(module, Linear):
            projection = module.projection
            bias, input_gradient = projection.bias_V, gradient @ projection.weight_VD.double() * projection.scale
        else:
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y = self._run(module, x)
            (input_gradient,) = torch.autograd.grad(y, x, gradient)
            self.bias += float((gradient * y).sum() - (input_gradient * x).sum())
            return input_gradient
        if bias is not None:
            self.bias += float((gradient * bias).sum())
        return input_gradient


def _back_through_norm(
    norm: Norm, x: Float64[Tensor, "*axes width"], gradient: Float64[Tensor, "*axes width"]
) -> Float64[Tensor, "*axes width"]:
    """Return the gradient with respect to the input of a norm whose mean and variance are held fixed at those of x."""
    if norm.weight is not None:
        gradient = gradient * (norm.weight.double() + float(norm.has_unit_offset))
    if isinstance(norm, LayerNorm):
        gradient = gradient - gradient.mean(-1, keepdim=True)
        x = x - x.mean(-1, keepdim=True)
    return gradient * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
