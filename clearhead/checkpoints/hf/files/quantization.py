"""Detection of quantized checkpoints in formats that are not supported, by their config or tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from clearhead.checkpoints.hf.files.tensor_files import FLOATS

# The methods of config.json, and their usual names.
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
# Names of tensors that only one format has; the first match counts.
_TENSORS = (
    (r".*\.g_idx", "GPTQ"),
    (r".*\.qweight", "AWQ or GPTQ"),
    (r".*\.(absmax|quant_map|quant_state\..*)", "bitsandbytes (4 bits)"),
    (r".*\.SCB", "bitsandbytes (8 bits)"),
    (r".*_blocks", "MXFP4 without a quantization_config"),
    (r".*\.weight_scale(_inv)?", "FP8"),
    (r".*\.weight_packed", "compressed-tensors"),
)


def quantization_of(config: Mapping[str, Any], dtypes: Mapping[str, str]) -> str | None:
    """Return the format of quantized weights; None: they are not quantized.

    Args:
        config: config.json.
        dtypes: of each tensor by its name, as safetensors names them.
    """
    settings = config.get("quantization_config")
    if isinstance(settings, dict) and settings:
        method = str(settings.get("quant_method", "an unnamed method"))
        return _METHODS.get(method, method)
    names = [name for name, dtype in dtypes.items() if dtype not in FLOATS]
    is_fp8 = any(dtype.startswith("F8") for dtype in dtypes.values())
    found = (kind for pattern, kind in _TENSORS if any(re.fullmatch(pattern, name) for name in names))
    return next(found, "FP8" if is_fp8 else None)
