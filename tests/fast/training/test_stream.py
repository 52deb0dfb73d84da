"""The stream of a stack in fewer passes is that of the plain computation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clearhead import spec
from clearhead.core import Transformer, build
from clearhead.core.norm import Norm, build_norm
from clearhead.fast.training.stream import _BranchOutput, _norm_sum, dropout, stream_branches
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec

pytestmark = pytest.mark.usefixtures("bf16_kernels")
WANTED = "sum", "normed", "rounded"


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).norm() / expected.norm()).detach())


def leaves(width: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    y = torch.randn(5, 7, width).bfloat16()
    return torch.randn(5, 7, width).add_(2.0).requires_grad_(), y.requires_grad_()


@pytest.mark.parametrize("width", [3, 16, 67])
@pytest.mark.parametrize(
    "kind", [spec.RMSNorm(), spec.LayerNorm(), spec.LayerNorm(bias=False), spec.RMSNorm(weight=False)], ids=str
)
def test_sums_norms_and_gradients_are_those_of_exact_arithmetic(
    kind: spec.LayerNorm | spec.RMSNorm, width: int
) -> None:
    x, y = leaves(width)
    norm = build_norm(width, kind)
    assert isinstance(norm, Norm)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    actual = _norm_sum(x, _BranchOutput(y, 0.0, 0.5), norm, WANTED)
    gradients = [torch.randn(tensor.shape).to(tensor.dtype) for tensor in actual]
    ours = torch.autograd.grad(actual, [x, y, *norm.parameters()], gradients)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, y)]
    theirs = build_norm(width, kind).double()
    theirs.load_state_dict(norm.state_dict())
    sums = exact[0] + 0.5 * exact[1]
    normed = theirs(sums)
    expected = [sums, normed, normed]
    beside = torch.autograd.grad(expected, [*exact, *theirs.parameters()], [tensor.double() for tensor in gradients])
    assert all(
        relative_error(*pair) < bound for bound, *pair in zip((1e-6, 1e-6, 0.003), actual, expected, strict=True)
    )
    bounds = (1e-5, 0.003, 1e-5, 1e-5)[: len(ours)]
    assert all(relative_error(*pair) < bound for bound, *pair in zip(bounds, ours, beside, strict=True))


@pytest.mark.parametrize("is_in_stream", [True, False])
def test_dropout_zeros_a_share_scales_the_rest_and_has_its_own_gradient(is_in_stream: bool) -> None:
    norm = build_norm(128, spec.RMSNorm())
    assert isinstance(norm, Norm)
    x, y = torch.zeros(1000, 128), torch.ones(1000, 128).bfloat16().requires_grad_()

    def drop() -> Tensor:
        if is_in_stream:
            return _norm_sum(x, _BranchOutput(y, 0.3, 2.0), norm, ("sum", "rounded"))[0]
        return dropout(2.0 * y.float(), 0.3)

    torch.manual_seed(5)
    first, second = drop(), drop()
    torch.manual_seed(5)
    assert torch.equal(drop(), first)
    assert set(first.unique().tolist()) == {0.0, float(torch.tensor(2.0 / 0.7))}
    # Five standard deviations of the share of 128,000 elements, of a row's 128 and of a column's 1,000.
    is_kept = (first > 0).float()
    assert abs(float(is_kept.mean()) - 0.7) < 5 * (0.21 / is_kept.numel()) ** 0.5
    assert float((is_kept.mean(0) - 0.7).abs().max()) < 5 * (0.21 / 1000) ** 0.5
    assert float((is_kept.mean(1) - 0.7).abs().max()) < 5 * (0.21 / 128) ** 0.5
    # Two draws agree by chance alone.
    both = float((is_kept * (second > 0)).mean())
    assert abs(both - 0.49) < 5 * (0.25 / is_kept.numel()) ** 0.5
    (gradient,) = torch.autograd.grad(first.sum(), [y])
    assert torch.equal(gradient.float() > 0, is_kept.bool())


def model(**changes: object) -> Transformer:
    torch.manual_seed(2)
    hparams = Hyperparameters(layers=2, width=32, heads=2, **{"dropout": 0.0} | changes)  # type: ignore[arg-type]
    return build(build_spec(hparams, source_vocab=11, target_vocab=11)).train()


@pytest.mark.parametrize(
    "make",
    [
        lambda: model(norm_place="pre", final_norm=False),
        lambda: build(spec.validate(_with_post_norms())).train(),
    ],
)
def test_other_stacks_keep_their_own_way(make: Callable[[], Transformer]) -> None:
    decoder = make().decoder
    assert decoder is not None
    assert stream_branches(decoder) is None


def _with_post_norms() -> spec.Model:
    """A decoder with a norm behind each branch as well."""
    hparams = Hyperparameters(family="decoder", layers=1, width=32, heads=2, norm_place="pre")
    model_spec = build_spec(hparams, source_vocab=11, target_vocab=11)
    return spec.map_nodes(
        model_spec,
        lambda _, node: node.model_copy(update={"post": spec.RMSNorm()}) if isinstance(node, spec.Branch) else node,
    )


@pytest.mark.parametrize("shape", [(3,), (5, 7, 19), (11, 16)])
def test_dropout_of_any_shape_is_its_own_adjoint(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).requires_grad_()
    for values in (x, x.expand(2, *shape).transpose(0, -1)):
        dropped = dropout(values, 0.4)
        mask = torch.where(dropped == 0, 0.0, 1.0 / 0.6)
        assert relative_error(dropped, values * mask) < 1e-6
        (gradient,) = torch.autograd.grad(dropped, [values], values.detach())
        assert torch.equal(gradient, dropped)
