"""Heads of attention and neurons of feed-forward networks removed: smaller matrices that compute the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead import spec
from clearhead.core import Transformer
from clearhead.core.rare.score_bias import alibi_slopes
from clearhead.errors import InputError
from clearhead.surgery.addresses import branch_functions, check_numbers, match_addresses
from clearhead.surgery.plan import Origin, SurgeryPlan, apply_plan, select_rows, unchanged_origins
from clearhead.surgery.report import AnyModel, EditedModel


def remove_heads(model: AnyModel, heads: Mapping[str, Collection[int]]) -> EditedModel[AnyModel]:
    """Remove heads of attention: the output is that of the whole model with these heads silenced.

    Heads that share a key and a value leave as whole groups, or as many of each group.

    Args:
        model: a module or a model; it is not changed.
        heads: numbers of heads to remove, by the address of their attention or of a layer that has one; * stands for
            any part of an address, as in "encoder.layers.*".

    Raises:
        InputError: places or heads that do not exist, or heads that others cannot do without; every fault is named.

    Source: arXiv 1905.10650, section 3.
    """
    return apply_plan(model, lambda module: _plan_heads(module, heads))


def remove_neurons(model: AnyModel, neurons: Mapping[str, Collection[int]]) -> EditedModel[AnyModel]:
    """Remove neurons of the inner layer of feed-forward networks: the output is that with these neurons silenced.

    Args:
        model: a module or a model; it is not changed.
        neurons: numbers to remove, by the address of a network or of a layer that has one, with * as for heads; of a
            mixture every expert loses them.

    Raises:
        InputError: places or neurons that do not exist, or no neuron is left; every fault is named.

    Source: arXiv 1608.08710, section 3 (whole units in place of single weights).
    """
    return apply_plan(model, lambda module: _plan_neurons(module, neurons))


@dataclass(frozen=True)
class _Cut:
    """What is left of an attention: the numbers of its heads, and of its key/value heads."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]


def _plan_heads(module: Transformer, given: Mapping[str, Collection[int]]) -> SurgeryPlan:
    found = branch_functions(module.spec, spec.Attention)
    removed = match_addresses(module.spec, given, found, "attention")
    faults: list[str] = []
    cuts: dict[str, _Cut] = {}
    for address, numbers in removed.items():
        wrong = check_numbers(address, numbers, found[address].num_heads, "head")
        faults += wrong or _obstacles(address, found[address], numbers)
        if not wrong:
            cuts[address] = _cut(found[address], numbers)
    if faults:
        raise InputError.from_faults(faults)
    origins = unchanged_origins(module)
    for address, cut in cuts.items():
        origins |= _attention_origins(module, address, found[address], cut)
    biases, resized = _biases(module.spec, found, cuts)

    def change(path: str, node: spec.Node) -> spec.Node:
        if isinstance(node, spec.Attention) and path in found:
            update: dict[str, object] = {"score_bias": biases.get(path, node.score_bias)}
            if path in cuts:
                update |= {"num_heads": len(cuts[path].heads), "num_kv_heads": len(cuts[path].kv_heads)}
            return node.model_copy(update=update)
        if isinstance(node, spec.RelativeBuckets) and path in resized:
            return node.model_copy(update={"num_heads": len(resized[path])})
        return node

    origins |= {f"{path}.weight": select_rows(f"{path}.weight", _index(left), 1) for path, left in resized.items()}
    return SurgeryPlan(spec.map_nodes(module.spec, change), origins)


def _obstacles(address: str, attention: spec.Attention, removed: Collection[int]) -> list[str]:
    """List why heads cannot leave although they exist."""
    norm = attention.query_key_norm
    if norm is not None and norm.over == "width":
        return [f"{address}: query and key are normed over all heads at once, so each head needs all others"]
    group = attention.num_heads // attention.num_kv_heads
    kept = _counts(attention, removed)
    if len({count for count in kept if count}) > 1:
        number = kept.index(min(count for count in kept if count))
        return [
            f"{address}: {group} heads share each key and value; of group {number} (heads {number * group} to "
            f"{(number + 1) * group - 1}) {kept[number]} would be left, of others {max(kept)}: remove whole groups, or "
            "as many heads of each"
        ]
    return []


def _counts(attention: spec.Attention, removed: Collection[int]) -> list[int]:
    """Count the heads that are left in each group."""
    group = attention.num_heads // attention.num_kv_heads
    return [group - sum(head // group == number for head in removed) for number in range(attention.num_kv_heads)]


def _cut(attention: spec.Attention, removed: Collection[int]) -> _Cut:
    kept = tuple(head for head in range(attention.num_heads) if head not in removed)
    return _Cut(kept, tuple(number for number, count in enumerate(_counts(attention, removed)) if count))


def _index(numbers: Sequence[int], size: int = 1) -> Tensor:
    """Return the rows of some heads, each of them `size` rows."""
    return (torch.tensor(numbers)[:, None] * size + torch.arange(size)).flatten()


def _attention_origins(module: Transformer, address: str, attention: spec.Attention, cut: _Cut) -> dict[str, Origin]:
    size = attention.head_size
    queries, keys = _index(cut.heads, size), _index(cut.kv_heads, size)
    rows = {"query": queries, "key": keys, "value": keys}
    rows |= {"score_bias.position_key": queries, "score_bias.position_query": queries}
    if attention.query_key_norm is not None and attention.query_key_norm.per_head:
        rows |= {"query_norm": _index(cut.heads), "key_norm": _index(cut.kv_heads)}
    kept = [(f"{address}.{name}.{leaf}", index, 0) for name, index in rows.items() for leaf in ("weight", "bias")]
    kept += [(f"{address}.out.weight", queries, 1), (f"{address}.sink", _index(cut.heads), 0)]
    return {place: select_rows(place, index, axis) for place, index, axis in kept if place in module.state_dict()}


def _biases(
    model: spec.Model, found: Mapping[str, spec.Attention], cuts: Mapping[str, _Cut]
) -> tuple[dict[str, spec.ScoreBias], dict[str, tuple[int, ...]]]:
    """Return the score bias of each attention that gets another, and the heads that are left of each table."""
    biases: dict[str, spec.ScoreBias] = {}
    readers: dict[str, dict[str, tuple[int, ...]]] = {}
    for address, attention in found.items():
        kept = cuts[address].heads if address in cuts else tuple(range(attention.num_heads))
        match attention.score_bias:
            case spec.Alibi() as alibi if address in cuts:
                slopes = alibi.slopes or tuple(alibi_slopes(attention.num_heads).tolist())
                left = tuple(slopes[head] for head in kept)
                usual = tuple(alibi_slopes(len(left)).tolist())
                biases[address] = alibi.model_copy(update={"slopes": None if left == usual else left})
            case spec.RelativeBuckets():
                readers.setdefault(f"{address}.score_bias", {})[address] = kept
            case spec.Reference(path=path):
                readers.setdefault(path, {})[address] = kept
            case spec.TableHeads(path=path, heads=heads):
                readers.setdefault(path, {})[address] = tuple(heads[head] for head in kept)
            case _:
                continue
    resized: dict[str, tuple[int, ...]] = {}
    nodes = dict(spec.walk(model))
    for table, wanted in readers.items():
        owner = nodes[table]
        assert isinstance(owner, spec.RelativeBuckets)
        every = tuple(range(owner.num_heads))
        if not set(wanted) & set(cuts):
            continue
        if len(set(wanted.values())) == 1:
            resized[table] = next(iter(wanted.values()))
            every = resized[table]
        elif wanted.get(table.removesuffix(".score_bias"), every) != every:
            raise InputError(
                f"{table} is a table of scores that {len(wanted)} attentions read: remove the same heads of all, or "
                "none of its owner's"
            )
        for address, heads in wanted.items():
            if f"{address}.score_bias" != table:
                is_whole = heads == every
                biases[address] = spec.Reference(path=table) if is_whole else spec.TableHeads(path=table, heads=heads)
    return biases, resized


def _plan_neurons(module: Transformer, given: Mapping[str, Collection[int]]) -> SurgeryPlan:
    found: dict[str, spec.FeedForward | spec.MixtureOfExperts] = {
        **branch_functions(module.spec, spec.FeedForward),
        **branch_functions(module.spec, spec.MixtureOfExperts),
    }
    removed = match_addresses(module.spec, given, found, "feed-forward network")
    sizes = {address: _network(node).size for address, node in found.items()}
    faults = [
        fault for address, numbers in removed.items() for fault in check_numbers(
            address, numbers, sizes[address], "neuron"
        )
    ]  # fmt: skip
    if faults:
        raise InputError.from_faults(faults)
    origins = unchanged_origins(module)
    left: dict[str, int] = {}
    for address, numbers in removed.items():
        node = found[address]
        is_mixed = isinstance(node, spec.MixtureOfExperts)
        place = f"{address}.expert" if is_mixed else address
        kept = _index([number for number in range(sizes[address]) if number not in numbers])
        left[place] = len(kept)
        first = int(is_mixed)  # the experts' own axis stands in front
        cut = [(f"{place}.{name}.{leaf}", first) for name in ("up", "gate") for leaf in ("weight", "bias")]
        cut.append((f"{place}.down.weight", first + 1))
        origins |= {name: select_rows(name, kept, axis) for name, axis in cut if name in origins}

    def change(path: str, node: spec.Node) -> spec.Node:
        return node.model_copy(update={"size": left[path]}) if path in left else node

    return SurgeryPlan(spec.map_nodes(module.spec, change), origins)


def _network(node: spec.FeedForward | spec.MixtureOfExperts) -> spec.FeedForward:
    return node.expert if isinstance(node, spec.MixtureOfExperts) else node
