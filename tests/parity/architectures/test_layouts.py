"""A family whose files come in two layouts is read in both, and written in the one it came in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clearhead.checkpoints.hf.loading import load_module
from clearhead.checkpoints.hf.saving import save_module
from tests.laws.tiny import difference
from tests.parity.architectures.harness import Case, all_cases, outputs, outputs_of, theirs_of

CASES = [case for case in all_cases() if case.model_type in ("mixtral", "qwen3_moe")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_experts_of_a_layer_may_be_one_tensor(case: Case, tmp_path: Path) -> None:
    theirs = theirs_of(case)
    theirs.save_pretrained(tmp_path / "apart")
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    before = load_file(tmp_path / "stacked" / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in before)

    apart, stacked = load_module(tmp_path / "apart"), load_module(tmp_path / "stacked")
    ids = torch.randint(1, case.vocab, (2, 7))
    with torch.no_grad():
        assert difference(outputs(stacked.module(ids)), outputs_of(theirs(input_ids=ids))) <= 1e-5
    first, second = (loaded.module.state_dict() for loaded in (apart, stacked))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    save_module(stacked.module, tmp_path / "again", loaded=stacked)
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
