"""Every record equals transformers' eager attention: layers, outputs, gradients, padding, cache, and saving.

Legend: B batch, T tokens, V outputs.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.loading import load_module
from clearhead.checkpoints.hf.saving import save_module
from clearhead.core import Cache
from clearhead.interpret.maps.hook_points import capture
from clearhead.interpret.maps.recording import recording
from tests.laws.tiny import difference
from tests.parity.architectures.harness import (
    B,
    Case,
    Pair,
    T,
    U,
    all_cases,
    layers_seen,
    no_complaints,
    our_gradients,
    outputs,
    outputs_of,
    their_gradients,
)  # fmt: skip

pytestmark = pytest.mark.slow
CASES = all_cases()
TOLERANCE = 1e-5
LENGTHS = torch.tensor([T, 5, 8])


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case: Case = request.param
    return Pair.of(case, tmp_path_factory.mktemp("parity") / "theirs")


def decoding() -> pytest.MarkDecorator:
    """Only the cases that write word after word."""
    cases = [case for case in CASES if case.variant.task in ("generate", "translate", "denoise")]
    return pytest.mark.parametrize("pair", cases, ids=lambda case: case.name, indirect=True)


def stacks() -> pytest.MarkDecorator:
    """Only the first case of each family and its options: what depends on the stacks and not on the head."""
    cases = [case for case in CASES if not case.is_head]
    return pytest.mark.parametrize("pair", cases, ids=lambda case: case.name, indirect=True)


def test_every_family_has_a_case() -> None:
    assert {case.model_type for case in CASES} == set(registry.all_families())


def segments_of(pair: Pair, ids: Tensor) -> dict[str, Tensor]:
    """Two kinds of segments where the model tells them apart."""
    stack = pair.ours.encoder
    if stack is None or stack.embedding.segments is None or stack.embedding.segments.weight.shape[0] < 2:
        return {}
    return {"segments": (torch.arange(ids.shape[1]) > 4).long().expand(ids.shape)}


def to_their_names(segments: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"token_type_ids": segments["segments"]} if segments else {}


def their_decoder_inputs(pair: Pair, targets: dict[str, Tensor]) -> dict[str, Tensor]:
    """What their decoder is given; where it reads a text once more, they make it themselves."""
    return {"decoder_input_ids": targets["target_ids"]} if targets and pair.repeats is None else {}


def both(pair: Pair, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> tuple[object, object]:
    """Run both models on the same."""
    segments, targets = segments_of(pair, ids), pair.targets(ids, mask)
    more = to_their_names(segments) | their_decoder_inputs(pair, targets)
    if positions is not None:
        more["position_ids"] = positions
    return pair.run_theirs(ids, mask, **more), pair.run_ours(ids, mask, **segments, **targets)


def comparison_mask(pair: Pair, mask: Tensor) -> Tensor | None:
    """Where outputs are of real tokens; None: everywhere."""
    return None if pair.is_pooled or (pair.has_memory and pair.repeats is None) else mask


def check_layers(seen: list[Tensor], expected: tuple[Tensor, ...], last: Tensor) -> None:
    assert len(seen) == len(expected)
    for index, (hidden, other) in enumerate(zip(seen[:-1], expected[:-1], strict=True)):
        assert difference(hidden, other) <= TOLERANCE, f"after {index} layers"
    # The last entry is what leaves the stack; a few classes list the states before the final norm.
    ends = [state for state in (last, seen[-1]) if state.shape == expected[-1].shape]
    assert min(difference(state, expected[-1]) for state in ends) <= TOLERANCE


def test_every_layer_the_outputs_and_all_gradients(pair: Pair, tmp_path: Path) -> None:
    ids = pair.ids()
    stack = pair.ours.decoder or pair.ours.encoder
    with layers_seen(stack) as seen:
        theirs, ours = both(pair, ids)
    states = theirs.decoder_hidden_states if pair.has_memory else theirs.hidden_states
    check_layers(seen, states, ours.hidden)
    if pair.has_memory:
        assert difference(ours.memory, theirs.encoder_last_hidden_state) <= TOLERANCE
    assert difference(outputs(ours), outputs_of(theirs)) <= TOLERANCE

    pair.ours.zero_grad()
    pair.theirs.zero_grad()
    cotangent = torch.randn(outputs(ours).shape)
    (outputs(ours) * cotangent).sum().backward()
    (outputs_of(theirs) * cotangent).sum().backward()
    expected, actual = their_gradients(pair.theirs, tmp_path / "gradients"), our_gradients(pair.loaded)
    assert set(expected) <= set(actual) | set(pair.loaded.unused)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name in (actual.keys() & expected.keys()) - {name for name, _ in pair.theirs.named_buffers()}:
        if expected[name].abs().max() > 1e-6 * max(10.0, largest):  # a key's bias moves nothing: rounding is left
            assert difference(actual[name], expected[name]) <= TOLERANCE, name
        else:
            assert actual[name].abs().max() <= 1e-4, name


def test_padding_on_the_right(pair: Pair) -> None:
    mask = torch.arange(T) < LENGTHS[:, None]
    ids = pair.ids(mask=mask)
    with torch.no_grad():
        theirs, ours = both(pair, ids, mask)
    assert difference(outputs(ours), outputs_of(theirs), comparison_mask(pair, mask)) <= TOLERANCE


@stacks()
def test_padding_on_the_left(pair: Pair) -> None:
    mask = torch.arange(T) >= T - LENGTHS[:, None]
    ids = pair.ids(mask=mask)
    real = comparison_mask(pair, mask)
    with torch.no_grad():
        segments, targets = segments_of(pair, ids), pair.targets(ids, mask)
        ours = pair.run_ours(ids, mask, **segments, **targets)
        for row in range(B):
            alone = ids[row : row + 1, mask[row]]
            more = {name: value[row : row + 1, mask[row]] for name, value in to_their_names(segments).items()}
            more |= {name: value[row : row + 1] for name, value in their_decoder_inputs(pair, targets).items()}
            theirs = outputs_of(pair.run_theirs(alone, **more))[0]
            actual = outputs(ours)[row] if real is None else outputs(ours)[row, mask[row]]
            assert difference(actual, theirs) <= TOLERANCE
    if pair.takes_positions and not pair.case.reads_ids and not pair.is_pooled:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            theirs, ours = both(pair, ids, mask, positions)
        assert difference(outputs(ours), outputs_of(theirs), real) <= TOLERANCE


@decoding()
def test_decoding_with_a_cache(pair: Pair) -> None:
    ids, targets, cache = pair.ids(), pair.ids(length=U), Cache()
    with torch.no_grad():
        if pair.has_memory:
            expected = outputs_of(pair.run_theirs(ids, decoder_input_ids=targets))
            memory = pair.ours.encode(ids).memory
            parts = [
                pair.ours.decode(targets[:, :3], memory, cache=cache),
                pair.ours.decode(targets[:, 3:4], cache=cache),
                pair.ours.decode(targets[:, 4:], cache=cache),
            ]
        else:
            expected = outputs_of(pair.run_theirs(ids))
            cut = (slice(0, 6), slice(6, 7), slice(7, None))
            parts = [pair.run_ours(ids[:, columns], cache=cache) for columns in cut]
    assert difference(torch.cat([outputs(piece) for piece in parts], dim=1), expected) <= TOLERANCE


def test_saved_as_loaded_every_bit_is_the_same(pair: Pair, tmp_path: Path) -> None:
    save_module(pair.ours, tmp_path / "ours", loaded=pair.loaded)
    before, after = (load_file(folder / "model.safetensors") for folder in (pair.folder, tmp_path / "ours"))
    assert before.keys() == after.keys()
    assert not [name for name in before if not torch.equal(before[name], after[name])]
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (pair.folder, tmp_path / "ours"))
    assert first == second


def test_transformers_reads_what_is_written_from_the_spec(pair: Pair, tmp_path: Path) -> None:
    save_module(pair.ours, tmp_path / "ours", task=pair.loaded.task, model_type=pair.case.model_type)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    if not pair.loaded.unused:
        assert config["architectures"] == [pair.loaded.variant.classes[0]]
    # What the class carries but the spec does not hold is not written from the spec, and missed.
    with no_complaints(unless=bool(pair.loaded.unused)):
        twin, report = getattr(transformers, config["architectures"][0]).from_pretrained(
            tmp_path / "ours", attn_implementation=pair.case.attention, output_loading_info=True
        )
    prefix = pair.loaded.family.prefix_of(pair.loaded.variant)
    spare = {name.removeprefix(prefix) for name in pair.loaded.unused}
    missing = {name.removeprefix(prefix) for name in report["missing_keys"]}
    assert missing <= spare and not report["unexpected_keys"] and not report["mismatched_keys"]
    for name in ("pad_token_id", "decoder_start_token_id"):
        setattr(twin.config, name, getattr(pair.theirs.config, name, None))
    again = load_module(tmp_path / "ours")
    assert again.module.spec.model_copy(update={"initialization": pair.ours.spec.initialization}) == pair.ours.spec
    ids = pair.ids()
    with torch.no_grad():
        more = their_decoder_inputs(pair, pair.targets(ids))
        expected = outputs_of(pair.run_theirs(ids, **more))
        assert difference(outputs_of(twin.eval()(input_ids=ids, **more)), expected) <= 1e-6


@stacks()
def test_training_mode_runs(pair: Pair) -> None:
    module = copy.deepcopy(pair.ours).train()
    ids = pair.ids()
    outputs(module(ids, **pair.targets(ids))).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@stacks()
@torch.no_grad()
def test_recomputed_attention_is_the_eager_kernels(pair: Pair) -> None:
    ids = pair.ids(rows=1)
    targets = pair.targets(ids)
    with recording(pair.ours) as records, capture(pair.ours, "**.weights") as seen:
        pair.run_ours(ids, **targets)
    assert len(records) == sum(map(len, seen.values()))
    for record in records:
        (expected,) = [
            captured.tensor for captured in seen[f"{record.address}.weights"] if captured.depth == record.layer
        ]
        assert torch.equal(record.weights(), expected)
        head = record.num_heads - 1
        assert difference(record.weights([head], slice(2, 5)), expected[:, [head], 2:5]) <= 1e-6
