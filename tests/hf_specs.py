"""The specs of tiny models of every Hugging Face family, from their configs alone."""

from __future__ import annotations

from functools import cache

from clearhead import spec
from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.mapping import config as configs
from tests.parity.architectures.harness import all_cases


@cache
def hf_specs() -> dict[str, spec.Model]:
    """Return the spec of each case of the parity tests, with each of its heads."""
    specs = {}
    for case in all_cases():
        family = registry.all_families()[case.model_type]
        parsed = configs.parse(family, {"model_type": case.model_type, **case.config})
        assert not parsed.faults, (case.name, parsed.faults)
        specs[case.name] = spec.validate(family.spec_of(parsed.values, case.variant))
    return specs
