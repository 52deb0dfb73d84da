"""Cross-entropy of a linear layer, computed in groups of rows: the logits of all rows never exist at once.

Shape suffixes: N rows (tokens), D width, V vocabulary, G rows of one group, C rows of one chunk of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from clearhead.base.errors import InputError

NO_LABEL = -100
"""The label of a position that carries no loss."""

# A chunk of logits fits into a CPU's last-level cache, which speeds up the passes over it.
_CHUNK_BYTES = 16 << 20
# Each matrix product reads the vocabulary matrix or adds to its gradient. If the matrix is larger than a chunk of
# logits, products take more rows. Their logits then become as large as the matrix, up to this bound.
_GROUP_BYTES = 128 << 20

# oneDNN makes a kernel for each row count of a 16-bit product, which costs milliseconds and megabytes. So row counts
# are rounded: at most this many lie between one power of two and the next.
_STEPS = 16

# exp of plus or minus this is a normal float32, and so is a sum of millions of them.
_SAFE_EXPONENT = 60.0


def linear_cross_entropy(
    hidden_ND: Float[Tensor, "rows width"],
    weight_VD: Float[Tensor, "vocabulary width"],
    bias_V: Float[Tensor, " vocabulary"] | None,
    labels_N: Int[Tensor, " rows"],
    *,
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> Float[Tensor, ""]:
    """Sum the cross-entropy of scale * hidden @ weight.T + bias over the rows that have a label.

    If a gradient is needed, the forward pass computes it together with the loss.

    Args:
        hidden_ND: hidden states.
        weight_VD: output matrix, one row per vocabulary entry; it may be tied to an embedding table.
        bias_V: one number per vocabulary entry; None means no bias.
        labels_N: vocabulary ids; NO_LABEL for rows without a loss.
        label_smoothing: share of the target that is spread evenly over the vocabulary, at least 0 and below 1.
        scale: factor on the hidden states.
        soft_cap: bound on the logits, cap * tanh(logits / cap). With a cap, all logits are built at once.

    Returns:
        The sum in nats, a scalar; float32 for 16-bit inputs. Divide by the number of labels for the mean.

    Raises:
        InputError: label_smoothing lies outside its range.

    Source: Szegedy et al. 2016 (arXiv 1512.00567), section 7, for label smoothing.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise InputError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}; 0.1 is usual")
    labelled_N = labels_N != NO_LABEL
    if not bool(labelled_N.all()):
        rows = labelled_N.nonzero().squeeze(1)
        hidden_ND, labels_N = select_rows(hidden_ND, rows), labels_N[rows]
    device = hidden_ND.device.type
    if soft_cap is not None:
        logits_NV = soft_cap * torch.tanh(F.linear(hidden_ND * scale, weight_VD, bias_V) / soft_cap)
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        return F.cross_entropy(logits_NV, labels_N, reduction="sum", label_smoothing=label_smoothing)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
    setting = _LossSetting(label_smoothing, scale, dtype, labels_N)
    tensors = (hidden_ND, weight_VD, bias_V)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        loss: Tensor = _LinearCrossEntropy.apply(*tensors, setting)  # type: ignore[no-untyped-call]
        return loss
    return _Sums(hidden_ND, weight_VD, bias_V, setting, (False, False, False)).run()


def select_rows(values_ND: Float[Tensor, "all_rows width"], rows: Int[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
    """Return selected rows, with a faster backward pass than indexing: it copies the gradients, without sums.

    Args:
        values_ND: rows to select from.
        rows: row indices without repetition.

    Returns:
        The selected rows in the order of the indices.
    """
    selected: Tensor = _SelectRows.apply(values_ND, rows)  # type: ignore[no-untyped-call]
    return selected


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_ND: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = values_ND.shape[0]
        return values_ND.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        (gradient_ND,) = gradients
        return gradient_ND.new_zeros(ctx.num_rows, gradient_ND.shape[1]).index_copy(0, rows, gradient_ND), None


def product_rows(num_rows: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the row count to which a matrix product is padded: `num_rows`, or more on a CPU in 16 bits."""
    is_rounded = device.type == "cpu" and dtype.itemsize <= 2 and num_rows > 0
    return -(-num_rows // shape_step(num_rows)) * shape_step(num_rows) if is_rounded else num_rows


def shape_step(number: int) -> int:
    """Return the multiple, at least 1, to which row counts near `number` are rounded up."""
    return max(1, (1 << (number.bit_length() - 1)) // _STEPS)


@dataclass(frozen=True)
class _LossSetting:
    label_smoothing: float
    scale: float
    product_dtype: torch.dtype
    labels_N: Tensor


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, setting: _LossSetting) -> Tensor:
        sums = _Sums(hidden_ND, weight_VD, bias_V, setting, ctx.needs_input_grad[:3])
        loss = sums.run()
        ctx.save_for_backward(*sums.gradients((hidden_ND, weight_VD, bias_V)))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hidden_ND, weight_VD, bias_V = (
            None if saved is None else saved * gradients[0].to(saved.dtype) for saved in ctx.saved_tensors
        )
        return hidden_ND, weight_VD, bias_V, None


class _Sums:
    """Loss and gradients of a linear cross-entropy, accumulated over chunks of rows."""

    def __init__(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        setting: _LossSetting,
        needed: tuple[bool, bool, bool],
    ) -> None:
        self.setting = setting
        self.dtype = torch.promote_types(setting.product_dtype, torch.float32)
        self.num_rows = hidden_ND.shape[0]
        # Rows of zeros pad the end; their rate is 0.
        extra = product_rows(self.num_rows, setting.product_dtype, hidden_ND.device) - self.num_rows
        self.hidden_ND = (hidden_ND * setting.scale if setting.scale != 1.0 else hidden_ND).to(setting.product_dtype)
        self.labels_N = setting.labels_N
        if extra:  # padding by nothing is a copy
            self.hidden_ND, self.labels_N = F.pad(self.hidden_ND, (0, 0, 0, extra)), F.pad(self.labels_N, (0, extra))
        self.weight_VD = weight_VD.to(setting.product_dtype)
        self.bias_V = None if bias_V is None else bias_V.to(self.dtype)
        self.is_bounded = self._logits_are_bounded()
        self.losses_N = hidden_ND.new_empty(len(self.hidden_ND), dtype=self.dtype)
        self.hidden_gradient_ND = torch.empty_like(self.hidden_ND, dtype=self.dtype) if needed[0] else None
        self.weight_gradient_VD = weight_VD.new_zeros(weight_VD.shape, dtype=self.dtype) if needed[1] else None
        self.bias_gradient_V = weight_VD.new_zeros(weight_VD.shape[0], dtype=self.dtype) if needed[2] else None

    def _logits_are_bounded(self) -> bool:
        """Return whether the exponentials of all logits stay in the range of float32.

        The inequality of Cauchy and Schwarz bounds all logits at once, and saves two passes over each chunk.
        """
        if self.hidden_ND.shape[0] == 0:
            return True
        norms = [
            torch.linalg.vector_norm(matrix, dim=1, dtype=self.dtype).max()
            for matrix in (self.hidden_ND, self.weight_VD)
        ]
        bound = norms[0] * norms[1]
        if self.bias_V is not None:
            bound = bound + self.bias_V.abs().max()
        return bool(bound < _SAFE_EXPONENT)

    def run(self) -> Tensor:
        """Compute loss and gradients of all rows, and return the summed loss in nats."""
        num_rows, num_entries = self.losses_N.shape[0], self.weight_VD.shape[0]
        product = self.setting.product_dtype
        least = _CHUNK_BYTES
        room = max(least, min(self.weight_VD.numel() * self.dtype.itemsize, _GROUP_BYTES))
        group = max(1, min(num_rows, room // (num_entries * product.itemsize)))
        chunk = max(1, min(group, least // (num_entries * self.dtype.itemsize)))
        operand_GV = torch.empty(group, num_entries, dtype=product, device=self.hidden_ND.device)
        # Where sums have the dtype of products, logits stay where the product wrote them.
        buffer_CV = (
            operand_GV[:chunk] if product == self.dtype else operand_GV.new_empty(chunk, num_entries, dtype=self.dtype)
        )
        with torch.autocast(self.hidden_ND.device.type, enabled=False):
            for start in range(0, num_rows, group):
                rows = slice(start, min(start + group, num_rows))
                self._add_group(rows, operand_GV[: rows.stop - start], buffer_CV)
            loss: Tensor = self.losses_N[: self.num_rows].sum() - self._spread_evenly()
        return loss

    def gradients(self, inputs: tuple[Tensor, Tensor, Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of hidden states, weight and bias in their dtypes; None if a gradient is not needed."""
        if self.hidden_gradient_ND is not None and self.setting.scale != 1.0:
            self.hidden_gradient_ND.mul_(self.setting.scale)
        hidden_ND = None if self.hidden_gradient_ND is None else self.hidden_gradient_ND[: self.num_rows]
        gradients = (hidden_ND, self.weight_gradient_VD, self.bias_gradient_V)
        return [
            None if gradient is None or values is None else gradient.to(values.dtype)
            for gradient, values in zip(gradients, inputs, strict=True)
        ]

    def _add_group(self, rows: slice, operand_GV: Tensor, buffer_CV: Tensor) -> None:
        """Add loss and gradients of a group of rows to the sums, without the label smoothing term."""
        hidden_GD, weight_DV = self.hidden_ND[rows], self.weight_VD.t()
        if self.bias_V is not None and operand_GV.dtype == self.dtype:
            torch.addmm(self.bias_V, hidden_GD, weight_DV, out=operand_GV)
        else:
            torch.mm(hidden_GD, weight_DV, out=operand_GV)
        rates = []
        for at in range(0, len(operand_GV), len(buffer_CV)):
            operand_CV = operand_GV[at : at + len(buffer_CV)]
            is_same = operand_CV.dtype == self.dtype
            logits_CV = operand_CV if is_same else buffer_CV[: len(operand_CV)].copy_(operand_CV)
            if self.bias_V is not None and not is_same:
                logits_CV.add_(self.bias_V)
            rates.append(self._add_chunk(rows.start + at, logits_CV))
            if not is_same:
                operand_CV.copy_(logits_CV)
        rate_G1 = torch.cat(rates)
        rate_G1[max(0, self.num_rows - rows.start) :] = 0.0
        if self.hidden_gradient_ND is not None:
            self.hidden_gradient_ND[rows] = torch.mm(operand_GV, self.weight_VD) * rate_G1
        if self.weight_gradient_VD is not None:
            scaled_GD = (hidden_GD * rate_G1).to(operand_GV.dtype)
            if scaled_GD.dtype == self.dtype:
                self.weight_gradient_VD.addmm_(operand_GV.t(), scaled_GD)
            else:
                self.weight_gradient_VD.add_(torch.mm(operand_GV.t(), scaled_GD))

    def _add_chunk(self, start: int, logits_CV: Tensor) -> Tensor:
        """Add the loss of a chunk, and turn its logits into gradients up to a factor per row; return the factors."""
        label_share = 1.0 - self.setting.label_smoothing
        labels_C1 = self.labels_N[start : start + len(logits_CV)].unsqueeze(1)
        label_logits_C1 = logits_CV.gather(1, labels_C1)
        if self.is_bounded:
            losses_C1 = -label_share * label_logits_C1
        else:
            top_C1 = logits_CV.amax(1, keepdim=True)
            losses_C1 = top_C1 - label_share * label_logits_C1
            logits_CV.sub_(top_C1)
        exp_CV = logits_CV.exp_()
        total_C1 = exp_CV.sum(1, keepdim=True)
        self.losses_N[start : start + len(logits_CV)] = (losses_C1 + total_C1.log()).squeeze(1)
        # The softmax is exp / total; the division is left to the small tensors on the other side of each product.
        gradient_CV = exp_CV.scatter_(1, labels_C1, exp_CV.gather(1, labels_C1) - label_share * total_C1)
        rate_C1 = total_C1.reciprocal()
        if self.bias_gradient_V is not None:
            rate_C = rate_C1.squeeze(1).clone()
            rate_C[max(0, self.num_rows - start) :] = 0.0
            self.bias_gradient_V.addmv_(gradient_CV.t(), rate_C)
        return rate_C1

    def _spread_evenly(self) -> Tensor:
        """Return the label smoothing term, a multiple of the sum of all logits, and subtract its gradients.

        The sum is linear in the hidden states, so it is computed without the logits.
        """
        share = self.setting.label_smoothing / self.weight_VD.shape[0]
        if share == 0.0:
            return self.losses_N.new_zeros(())
        hidden_sum_D = self.hidden_ND.sum(0, dtype=self.dtype)
        weight_sum_D = self.weight_VD.sum(0, dtype=self.dtype)
        logits_sum = hidden_sum_D @ weight_sum_D
        if self.bias_V is not None:
            logits_sum = logits_sum + self.num_rows * self.bias_V.sum()
        if self.hidden_gradient_ND is not None:
            self.hidden_gradient_ND.sub_(weight_sum_D, alpha=share)
        if self.weight_gradient_VD is not None:
            self.weight_gradient_VD.sub_(hidden_sum_D, alpha=share)
        if self.bias_gradient_V is not None:
            self.bias_gradient_V.sub_(share * self.num_rows)
        spread: Tensor = share * logits_sum
        return spread
