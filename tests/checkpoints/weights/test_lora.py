"""Low-rank adaptation: what trains, what stays, and that one merged map computes what the two did."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.checkpoints.weights.files import load_tensors
from clearhead.checkpoints.weights.lora import adapt, merge_low_rank
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.training.assemble import train_run
from clearhead.training.optim.weight_averages import average_run
from clearhead.training.runfile.read import load_run_file
from tests.tasks import fine_tuning

pytestmark = pytest.mark.usefixtures("quick_trainings")
HPARAMS = Hyperparameters(layers=2, width=22, heads=2, feedforward=31, activation="gelu", dropout=0.0)
SCALE = 5.0 / 3


def build_module() -> ch.Transformer:
    torch.manual_seed(2)
    return ch.build(build_spec(HPARAMS, source_vocab=53, target_vocab=53)).eval()


def adapt_randomly(module: ch.Transformer) -> tuple[ch.Transformer, list[str]]:
    other = copy.deepcopy(module)
    chosen = adapt(other, rank=3, alpha=5.0)
    for name, parameter in other.named_parameters():
        if name.endswith("lora_up"):
            torch.nn.init.normal_(parameter)
    return other, chosen


IDS = torch.arange(35).view(5, 7)
TARGET = torch.arange(30).view(5, 6)


def test_merged_it_computes_the_same() -> None:
    module = build_module()
    other, _ = adapt_randomly(module)
    merged_module = copy.deepcopy(module)
    merged_module.load_state_dict(merge_low_rank(other.state_dict()))
    with torch.no_grad():
        ours, theirs, before = (each(IDS, TARGET).logits for each in (merged_module, other, module))
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5
    assert float((before - theirs).abs().max() / theirs.abs().max()) > 0.1


def test_gradients_are_those_of_the_formula() -> None:
    """W + scale B A, written out by hand and put into the module as it was."""
    module = build_module()
    other, chosen = adapt_randomly(module)
    other(IDS, TARGET).logits.square().sum().backward()
    trained = {name: parameter for name, parameter in other.named_parameters() if parameter.requires_grad}
    assert trained.keys() == {f"{address}.{leaf}" for address in chosen for leaf in ("lora_down", "lora_up")}
    by_hand = {name: parameter.detach().clone().requires_grad_() for name, parameter in trained.items()}
    weights = {}
    for address in chosen:
        change = by_hand[f"{address}.lora_up"] @ by_hand[f"{address}.lora_down"]
        weights[f"{address}.weight"] = module.state_dict()[f"{address}.weight"] + SCALE * change
    functional_call(module, weights, (IDS, TARGET)).logits.square().sum().backward()
    for name, parameter in by_hand.items():
        expected, actual = parameter.grad, trained[name].grad
        assert expected is not None and actual is not None
        assert float((expected - actual).abs().max() / expected.abs().max()) < 1e-4, name


def test_by_default_it_stands_beside_every_attention_and_begins_with_nothing() -> None:
    module = build_module()
    other = copy.deepcopy(module)
    chosen = adapt(other, rank=3, new=("head.layers.0.bias",))
    assert len(chosen) == 4 * (2 + 2 * 2) and all(".function." in name for name in chosen)
    with torch.no_grad():
        assert torch.equal(module(IDS, TARGET).logits, other(IDS, TARGET).logits)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("*.querry",), r"'\*\.querry' matches no linear layer"),
        (("encoder.embedding.table",), "matches no linear layer"),
    ],
)
def test_a_target_that_is_none_is_refused(targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        adapt(build_module(), rank=3, targets=targets)


def test_a_run_trains_the_narrow_maps_alone(tmp_path: Path) -> None:
    start = fine_tuning.encoder(tmp_path / "start")
    section = "[lora]\nrank = 2\nalpha = 4\ndropout = 0.1\ntargets = ['**.query', '**.value']"
    path = fine_tuning.write_run(tmp_path, start, 'kind = "classify"', "classify", steps=20, more=section)
    progress = fine_tuning.MessageLog()
    train_run(load_run_file(path, ["train.validate_every=5"]), resume=False, progress=progress)
    assert any(line.startswith("LoRA beside 4 linear maps: ") for line in progress.messages)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    assert losses[-1] < losses[0]
    last = tmp_path / "run" / "checkpoints" / "step-20"
    tensors, began = load_tensors(last / "weights.safetensors"), ch.load(start, device="cpu").module.state_dict()
    assert all(torch.equal(tensors[name], began[name]) for name in began if not name.startswith("head."))
    state = (
        sum(file.stat().st_size for file in last.glob("*.safetensors")) - (last / "weights.safetensors").stat().st_size
    )
    assert state < (last / "weights.safetensors").stat().st_size
    run = ch.load(tmp_path / "run@last", device="cpu", precision="fp32")
    assert run.module.state_dict().keys() == merge_low_rank(tensors).keys()
    assert not torch.equal(
        *(
            weights["encoder.layers.0.steps.0.branches.0.function.query.weight"]
            for weights in (began, run.module.state_dict())
        )
    )
    run.save(tmp_path / "back", format="hf")
    again = ch.load(tmp_path / "back", device="cpu", precision="fp32")
    texts = ["the cat sat", "the dog sat"]
    for result, other in zip(run.classify(texts), again.classify(texts), strict=True):
        assert result.label == other.label and abs(result.probability - other.probability) < 1e-5
    train_run(load_run_file(path, ["train.validate_every=5", "train.steps=25"]), resume=True, progress=progress)
    average_run(tmp_path / "run", 2)
    assert ch.load(tmp_path / "run@averaged", device="cpu").classify(texts)


def test_it_needs_a_start_and_an_optimizer_that_fits(tmp_path: Path) -> None:
    path = fine_tuning.write_run(tmp_path, "", 'kind = "generate"', "text", more="[lora]\nrank = 2")
    with pytest.raises(InputError, match="it needs one: name it as"):
        load_run_file(path)
