"""Surgery on heads and neurons: remove them, with smaller matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead import spec
from clearhead.apps.surgery.addresses import branch_functions, check_numbers, match_addresses, refuse, update_nodes
from clearhead.apps.surgery.plan import Origin, SurgeryPlan, apply_plan, copy_origins, select_rows
from clearhead.apps.surgery.report import AnyModel, EditedModel
from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError
from clearhead.core import Transformer


@check_types
def remove_heads(model: AnyModel, heads: Mapping[str, Collection[int]]) -> EditedModel[AnyModel]:
    """Remove attention heads; the new model computes the same as the old model with the output of these heads zero.

    If heads share a key and a value, remove whole groups, or the same number of heads from each group.

    Args:
        model: a module or a model; it is not changed.
        heads: the numbers of the heads to remove, by address or pattern, such as "encoder.layers.*". The address is
            that of an attention, or of a layer with one attention.

    Raises:
        InputError: an address or head does not exist, or other heads depend on a head; the message names every fault.

    Source: arXiv 1905.10650, section 3.
    """
    return apply_plan(model, lambda module: _plan_heads(module, heads))


@check_types
def remove_neurons(model: AnyModel, neurons: Mapping[str, Collection[int]]) -> EditedModel[AnyModel]:
    """Remove inner neurons of feed-forward networks; the new model equals the old model with these neurons zero.

    Args:
        model: a module or a model; it is not changed.
        neurons: the numbers of the neurons to remove, by address or pattern. The address is that of a feed-forward
            network, or of a layer with one. Every expert of a mixture loses the neurons.

    Raises:
        InputError: an address or neuron does not exist, or no neuron would be left; the message names every fault.

    Source: arXiv 1608.08710, section 3 (whole units in place of single weights).
    """
    return apply_plan(model, lambda module: _plan_neurons(module, neurons))


class _RemainingHeads(NamedTuple):
    """The numbers of the heads, and of the key/value heads, that an attention keeps."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]


def _plan_heads(module: Transformer, heads_by_pattern: Mapping[str, Collection[int]]) -> SurgeryPlan:
    attentions = branch_functions(module.spec, spec.Attention)
    faults: list[str] = []
    remaining: dict[str, _RemainingHeads] = {}
    for address, numbers in match_addresses(module.spec, heads_by_pattern, attentions, "attention").items():
        attention = attentions[address]
        wrong = check_numbers(address, numbers, attention.num_heads, "head")
        faults += wrong or _obstacles(address, attention, numbers)
        heads = tuple(head for head in range(attention.num_heads) if head not in numbers)
        counts = [] if wrong else _group_sizes(attention, numbers)
        remaining[address] = _RemainingHeads(heads, tuple(group for group, count in enumerate(counts) if count))
    refuse(faults)
    origins = copy_origins(module)
    updates: dict[str, dict[str, Any]] = {}
    for address, (heads, kv_heads) in remaining.items():
        origins |= _attention_origins(module, address, attentions[address], remaining[address])
        updates[address] = {"num_heads": len(heads), "num_kv_heads": len(kv_heads)}
    biases, tables = _score_biases(module.spec, attentions, remaining)
    for address, bias in biases.items():
        updates.setdefault(address, {})["score_bias"] = bias
    for path, (table, heads) in tables.items():
        if path == table:
            updates[path] = {"num_heads": len(heads)}
        origins[f"{path}.weight"] = select_rows(f"{table}.weight", _rows(heads), 1)
    return SurgeryPlan(update_nodes(module.spec, updates), origins)


def _obstacles(address: str, attention: spec.Attention, removed: Collection[int]) -> list[str]:
    """Return the reasons why heads cannot be removed."""
    norm = attention.query_key_norm
    if norm is not None and norm.over == "width":
        return [f"{address}: queries and keys are normalized over all heads at once, so no head can be removed"]
    group = attention.num_heads // attention.num_kv_heads
    counts = _group_sizes(attention, removed)
    if len({count for count in counts if count}) > 1:
        number = counts.index(min(count for count in counts if count))
        return [
            f"{address}: {group} heads share each key and value; of group {number} (heads {number * group} to "
            f"{(number + 1) * group - 1}) {counts[number]} would be left, of others {max(counts)}: remove whole "
            "groups, or equally many heads of each"
        ]
    return []


def _group_sizes(attention: spec.Attention, removed: Collection[int]) -> list[int]:
    """Return the number of remaining query heads for each key/value head."""
    group = attention.num_heads // attention.num_kv_heads
    return [group - sum(head // group == number for head in removed) for number in range(attention.num_kv_heads)]


def _rows(numbers: Sequence[int], size: int = 1) -> Tensor:
    """Return the row numbers of heads that have `size` rows each."""
    return (torch.tensor(numbers)[:, None] * size + torch.arange(size)).flatten()


def _attention_origins(
    module: Transformer, address: str, attention: spec.Attention, remaining: _RemainingHeads
) -> dict[str, Origin]:
    size = attention.head_size
    queries, keys = _rows(remaining.heads, size), _rows(remaining.kv_heads, size)
    rows = {"query": queries, "key": keys, "value": keys}
    rows |= {"score_bias.position_key": queries, "score_bias.position_query": queries}
    if attention.query_key_norm is not None and attention.query_key_norm.per_head:
        rows |= {"query_norm": _rows(remaining.heads), "key_norm": _rows(remaining.kv_heads)}
    tensors = [(f"{address}.{name}.{leaf}", index, 0) for name, index in rows.items() for leaf in ("weight", "bias")]
    tensors += [(f"{address}.out.weight", queries, 1), (f"{address}.sink", _rows(remaining.heads), 0)]
    present = module.state_dict()
    return {
        tensor_name: select_rows(tensor_name, index, axis)
        for tensor_name, index, axis in tensors
        if tensor_name in present
    }


def _score_biases(
    model: spec.Model, attentions: Mapping[str, spec.Attention], remaining: Mapping[str, _RemainingHeads]
) -> tuple[dict[str, spec.ScoreBias], dict[str, tuple[str, tuple[int, ...]]]]:
    """Return changed score biases by address, and for each new table the old one and its remaining heads.

    Attentions that shared a table but keep different heads get separate tables.
    """
    biases: dict[str, spec.ScoreBias] = {}
    readers: dict[str, dict[str, tuple[int, ...]]] = {}
    for address, attention in attentions.items():
        left = remaining[address].heads if address in remaining else tuple(range(attention.num_heads))
        match attention.score_bias:
            case spec.Alibi() as alibi if address in remaining:
                slopes = tuple(alibi.head_slopes(attention.num_heads)[head] for head in left)
                is_default = slopes == spec.Alibi().head_slopes(len(left))
                biases[address] = alibi.model_copy(update={"slopes": None if is_default else slopes})
            case spec.RelativeBuckets():
                readers.setdefault(f"{address}.score_bias", {})[address] = left
            case spec.Reference(path=path):
                readers.setdefault(path, {})[address] = left
            case _:
                continue
    tables: dict[str, tuple[str, tuple[int, ...]]] = {}
    nodes = dict(spec.walk(model))
    for table, read in readers.items():
        node, owner = nodes[table], table.removesuffix(".score_bias")
        assert isinstance(node, spec.RelativeBuckets)
        every = tuple(range(node.num_heads))
        if not set(read) & set(remaining):
            continue
        if len(set(read.values())) == 1:
            tables[table] = table, next(iter(read.values()))
            continue
        if read.get(owner, every) != every:
            raise InputError(
                f"{table} is a table of scores that {len(read)} attentions share: remove the same heads of all, or "
                "none of the attention that owns it"
            )
        for address, heads in read.items():
            if heads != every:
                biases[address] = node.model_copy(update={"num_heads": len(heads)})
                tables[f"{address}.score_bias"] = table, heads
    return biases, tables


def _plan_neurons(module: Transformer, neurons_by_pattern: Mapping[str, Collection[int]]) -> SurgeryPlan:
    # The weights of experts have one more axis in front.
    networks = {path: (path, node, 0) for path, node in branch_functions(module.spec, spec.FeedForward).items()}
    for path, mixture in branch_functions(module.spec, spec.MixtureOfExperts).items():
        networks[path] = (f"{path}.expert", mixture.expert, 1)
    removed = match_addresses(module.spec, neurons_by_pattern, networks, "feed-forward network")
    refuse(
        [
            fault
            for address, numbers in removed.items()
            for fault in check_numbers(address, numbers, networks[address][1].size, "neuron")
        ]
    )
    origins = copy_origins(module)
    updates = {}
    for address, numbers in removed.items():
        path, node, axis = networks[address]
        remaining = [number for number in range(node.size) if number not in numbers]
        updates[path] = {"size": len(remaining)}
        cut = [(f"{path}.{name}.{leaf}", axis) for name in ("up", "gate") for leaf in ("weight", "bias")]
        cut.append((f"{path}.down.weight", axis + 1))
        origins |= {name: select_rows(name, torch.tensor(remaining), axis) for name, axis in cut if name in origins}
    return SurgeryPlan(update_nodes(module.spec, updates), origins)
