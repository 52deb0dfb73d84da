"""`clearhead inspect --plan`: its settings, and the plan as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clearhead.cli.console import human_bytes, human_count
from clearhead.errors import InputError, nearest

if TYPE_CHECKING:
    from clearhead.spec import Model
    from clearhead.training.plan import TrainingPlan, TrainingSetting

CHOICES: Final = {"optimizer": ("adamw", "adam", "muon"), "precision": ("bf16", "fp32")}
# With the largest that each may be: sizes that no file and no machine has would not fit into 64 bits.
NUMBERS: Final = {
    "gpus": 1 << 20,
    "memory": 1 << 20,
    "context": 1 << 24,
    "batch_tokens": 1 << 40,
    "accumulate": 1 << 20,
}
KEYS: Final = (*NUMBERS, *CHOICES)
_CONTEXT = 2048
_MEMORY = 80


def forecast(text: str, spec: Model, run: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Return a plan as JSON values and as lines of text; arguments as of `read_setting`.

    Raises:
        InputError: a key or a value cannot be used, or the batch is too small.
    """
    from clearhead.training.plan import plan_training

    plan = plan_training(spec, read_setting(text, spec, run))
    return plan_record(plan), [*plan_lines(plan)]


def read_setting(text: str, spec: Model, run: Path | None) -> TrainingSetting:
    """Return the setting of a plan.

    Args:
        text: KEY=VALUE, with commas between several.
        spec: of the model.
        run: the run file that gives what is not said; None: there is none.

    Raises:
        InputError: a key or a value cannot be used.
    """
    from clearhead.core import build
    from clearhead.training.plan import TrainingSetting

    given = _pairs(text)
    if "gpus" not in given:
        raise InputError("--plan needs the number of GPUs: --plan gpus=8")
    values = _of_run_file(run) | given
    limit = build(spec, device="meta").max_positions
    context = values.get("context", min(_CONTEXT, limit or _CONTEXT))
    if limit is not None and context > limit:
        raise InputError(f"--plan context={context} is more than the {limit} positions of the model")
    return TrainingSetting(
        gpus=values["gpus"],
        memory=round(1e9 * values.get("memory", _MEMORY)),
        context=context,
        batch_tokens=values.get("batch_tokens", values["gpus"] * context),
        optimizer=values.get("optimizer", "adamw"),
        precision=values.get("precision", "bf16"),
        accumulate=values.get("accumulate", 1),
    )


def _of_run_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    from clearhead.training.runfile.read import load_run_file

    run_file = load_run_file(path)
    precision = {} if run_file.train.precision == "auto" else {"precision": run_file.train.precision}
    return {
        "context": run_file.data.max_length,
        "batch_tokens": run_file.train.batch_tokens,
        "accumulate": run_file.train.accumulate,
        "optimizer": run_file.train.optimizer,
        **precision,
    }


def _pairs(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign or not value:
            raise InputError(f"--plan takes KEY=VALUE with commas between, such as gpus=8,context=4096; got '{part}'")
        if name not in KEYS:
            raise InputError(f"--plan has no key '{name}'{nearest(name, KEYS)}; it takes {', '.join(KEYS)}")
        if name in values:
            raise InputError(f"--plan names {name} twice; give one value")
        values[name] = _chosen(name, value) if name in CHOICES else _number(name, value)
    return values


def _chosen(name: str, value: str) -> str:
    if value not in CHOICES[name]:
        raise InputError(f"--plan {name} must be {' or '.join(CHOICES[name])}, received '{value}'")
    return value


def _number(name: str, value: str) -> int | float:
    try:
        number = float(value) if name == "memory" else int(value)
    except ValueError:
        number = math.nan
    if not 0 < number <= NUMBERS[name]:
        kind = "gigabytes of one GPU, more than 0" if name == "memory" else "a whole number from 1"
        raise InputError(f"--plan {name} must be {kind} up to {NUMBERS[name]:,}, received '{value}'")
    return number


def plan_record(plan: TrainingPlan) -> dict[str, Any]:
    """Return a plan as JSON values, in bytes."""
    best = plan.best
    shares: dict[str, Any] = {
        share.parallel: {
            **{name: value for name, value in asdict(share).items() if name != "parallel"},
            "total": share.total(checkpointing=False),
            "total_checkpointed": share.total(checkpointing=True),
        }
        for share in plan.shares
    }
    return {
        **asdict(plan.setting),
        "parameters": plan.parameters,
        "largest_layer": plan.largest_layer,
        "flops": plan.flops,
        **shares,
        "fits": None if best is None else {"parallel": best[0].parallel, "checkpointing": best[1]},
        "verdict": plan.verdict(),
    }


def plan_lines(plan: TrainingPlan) -> Iterator[str]:
    """Yield a plan as a table and a sentence."""
    setting = plan.setting
    tokens = f"{setting.batch_tokens:,} tokens in rows of {setting.context:,}"
    yield f"training    {human_count(plan.parameters)} parameters, {setting.optimizer}, {setting.precision}, {tokens}"
    times = f", {setting.accumulate:,} times" if setting.accumulate > 1 else ""
    many = "s" * (setting.rows > 1)
    yield f"of one GPU  {setting.rows:,} row{many}{times}, {human_count(plan.flops)} FLOPs in a step"
    yield ""
    rows: list[tuple[str, Mapping[str, int]]] = [("memory", {})]
    for name in ("parameters", "gradients", "optimizer", "weights", "activations"):
        rows.append((f"  {_LABELS.get(name, name)}", _both(plan, name)))
    rows.append(("  all of it", {share.parallel: share.total(checkpointing=False) for share in plan.shares}))
    rows.append(("with activation checkpointing", {}))
    rows.append(("  activations", _both(plan, "checkpointed")))
    rows.append(("  all of it", {share.parallel: share.total(checkpointing=True) for share in plan.shares}))
    rows.append(("communication of a step", {}))
    for name in ("gathered", "scattered", "reduced", "sent"):
        rows.append((f"  {_LABELS[name]}", _both(plan, name)))
    yield f"{'':<34}{'ddp':>10}{'fsdp':>10}"
    for label, values in rows:
        cells = "".join(f"{human_bytes(value) if value else '-':>10}" for value in values.values())
        yield f"{label:<34}{cells}".rstrip()
    yield ""
    yield f"{plan.verdict()}."


_LABELS = {
    "weights": "weights gathered, or cast",
    "gathered": "weights gathered",
    "scattered": "gradients added up and scattered",
    "reduced": "gradients added up",
    "sent": "sent and received by each GPU",
}


def _both(plan: TrainingPlan, name: str) -> dict[str, int]:
    return {share.parallel: getattr(share, name) for share in plan.shares}
