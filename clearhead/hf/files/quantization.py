"""Checkpoints whose weights are quantised in a format that is not read here: config or tensors tell it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# What config.json calls a method, and what people do.
_METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "compressed-tensors": "compressed-tensors",
    "hqq": "HQQ",
    "quanto": "Quanto",
    "torchao": "torchao",
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "bitnet": "BitNet",
}
# What only tensors of one format are called; the first that fits counts.
_TENSORS = (
    (r".*\.g_idx", "GPTQ"),
    (r".*\.qweight", "AWQ or GPTQ"),
    (r".*\.(absmax|quant_map|quant_state\..*)", "bitsandbytes (4 bits)"),
    (r".*\.SCB", "bitsandbytes (8 bits)"),
    (r".*_blocks", "MXFP4 without saying so in quantization_config"),
    (r".*\.weight_scale(_inv)?", "FP8"),
    (r".*\.weight_packed", "compressed-tensors"),
)


def quantization_of(config: Mapping[str, Any], dtypes: Mapping[str, str]) -> str | None:
    """Return the format in which weights are quantised; None: they are not.

    Args:
        config: config.json.
        dtypes: the type of each tensor by its name, in the words of safetensors.
    """
    settings = config.get("quantization_config")
    if isinstance(settings, dict) and settings:
        method = str(settings.get("quant_method", "an unnamed method"))
        return _METHODS.get(method, method)
    found = _by_names(name for name, dtype in dtypes.items() if dtype not in ("F32", "F16", "BF16", "F64"))
    if found is None and any(dtype.startswith("F8") for dtype in dtypes.values()):
        return "FP8"
    return found


def _by_names(names: Iterable[str]) -> str | None:
    known = list(names)
    return next((kind for pattern, kind in _TENSORS if any(re.fullmatch(pattern, name) for name in known)), None)
