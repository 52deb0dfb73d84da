"""The family to save a module as: the first that can express it or its equal, or a report of what fits nowhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.equivalent_specs import CHANGES, Change, changed
from clearhead.checkpoints.hf.loading import bind_rules
from clearhead.checkpoints.hf.mapping import config as configs
from clearhead.checkpoints.hf.mapping.blocks import no_head
from clearhead.checkpoints.hf.mapping.family import Family, Variant
from clearhead.core import Transformer
from clearhead.spec import Model
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find

_MOST_LINES = 6
# The fields that an equivalent spec can have otherwise; where another differs, no change helps.
_CHANGEABLE = re.compile(r"\.(?:dropout|scale|layout)$|^head\.layers\.\d+\.(?:bias|weight\b.*)$")


@dataclass(frozen=True)
class _Candidate:
    """A class of a family, and a spec, equivalent to that of the module, that it may express.

    Args:
        family, variant: the class.
        model: the equivalent spec.
        changes: that lead to it.
        config: that expresses it; None: there is none.
        expressed: the nearest spec that the class can express; None: the values of its config do not fit at all.
        error: why there is no config.
    """

    family: Family
    variant: Variant
    model: Model
    changes: tuple[Change, ...] = ()
    config: Mapping[str, Any] | None = None
    expressed: Model | None = None
    error: InputError | None = None

    @cached_property
    def differing(self) -> dict[str, tuple[Any, Any]]:
        """The fields that the class cannot express: what it can, and what the spec has."""
        return {} if self.expressed is None else configs.differing_fields(self.expressed, self.model)

    @property
    def is_hopeful(self) -> bool:
        """Whether an equivalent spec may fit."""
        return self.expressed is not None and all(map(_CHANGEABLE.search, self.differing))

    def tried(self) -> _Candidate:
        """Return the candidate with its config, or with what prevents one."""
        try:
            return replace(self, config=configs.to_config(self.family, self.variant, self.model))
        except InputError as error:
            expressed = error.expressed if isinstance(error, configs.NotExpressible) else None
            return replace(self, expressed=expressed, error=error)

    def nearer(self) -> _Candidate | None:
        """Return the candidate after the change that removes most of the differences; None: no change removes any."""
        best, fewest = None, len(self.differing)
        for change in CHANGES:
            other = None if self.expressed is None else _equivalent(change, self.model)
            if other is None:
                continue
            candidate = replace(self, model=other, changes=(*self.changes, change)).tried()
            left = 0 if candidate.config is not None else len(candidate.differing) or fewest
            if left < fewest:
                best, fewest = candidate, left
        return best

    def nearest(self) -> _Candidate:
        """Return the candidate after every change that removes differences."""
        nearer = self.nearer()
        return self if nearer is None else nearer.nearest()


@cache
def _equivalent(change: Change, model: Model) -> Model | None:
    equivalent = change(model)
    return None if equivalent is None else equivalent[0]


def choose_family(
    module: Transformer, model_type: str | None, task: TaskRecord | None
) -> tuple[Transformer, Family, Variant, dict[str, Any]]:
    """Return the family to save a module as, and an equivalent module that this family can express.

    The fewer changes lead to the equivalent module the better; among the same number, the earlier family.

    Args:
        module: the module.
        model_type: of the only family that is tried; None: all are.
        task: of the module's outputs.

    Raises:
        InputError: there is none; the report is of the nearest.
    """
    for _, node in spec.own_parts(module.spec):
        raise InputError(
            f"no Hugging Face architecture has the part '{node.kind}'; a run directory and Model.save(path) keep it"
        )
    families = registry.saved_first() if model_type is None else [registry.all_families()[model_type]]
    candidates, stuck = list[_Candidate](), list[_Candidate]()
    for family in families:
        for variant in _fitting(family, task, module.spec):
            candidate = _Candidate(family, variant, module.spec).tried()
            is_stuck = candidate.config is None and not candidate.is_hopeful
            (stuck if is_stuck else candidates).append(candidate)
    while candidates:
        for candidate in candidates:
            if candidate.config is not None:
                family, variant = candidate.family, candidate.variant
                equivalent = changed(module, candidate.changes)
                if not bind_rules(family, variant, family.prefix_of(variant), equivalent)[1]:
                    return equivalent, family, variant, dict(candidate.config)
        steps = [(candidate, candidate.nearer()) for candidate in candidates if candidate.config is None]
        stuck += [candidate for candidate, nearer in steps if nearer is None]
        candidates = [nearer for _, nearer in steps if nearer is not None]
    raise _report(module.spec, stuck, is_free=model_type is None)


def _fitting(family: Family, task: TaskRecord | None, model: Model) -> list[Variant]:
    """The variants that a module may be, those of its task first."""
    if model.head is None:
        return [variant for variant in family.variants if variant.head is no_head]
    if task is None:
        return list(family.variants)
    # A class whose outputs are of another form never fits.
    fitting = [variant for variant in family.variants if find(variant.task).outputs == find(task.kind).outputs]
    return sorted(fitting, key=lambda variant: variant.task != task.kind)


# --- the report -----------------------------------------------------------------------------------------------

_NORM = r"(?<!query_key_norm\.)\b(?:pre|post|out|final_norm|embedding\.norm)\."
# The keys of a run file's [model] table, and the fields of a spec that they decide.
_KEYS = {
    "norm_place": None,
    "norm": _NORM,
    "positions": r"\.position\b|score_bias|score_table",
    "qk_norm": "query_key_norm",
    "gated": r"\.gated$",
    "activation": r"layers\.\d+\.steps\..*\.activation$",
    "bias": r"\.bias\.\w+$|\.bias_(?:in|out)$",
    "window": r"\.mask\b",
    "kv_heads": "num_kv_heads",
    "tie": r"\.table\b",
}


def _report(model: Model, stuck: Sequence[_Candidate], *, is_free: bool) -> InputError:
    """Describe the nearest family, what does not fit, and what would."""
    known = [candidate for candidate in stuck if candidate.expressed is not None]
    if not known:
        errors = (candidate.error for candidate in stuck if candidate.error is not None)
        return next(errors, InputError("no family has such a model"))
    nearest = min(known, key=lambda candidate: (len(_grouped(candidate)), len(candidate.differing))).nearest()
    family, cls, lines = nearest.family.model_type, nearest.variant.classes[0], _lines(nearest)
    shown = [f"  - {line}" for line in lines[:_MOST_LINES]]
    if len(lines) > _MOST_LINES:
        shown.append(f"  - and {len(lines) - _MOST_LINES} more")
    if not is_free:
        return InputError(f"{family} ({cls}) cannot express this model:", *shown)
    settings = _settings(nearest)
    if settings and len(settings) == len(lines):
        shown.append(f"A run file with {', '.join(settings)} under [model] trains one that it can")
    return InputError(f"no Hugging Face architecture can express this model; the nearest is {family} ({cls}):", *shown)


def _settings(candidate: _Candidate) -> list[str]:
    """Return what a run file's [model] table says for the family, for each key that decides what differs."""
    assert candidate.expressed is not None, "chosen among those that can be expressed"
    values = {key: _value(key, candidate.expressed) for key in _grouped(candidate) if key in _KEYS}
    return [f"{key} = {value}" for key, value in values.items() if value is not None]


def _lines(candidate: _Candidate) -> list[str]:
    """What does not fit, one line for each key of a run file or each kind of field."""
    lines = []
    for key, paths in _grouped(candidate).items():
        if key in _KEYS and candidate.expressed is not None:
            ours, theirs = _value(key, candidate.model), _value(key, candidate.expressed)
            if ours is not None and theirs is not None and ours != theirs:
                lines.append(f"{key} = {ours} here, {theirs} there")
                continue
        theirs, ours = candidate.differing[paths[0]]
        more = f" (and {len(paths) - 1} more like it)" if len(paths) > 1 else ""
        lines.append(f"{paths[0]}: {configs.shown(ours)} here, {configs.shown(theirs)} there{more}")
    return lines


def _grouped(candidate: _Candidate) -> dict[str, list[str]]:
    """The paths of the differing fields, by the key of a run file that decides them or by the name of the field."""
    groups: dict[str, list[str]] = {}
    model, expressed = candidate.model, candidate.expressed
    fixed = [path for path in candidate.differing if not _CHANGEABLE.search(path)]
    for path in fixed or candidate.differing:
        key = next((key for key, pattern in _KEYS.items() if pattern and re.search(pattern, path)), None)
        if path.startswith("head."):
            key = "head"
        elif key == "norm" and expressed is not None and _value("norm_place", model) != _value("norm_place", expressed):
            key = "norm_place"
        groups.setdefault(key or path.rpartition(".")[2], []).append(path)
    return groups


def _value(key: str, model: Model) -> str | None:
    """Return what a [model] table of a run file says for a spec, as TOML; None: it cannot say it."""
    stack = model.decoder or model.encoder
    assert stack is not None, "a validated model has a stack"
    step = stack.layers[0].steps[0]
    function = step.branches[0].function
    networks = [node for _, node in spec.walk(stack) if isinstance(node, spec.FeedForward)]
    if not isinstance(function, spec.Attention) or not networks:
        return None
    branch = step.branches[0]
    norm = branch.pre or step.pre or step.out or branch.post
    values: dict[str, Any] = {
        "norm_place": _norm_place(step),
        "norm": {"layer_norm": "layer", "rms_norm": "rms"}[norm.kind] if norm else None,
        "positions": _positions(stack, function),
        "qk_norm": function.query_key_norm is not None,
        "gated": networks[0].gated,
        "activation": networks[0].activation if isinstance(networks[0].activation, str) else None,
        "bias": function.bias.query and networks[0].bias_in,
        "window": getattr(function.mask, "before", None),
        "kv_heads": function.num_kv_heads,
        "tie": None,
    }
    value = values[key]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return None if value is None else str(value)


def _norm_place(step: spec.Step) -> str | None:
    branch = step.branches[0]
    places = {"pre": branch.pre or step.pre, "inside": branch.post, "post": step.out}
    with_norm = [name for name, norm in places.items() if norm is not None]
    return with_norm[0] if len(with_norm) == 1 and with_norm != ["inside"] else None


def _positions(stack: spec.Stack, function: spec.Attention) -> str | None:
    position = stack.embedding.position
    if position is not None:
        return "learned" if isinstance(position, spec.Learned) else "sinusoidal"
    if function.position is not None:
        return "rotary"
    if isinstance(function.score_bias, spec.Alibi):
        return "alibi"
    return "buckets" if stack.score_table is not None else None
