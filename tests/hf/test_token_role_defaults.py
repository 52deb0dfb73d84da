"""What a class has where a config says nothing is what the class of the other library has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from clearhead.hf.checkpoint import read_generation_config
from clearhead.hf.token_role_defaults import ROLE_IDS

KEYS = ("decoder_start_token_id", "pad_token_id", "bos_token_id", "eos_token_id", "forced_eos_token_id")


@pytest.mark.parametrize("model_type", ROLE_IDS)
def test_they_are_those_of_the_class(model_type: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type]()
    found = {key: getattr(config, key, None) for key in KEYS}
    assert dict(ROLE_IDS[model_type]) == {key: index for key, index in found.items() if index is not None}


def test_what_a_config_says_wins(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bart", "eos_token_id": 7}')
    rules = read_generation_config(tmp_path)
    assert (rules.start, rules.pad, rules.opening, rules.ends, rules.last) == (2, 1, 0, (7,), 2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, "num_beams": 3}))
    rules = read_generation_config(tmp_path)
    assert (rules.start, rules.ends, rules.last) == (2, (9,), None)
