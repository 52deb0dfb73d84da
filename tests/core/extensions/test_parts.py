"""Custom modules work like built-in ones: in the spec, in cost, in every mode of a model, and in all exports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import spec, surgery
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.export_family import choose_family
from clearhead.checkpoints.weights.lora import adapt
from clearhead.core import Cache, Transformer
from clearhead.core.context import Sequence
from clearhead.core.extensions.files import load_parts
from clearhead.core.extensions.modules import recomputed_parts
from clearhead.fast.cache import IndexedCache
from clearhead.fast.runner import Runner
from clearhead.fast.training.tree import training_tree
from clearhead.generate.continuation import GenerateRequest, generate_ids
from clearhead.generate.generation_config import GenerationConfig
from clearhead.generate.options import GenerateOptions
from clearhead.generate.results import Continuation
from clearhead.interpret.maps.recording import record_run
from clearhead.interpret.view.architecture import draw_architecture
from clearhead.spec.cost import cost_per_token
from clearhead.training.runfile.model_table import with_extensions
from clearhead.training.runfile.sections import ModelSection
from tests.laws.tiny import VOCAB, difference, hparams, resolve_spec

OWN = Path(__file__).parent / "own.py"
EXAMPLES = Path(__file__).parents[3] / "examples"
EVERYWHERE: dict[str, Any] = {
    "own_norm": {"kind": "gain", "start": 1.5}, "own_position": {"kind": "ramp"}, "score_step": {"kind": "tilt"},
    "weight_step": {"kind": "offbeat"}, "network": {"kind": "last_tokens", "count": 3},
}  # fmt: skip
ENDS = GenerationConfig(eos_ids=(3, 5, 7, 11, 13))
MODELS: dict[str, dict[str, Any]] = {
    "everywhere": EVERYWHERE,
    "recomputed": {"mixer": {"kind": "last_tokens", "count": 2}},
    "recurrent": {"mixer": {"kind": "gated_recurrence", "size": 11}},
    "differential": {"weight_step": {"kind": "differential", "rank": 5}},
}


def model(name: str, family: str = "decoder") -> spec.Model:
    load_parts([OWN, EXAMPLES / "gated_recurrence.py", EXAMPLES / "differential_attention.py"])
    chosen = replace(hparams(f"{family}/pre-grouped/rotary"), layers=2, encoder_layers=1, tie="all")
    plain = resolve_spec(chosen)
    return with_extensions(plain, ModelSection(**MODELS[name]))


def module(name: str, family: str = "decoder") -> Transformer:
    torch.manual_seed(3)
    return ch.build(model(name, family)).eval()


def ids(rows: int = 3, tokens: int = 7) -> Tensor:
    return torch.randint(VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", MODELS)
def test_the_spec_survives_json_and_names_the_file(name: str) -> None:
    tree = model(name)
    text = tree.to_json()
    assert spec.Model.from_json(text) == tree and hash(tree) == hash(spec.Model.from_json(text))
    needed = json.loads(text)["needs"]
    assert {need["kind"] for need in needed} == {table["kind"] for table in MODELS[name].values()}
    assert all(need["file"].endswith(".py") and len(need["sha256"]) == 64 for need in needed)
    assert "function: " in repr(tree) or "function=" in repr(tree)


def test_a_dataclass_stands_in_a_spec_as_itself() -> None:
    load_parts(OWN)
    kind = spec.Branch(function={"kind": "last_tokens", "count": 2}).function
    assert isinstance(kind, spec.Part)
    assert spec.Branch(function=kind.as_dataclass()).function == kind


def test_its_faults_stand_in_the_report_with_others() -> None:
    text = model("everywhere").to_json().replace('"count": 3', '"count": 9').replace('"start": 1.5', '"stat": 1.5')
    with pytest.raises(InputError) as error:
        spec.Model.from_json(text.replace('"num_kv_heads": 2', '"num_kv_heads": 4'))
    report = str(error.value)
    for fault in ("count is at most 7, got 9", "stat: unknown key (did you mean 'start'?)", "is not a multiple"):
        assert fault in report
    with pytest.raises(InputError, match=r"function: kind must be one of .*'last_tokens'.*did you mean 'last_tokens'"):
        spec.Branch(function={"kind": "last_token", "count": 2})


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("name", MODELS)
def test_cached_padded_and_served_calls_are_those_of_the_whole_text(name: str, family: str) -> None:
    plain, read = module(name, family), ids()
    source = (read,) if family == "decoder" else (read[:, :4], read)
    with torch.no_grad():
        whole = plain(*source).logits
        padding = torch.zeros(3, 2, dtype=torch.long)
        mask = torch.cat([padding.bool(), torch.ones_like(read, dtype=torch.bool)], 1)
        padded = torch.cat([padding, read], 1)
        if family == "decoder":
            assert difference(plain(padded, mask=mask).logits[:, 2:], whole) < 1e-5
        for tree in (plain, Runner(plain).tree()):
            assert difference(tree(*source).logits, whole) < 1e-5
            cache = Cache() if tree is plain else IndexedCache()
            memory = None if family == "decoder" else tree.encode(source[0]).memory
            first = tree.decode(padded[:, :5], memory, target_mask=mask[:, :5], cache=cache).logits
            cache.select(torch.tensor([2, 0, 1]), None if memory is None else torch.tensor([2, 0, 1]))
            padded, mask, whole = padded[[2, 0, 1]], mask[[2, 0, 1]], whole[[2, 0, 1]]
            rest = [
                tree.decode(padded[:, at : at + 1], target_mask=mask[:, at : at + 1], cache=cache).logits
                for at in range(5, 9)
            ]
            merged = torch.cat([first[[2, 0, 1]][:, 2:], *rest], 1)
            assert difference(merged, whole) < 1e-5
            read = read[[2, 0, 1]]
            source = (read,) if family == "decoder" else (read[:, :4], read)


@pytest.mark.parametrize("name", MODELS)
def test_what_it_keeps_is_kept_where_others_join_and_leave(name: str) -> None:
    """Prompts that join a batch after others end get the same results as alone."""
    custom = module(name).double()
    prompts = [row[: 2 + number % 4].tolist() for number, row in enumerate(ids(rows=8))]
    sampled = GenerateOptions(max_new_tokens=9, batch_size=3, temperature=1.5, seed=4)

    def run(some: list[list[int]]) -> list[Continuation]:
        return [
            result
            for (result,) in generate_ids(custom, GenerateRequest(some, sampled, eos_id=3, pad_id=0, config=ENDS))
        ]

    together, alone = run(prompts), [result for prompt in prompts for result in run([prompt])]
    assert len({len(result.ids) for result in alone}) > 2, "all end together, so that no sequence joins later"
    assert [result.ids for result in together] == [result.ids for result in alone]
    sums = [result.log_probability for result in alone]
    assert [result.log_probability for result in together] == pytest.approx(sums, abs=1e-9)


def test_what_keeps_nothing_is_said() -> None:
    assert recomputed_parts(module("recurrent")) == []
    assert "MeanOfLastTokens caches nothing" in recomputed_parts(module("recomputed"))[0]


def test_documents_of_one_block_do_not_see_each_other() -> None:
    plain, read = module("recurrent"), ids(1, 7)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        packed = plain(read, documents=documents).logits
        alone = plain(read[:, 3:]).logits
    assert difference(packed[:, 3:], alone) < 1e-5


def test_its_weights_are_initialized_as_it_made_them_and_its_linear_layers_as_ours() -> None:
    plain = module("recomputed")
    function: Any = plain.get_submodule("decoder.layers.0.steps.0.branches.0.function")
    assert torch.equal(function.gain, torch.full((14,), 3.0))
    assert not function.out.bias.any() and function.out.weight.abs().max() <= (6 / 28) ** 0.5
    on_meta = ch.build(model("recomputed"), device="meta")
    assert not any(buffer.is_meta for buffer in on_meta.buffers())


def test_its_hook_points_are_addresses() -> None:
    plain = module("recurrent")
    address = "decoder.layers.1.steps.0.branches.0.function.state"
    with ch.capture(plain, address) as seen, torch.no_grad():
        before = plain(ids()).logits
    assert seen.tensor(address).shape == (3, 7, 11)
    with ch.edit(plain, {address: lambda state: 0 * state}), torch.no_grad():
        assert difference(plain(ids()).logits, before) > 1e-3


@pytest.mark.parametrize("name", ["everywhere", "differential"])
def test_maps_have_the_weights_of_its_steps(name: str) -> None:
    plain, read = module(name), ids(1)
    with ch.capture(plain, "**.weights") as seen, torch.no_grad():
        plain(read)
    for record in record_run(plain, Sequence(read), None):
        weights = seen.tensor(f"{record.address}.weights")
        assert difference(record.weights(), weights) < 1e-6
        assert difference(record.weights([3], slice(2, 5)), weights[:, [3], 2:5]) < 1e-6


def test_a_model_without_attention_has_no_maps() -> None:
    with pytest.raises(InputError, match="this model has no attention, so it has no attention maps"):
        record_run(module("recurrent"), Sequence(ids(1)), None)


def test_the_cost_is_measured_or_its_own() -> None:
    plain, custom = cost_per_token(resolve_spec(hparams("decoder/pre-grouped/rotary")), 32, 32), model("recurrent")
    cost = cost_per_token(custom, 32, 32)
    assert 0 < cost.target_flops != plain.target_flops and cost.cache_numbers == 0
    recomputed = cost_per_token(model("recomputed"), 32, 32)
    assert recomputed.cache_numbers == 2 * 14
    networks = 2 * 3 * 2 * 14 * 19
    assert recomputed.target_flops == 2 * 2 * 14 * 14 + networks + 2 * 14 * VOCAB


@pytest.mark.parametrize("name", MODELS)
def test_the_training_tree_and_gradients_are_those_of_the_plain_one(name: str) -> None:
    plain, read = module(name), ids(2, 70)
    plain(read).logits.square().mean().backward()
    gradients = {path: weight.grad for path, weight in plain.named_parameters()}
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients.values())
    plain.zero_grad()
    tree = training_tree(plain, "bf16")
    with torch.autocast("cpu", torch.bfloat16):
        tree(read).logits.float().square().mean().backward()
    for path, weight in plain.named_parameters():
        assert weight.grad is not None
        assert torch.nn.functional.cosine_similarity(weight.grad.flatten(), gradients[path].flatten(), 0) > 0.9, path


def test_layers_are_cut_and_its_linear_layers_adapted() -> None:
    plain = module("recurrent")
    cut = surgery.keep_layers(plain, [1, 0, 1]).model
    assert [layer.steps[0].branches[0].function.kind for layer in cut.spec.decoder.layers] == ["gated_recurrence"] * 3
    chosen = adapt(plain, rank=2, targets=["**.function.value"])
    assert len(chosen) == 2
    with pytest.raises(InputError, match="no Hugging Face architecture has the custom module 'gated_recurrence'"):
        choose_family(cut, None, None)


def test_the_drawing_names_it() -> None:
    picture = draw_architecture(model("everywhere"), "own", [])
    for text in ("Last tokens", "count 3", "Gain", "Ramp", "scores by tilt", "weights by offbeat"):
        assert text in picture
