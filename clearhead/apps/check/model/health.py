"""Health of a model's weights: NaN and huge values, heads, norms, embedding rows, and the output head.

A finding is wrong if no healthy model has it. It is a warning if it costs quality or memory but may be intended.
Legend: B rows, T tokens, H heads, E head size, D width.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from clearhead.apps.check.handwritten.report import Finding
from clearhead.apps.check.model.flow import Draw
from clearhead.apps.check.model.report import CheckOutcome
from clearhead.base.commands import make_command
from clearhead.core import Attention, Sequence, Transformer
from clearhead.core.embedding import Embedding
from clearhead.core.head import Linear as HeadLinear
from clearhead.core.norm import Norm
from clearhead.interpret.maps.hook_points import capture
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer

GROUP: Final = "health"
HUGE = 1e4
"""Bound far above all trained weights; the largest fp16 number is 65,504."""
DEAD, SAME = 1e-6, 1e-5
_MOST_SHOWN = 5
Severity = Literal["wrong", "warning"]


@dataclass(frozen=True)
class _HealthFinding:
    where: str
    says: str
    severity: Severity = "warning"
    fix: str = ""

    def finding(self) -> Finding:
        return Finding(where=self.where, says=self.says, severity=self.severity, fix=self.fix)


def _outcome(name: str, findings: list[_HealthFinding], fine: str) -> Iterator[CheckOutcome | Finding]:
    yield from (finding.finding() for finding in findings[:_MOST_SHOWN])
    if not findings:
        yield CheckOutcome(GROUP, name, "right", fine)
        return
    is_wrong = any(finding.severity == "wrong" for finding in findings)
    rest = f" and {len(findings) - 1} more" if len(findings) > 1 else ""
    yield CheckOutcome(GROUP, name, "wrong" if is_wrong else "warning", f"{findings[0].where}{rest}")


def check_numbers(module: Transformer) -> Iterator[CheckOutcome | Finding]:
    """Yield findings about weights that are NaN, infinite or huge; with NaN, nothing else can be checked."""
    bad, huge = [], []
    for address, parameter in itertools.chain(module.named_parameters(), module.named_buffers()):
        weight = parameter.detach()
        if not weight.is_floating_point():
            continue
        count = int((~torch.isfinite(weight)).sum())
        if count:
            bad.append(
                _HealthFinding(
                    address, _not_numbers(weight, count), "wrong", "load an earlier checkpoint, such as RUN@step-N"
                )
            )
            continue
        largest = float(weight.abs().max()) if weight.numel() else 0.0
        if largest > HUGE:
            says = f"its largest weight is {largest:.3g}; trained weights stay far below {HUGE:g}"
            huge.append(_HealthFinding(address, f"{says}; likely cause: a damaged file, or a run that diverges"))
    yield from _outcome("weights are numbers", bad, "every weight is a number")
    if not bad:
        yield from _outcome("huge weights", huge, f"none is above {HUGE:g}")


def _not_numbers(weight: Tensor, count: int) -> str:
    index = (~torch.isfinite(weight)).nonzero()[0].tolist()
    return (
        f"{count:,} of {weight.numel():,} weights are NaN or infinite, the first at {index}; likely cause: the "
        "training of this model diverged, or the file is damaged"
    )


def check_health(module: Transformer, exact: Transformer, draw: Draw) -> Iterator[CheckOutcome | Finding]:
    """Yield findings about the health of a model whose weights are numbers.

    Args:
        module: the model.
        exact: the model in double precision.
        draw: function that draws ids.
    """
    yield from _outcome("dead heads", list(_find_dead_heads(exact, draw)), "every head adds to the residual stream")
    yield from _outcome("duplicate heads", list(_find_duplicate_heads(exact)), "no two heads have the same weights")
    yield from _outcome("collapsed norms", list(_find_collapsed_norms(module)), "no norm has weights of zero")
    yield from _outcome("rows of the tables", list(_check_table_rows(module)), "no row is zero or equal to another row")
    yield from _outcome("trained", list(_find_untrained(module)), "no norm or head has its initial weights")


def _find_dead_heads(exact: Transformer, draw: Draw) -> Iterator[_HealthFinding]:
    """Yield heads whose output (mixed values times output projection) adds almost nothing to the residual stream."""
    attentions = {path: submodule for path, submodule in exact.named_modules() if isinstance(submodule, Attention)}
    if not attentions:
        return
    length = min(24, exact.max_positions or 24)
    ids = torch.stack([draw(length, exact.num_source_ids) for _ in range(2)])
    target = None
    if exact.encoder is not None and exact.decoder is not None:
        target = Sequence(torch.stack([draw(length, exact.num_target_ids) for _ in range(2)]))
    with torch.no_grad(), capture(exact, [f"{path}.mixed" for path in attentions]) as seen:
        exact(ids, target, head=False)
    sizes = {}
    for path, attention in attentions.items():
        mixed_BHTE = seen[f"{path}.mixed"][0].tensor
        heads = mixed_BHTE.shape[1]
        out_HDE = attention.out.weight.unflatten(1, (heads, -1)).transpose(0, 1)
        added = torch.einsum("bhte,hde->bhtd", mixed_BHTE, out_HDE)
        sizes[path] = added.norm(dim=-1).mean((0, 2)).tolist()
    usual = statistics.median(size for head_norms in sizes.values() for size in head_norms)
    for path, head_sizes in sizes.items():
        for head, size in enumerate(head_sizes):
            if size <= DEAD * usual:
                yield _HealthFinding(
                    f"{path}, head {head}", _describe_dead_head(attentions[path], head, len(head_sizes))
                )


def _describe_dead_head(attention: Attention, head: int, heads: int) -> str:
    value = attention.value.weight.unflatten(0, (attention.spec.num_kv_heads, -1))[
        head * attention.spec.num_kv_heads // heads
    ]
    out = attention.out.weight.unflatten(1, (heads, -1))[:, head]
    zero = [name for name, weight in (("value", value), ("out", out)) if not bool(weight.any())]
    why = f"its weights of {' and '.join(zero)} are zero" if zero else "its values or its output are nearly zero"
    return f"this head is dead: it adds nothing to the residual stream; {why}"


def _find_duplicate_heads(exact: Transformer) -> Iterator[_HealthFinding]:
    for path, submodule in exact.named_modules():
        if not isinstance(submodule, Attention) or submodule.spec.num_heads < 2:
            continue
        heads, groups = submodule.spec.num_heads, submodule.spec.num_kv_heads
        shared = torch.arange(heads) * groups // heads
        weights = {
            "query": submodule.query.weight.unflatten(0, (heads, -1)).flatten(1),
            "key": submodule.key.weight.unflatten(0, (groups, -1)).flatten(1)[shared],
            "value": submodule.value.weight.unflatten(0, (groups, -1)).flatten(1)[shared],
        }
        same = torch.ones(heads, heads, dtype=torch.bool)
        for matrix in weights.values():
            scale = matrix.norm(dim=1).clamp(min=1e-30)
            apart = torch.cdist(matrix[None], matrix[None], compute_mode="donot_use_mm_for_euclid_dist")[0]
            same &= (apart <= SAME * torch.maximum(scale[:, None], scale)) & bool(matrix.any())
        for first, second in same.triu(1).nonzero().tolist():
            yield _HealthFinding(
                f"{path}, heads {first} and {second}",
                "both heads have the same weights of query, key and value, so one of them adds nothing new; likely "
                "cause: heads that were copied, or initialized alike",
            )


def _find_collapsed_norms(module: Transformer) -> Iterator[_HealthFinding]:
    for path, submodule in module.named_modules():
        if isinstance(submodule, Norm) and submodule.weight is not None:
            weight = submodule.weight.detach().double() + float(submodule.has_unit_offset)
            size = float(weight.square().mean().sqrt())
            if size <= DEAD:
                says = f"this norm has collapsed: its weights are zero (root of their mean square: {size:.1g})"
                yield _HealthFinding(path, f"{says}, so its output is the same for every token", "wrong")


def _check_table_rows(module: Transformer) -> Iterator[_HealthFinding]:
    for path, submodule in module.named_modules():
        if not isinstance(submodule, Embedding) or submodule.table is None:
            continue
        table = submodule.table.weight.detach()
        zero = (~table.any(1)).nonzero()[:, 0].tolist()
        # One row of zeros is usual: that of padding.
        if len(zero) > 1:
            yield _HealthFinding(f"{path}.table", f"{len(zero):,} rows are zero: those of the ids {_list_ids(zero)}")
        _, group, counts = torch.unique(table, dim=0, return_inverse=True, return_counts=True)
        alike = ((counts[group] > 1) & table.any(1)).nonzero()[:, 0].tolist()
        if alike:
            says = f"{len(alike):,} rows equal another row bit for bit, so they are untrained or copied: the ids"
            yield _HealthFinding(f"{path}.table", f"{says} {_list_ids(alike)}")


def _list_ids(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (" ..." if len(ids) > 8 else "")


def _find_untrained(module: Transformer) -> Iterator[_HealthFinding]:
    """Yield a finding if the head, or the whole model, still has its initial weights."""
    norms = [
        submodule for submodule in module.modules() if isinstance(submodule, Norm) and submodule.weight is not None
    ]
    is_fresh = [_is_neutral(norm) for norm in norms]
    if norms and all(is_fresh):
        yield _HealthFinding(
            "the whole model",
            "every norm has its initial weights of one and biases of zero: the model is untrained, or its norms are",
        )
        return
    if module.head is None or not norms:
        return
    linears = [(number, layer) for number, layer in enumerate(module.head.layers) if isinstance(layer, HeadLinear)]
    untied = [(number, layer) for number, layer in linears if layer.weight is not None]
    # The layers before it may be those of the checkpoint, such as BERT's pooler.
    if untied and _looks_drawn(untied[-1][1]):
        yield _HealthFinding(
            f"head.layers.{untied[-1][0]}",
            "the head is untrained: its biases are zero and its weights are those of a normal distribution, while the "
            "norms of the model were trained; likely cause: a checkpoint without a head was saved with a new one",
            "wrong",
            f"train it: {make_command('new ... --init REF')}",
        )


def _is_neutral(norm: Norm) -> bool:
    assert norm.weight is not None
    has_bias = norm.bias is not None and bool(norm.bias.any())
    return not has_bias and bool((norm.weight == (0.0 if norm.has_unit_offset else 1.0)).all())


def _looks_drawn(layer: HeadLinear) -> bool:
    """Return whether a projection looks untrained: zero biases, and weights that are zero or normally distributed."""
    if layer.weight is None or layer.bias is None or bool(layer.bias.any()):
        return False
    weight = layer.weight.detach().double().flatten()
    std = float(weight.std()) if len(weight) > 1 else 0.0
    if std == 0.0:
        return not bool(weight.any())
    # For n normally distributed numbers, the mean deviates by std / sqrt(n).
    scaled = weight / std
    spread = 5 / len(weight) ** 0.5
    kurtosis = float((scaled - scaled.mean()).pow(4).mean())
    return any(abs(std / known - 1) < spread for known in (0.02, 0.01)) and (
        abs(float(scaled.mean())) < spread and abs(kurtosis - 3) < 25 / len(weight) ** 0.5
    )


def check_tokenizers(module: Transformer, tokenizers: TokenizerPair) -> Iterator[CheckOutcome | Finding]:
    """Yield findings about tokenizers that do not fit the embedding tables of a model."""
    findings: list[_HealthFinding] = []
    sides = [("source", tokenizers.source, module.num_source_ids)]
    if not tokenizers.joint or module.num_target_ids != module.num_source_ids:
        sides.append(("target", tokenizers.target, module.num_target_ids))
    for side, tokenizer, rows in sides:
        findings += _compare_with_table(side if len(sides) > 1 else "tokenizer", tokenizer, rows)
    yield from _outcome("tokenizer against table", findings, "every id has a row, and only padding rows have no entry")


def _compare_with_table(side: str, tokenizer: Tokenizer, rows: int) -> Iterator[_HealthFinding]:
    size, largest = tokenizer.vocab_size, tokenizer.special_tokens.largest_id
    fix = "restore the tokenizer that the model was trained with"
    if size > rows:
        yield _HealthFinding(side, f"it has {size:,} entries, but the table has {rows:,} rows", "wrong", fix)
    if largest >= rows:
        yield _HealthFinding(
            side, f"a special token has the id {largest}, but the table has {rows:,} rows", "wrong", fix
        )
    spare = rows - size
    # Tables are padded to multiples of up to 256, and hold a few reserved rows.
    if spare > max(256, rows // 8):
        yield _HealthFinding(
            side, f"the table has {rows:,} rows and the tokenizer {size:,} entries: {spare:,} rows are unused"
        )
