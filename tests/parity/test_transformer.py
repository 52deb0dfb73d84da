"""The whole original Transformer equals `torch.nn.Transformer`: outputs and all gradients, norms after or before.

Legend: B batch, S source tokens, T target tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from clearhead import spec
from clearhead.core import Attention, Transformer, build
from clearhead.core.feedforward import FeedForward
from clearhead.core.kernels import attention
from clearhead.core.stack import Layer
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from tests.laws.tiny import difference, with_mask

B, S, T, D, V = 3, 11, 7, 26, 29


def original(norm_place: str, window: spec.Window | None) -> Transformer:
    hparams = Hyperparameters(
        encoder_layers=2, decoder_layers=3, width=D, heads=2, feedforward=37, dropout=0.0, norm_place=norm_place,
        final_norm=True,
    )  # fmt: skip
    model = build_spec(hparams, source_vocab=V, target_vocab=V)
    return build(model if window is None else with_mask(model, window, "encoder"))


def torch_twin(norm_place: str) -> nn.Transformer:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        return nn.Transformer(
            D, 2, 2, 3, dim_feedforward=37, dropout=0.0, batch_first=True, norm_first=norm_place == "pre"
        )


def attention_tensors(name: str, module: Attention, field: str) -> dict[str, Tensor]:
    three = (module.query, module.key, module.value)
    tensors = {f"{name}.in_proj_{leaf}": [getattr(linear, leaf) for linear in three] for leaf in ("weight", "bias")}
    tensors |= {f"{name}.out_proj.{leaf}": [getattr(module.out, leaf)] for leaf in ("weight", "bias")}
    return {key: torch.cat([t.grad if field == "grad" else t.data for t in parts]) for key, parts in tensors.items()}


def in_torch_layout(module: Transformer, field: str) -> dict[str, Tensor]:
    """Our weights, or their gradients, under torch's names."""

    def plain(prefix: str, owner: nn.Module) -> dict[str, Tensor]:
        return {
            f"{prefix}.{n}": p.grad if field == "grad" else p.data for n, p in owner.named_parameters(recurse=False)
        }

    tensors: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        stack = module.get_submodule(side)
        tensors |= plain(f"{side}.norm", stack.final_norm)
        for index, layer in enumerate(stack.layers):
            assert isinstance(layer, Layer)
            for number, step in enumerate(layer.steps):
                prefix, branch = f"{side}.layers.{index}", step.branches[0]
                norm = branch.pre if isinstance(step.out, nn.Identity) else step.out
                tensors |= plain(f"{prefix}.norm{number + 1}", norm)
                if isinstance(branch.function, FeedForward):
                    tensors |= plain(f"{prefix}.linear1", branch.function.up)
                    tensors |= plain(f"{prefix}.linear2", branch.function.down)
                else:
                    name = "multihead_attn" if branch.function.spec.source == "memory" else "self_attn"
                    tensors |= attention_tensors(f"{prefix}.{name}", branch.function, field)
    return tensors


def embed_tokens(table_VD: Tensor, ids: Tensor) -> Tensor:
    """Section 3.4 and 3.5 of the paper, written out."""
    angles = torch.tensor(
        [[p / 10000 ** (2 * (i // 2) / D) for i in range(D)] for p in range(ids.shape[1])], dtype=torch.float64
    )
    waves = torch.where(torch.arange(D) % 2 == 0, angles.sin(), angles.cos()).float()
    return table_VD[ids] * math.sqrt(D) + waves


def run_torch(
    theirs: nn.Transformer, table: Tensor, ids: Tensor, target_ids: Tensor, masks: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    memory_source, target = embed_tokens(table, ids), embed_tokens(table, target_ids)
    hidden = theirs(memory_source, target, **masks)
    return hidden, hidden @ table.T


@pytest.mark.parametrize("kernel", ["eager", "fused"])
@pytest.mark.parametrize("kind", ["causal", "padding", "window"])
@pytest.mark.parametrize("norm_place", ["post", "pre"])
def test_outputs_and_all_gradients(norm_place: str, kind: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SHORT_ON_CPU", 0 if kernel == "fused" else 1000)
    window = spec.Window(before=2, after=1) if kind == "window" else None
    ours, theirs = original(norm_place, window), torch_twin(norm_place)
    for name, parameter in ours.named_parameters():
        if parameter.dim() == 1:  # biases and norms differ from zeros and ones, so that a lost one shows
            nn.init.normal_(parameter, mean=float("norm" in name or ".out.weight" in name), std=0.2)
    theirs.load_state_dict(in_torch_layout(ours, "data"))
    table = ours.encoder.embedding.table.weight.detach().clone().requires_grad_()
    ids, target_ids = torch.randint(V, (B, S)), torch.randint(V, (B, T))
    mask = torch.arange(S) < torch.tensor([S, 5, 2])[:, None]
    target_mask = torch.arange(T) < torch.tensor([3, T, 5])[:, None]
    masks = {"tgt_mask": torch.ones(T, T, dtype=torch.bool).triu(1)}
    if kind == "padding":
        masks |= {"src_key_padding_mask": ~mask, "memory_key_padding_mask": ~mask}
        masks |= {"tgt_key_padding_mask": ~target_mask}
    elif kind == "window":
        distance = torch.arange(S)[:, None] - torch.arange(S)
        masks["src_mask"] = (distance > 2) | (distance < -1)
    real = target_mask if kind == "padding" else torch.ones_like(target_mask)

    hidden, logits = run_torch(theirs, table, ids, target_ids, masks)
    ours_masks = {"mask": mask, "target_mask": target_mask} if kind == "padding" else {}
    output = ours(ids, target_ids, **ours_masks)
    assert difference(output.hidden, hidden, real) <= 1e-5
    assert difference(output.logits, logits, real) <= 1e-5

    cotangent = torch.randn(B, T, V)[real]
    (logits[real] * cotangent).sum().backward()
    (output.logits[real] * cotangent).sum().backward()
    gradients = in_torch_layout(ours, "grad")
    assert set(gradients) == {name for name, _ in theirs.named_parameters()}
    for name, parameter in theirs.named_parameters():
        assert difference(gradients[name], parameter.grad) <= 1e-5, name
    assert difference(ours.encoder.embedding.table.weight.grad, table.grad) <= 1e-5
