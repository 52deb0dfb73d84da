"""LoRA on a base in 16 bits: bits of the same run in fp32, exact resumption, and memory within the forecast."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead import spec
from clearhead.checkpoints.weights.files import load_tensors
from clearhead.checkpoints.weights.lora import adapt, merge_low_rank
from clearhead.fast.stored import BF16, FP16, StorageFormat, choose_formats, store
from clearhead.fast.training.frozen import multiply_frozen
from clearhead.fast.training.tree import training_tree
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.training.assemble import train_run
from clearhead.training.frozen_base import build_base
from clearhead.training.runfile.read import load_run_file
from tests import hf_models
from tests.conftest import ROOT
from tests.tasks import fine_tuning

LORA = "[lora]\nrank = 3\ndropout = 0.1\ntargets = ['**.query', '**.value', '**.up']"
WIDTH, LAYERS, ROWS = 160, 4, 400


def write_checkpoint(folder: Path, dtype: torch.dtype) -> Path:
    """Write a Llama with bf16-exact weights in a dtype; it is large enough for weights in 16 bits."""
    hf_models.rotary_model(folder)
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=ROWS, hidden_size=WIDTH, intermediate_size=352, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=61, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hf_models.save(transformers.LlamaForCausalLM(config).bfloat16().to(dtype), folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {name: write_checkpoint(root / name, getattr(torch, name)) for name in ("bfloat16", "float32")}


def train(folder: Path, start: Path, *keys: str, resume: bool = False) -> tuple[dict[str, Tensor], Path]:
    """Train some steps of LoRA, and return the tensors of the last checkpoint and the run directory."""
    folder.mkdir(exist_ok=True)
    path = fine_tuning.write_run(folder, start, 'kind = "generate"', "text", steps=4, more=LORA)
    run_file = load_run_file(path, ["train.schedule=constant", "train.validate_every=2", *keys])
    result = train_run(run_file, resume=resume, progress=fine_tuning.MessageLog())
    last = folder / "run" / "checkpoints" / f"step-{result.step}"
    tensors = {
        f"{file.name}:{name}": tensor
        for file in last.glob("*.safetensors")
        for name, tensor in load_tensors(file).items()
    }
    return tensors, folder / "run"


@pytest.mark.usefixtures("quick_trainings")
def test_a_run_in_fp32_has_the_bits_of_a_base_in_fp32(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    keys = "train.precision=fp32", "train.ema=0.9", "train.average=2"
    ours, run = train(tmp_path / "ours", checkpoints["bfloat16"], *keys, "train.activation_checkpointing=true")
    theirs, other = train(tmp_path / "theirs", checkpoints["float32"], *keys)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor.to(theirs[name].dtype), theirs[name]) for name, tensor in ours.items())
    for name, tensor in ours.items():
        is_base = not name.startswith("optimizer") and tensor.dim() > 1 and "lora" not in name
        assert tensor.dtype == (torch.bfloat16 if is_base else torch.float32), name
    metrics = [
        [
            (row.get("loss"), row.get("valid_loss"))
            for row in map(json.loads, (each / "metrics.jsonl").read_text().splitlines())
        ]
        for each in (run, other)
    ]
    assert metrics[0] == metrics[1]
    for label in ("last", "averaged"):
        loaded, expected = (ch.load(f"{each}@{label}", device="cpu", precision="fp32") for each in (run, other))
        state, expected_state = loaded.module.state_dict(), expected.module.state_dict()
        assert all(torch.equal(state[name], expected_state[name]) for name in expected_state)
    loaded.save(tmp_path / "back", format="hf")
    back = ch.load(tmp_path / "back", device="cpu", precision="fp32")
    assert all(torch.equal(tensor, back.module.state_dict()[name]) for name, tensor in state.items())
    options = {"max_new_tokens": 4, "temperature": 0.0}
    texts = [ch.load(each, device="cpu").generate("the cat", **options)[0].text for each in (run, other)]
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("quick_trainings")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, checkpoints: dict[str, Path], precision: str) -> None:
    keys = f"train.precision={precision}", "train.ema=0.9"
    whole, _ = train(tmp_path / "whole", checkpoints["bfloat16"], *keys)
    train(tmp_path / "halves", checkpoints["bfloat16"], *keys, "train.steps=2")
    halves, run = train(tmp_path / "halves", checkpoints["bfloat16"], *keys, resume=True)
    assert whole.keys() == halves.keys()
    assert all(torch.equal(tensor, halves[name]) for name, tensor in whole.items())
    # Another run starts from the merged weights: those of adapted layers are fp32.
    again, _ = train(tmp_path / "again", run, *keys)
    merged = merge_low_rank({name.partition(":")[2]: each for name, each in halves.items() if name.startswith("ema")})
    adapted = {name.rpartition(".")[0] for name in again if name.endswith("lora_up")}
    for name, tensor in again.items():
        if name.startswith("weights") and "lora" not in name:
            assert torch.equal(tensor, merged[name.partition(":")[2]])
            assert name.rpartition(".")[0] not in adapted or tensor.dtype == torch.float32


def models() -> dict[str, spec.Model]:
    hparams = Hyperparameters(layers=2, width=32, heads=2, feedforward=64, dropout=0.0)
    translator = build_spec(hparams, source_vocab=53, target_vocab=53)
    decoder = ch.presets.llama_tiny(vocab_size=53, layers=2)
    experts = spec.MixtureOfExperts(
        count=3, top_k=2, router=spec.Router(), expert=spec.FeedForward(size=31, activation="silu", gated=True)
    )
    assert decoder.decoder is not None
    layer = decoder.decoder.layers[0]
    step = layer.steps[1].model_copy(
        update={"branches": (layer.steps[1].branches[0].model_copy(update={"function": experts}),)}
    )
    mixed = layer.model_copy(update={"steps": (layer.steps[0], step)})
    stack = decoder.decoder.model_copy(update={"layers": (mixed, *decoder.decoder.layers[1:])})
    return {"translator": translator, "decoder": decoder, "experts": decoder.model_copy(update={"decoder": stack})}


@pytest.mark.parametrize("kind", [BF16, FP16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["translator", "decoder", "experts"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["stored", "recomputed"])
def test_gradients_have_the_bits_of_widened_weights(name: str, kind: StorageFormat, recomputes: bool) -> None:
    torch.manual_seed(3)
    plain = ch.build(models()[name])
    formats = choose_formats(plain, kind)
    stored = store(copy.deepcopy(plain), formats)
    plain.load_state_dict(stored.state_dict())
    ids = torch.arange(1, 47).view(2, 23)
    inputs = (ids, ids.flip(1)) if plain.encoder is not None else (ids,)
    results = []
    for module in (plain, stored):
        torch.manual_seed(5)
        adapt(module, rank=3, targets=["**.query", "**.function.out"])
        for address, parameter in module.named_parameters():
            if address.endswith("lora_up"):
                nn.init.normal_(parameter)
        tree = training_tree(module, "fp32", recomputes_layers=recomputes)
        logits = tree(*inputs).logits
        logits.square().mean().backward()
        results.append({each: x.grad for each, x in module.named_parameters() if x.grad is not None})
    assert results[0].keys() == results[1].keys() and len(results[0]) > 0
    assert all(torch.equal(gradient, results[1][each]) for each, gradient in results[0].items())


def test_the_graph_keeps_the_stored_matrix_itself() -> None:
    weight = nn.Parameter(torch.randn(24, 16).bfloat16(), requires_grad=False)
    x = torch.randn(2, 5, 16, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: (kept.append(saved), saved)[1], lambda saved: saved):
        y = multiply_frozen(x, weight, torch.randn(24))
        with torch.autocast("cpu", torch.bfloat16):
            short = multiply_frozen(x, weight, None)
    assert [saved.data_ptr() for saved in kept] == [weight.data_ptr()] * 2
    assert (y.dtype, short.dtype) == (torch.float32, torch.bfloat16)
    (short.sum() + y.sum()).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * F.linear(torch.ones(2, 5, 24), weight.float().t()), rtol=1e-2, atol=1e-2)


def test_new_weights_get_the_random_numbers_of_a_plain_model() -> None:
    model = models()["decoder"]
    torch.manual_seed(6)
    plain = ch.build(model)
    state = torch.get_rng_state()
    formats = choose_formats(plain, BF16)
    del formats["decoder.layers.0.steps.0.branches.0.function.query"]
    torch.manual_seed(6)
    base = build_base(model, formats, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in base.state_dict().items():
        is_stored = name.removesuffix(".weight") in formats
        assert tensor.dtype == (torch.bfloat16 if is_stored else torch.float32), name
        assert is_stored or torch.equal(tensor, plain.state_dict()[name]), name


CHILD = """
import gc, json, sys
from pathlib import Path
import torch
from clearhead.base.machine import give_memory_back
from clearhead.training.assemble import assemble_run, forecast, open_training
from clearhead.training.runfile.read import load_run_file
from tests.tasks.fine_tuning import MessageLog

def peak():
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

torch.set_num_threads(1)
tiny, big, precision = sys.argv[1:]
for path in (tiny, big):
    run_file = load_run_file(Path(path), ["train.precision=" + precision, f"train.run={path}-{precision}"])
    gc.collect()
    give_memory_back()
    with open_training(run_file, resume=False, progress=MessageLog()) as run:
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        assembled = assemble_run(run)
        load = peak() - run.memory_before
        report = forecast(assembled)
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        assembled.trainer.run()
        steps = peak() - run.memory_before
    del assembled
print(json.dumps({"load": load, "steps": steps, "forecast": report.memory_bytes, "weights": dict(report.weights)}))
"""
BIG_ROWS, BIG_WIDTH = 8_000, 768


@pytest.fixture(scope="module")
def run_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the run file of a tiny base, and that of 63 million random weights in bf16."""
    root, files = tmp_path_factory.mktemp("memory"), []
    for name in ("tiny", "big"):
        folder = hf_models.rotary_model(root / name)
        if name == "big":
            config = transformers.LlamaConfig(
                vocab_size=BIG_ROWS, hidden_size=BIG_WIDTH, intermediate_size=2048, num_hidden_layers=8,
                num_attention_heads=12, max_position_embeddings=61, tie_word_embeddings=True, bos_token_id=0,
                eos_token_id=0,
            )  # fmt: skip
            hf_models.save(transformers.LlamaForCausalLM(config).bfloat16(), folder)
        data = root / f"data-{name}"
        data.mkdir()
        files.append(fine_tuning.write_run(data, folder, 'kind = "generate"', "text", steps=2, more="[lora]\nrank = 2"))
    return files


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_loads_and_steps_within_its_forecast(run_files: list[Path], precision: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, run_files), precision],
        capture_output=True, text=True, check=False, timeout=600, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    weights, largest = report["weights"]["bfloat16"], 4 * BIG_ROWS * BIG_WIDTH
    assert weights >= 0.95 * sum(report["weights"].values()), report
    assert report["load"] <= 1.1 * weights + 2 * largest, report
    assert report["steps"] <= report["forecast"], report
