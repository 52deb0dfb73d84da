"""Check of a model: runs all experiments and collects one report."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.apps.check.handwritten.report import Finding
from clearhead.apps.check.model.flow import check_flow
from clearhead.apps.check.model.health import check_health, check_numbers, check_tokenizers
from clearhead.apps.check.model.invariances import check_invariances, check_saving
from clearhead.apps.check.model.report import CheckOutcome, ModelReport
from clearhead.base.errors import InputError
from clearhead.base.printing import num_parameters
from clearhead.base.progress import message
from clearhead.core import Transformer
from clearhead.fast.computing import replica_in_dtype
from clearhead.fast.replica import in_evaluation
from clearhead.text.pair import TokenizerPair
from clearhead.version import __version__

if TYPE_CHECKING:
    from clearhead.model.facade import Model

ROWS_AT_ONCE = 64


def check_model(model: Model, subject: str, *, rows_at_once: int | None = None, seed: int = 7) -> ModelReport:
    """Check the masks, caches, batches, attention kernels and saved files of a loaded model.

    Args:
        model: the loaded model; its weights stay unchanged.
        subject: the name of the model in the report.
        rows_at_once: the maximum batch size; None means `ROWS_AT_ONCE`.
        seed: the seed of the token ids that the model reads.

    Raises:
        InputError: the device has no double precision.
    """
    return check_module(
        model.module, subject, tokenizers=model.tokenizers, saved=model, rows_at_once=rows_at_once, seed=seed
    )


def check_module(
    module: Transformer, subject: str, *, tokenizers: TokenizerPair | None = None, saved: Model | None = None,
    rows_at_once: int | None = None, seed: int = 7,
) -> ModelReport:  # fmt: skip
    """Check the masks, caches, batches and attention kernels of a module, with or without its tokenizers.

    Args:
        module: the module; its weights stay unchanged.
        subject, rows_at_once, seed: same as in `check_model`.
        tokenizers: the tokenizers of the model; None means that they are not checked.
        saved: the model that is saved and loaded again; None means that saving is not checked.

    Raises:
        InputError: the device has no double precision.
    """
    device = next(module.parameters()).device
    if device.type == "mps":
        raise InputError("a check needs double precision, which mps does not have: use the device cpu")
    start = time.perf_counter()
    results: list[CheckOutcome | Finding] = []
    # New tensors are created on the model's device; on a CPU the context would only cost time.
    with torch.no_grad(), contextlib.nullcontext() if device.type == "cpu" else torch.device(device):
        results.extend(_experiments(in_evaluation(module), tokenizers, saved, rows_at_once or ROWS_AT_ONCE, seed))
    return ModelReport(
        subject,
        tuple(_facts(module)),
        tuple(result for result in results if isinstance(result, CheckOutcome)),
        tuple(result for result in results if isinstance(result, Finding)),
        time.perf_counter() - start,
    )


def _experiments(
    module: Transformer, tokenizers: TokenizerPair | None, saved: Model | None, rows_at_once: int, seed: int
) -> Iterator[CheckOutcome | Finding]:
    generator = torch.Generator(device="cpu").manual_seed(seed)

    def draw(count: int, vocabulary: int) -> Tensor:
        return torch.randint(vocabulary, (count,), generator=generator, device="cpu").to(torch.get_default_device())

    numbers = list(check_numbers(module))
    yield from numbers
    if tokenizers is not None:
        yield from check_tokenizers(module, tokenizers)
    if any(isinstance(result, Finding) and result.severity == "wrong" for result in numbers):
        return  # every further output would be NaN
    single, exact = replica_in_dtype(module, torch.float32), replica_in_dtype(module, torch.float64)
    message("checking information flow")
    yield from check_flow(exact, draw, rows_at_once)
    message("checking invariances")
    yield from check_invariances(single, exact, draw)
    if saved is not None:
        yield from check_saving(saved)
    message("checking the health of the weights")
    yield from check_health(module, exact, draw)


def _facts(module: Transformer) -> Iterator[str]:
    parameters = list(module.parameters())
    dtypes = " and ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))
    yield f"{num_parameters(module):,} parameters, {dtypes}, on {parameters[0].device}"
    yield (
        f"clearhead {__version__}, torch {torch.__version__}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} processors, {torch.get_num_threads()} threads"
    )
