"""What was built here saves as a family that can say it, or its equal, and transformers computes the same."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.export_family import CHANGES, apply_changes, with_folded_scale, with_scaled_output
from clearhead.checkpoints.hf.loading import load_module
from clearhead.checkpoints.hf.saving import save_module
from clearhead.core import Transformer, build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.presets.named import PRESETS
from clearhead.spec.presets.task_heads import default_label_head, label_head, token_head, with_head
from clearhead.spec.tasks.record import TaskRecord
from tests.laws.tiny import difference
from tests.parity.architectures.harness import no_complaints, outputs_of

VOCAB, TARGET_VOCAB = 29, 31
SMALL = {"layers": 2, "width": 28, "heads": 2, "feedforward": 31, "head_size": None}


def hparams(name: str, **changes: object) -> Hyperparameters:
    usual = {"kv_heads": 1} if name == "llama-tiny" else {"output_scale": 28**-0.5} if name == "t5-small" else {}
    return replace(PRESETS[name], **SMALL, **usual, **changes)


def build_module(model: spec.Model) -> Transformer:
    """With weights that show what is lost: no norm is one, no bias is zero."""
    torch.manual_seed(11)
    module = build(model).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def make_spec(chosen: Hyperparameters, head: spec.Head | None = None) -> spec.Model:
    apart = chosen.family == "encoder-decoder" and chosen.tie != "all"
    model = build_spec(chosen, source_vocab=VOCAB, target_vocab=TARGET_VOCAB if apart else VOCAB)
    return model if head is None else with_head(model, head)


LABELS = tuple("abcde")
# What `examples/tinyshakespeare-large.toml` asks for, small.
EXAMPLE = hparams(
    "transformer", family="decoder", positions="rotary", norm="rms", norm_place="pre", qk_norm=True, bias=False,
    activation="silu", gated=True, dropout=0.2,
)  # fmt: skip
# What `clearhead new` likes: norms before the branches, by the root mean square, and no biases.
MODERN = {"norm": "rms", "norm_place": "pre", "gated": True, "activation": "silu", "bias": False, "dropout": 0.1}
ENCODER = make_spec(hparams("transformer", family="encoder", positions="rotary", **MODERN))
DECODER = make_spec(hparams("transformer", family="decoder", positions="rotary", **MODERN))
CASES: dict[str, tuple[spec.Model, str, str]] = {
    "the original": (make_spec(hparams("transformer")), "translate", "MarianMTModel"),
    "the original, two vocabularies": (make_spec(hparams("transformer", tie="decoder")), "translate", "MarianMTModel"),
    "the original, untied": (make_spec(hparams("transformer", tie="none")), "translate", "MarianMTModel"),
    "the original, norms inside": (
        make_spec(hparams("transformer", norm_place="pre")), "translate", "PegasusForConditionalGeneration",
    ),
    "buckets": (make_spec(hparams("t5-small")), "translate", "T5ForConditionalGeneration"),
    "buckets, and scores and words that are scaled": (
        make_spec(hparams("transformer", positions="buckets", **MODERN)), "denoise", "T5ForConditionalGeneration",
    ),
    "a modern encoder": (ENCODER, "fill", "EuroBertForMaskedLM"),
    "a modern classifier": (
        with_head(ENCODER, default_label_head(ENCODER, 5, pool="mean")), "classify", "EuroBertForSequenceClassification",
    ),
    "a modern reader": (with_head(ENCODER, token_head(2)), "answer", "UltrabertForQuestionAnswering"),
    "a modern tagger": (with_head(ENCODER, token_head(5)), "tag", "EuroBertForTokenClassification"),
    "a classifying decoder": (
        with_head(DECODER, default_label_head(DECODER, 5, pool="last")), "classify", "LlamaForSequenceClassification",
    ),
    "a decoder with learned positions": (make_spec(hparams("gpt2")), "generate", "GPT2LMHeadModel"),
    "a decoder with rotation": (make_spec(hparams("llama-tiny")), "generate", "LlamaForCausalLM"),
    "a decoder with scaled words": (
        make_spec(hparams("llama-tiny", embedding_scale=5.0, dropout=0.1)), "generate", "GraniteForCausalLM",
    ),
    "a decoder as the examples train it": (make_spec(EXAMPLE), "generate", "Qwen3ForCausalLM"),
    "a tagging decoder": (make_spec(hparams("llama-tiny"), token_head(5)), "tag", "LlamaForTokenClassification"),
    "an encoder": (make_spec(hparams("bert")), "fill", "BertForMaskedLM"),
    "a reader": (make_spec(hparams("bert"), token_head(2)), "answer", "BertForQuestionAnswering"),
    "a tagger": (make_spec(hparams("bert"), token_head(5)), "tag", "BertForTokenClassification"),
    "a classifier": (
        make_spec(hparams("bert"), label_head(28, 5, pool="first")), "classify", "BertForSequenceClassification",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_the_same(name: str, tmp_path: Path) -> None:
    model, kind, cls = CASES[name]
    module = build_module(model)
    labels = LABELS if kind in ("classify", "tag") else ()
    save_module(
        module,
        tmp_path,
        task=TaskRecord(kind=kind, labels=labels, label_kind="single_label" if labels else None),
        token_ids={"pad_token_id": 0},
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [cls]
    with no_complaints():
        theirs, report = getattr(transformers, cls).from_pretrained(
            tmp_path, attn_implementation="eager", output_loading_info=True
        )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids, targets = torch.randint(3, VOCAB, (3, 11)), torch.randint(3, VOCAB, (3, 7))
    has_memory = model.encoder is not None and model.decoder is not None
    with torch.no_grad():
        ours = module(ids, targets if has_memory else None).logits
        expected = outputs_of(theirs.eval()(input_ids=ids, **({"decoder_input_ids": targets} if has_memory else {})))
    assert difference(ours, expected) <= 1e-5
    again = load_module(tmp_path)
    assert again.task.labels == labels
    with torch.no_grad():
        assert difference(again.module(ids, targets if has_memory else None).logits, ours) <= 1e-5


@pytest.mark.parametrize("style", [{}, {"norm_place": "pre", "gated": True, "embedding_norm": True, "bias": False}])
@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
@pytest.mark.parametrize("transform", [False, True])
def test_every_form_computes_the_same(family: str, style: dict[str, object], transform: bool) -> None:
    chosen = Hyperparameters(
        family=family, output_transform=transform, segments=2, **(SMALL | {"embedding_scale": 3.0} | style)
    )
    module = build_module(make_spec(chosen))
    before = copy.deepcopy(module.state_dict())
    ids, targets = torch.randint(VOCAB, (3, 11)), torch.randint(VOCAB, (3, 7))
    arguments = (ids, targets if family == "encoder-decoder" else None)
    # One of the two that take the scale of the embedding away leaves nothing for the other.
    chains = [(), *((change,) for change in CHANGES)]
    chains += [
        tuple(change for change in CHANGES if change is not excluded)
        for excluded in (with_folded_scale, with_scaled_output)
    ]
    forms = [apply_changes(module, chosen) for chosen in chains]
    assert forms[0] is module and len({form.spec.to_json() for form in forms}) == len(forms)
    for form in forms:
        assert difference(form(*arguments).logits, module(*arguments).logits) <= 1e-5
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize(
    ("chosen", "nearest", "differences"),
    [
        (
            hparams("transformer", positions="rotary", **MODERN),
            "t5 (T5ForConditionalGeneration)",
            [
                "decoder.{}.position.kind: rotary here, null there (and 3 more like it)",
                "decoder.{}.score_bias.kind: null here, reference there (and 3 more like it)",
                "decoder.score_table.kind: null here, relative_buckets there (and 1 more like it)",
            ],
        ),
        (
            hparams("transformer", family="encoder", positions="rotary", qk_norm=True, **MODERN),
            "eurobert (EuroBertForMaskedLM)",
            [
                "encoder.{}.query_key_norm.after_rotation: false here, null there (and 1 more like it)",
                "encoder.{}.query_key_norm.norm.kind: rms_norm here, null there (and 1 more like it)",
                "encoder.{}.query_key_norm.over: head here, null there (and 1 more like it)",
                "encoder.{}.query_key_norm.per_head: false here, null there (and 1 more like it)",
            ],
        ),
    ],
)
def test_what_no_family_can_say_is_named_for_the_nearest(
    chosen: Hyperparameters, nearest: str, differences: list[str], tmp_path: Path
) -> None:
    with pytest.raises(InputError) as error:
        save_module(build_module(make_spec(chosen)), tmp_path / "out")
    first, *lines = str(error.value).split("\n")
    assert first == f"no Hugging Face architecture can express this model; the nearest is {nearest}:"
    assert lines == [f"  - {line.format('layers.0.steps.0.branches.0.function')}" for line in differences]
    assert not (tmp_path / "out").exists()
