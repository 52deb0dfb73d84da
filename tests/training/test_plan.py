"""Plans against real models of small sizes: what autograd keeps, the state of optimizers, what is divided and sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.core import Sequence, Transformer, build
from clearhead.errors import InputError
from clearhead.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec import Attention, FeedForward, MixtureOfExperts, Model, map_nodes
from clearhead.training.activations import measure_activations
from clearhead.training.optim.optimizers import build_optimizer
from clearhead.training.plan import TrainingSetting, optimizer_bytes, plan_training

VOCAB = 31
DECODER = Hyperparameters(
    family="decoder", layers=3, width=28, heads=4, kv_heads=2, head_size=10, feedforward=37, gated=True,
    activation="silu", norm="rms", norm_place="pre", positions="rotary", bias=False, dropout=0.0,
)  # fmt: skip
FAMILIES = {
    "decoder": DECODER,
    "encoder": Hyperparameters(
        family="encoder", layers=2, width=28, heads=4, feedforward=37, positions="learned", attention_dropout=0.1
    ),
    "both": Hyperparameters(layers=2, width=28, heads=4, feedforward=37, activation_dropout=0.1),
}
SETTING = TrainingSetting(gpus=8, memory=10**9, batch_tokens=560, context=70, optimizer="adamw", precision="fp32")


def spec_of(family: str, **changes: Any) -> Model:
    return build_spec(replace(FAMILIES[family], **changes), source_vocab=VOCAB, target_vocab=VOCAB)


def kept(module: Transformer, rows: int, length: int, precision: str) -> int:
    """The bytes that autograd really keeps of a forward pass, the parameters left out."""
    own = {parameter.data_ptr() for parameter in module.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    ids = torch.randint(0, VOCAB, (rows, length))
    target = Sequence(ids) if module.encoder is not None and module.decoder is not None else None
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        module.train().states(Sequence(ids), target)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize(
    ("family", "length", "precision"),
    [
        ("decoder", 70, "fp32"),
        ("decoder", 70, "bf16"),
        ("decoder", 19, "fp32"),
        ("encoder", 70, "fp32"),
        ("both", 70, "bf16"),
        ("both", 19, "fp32"),
    ],
)
def test_activations_are_those_that_autograd_keeps(family: str, length: int, precision: Any) -> None:
    spec = spec_of(family)
    found = measure_activations(spec, length, precision)
    states = 4 * length * 28  # the gradient of the states, which the loss keeps
    expected = kept(build(spec), 3, length, precision)
    assert found.fixed + found.kept(3, checkpointing=False) - 3 * states == expected


def test_checkpointing_keeps_the_inputs_of_the_layers_and_one_layer() -> None:
    few, many = (measure_activations(spec_of("decoder", layers=layers), 70, "fp32") for layers in (3, 11))
    assert many.largest_layer == few.largest_layer and many.layers == 11 * many.largest_layer
    assert many.kept(5, checkpointing=True) - few.kept(5, checkpointing=True) == 5 * 8 * 70 * 28 * 4
    assert many.kept(5, checkpointing=True) < many.kept(5, checkpointing=False)


def test_a_mixture_counts_as_the_experts_that_a_token_passes() -> None:
    def mix(path: str, node: Any) -> Any:
        if not isinstance(node, FeedForward):
            return node
        return MixtureOfExperts(count=7, top_k=2, expert=node.model_copy(update={"size": 13}))

    mixed = measure_activations(map_nodes(spec_of("decoder"), mix), 70, "fp32")
    assert mixed == measure_activations(spec_of("decoder", feedforward=26), 70, "fp32")


@pytest.mark.parametrize(("family", "kind"), [("decoder", "adam"), ("encoder", "adamw"), ("both", "muon")])
def test_parameters_and_optimizer_are_those_of_a_real_model(family: str, kind: Any) -> None:
    spec = spec_of(family)
    module = build(spec)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = build_optimizer(module, kind=kind, learning_rate=1e-3)
    optimizer.step()
    state = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)]
    plan = plan_training(spec, replace(SETTING, optimizer=kind))
    ddp, fsdp = plan.shares
    assert ddp.parameters == ddp.gradients == sum(parameter.nbytes for parameter in module.parameters())
    assert ddp.optimizer == sum(value.nbytes for value in state) == optimizer_bytes(build(spec, device="meta"), kind)
    assert 0 <= 8 * fsdp.parameters - ddp.parameters < 8 and 0 <= 8 * fsdp.optimizer - ddp.optimizer < 8


def test_what_is_sent_follows_from_the_rings() -> None:
    spec = spec_of("decoder")
    parameters = sum(weight.numel() for weight in build(spec).parameters())
    layers = sum(weight.numel() for name, weight in build(spec).named_parameters() if ".layers." in name)
    ddp, fsdp = plan_training(spec, replace(SETTING, precision="bf16")).shares
    assert (ddp.reduced, ddp.sent) == (4 * parameters, 2 * 7 * 4 * parameters // 8)
    assert (fsdp.gathered, fsdp.scattered) == (2 * (parameters + layers), 4 * parameters)
    assert fsdp.sent == 7 * (fsdp.gathered + fsdp.scattered) // 8
    more = plan_training(spec, replace(SETTING, precision="bf16", accumulate=3)).shares
    assert more[0] == ddp and (more[1].gathered, more[1].scattered) == (3 * fsdp.gathered, fsdp.scattered)
    assert more[1].gradients - fsdp.gradients > 3 * parameters
    alone = plan_training(spec, replace(SETTING, gpus=1)).shares
    assert all(share.sent == share.gathered == share.reduced == share.scattered == 0 for share in alone)


def test_more_gpus_take_less_of_each_with_fsdp_alone() -> None:
    spec = spec_of("both")
    plans = [plan_training(spec, replace(SETTING, gpus=gpus, batch_tokens=70 * gpus)) for gpus in (2, 8, 64)]
    ddp, fsdp = ([plan.shares[index].total(checkpointing=False) for plan in plans] for index in (0, 1))
    assert ddp[0] == ddp[1] == ddp[2] and fsdp[0] > fsdp[1] > fsdp[2]
    assert plans[0].flops == plans[1].flops == plans[2].flops  # a row each


def test_the_verdict_names_what_fits() -> None:
    spec = spec_of("decoder", layers=17, width=84, heads=4, feedforward=211)
    whole = plan_training(spec, SETTING)
    ways: dict[Any, str] = {}
    for memory in range(1, 80):
        plan = replace(whole, setting=replace(SETTING, memory=memory * 500_000))
        best = plan.best
        ways.setdefault(None if best is None else (best[0].parallel, best[1]), plan.verdict())
    assert list(ways) == [None, ("fsdp", True), ("fsdp", False), ("ddp", True), ("ddp", False)]
    assert ways[None].startswith("nothing fits on 8 GPUs of 500 kB: fsdp with activation checkpointing takes")
    assert ways["fsdp", True].startswith("fsdp with activation checkpointing fits on 8 GPUs")
    assert "; ddp would take" in ways["fsdp", False] and "would" not in ways["ddp", False]


def test_a_batch_without_a_row_for_each_gpu_is_refused() -> None:
    with pytest.raises(
        InputError, match="batch_tokens=489 is 6 rows of context=70, fewer than the 8 GPUs: raise it to at least 560"
    ):
        plan_training(spec_of("decoder"), replace(SETTING, batch_tokens=489))


def test_attention_without_its_weights_takes_memory_in_proportion_to_the_tokens() -> None:
    def dropped(path: str, node: Any) -> Any:
        return node.model_copy(update={"dropout": 0.1}) if isinstance(node, Attention) else node

    spec = spec_of("decoder")
    short, long = (measure_activations(spec, length, "bf16").layers for length in (100, 200))
    assert long == 2 * short
    eager = [measure_activations(map_nodes(spec, dropped), length, "bf16").layers for length in (100, 200)]
    assert eager[1] > 3 * eager[0] > 3 * short
