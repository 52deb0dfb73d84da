"""What a class has where a config says nothing is what the class of the other library has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from clearhead.hf.generation import DEFAULT_IDS, read_generation_config

KEYS = ("decoder_start_token_id", "pad_token_id", "bos_token_id", "eos_token_id", "forced_eos_token_id")


@pytest.mark.parametrize("model_type", DEFAULT_IDS)
def test_they_are_those_of_the_class(model_type: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type]()
    found = {key: getattr(config, key, None) for key in KEYS}
    assert dict(DEFAULT_IDS[model_type]) == {key: index for key, index in found.items() if index is not None}


def test_what_a_config_says_wins(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bart", "eos_token_id": 7}')
    config = read_generation_config(tmp_path)
    assert (config.decoder_start_id, config.pad_id, config.bos_id, config.eos_ids, config.forced_eos_id) == (
        2,
        1,
        0,
        (7,),
        2,
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, "num_beams": 3}))
    config = read_generation_config(tmp_path)
    assert (config.decoder_start_id, config.eos_ids, config.forced_eos_id) == (2, (9,), None)
