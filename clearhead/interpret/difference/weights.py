"""Compare the weights of two models A and B: tensors, attention heads and rows of tables.

Two numbers describe each change. `relative` is ||B - A|| / ||A||, in the Frobenius norm. `score` divides by a typical
norm if that is larger than ||A||, so noise on a small bias or row ranks low. The typical norm of a head or row is the
root mean square over all heads of the attention or rows of the table. For a tensor, it is the norm that its size and
the mean square of all weights of its module give.

Weights are read a few rows at a time. Legend: M rows, N columns, K random directions, H heads, P the pair A and B - A.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.base.machine import give_memory_back
from clearhead.base.printing import Printed
from clearhead.base.progress import Notify, counter
from clearhead.checkpoints.stored_weights import StoredWeights, matrix_shape

BLOCK = 2**19
"""Most numbers of a weight that are read at once."""
MOST_EXACT, MOST_SIDE = 2**22, 2**10
"""Largest matrix (in numbers) and largest smaller side for which all singular values are computed."""
NUM_DIRECTIONS = 256
"""Number of random directions that a larger matrix is projected to."""
RANK_THRESHOLD = 0.01
"""A singular value counts towards the rank if it is larger than this share of the largest one."""
MOST_ROWS = 20
"""Most rows of a table that are listed."""

_HEAD_TENSORS = (
    ".query.weight", ".query.bias", ".key.weight", ".key.bias", ".value.weight", ".value.bias", ".out.weight",
)  # fmt: skip

Squares = Float64[Tensor, "2 parts"]
"""Sums of squares of A and of B - A, for each head or row."""


@dataclass(frozen=True, repr=False)
class Change(Printed):
    """Change of a tensor, an attention head, or a row of a table.

    Args:
        kind: "tensor", "head" or "row".
        address: address of the tensor, or of the attention that has the head.
        relative: ||B - A|| / ||A||, Frobenius norm. None means that A is zero and B is not.
        score: ||B - A|| divided by the larger of ||A|| and the typical norm; see the module docstring.
        index: number of the head or the row, from 0. None means a tensor.
        shape: shape of a tensor; empty for a head or a row.
        rank: number of singular values of B - A above 1 % of the largest. None means that it is not a matrix.
        is_rank_at_least: True if the rank may be higher, because a large matrix was projected.
        token: token of a row. None means that no tokenizer was loaded or that it is not a row of an embedding.
        divergence: mean Jensen-Shannon divergence of a head's attention rows, in nats. None means without texts.
    """

    kind: Literal["tensor", "head", "row"]
    address: str
    relative: float | None
    score: float
    index: int | None = None
    shape: tuple[int, ...] = ()
    rank: int | None = None
    is_rank_at_least: bool = False
    token: str | None = None
    divergence: float | None = None


@dataclass(frozen=True, repr=False)
class OtherShape(Printed):
    """Weight with different shapes in the two models.

    Args:
        address: address of the weight.
        a, b: shape in model A and in model B.
        common_rows: number of table rows that were compared. None means that the weight was not compared.
    """

    address: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    common_rows: int | None = None


@dataclass(frozen=True, repr=False)
class WeightChanges(Printed):
    """Changes of all weights that two models share, and lists of the weights that they do not share.

    Args:
        changes: changes, the largest score first. A tensor comes after its head or row that changed most. Each table
            contributes only the rows that changed most.
        only_in_a, only_in_b: addresses of weights that the other model lacks.
        other_shape: weights with different shapes.
    """

    changes: tuple[Change, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    other_shape: tuple[OtherShape, ...]


@dataclass(frozen=True)
class _TensorSums:
    """Sums of squares of A and B - A for one tensor, by rows and by columns, and the rank of B - A."""

    shape: tuple[int, ...]
    rows_PM: Float64[Tensor, "2 rows"]
    columns_PN: Float64[Tensor, "2 columns"]
    rank: int | None
    is_rank_at_least: bool

    @property
    def total_P(self) -> Float64[Tensor, "2"]:
        return self.rows_PM.sum(1)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def compare_weights(a: StoredWeights, b: StoredWeights, notify: Notify | None = None) -> WeightChanges:
    """Return the changes of all weights from A to B.

    Args:
        a, b: stored weights of the models; only a few blocks of rows are in memory at a time.
        notify: function called with the numbers of compared and of all tensors. None means the progress display.

    Raises:
        InputError: no address has the same shape in both models, or a weight is NaN or infinite.
    """
    other_shape, sums, tell = [], dict[str, _TensorSums](), counter("tensors", notify)
    common = [address for address in a.shapes if address in b.shapes]
    for number, address in enumerate(common, start=1):
        shapes = a.shapes[address], b.shapes[address]
        shape = shapes[0]
        if shapes[0] != shapes[1]:
            rows = min(shapes[0][:1], shapes[1][:1])
            is_grown = _has_token_rows(a.model, address) and shapes[0][1:] == shapes[1][1:]
            other_shape.append(OtherShape(address, *shapes, rows[0] if is_grown else None))
            shape = (*rows, *shapes[0][1:]) if is_grown else ()
        if shape or shapes[0] == shapes[1]:
            sums[address] = _compare_tensor(a, b, address, shape)
            if sums[address].size > MOST_EXACT:
                give_memory_back()
        tell(number, len(common))
    if not sums:
        raise InputError(
            f"no weight of {a.name} has the address and the shape of one of {b.name}: "
            "give two models of the same architecture"
        )
    head_and_row_changes = [*_head_changes(a.model, b.model, sums), *_row_changes(a.model, sums)]
    return WeightChanges(
        tuple(_sort_changes([*head_and_row_changes, *_tensor_changes(sums)])),
        tuple(address for address in a.shapes if address not in b.shapes),
        tuple(address for address in b.shapes if address not in a.shapes),
        tuple(other_shape),
    )


def _sort_changes(changes: Sequence[Change]) -> list[Change]:
    """Sort changes by score, the largest first; a tensor comes after its head or row that changed most."""
    most: dict[str, float] = {}
    for change in changes:
        if change.kind != "tensor":
            names = _HEAD_TENSORS if change.kind == "head" else ("",)
            for address in (f"{change.address}{name}" for name in names):
                most[address] = max(change.score, most.get(address, 0.0))

    def order(change: Change) -> tuple[float, bool, float, str]:
        is_tensor = change.kind == "tensor"
        least = min(change.score, most.get(change.address, math.inf)) if is_tensor else change.score
        return -least, is_tensor, -change.score, change.address

    return sorted(changes, key=order)


def _has_token_rows(model: spec.Model, address: str) -> bool:
    """Return whether each row of a weight belongs to a token, a position or a segment (not to a neuron)."""
    if ".embedding." in address and ".projection." not in address:
        return True
    vocabularies = {node.rows for _, node in spec.walk(model) if isinstance(node, spec.Table)}
    linear = address.startswith("head.layers.") and address.rpartition(".")[0]
    node = dict(spec.walk(model)).get(linear) if linear else None
    return isinstance(node, spec.Linear) and node.size in vocabularies


def _compare_tensor(a: StoredWeights, b: StoredWeights, address: str, shape: tuple[int, ...]) -> _TensorSums:
    """Read a tensor of both models in blocks of rows, and sum the squares of A and of B - A."""
    num_rows, num_columns = matrix_shape(shape)
    step = max(1, BLOCK // max(1, num_columns))

    def read_changes() -> Iterator[tuple[slice, Tensor, Tensor]]:
        for start in range(0, num_rows, step):
            rows = range(start, min(start + step, num_rows))
            before_MN = a.read_rows(address, rows)
            yield slice(rows.start, rows.stop), before_MN, b.read_rows(address, rows) - before_MN

    rows_PM, columns_PN = torch.zeros(2, num_rows).double(), torch.zeros(2, num_columns).double()
    counter_of_rank = _RankCounter(num_rows, num_columns) if len(shape) == 2 else None
    for rows, before_MN, change_MN in read_changes():
        for index, block_MN in enumerate((before_MN, change_MN)):
            squares_MN = block_MN.double().square_()
            rows_PM[index, rows] = squares_MN.sum(1)
            columns_PN[index] += squares_MN.sum(0)
        if counter_of_rank is not None:
            counter_of_rank.add(rows, change_MN)
    if not torch.isfinite(rows_PM).all():
        raise InputError(
            f"{a.name} or {b.name}: {address} has NaN or infinite numbers, so its change is undefined: "
            "compare undamaged models"
        )
    rank = None
    if counter_of_rank is not None:
        rank = counter_of_rank.count(lambda: (change_MN for _, _, change_MN in read_changes()))
    return _TensorSums(shape, rows_PM, columns_PN, rank, counter_of_rank is not None and rank == NUM_DIRECTIONS)


class _RankCounter:
    """Numerical rank of a matrix that is added in blocks of rows: its singular values above a fraction of the largest.

    A matrix of at most `MOST_EXACT` numbers is kept whole, and all its singular values are computed. A larger one is
    projected to the span of `NUM_DIRECTIONS` random combinations of its rows. Almost surely, this span contains all
    rows of a matrix of lower rank. Source: arXiv 0909.4061, section 1.6 (the range of a random projection).
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        is_small = num_rows * num_columns <= MOST_EXACT and min(num_rows, num_columns) <= MOST_SIDE
        self._held_MN: Tensor | None = torch.zeros(num_rows, num_columns) if is_small else None
        self._sketch_KN: Tensor = torch.zeros(0 if is_small else NUM_DIRECTIONS, num_columns)
        self._draw: torch.Generator = torch.Generator().manual_seed(0)

    def add(self, rows: slice, change_MN: Float[Tensor, "rows columns"]) -> None:
        """Add the next block of rows of the matrix."""
        if self._held_MN is not None:
            self._held_MN[rows] = change_MN
        else:
            combine_KM = torch.randn(NUM_DIRECTIONS, len(change_MN), generator=self._draw)
            self._sketch_KN.addmm_(combine_KM, change_MN)

    def count(self, read_again: Callable[[], Iterator[Tensor]]) -> int:
        """Return the number of singular values above `RANK_THRESHOLD` of the largest.

        Args:
            read_again: function that reads the rows of the matrix again; called only if the matrix was projected.
        """
        if (held_MN := self._held_MN) is not None:
            gram = held_MN.T @ held_MN if len(held_MN) > held_MN.shape[1] else held_MN @ held_MN.T
        else:
            basis_NK = _orthogonal_basis(self._sketch_KN)
            del self._sketch_KN
            gram = torch.zeros(basis_NK.shape[1], basis_NK.shape[1])
            for block_MN in read_again() if len(gram) else ():
                projected_MK = block_MN @ basis_NK
                gram.addmm_(projected_MK.T, projected_MK)
        if not gram.any():
            return 0
        # Eigenvalues of the Gram matrix are squares of singular values.
        values = torch.linalg.eigvalsh(gram.double() / gram.abs().max())
        return int((values > RANK_THRESHOLD**2 * values[-1]).sum())


def _orthogonal_basis(sketch_KN: Float[Tensor, "directions columns"]) -> Float[Tensor, "columns rank"]:
    """Return an orthonormal basis of the span of a matrix's rows, with less memory than a QR decomposition."""
    gram = sum((columns.double() @ columns.double().T for columns in sketch_KN.split(4096, 1)), torch.tensor(0.0))
    squares, vectors = torch.linalg.eigh(gram)
    is_in = squares > 1e-12 * squares[-1]
    basis_NK: Tensor = sketch_KN.T @ (vectors[:, is_in] / squares[is_in].sqrt()).float()
    return basis_NK


def _measure(squares_P: Float64[Tensor, "2"], typical: float) -> tuple[float | None, float]:
    """Return `Change.relative` and `Change.score` of a tensor, head or row.

    Args:
        squares_P: sums of squares of A and of B - A.
        typical: typical sum of squares of such a tensor, head or row in A.
    """
    before, change = squares_P.tolist()
    if change == 0.0:
        return 0.0, 0.0
    largest = max(before, typical)
    return math.sqrt(change / before) if before else None, math.sqrt(change / largest) if largest else 1.0


def _tensor_changes(sums: Mapping[str, _TensorSums]) -> Iterator[Change]:
    """Yield the change of each tensor.

    The typical norm in `Change.score` comes from the mean square of all weights of the module. If that is zero, it
    comes from the mean square of all weights of the model.
    """
    modules: dict[str, list[_TensorSums]] = {}
    for address, tensor_sums in sums.items():
        modules.setdefault(address.rpartition(".")[0], []).append(tensor_sums)
    overall = _mean_square(list(sums.values()))
    for address, tensor_sums in sums.items():
        typical = _mean_square(modules[address.rpartition(".")[0]]) or overall
        measures = _measure(tensor_sums.total_P, typical * tensor_sums.size)
        yield Change(
            "tensor",
            address,
            *measures,
            shape=tensor_sums.shape,
            rank=tensor_sums.rank,
            is_rank_at_least=tensor_sums.is_rank_at_least,
        )


def _mean_square(tensors: Sequence[_TensorSums]) -> float:
    return math.fsum(float(sums.total_P[0]) for sums in tensors) / max(1, sum(sums.size for sums in tensors))


def _head_changes(a: spec.Model, b: spec.Model, sums: Mapping[str, _TensorSums]) -> Iterator[Change]:
    """Yield the weight change of each attention head: its query, key, value and output weights."""
    others = dict(spec.walk(b))
    for address, node in spec.walk(a):
        if not isinstance(node, spec.Attention):
            continue
        other = others.get(address)
        needed = [f"{address}{name}" for name in _HEAD_TENSORS if name.endswith("weight")]
        if _head_sizes(node) == _head_sizes(other) and all(name in sums for name in needed):
            yield from _component_changes("head", address, _head_squares(address, node, sums), range(node.num_heads))


def _head_sizes(node: spec.Node | None) -> tuple[int, int, int] | None:
    return (node.num_heads, node.num_kv_heads, node.head_size) if isinstance(node, spec.Attention) else None


def _head_squares(address: str, node: spec.Attention, sums: Mapping[str, _TensorSums]) -> Squares:
    """Return the sums of squares of the weights of each attention head, in A and in B - A."""
    total_PH: Squares = sums[f"{address}.out.weight"].columns_PN.unflatten(1, (node.num_heads, -1)).sum(2)
    for name, num_heads in (("query", node.num_heads), ("key", node.num_kv_heads), ("value", node.num_kv_heads)):
        for leaf in ("weight", "bias"):
            if (tensor_sums := sums.get(f"{address}.{name}.{leaf}")) is not None:
                grouped_PH = tensor_sums.rows_PM.unflatten(1, (num_heads, -1)).sum(2)
                total_PH = total_PH + grouped_PH.repeat_interleave(node.num_heads // num_heads, 1)
    return total_PH


def _row_changes(model: spec.Model, sums: Mapping[str, _TensorSums]) -> Iterator[Change]:
    """Yield the changes of the rows that changed most, for each table with a row per token, position or segment."""
    for address, tensor_sums in sums.items():
        if len(tensor_sums.shape) == 2 and _has_token_rows(model, address):
            largest_M = tensor_sums.rows_PM[0].clamp(min=float(tensor_sums.rows_PM[0].mean()))
            order = (tensor_sums.rows_PM[1] / largest_M).nan_to_num().topk(min(MOST_ROWS, tensor_sums.shape[0])).indices
            changes = _component_changes("row", address, tensor_sums.rows_PM, order.tolist())
            yield from (change for change in changes if change.score)


def _component_changes(
    kind: Literal["head", "row"], address: str, squares_PH: Squares, chosen: Sequence[int]
) -> Iterator[Change]:
    """Yield the changes of chosen heads or rows; `score` uses the mean sum of squares of all heads or rows in A."""
    typical = float(squares_PH[0].mean())
    for index in chosen:
        yield Change(kind, address, *_measure(squares_PH[:, index], typical), index=index)
