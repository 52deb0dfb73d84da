"""A device that computes one operation wrong is found, named, and refused or given the eager kernel."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.base.machine import DEVICE_CHECK, needs_check
from clearhead.core import build
from clearhead.core.attention import Attention
from clearhead.fast import device_check
from clearhead.fast.device_cases import CASES, KINDS
from clearhead.fast.device_check import BOUNDS, check_device, find_faults
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from clearhead.training import assemble
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.read import load_run_file
from tests.apps.cli.tiny_run import write_run_file
from tests.fast import wrong_device
from tests.fast.wrong_device import OPERATIONS, EverySecondCall, WrongDevice

CPU = torch.device("cpu")
ALL_OPERATIONS = [name for kind in KINDS.values() for name in kind.operations]


def wrong_devices() -> Iterator[tuple[str, str, wrong_device.Fault, str]]:
    """Operation, what is wrong with it, the fault, and words of the report that must name it."""
    attention = "fused attention"
    yield attention, "causal mask by fours", wrong_device.mask_by_fours, "hidden: future"
    yield attention, "garbage past a multiple of 32", wrong_device.read_past_the_end, "keys, "
    yield attention, "last key ignored", wrong_device.ignore_the_last_key, "keys, "
    yield attention, "wrong above 512 keys", wrong_device.stop_at_512, "on 1024 keys"
    yield "softmax", "wrong above 512 numbers", wrong_device.stop_at_512, "2 x 4096"
    for operation in (attention, "eager attention", "matrix products", "softmax", "layer norm", "RMS norm"):
        yield operation, "stride ignored", wrong_device.ignore_strides, ""
    for operation in OPERATIONS:
        if operation != "sampling":  # ids have no 5 %
            yield operation, "one element off by 5 %", wrong_device.move_one_element, ""
        yield operation, "wrong on every second call", EverySecondCall(), ""


@pytest.mark.parametrize(
    ("operation", "fault", "words"),
    [pytest.param(*(case[0], *case[2:]), id=f"{case[0]}: {case[1]}") for case in wrong_devices()],
)
def test_a_wrong_operation_is_found_and_named(operation: str, fault: wrong_device.Fault, words: str) -> None:
    device = WrongDevice(operation, fault)
    with device:
        faults = find_faults(check_device(CPU, ("bf16",)))
    assert device.calls
    named = {each.operation for each in faults}
    # The eager kernel of attention consists of products and a softmax.
    assert operation in named and named <= {operation, "eager attention"} | (
        {"sampling"} if operation == "softmax" else set()
    )
    (sentence,) = (str(each) for each in faults if each.operation == operation)
    assert words in sentence and "bf16" in sentence and "#" in sentence


def test_the_cpu_is_right_in_every_precision() -> None:
    results = check_device(CPU, tuple(BOUNDS))
    assert not find_faults(results)
    assert {(each.operation, each.precision) for each in results} == {*itertools.product(ALL_OPERATIONS, BOUNDS)}


def test_a_hidden_key_that_changes_a_bit_is_found() -> None:
    """The change is far below what rounding allows."""

    def leak(
        right: wrong_device.Call, query: torch.Tensor, key: torch.Tensor, *rest: object, **named: object
    ) -> object:
        return right(query, key, *rest, **named) + key[0, 0, -1, 0].abs() * 1e-7

    with WrongDevice("fused attention", leak, torch.float32):
        faults = find_faults(check_device(CPU, ("fp32",)))
    assert [each.operation for each in faults] == ["fused attention"]
    assert "changes with a hidden key" in str(faults[0])


def test_every_case_names_its_public_report() -> None:
    reports = {case.report for case in CASES}
    assert {"pytorch #174861", "pytorch #195910"} <= reports
    assert all(name and number.isdigit() for name, _, number in (report.partition(" #") for report in reports))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a saved model; the CPU must pass the check, and no verdict is known yet."""
    monkeypatch.setenv(DEVICE_CHECK, "all")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    text = train_tokenizer("byte", ["Ada sleeps here"], vocab_size=300)
    hyperparameters = Hyperparameters(family="decoder", layers=1, width=16, heads=2, feedforward=16)
    module = build(build_spec(hyperparameters, source_vocab=text.vocab_size, target_vocab=text.vocab_size))
    model = ch.Model(module.eval(), TokenizerPair(text, text, joint=True), TaskRecord(kind="generate"))
    model.save(tmp_path / "model")
    return tmp_path / "model"


def count_fused_calls(model: ch.Model) -> int:
    """How many attentions of a text that is too long for the eager kernel run the fused one."""
    with torch.inference_mode(), WrongDevice("fused attention", wrong_device.ignore_strides, torch.int8) as device:
        model.module(torch.arange(100)[None])
    return device.calls


def test_attention_that_is_wrong_gets_the_eager_kernel(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    right = ch.load(folder)
    assert count_fused_calls(right) == 1 and not caplog.records
    (folder.parent / "cache").rename(folder.parent / "other cache")
    with WrongDevice("fused attention", wrong_device.ignore_the_last_key, torch.float32) as device:
        model = ch.load(folder)
        checked = device.calls
        ch.load(folder)
        assert device.calls == checked > 0, "the verdict is kept"
        ids = torch.arange(100)[None]
        with torch.inference_mode():
            logits = model.module(ids).logits
    with torch.inference_mode():
        expected = right.module(ids).logits
    assert torch.allclose(logits, expected, atol=1e-5)
    assert count_fused_calls(model) == 0
    first, second = caplog.messages
    assert (
        first == second
        and "attention uses the eager kernel there" in first
        and "pytorch #" in first
        and "\n" not in first
    )
    (attention,) = (module for module in model.module.modules() if isinstance(module, Attention))
    assert attention.kernel() == ("eager", "the fused kernel is wrong on cpu")
    assert ch.load(folder).module.spec == right.module.spec


def test_a_device_without_a_right_kernel_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = WrongDevice("matrix products", wrong_device.move_one_element, torch.float32)
    with (
        device,
        pytest.raises(InputError, match=r"cpu .* computes wrong: matrix products in fp32 .* as in pytorch #\d+"),
    ):
        ch.load(folder)
    calls = device.calls
    with device, pytest.raises(InputError, match=r"delete .*\.verdict"):
        ch.load(folder)
    assert device.calls == calls, "the verdict is kept"
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert ch.load(folder), "another version of PyTorch has another verdict"


def test_only_the_precision_that_runs_counts(folder: Path) -> None:
    with WrongDevice("matrix products", wrong_device.move_one_element, torch.bfloat16):
        assert ch.load(folder, precision="fp32")
        with pytest.raises(InputError, match="matrix products in bf16"):
            ch.load(folder, precision="bf16")


def test_where_the_cache_cannot_be_written_a_process_checks_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "file").write_text("")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(folder.parent / "file"))
    device_check._check_once.cache_clear()
    with WrongDevice("fused attention", wrong_device.ignore_strides, torch.int8) as device:
        ch.load(folder)
        calls = device.calls
        ch.load(folder)
    assert device.calls == calls > 0


def test_training_refuses_a_wrong_device_before_it_reads_data(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "prepare_data", None)
    wrong = WrongDevice("layer norm", wrong_device.move_one_element, torch.float32)
    with wrong, pytest.raises(InputError, match="computes wrong: layer norm"):
        ch.train(write_run_file(tmp_path), overrides={"train.precision": "fp32"})
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_training_avoids_a_wrong_kernel(folder: Path, tmp_path: Path) -> None:
    run_file = load_run_file(write_run_file(tmp_path), ["train.precision=fp32"])
    with WrongDevice("fused attention", wrong_device.ignore_the_last_key, torch.float32) as device:
        with assemble.open_training(run_file, resume=False, progress=TrainingProgress()) as run:
            assert device.calls
            assembled = assemble.assemble_run(run)
    for module in (assembled.model.module, assembled.trainer.module):
        attentions = [each for each in module.modules() if isinstance(each, Attention)]
        assert attentions and {each.kernel()[1] for each in attentions} == {"the fused kernel is wrong on cpu"}


@pytest.mark.parametrize(
    ("choice", "device", "expected"),
    [
        ("auto", "cpu", False),
        ("auto", "meta", True),
        ("all", "cpu", True),
        ("all", "meta", True),
        ("off", "cpu", False),
        ("off", "meta", False),
    ],
)
def test_the_environment_chooses_the_devices(
    choice: str, device: str, expected: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DEVICE_CHECK, choice)
    assert needs_check(torch.device(device)) is expected
    assert len(caplog.messages) == ((choice, device) == ("off", "meta"))
    monkeypatch.setenv(DEVICE_CHECK, "never")
    with pytest.raises(InputError, match="expected auto, all or off"):
        needs_check(torch.device(device))


COMPILED = """
import torch
from clearhead import build, presets
from clearhead.fast.replica import use_eager

torch.manual_seed(0)
module = build(presets.llama_tiny(20, layers=1)).eval()
ids = torch.arange(70)[None] % 20
fused = module(ids).logits
use_eager(module, "the fused kernel is wrong here")
compiled = torch.compile(module, fullgraph=True, backend="eager")(ids).logits
assert torch.equal(compiled, module(ids).logits) and not torch.equal(compiled, fused)
"""


def test_the_eager_kernel_keeps_one_compiled_graph() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILED], check=True, timeout=300)
