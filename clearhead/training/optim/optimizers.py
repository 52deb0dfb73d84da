"""Optimizers (Adam, AdamW, Muon) over groups of a model's parameters, and gradient scaling.

Shape suffixes: K matrices of one shape, R the smaller and C the larger of their two sizes.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from clearhead.base.errors import InputError
from clearhead.fast.probe import has_fast_bf16
from clearhead.fast.training.muon import Update, is_served, update_matrices

_MOMENTUM = 0.95
_NEWTON_SCHULZ_STEPS = 5
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# The root mean square of an AdamW update, measured over many runs: arXiv 2502.16982, section 2.2.
_UPDATE_SIZE = 0.2
# Devices with fused optimizers.
_FUSED_DEVICES = ("cpu", "cuda")


def build_optimizer(
    module: nn.Module,
    *,
    kind: Literal["adam", "adamw", "muon"],
    learning_rate: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-9,
) -> torch.optim.Optimizer:
    """Build an optimizer over the parameters that require a gradient.

    Weight decay applies to matrices only, not to biases, norms and embeddings. All groups have the same learning rate;
    Muon scales its updates to the size of AdamW updates.

    Args:
        module: the module to train.
        kind: the name of the optimizer. Adam ("adam") adds the weight decay to the gradient, and AdamW ("adamw") decays
            the weights directly. Muon ("muon") orthogonalizes the updates of matrices.
        learning_rate: the learning rate, positive.
        weight_decay: the weight decay of matrices, at least 0.
        betas: the decay of the first and the second moment, at least 0 and below 1.
        eps: the number added to the root of the second moment, positive.

    Raises:
        InputError: no parameter requires a gradient.

    Source: arXiv 1412.6980 (Adam), arXiv 1711.05101 (AdamW).
    """
    matrices = matrix_parameters(module)
    known = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in module.parameters() if parameter.requires_grad and id(parameter) not in known]
    if not matrices and not others:
        raise InputError("the model has no parameter that requires a gradient; unfreeze some before training")
    fused = _can_fuse(matrices + others)
    rate: float | Tensor = learning_rate
    if kind != "muon" and fused and (matrices or others)[0].device.type == "cuda":
        rate = torch.tensor(learning_rate, dtype=torch.float32, device=(matrices or others)[0].device)
    groups = [
        {"params": parameters, "lr": rate, "weight_decay": decay, "matrices": parameters is matrices}
        for parameters, decay in ((matrices, weight_decay), (others, 0.0))
        if parameters
    ]
    if kind == "muon":
        return _without_compiler(Muon)(groups, betas=betas, eps=eps)
    family = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    return _without_compiler(family)(groups, lr=rate, betas=betas, eps=eps, fused=fused)


@functools.cache
def _without_compiler(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return a subclass of an optimizer that does not import torch's compiler, which takes a second at the start.

    Torch imports the compiler at the first call of one of these methods, to mark the method as not compiled.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), {**methods, "step": torch.no_grad()(methods["step"])})


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups; on CUDA, fused optimizers have it in a tensor of the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Restore the optimizer's state (such as moments) of every parameter, but not settings such as the learning rate.

    Args:
        optimizer: the optimizer to restore.
        state: a state dict of the optimizer, which may be altered.

    Raises:
        ValueError: the state does not fit the parameters of the optimizer.
    """
    groups = optimizer.state_dict()["param_groups"]
    if [group.get("params") for group in state["param_groups"]] != [group["params"] for group in groups]:
        raise ValueError("its optimizer state lists other parameters than the optimizer of this run")
    optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter in optimizer.state]
        if len({frozenset(optimizer.state[parameter]) for parameter in trained}) > 1:
            raise ValueError("its optimizer state must have the same entries for every parameter, but they differ")
        for parameter in trained:
            for name, value in optimizer.state[parameter].items():
                if name != "step" and isinstance(value, Tensor) and value.shape != parameter.shape:
                    raise ValueError("its optimizer state has a tensor with another shape than its parameter")


def matrix_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of the linear layers between the embeddings and the head, in the order of the model.

    A weight that is shared with an embedding or with the head is not included.
    """
    head = getattr(module, "head", None)
    taken = {id(parameter) for parameter in head.parameters()} if isinstance(head, nn.Module) else set()
    for child in module.modules():
        if not isinstance(child, nn.Linear):
            taken.update(id(parameter) for parameter in child.parameters(recurse=False))
    matrices: dict[int, nn.Parameter] = {}
    for child in module.modules():
        weight = child.weight if isinstance(child, nn.Linear) else None
        if isinstance(weight, nn.Parameter) and weight.requires_grad and id(weight) not in taken:
            matrices[id(weight)] = weight
    return list(matrices.values())


class Muon(torch.optim.Optimizer):
    """Muon: orthogonalizes the updates of matrices, and uses AdamW for all other parameters.

    An update of an R x C matrix is multiplied by 0.2 * sqrt(max(R, C)). It then has the root mean square of a typical
    AdamW update, so that the learning rates and weight decays of AdamW apply. All matrices of one shape are
    orthogonalized at once. This uses bfloat16 if it is faster, which is precise enough for a direction. On CPUs with
    bf16 products, a compiled kernel computes the whole update.

    Args:
        groups: the parameter groups with "lr", "weight_decay" and "matrices" (True: all parameters are matrices).
        betas: the betas of AdamW.
        eps: the eps of AdamW.

    Source: K. Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (kellerjordan.github.io);
    the scale and the weight decay: Liu et al. 2025 (arXiv 2502.16982), section 2.2.
    """

    # Set by `update_on_device`; None means gradients that are scaled already, and a step that has not failed.
    grad_scale: Float[Tensor, ""] | None = None
    found_inf: Float[Tensor, ""] | None = None

    def __init__(self, groups: Iterable[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {})
        rest = self._groups(matrices=False)
        self._adamw: torch.optim.Optimizer | None = None
        if rest:
            fused = _can_fuse([parameter for group in rest for parameter in group["params"]])
            # AdamW adds its options to these group dicts, so they are part of this optimizer's state.
            self._adamw = _without_compiler(torch.optim.AdamW)(rest, betas=betas, eps=eps, fused=fused)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self._adamw is None or bool(getattr(self._adamw, "_step_supports_amp_scaling", False))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a closure is not supported."""
        for group in self._groups(matrices=True):
            self._step_matrices(group)
        if self._adamw is not None:
            # Loading a state replaces both objects, so they are passed on in every step.
            self._adamw.param_groups, self._adamw.state = self._groups(matrices=False), self.state
            self._adamw.grad_scale, self._adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
            self._adamw.step()

    def _groups(self, *, matrices: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["matrices"] is matrices]

    def _step_matrices(self, group: dict[str, Any]) -> None:
        by_shape: dict[tuple[torch.Size, torch.device] | None, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                # Tested before `is_served`: without bf16 products, no kernels need to be compiled.
                has_kernel = self.grad_scale is None and has_fast_bf16(parameter.device) and is_served(parameter)
                shape = None if has_kernel else (parameter.shape, parameter.device)
                by_shape.setdefault(shape, []).append(parameter)
                if "momentum" not in self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        for shape, parameters in by_shape.items():
            rates = [group["lr"] * _UPDATE_SIZE * max(parameter.shape) ** 0.5 for parameter in parameters]
            weight_factor = 1.0 - group["lr"] * group["weight_decay"]
            if shape is None:
                rule = Update(_NEWTON_SCHULZ, _NEWTON_SCHULZ_STEPS, _MOMENTUM, weight_factor)
                update_matrices(parameters, self._momenta(parameters), rates, rule)
            else:
                self._step_shape(parameters, rates[0], weight_factor)

    def _step_shape(self, parameters: list[Tensor], rate: float, weight_factor: float) -> None:
        """Apply the Muon update to all matrices of one shape on one device."""
        # Singular values need whole matrices: each process gathers the updates of sharded ones.
        updates = torch.stack([_gather_whole(update) for update in self._nesterov(parameters)])
        dtype = torch.bfloat16 if has_fast_bf16(updates.device) else torch.float32
        orthogonal = orthogonalize(updates.to(dtype)).to(updates.dtype)
        factor: float | Tensor = weight_factor
        if self.found_inf is not None:
            orthogonal = orthogonal.masked_fill(self.found_inf > 0, 0.0)
            factor = torch.full_like(self.found_inf, weight_factor).masked_fill_(self.found_inf > 0, 1.0)
        shards = map(_distribute_like, parameters, orthogonal.unbind(0))
        weights = [*map(_local, parameters)]
        torch._foreach_mul_(weights, factor)
        torch._foreach_add_(weights, [*map(_local, shards)], alpha=-rate)

    def _momenta(self, parameters: list[Tensor]) -> list[Tensor]:
        return [self.state[parameter]["momentum"] for parameter in parameters]

    def _nesterov(self, parameters: list[Tensor]) -> Sequence[Tensor]:
        """Update the momenta of parameters, and return their Nesterov updates."""
        momenta = self._momenta(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.grad_scale is not None and self.found_inf is not None:
            has_failed, local = self.found_inf > 0, [*map(_local, gradients)]
            torch._foreach_div_(local, self.grad_scale)
            for gradient, momentum in zip(local, map(_local, momenta), strict=True):
                # So that the momentum of a failed step stays.
                torch.where(has_failed, momentum, gradient, out=gradient)
        torch._foreach_lerp_(momenta, gradients, 1.0 - _MOMENTUM)
        return torch._foreach_lerp(gradients, momenta, _MOMENTUM)


def orthogonalize(matrices: Float[Tensor, "count rows columns"]) -> Float[Tensor, "count rows columns"]:
    """Orthogonalize matrices: their singular values become about 0.7 to 1.2, and their singular vectors stay.

    Five steps of a Newton-Schulz iteration of degree 5; its coefficients favour a steep start over convergence.

    Args:
        matrices: matrices of one shape; a matrix of zeros stays zero.

    Source: K. Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (kellerjordan.github.io).
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x_KRC = matrices.mT if tall else matrices
    x_KRC = x_KRC / torch.linalg.vector_norm(x_KRC, dim=(1, 2), keepdim=True).clamp_min(1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram_KRR = x_KRC @ x_KRC.mT
        polynomial_KRR = torch.baddbmm(gram_KRR, gram_KRR, gram_KRR, beta=b, alpha=c)
        x_KRC = torch.baddbmm(x_KRC, polynomial_KRR, x_KRC, beta=a)
    return x_KRC.mT if tall else x_KRC


def _gather_whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; a sharded tensor is gathered."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _local(tensor: Tensor) -> Tensor:
    """Return the shard of this process; a tensor that is not sharded is returned unchanged."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _distribute_like(parameter: Tensor, values: Tensor) -> Tensor:
    """Shard whole values like a parameter; returns them unchanged if the parameter is not sharded."""
    if not hasattr(parameter, "placements"):
        return values
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    return distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    return all(parameter.device.type in _FUSED_DEVICES for parameter in parameters)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float, *, max_norm: float | None) -> float:
    """Scale all gradients by a factor, clip their total norm, and return the norm.

    Args:
        parameters: the parameters of the gradients; parameters without a gradient are skipped.
        factor: the positive factor that turns the gradient of a summed loss into that of a mean.
        max_norm: the maximum total norm. None means no clipping.

    Returns:
        The total norm after scaling and before clipping; if it is not finite, the gradients are unchanged.

    Source: arXiv 1211.5063, section 3.2 (clipping by the norm).
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = float(_total_norm(gradients)) * factor
    if not math.isfinite(norm):
        return norm
    if max_norm is not None and norm > max_norm:
        factor *= max_norm / norm
    torch._foreach_mul_(gradients, factor)
    return norm


def gradient_scale(
    parameters: Iterable[nn.Parameter], factor: float, *, max_norm: float | None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the norm of all gradients and the number that divides them in the update, without reading either.

    Args:
        parameters: the parameters of the gradients; parameters without a gradient are skipped.
        factor: the positive factor that turns the gradient of a summed loss into that of a mean.
        max_norm: the maximum total norm. None means no clipping.

    Returns:
        The total norm after scaling and before clipping, in fp64, and the divisor for `update_on_device`, in fp32.
    """
    norm = _total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]).double() * factor
    excess = torch.ones_like(norm) if max_norm is None else (norm / max_norm).clamp_min(1.0)
    return norm, (excess / factor).float()


def updates_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether an optimizer divides gradients and skips updates by tensors of a device other than the CPU.

    PyTorch's fused optimizers do, such as Adam and AdamW, and Muon with a fused AdamW.
    """
    return device.type == "cuda" and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def update_on_device(
    optimizer: torch.optim.Optimizer, *, divisor: Float[Tensor, ""], has_failed: Bool[Tensor, ""]
) -> None:
    """Update parameters by an optimizer that divides the gradients itself and skips the update of a failed step.

    Args:
        optimizer: an optimizer that `updates_on_device` accepts.
        divisor: the number that divides all gradients, in fp32.
        has_failed: True leaves parameters, moments and step counts unchanged.
    """
    # The protocol between PyTorch's gradient scaler and its fused optimizers.
    optimizer.grad_scale, optimizer.found_inf = divisor, has_failed.float()  # type: ignore[attr-defined]
    optimizer.step()


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients; with sharded gradients, each process has only a part of it."""
    total = torch.nn.utils.get_total_norm(gradients)
    whole: Tensor = total.full_tensor() if hasattr(total, "full_tensor") else total
    return whole
