"""Optimizers: groups, exact resumption, parity with torch, and orthogonal updates."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon as torch_muon

from clearhead.base.errors import InputError
from clearhead.fast.training import muon as fast_muon
from clearhead.training.optim import optimizers
from clearhead.training.optim.optimizers import build_optimizer, matrix_parameters, orthogonalize, update_on_device
from clearhead.training.random_state import deterministic_algorithms

KINDS = ("adam", "adamw", "muon")
WIDTH, INNER, VOCABULARY = 13, 29, 41


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.down(self.up(self.norm(values)).relu())


class Model(nn.Module):
    """An embedding, two blocks with an equal shape each, and a head that may share the embedding's table."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.ModuleList([nn.Linear(WIDTH, VOCABULARY)])
        if tied:
            self.head[0].weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head[0](self.blocks(self.table(ids)))


def make(kind: str, **options: float) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(31)
    model = Model()
    return model, build_optimizer(model, kind=kind, learning_rate=0.01, **options)


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = torch.randint(0, VOCABULARY, (17,), generator=torch.Generator().manual_seed(step % 3))
        loss = nn.functional.cross_entropy(model(ids), ids.roll(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_in_one_group(kind: str) -> None:
    model, optimizer = make(kind)
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    assert all(group["lr"] == 0.01 for group in optimizer.param_groups)


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_are_the_weights_of_the_linear_layers_between_embedding_and_head(tied: bool) -> None:
    model = Model(tied=tied)
    matrices = {id(parameter) for parameter in matrix_parameters(model)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in matrices}
    assert names == {f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in ("up", "down")}


def test_a_linear_layer_that_shares_an_embedding_is_no_matrix() -> None:
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight = model[0].weight
    assert [id(parameter) for parameter in matrix_parameters(model)] == [id(model[2].weight)]


def test_frozen_parameters_are_left_out() -> None:
    model = Model()
    model.table.requires_grad_(False)
    model.blocks[0].up.weight.requires_grad_(False)
    optimizer = build_optimizer(model, kind="muon", learning_rate=0.01)
    grouped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert grouped == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    with pytest.raises(InputError, match="requires a gradient"):
        build_optimizer(Model().requires_grad_(False), kind="adam", learning_rate=0.01)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_weight_decay_shrinks_matrices_and_nothing_else(kind: str) -> None:
    torch.manual_seed(32)
    model = Model()
    optimizer = build_optimizer(model, kind=kind, learning_rate=0.01, weight_decay=0.5)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    matrices = {id(parameter) for parameter in matrix_parameters(model)}
    for name, parameter in model.named_parameters():
        factor = 1 - 0.01 * 0.5 if id(parameter) in matrices else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns(kind: str) -> None:
    losses = train(*make(kind), range(40))
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_state_continues_bit_by_bit(kind: str) -> None:
    model, optimizer = make(kind, weight_decay=0.1)
    train(model, optimizer, range(4))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(4, 9))

    other, other_optimizer = make(kind, weight_decay=0.7)
    train(other, other_optimizer, range(2))
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(state)
    assert other_optimizer.state_dict()["param_groups"] == state["param_groups"]
    train(other, other_optimizer, range(4, 9))
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_imports_the_compiler_of_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler would take a second at the start of every run; None makes its import fail."""
    for name in ("torch._dynamo", "torch._inductor"):
        monkeypatch.setitem(sys.modules, name, None)
    with deterministic_algorithms():
        model, optimizer = make(kind)
        train(model, optimizer, range(2))
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_learning_rate_set_from_outside_is_used(kind: str) -> None:
    model, optimizer = make(kind)
    before = copy.deepcopy(model.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_adam_is_torchs_plain_adam(kind: str) -> None:
    model, optimizer = make(kind, weight_decay=0.1)
    other = copy.deepcopy(model)
    matrices = matrix_parameters(other)
    known = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in other.parameters() if id(parameter) not in known]
    family = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    plain = family(groups, lr=0.01, betas=(0.9, 0.98), eps=1e-9, foreach=False)
    train(model, optimizer, range(3))
    train(other, plain, range(3))
    for actual, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert relative_error(actual, expected) < 1e-4


def take_steps(optimizers: list[torch.optim.Optimizer], parameters: list[nn.Parameter]) -> None:
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("products", ["single", "half", "kernel"])
def test_muon_is_torchs_muon_up_to_the_precision_of_its_products(
    products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if products == "single":

        def in_single_precision(gradient: Tensor, *_: object) -> Tensor:
            return orthogonalize(gradient.unsqueeze(0)).squeeze(0)

        monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", in_single_precision)
    monkeypatch.setattr(optimizers, "has_fast_bf16", lambda device: products != "single")
    size = 32 if products == "kernel" else 1  # the kernel's blocks; without a matrix unit the rows of "half" again
    torch.manual_seed(33)
    ours = nn.Sequential(
        *(nn.Linear(rows * size, columns * size) for rows, columns in ((5, 3), (3, 5), (5, 3), (2, 2)))
    )
    theirs = copy.deepcopy(ours)
    starts = [layer.weight.detach().clone() for layer in ours]
    matrices = [layer.weight for layer in theirs]
    reference = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    biases = torch.optim.AdamW([layer.bias for layer in theirs], lr=0.01, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0)
    take_steps([build_optimizer(ours, kind="muon", learning_rate=0.01, weight_decay=0.1)], list(ours.parameters()))
    take_steps([reference, biases], list(theirs.parameters()))
    for mine, other, start in zip(ours, theirs, starts, strict=True):
        assert relative_error(mine.weight - start, other.weight - start) < (1e-5 if products == "single" else 0.05)
        assert relative_error(mine.bias, other.bias) < 1e-5


def test_muon_compiles_no_kernel_for_a_processor_without_products_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "has_fast_bf16", lambda device: False)
    monkeypatch.setattr(fast_muon, "has_products", lambda: pytest.fail("kernels were asked for"))
    layer = nn.Linear(32, 64)
    before = layer.weight.detach().clone()
    take_steps([build_optimizer(layer, kind="muon", learning_rate=0.01)], list(layer.parameters()))
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize("shape", [(1, 37, 37), (3, 23, 61), (2, 61, 23)])
def test_orthogonal_means_singular_values_near_one_and_the_same_vectors(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(34)
    matrices = torch.randn(shape, dtype=torch.float64)
    left, sizes, right = torch.linalg.svd(matrices, full_matrices=False)
    rotated = left.mT @ orthogonalize(matrices) @ right.mT
    values = rotated.diagonal(dim1=1, dim2=2)
    assert (rotated - torch.diag_embed(values)).abs().max() < 1e-10
    large = sizes > 0.05 * sizes.amax(1, keepdim=True)
    assert values[large].min() > 0.6
    assert values.max() < 1.25


def test_matrices_of_a_batch_do_not_touch_each_other_and_zero_stays_zero() -> None:
    torch.manual_seed(35)
    matrices = torch.randn(3, 11, 17)
    matrices[1] = 0
    together = orthogonalize(matrices)
    assert not together[1].any()
    for alone, many in zip(matrices, together, strict=True):
        torch.testing.assert_close(orthogonalize(alone.unsqueeze(0)).squeeze(0), many, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(31, 31), (31, 127), (127, 31)])
def test_muons_updates_have_the_size_of_adamws(shape: tuple[int, int]) -> None:
    layer = nn.Linear(shape[1], shape[0], bias=False)
    before = layer.weight.detach().clone()
    optimizer = build_optimizer(layer, kind="muon", learning_rate=1.0)
    layer.weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(36)) * 1e-3
    optimizer.step()
    size = (layer.weight.detach() - before).square().mean().sqrt().item()
    assert 0.14 < size < 0.25


def test_muon_scales_gradients_and_skips_failed_steps_on_the_device_to_the_bit() -> None:
    """A division by a power of two is exact, so that it equals the product before the step."""
    sizes = [(6, 10), (6, 10), (10, 6), (6, 6)]
    torch.manual_seed(0)
    modules = [nn.Sequential(*(nn.Linear(*size) for size in sizes))]
    modules.append(copy.deepcopy(modules[0]))
    early, late = (build_optimizer(m, kind="muon", learning_rate=0.1, weight_decay=0.1) for m in modules)
    for step in range(6):
        has_failed = step in (0, 3)
        for weight, other in zip(*(module.parameters() for module in modules), strict=True):
            other.grad = torch.randn_like(weight) * (torch.nan if has_failed else 1.0)
            weight.grad = other.grad / 4.0
        update_on_device(late, divisor=torch.tensor(4.0), has_failed=torch.tensor(has_failed))
        if not has_failed:
            early.step()
        for weight, other in zip(*(module.parameters() for module in modules), strict=True):
            assert torch.equal(weight, other), step


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_a_gradient_stays(kind: str) -> None:
    model, optimizer = make(kind)
    frozen = model.blocks[0].up.weight
    before = frozen.detach().clone()
    model(torch.arange(5)).sum().backward()
    frozen.grad = None
    optimizer.step()
    assert torch.equal(frozen, before)
