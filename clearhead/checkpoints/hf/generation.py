"""Generation settings of a checkpoint, from generation_config.json or the same keys of config.json."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clearhead.base.files import read_json_object
from clearhead.core import Transformer
from clearhead.generate.generation_config import GenerationConfig

GENERATION_CONFIG = "generation_config.json"


def _default_ids(
    start: int | None, pad: int, bos: int | None, eos: int, forced_eos: int | None = None
) -> Mapping[str, int]:
    ids = {
        "decoder_start_token_id": start,
        "pad_token_id": pad,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "forced_eos_token_id": forced_eos,
    }
    return MappingProxyType({key: index for key, index in ids.items() if index is not None})


# Default ids of the config classes of encoder-decoders. When transformers writes a config, it leaves defaults out. So
# an absent key does not mean an absent token. Source: the configuration classes of the transformers library 5.23.
DEFAULT_IDS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "bart": _default_ids(2, 1, 0, 2, 2),
        "blenderbot": _default_ids(1, 0, 1, 2, 2),
        "m2m_100": _default_ids(2, 1, 0, 2),
        "marian": _default_ids(58100, 58100, None, 0, 0),
        "mbart": _default_ids(None, 1, 0, 2, 2),
        "mt5": _default_ids(0, 0, None, 1),
        "pegasus": _default_ids(0, 0, None, 1, 1),
        "t5": _default_ids(None, 0, None, 1),
        "umt5": _default_ids(0, 0, None, 1),
    }
)


def read_generation_config(
    folder: Path, config: Mapping[str, Any], module: Transformer, task: str | None = None
) -> GenerationConfig:
    """Read the generation settings of a checkpoint: generation_config.json, else the same keys of config.json.

    A start or end token outside the decoder's vocabulary is left out, and a warning names it.

    Args:
        folder: the folder of the checkpoint.
        config: the content of config.json.
        module: the module of the checkpoint; it may be on the meta device.
        task: the name of one of the config's `task_specific_params`, which take precedence. None means no task.

    Raises:
        InputError: a file is not a JSON object or has values of a wrong type. Or a setting such as `pad_token_id`
            or `suppress_tokens` has an id outside the vocabulary.
    """
    read = _read(folder, config, task)
    if module.decoder is None:
        return read
    generation_config = read.within(module.num_target_ids, str(folder))
    if generation_config.left_out and task is None:
        warnings.warn(
            f"{folder}: {' and '.join(generation_config.left_out)} "
            f"{'is' if len(generation_config.left_out) == 1 else 'are'} beyond the "
            f"vocabulary of {module.num_target_ids} entries and left out",
            stacklevel=2,
        )
    return generation_config


def _read(folder: Path, config: Mapping[str, Any], task: str | None) -> GenerationConfig:
    config = {**DEFAULT_IDS.get(str(config.get("model_type")), {}), **config}
    listed = config.get("task_specific_params") or {}
    prefixes = {name: entry["prefix"] for name, entry in listed.items() if entry.get("prefix") is not None}
    path, settings = folder / GENERATION_CONFIG, dict(config)
    if os.path.lexists(path):
        settings = read_json_object(path, what="a generation_config.json")
        # config.json provides the special token ids that the settings lack.
        ids = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
        settings |= {key: config[key] for key in ids if key in config and settings.get(key) is None}
    else:
        path = folder / "config.json"
    task_settings = {} if task is None else listed[task]
    return replace(
        GenerationConfig.from_settings({**settings, **task_settings}, source=str(path)), task_prefixes=prefixes
    )
