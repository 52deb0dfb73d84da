"""Weights that change on disk while they are mapped: one message and exit code 2, and no half-written file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError
from clearhead.fast.stored import WeightPlan
from tests import hf_models
from tests.conftest import ROOT

CHANGED = r"was changed on disk while its weights were in use: wait until it is complete, and load it again"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a million weights in bf16, which stay in the mapped file."""
    folder = hf_models.rotary_model(tmp_path_factory.mktemp("original") / "model")
    config = transformers.LlamaConfig(
        vocab_size=600, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=61, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    hf_models.save(transformers.LlamaForCausalLM(config).bfloat16(), folder)
    ch.load(folder, device="cpu", precision="int8").save(folder.parent / "int8")
    return folder


@pytest.fixture(params=["bf16", "int8"])
def folder(original: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the checkpoint, or of the model that was saved in int8."""
    source = original if request.param == "bf16" else original.parent / "int8"
    return Path(shutil.copytree(source, tmp_path / "model"))


def weights_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-2, os.SEEK_END)
        opened.write(b"12")


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 2)  # the page of the lost bytes stays readable


USES: dict[str, Callable[[ch.Model, Path], object]] = {
    "generate": lambda model, _: model.generate("the cat", max_new_tokens=1, temperature=0),
    "score": lambda model, _: model.score("the cat"),
    "attention": lambda model, _: model.attention("the cat"),
    "save": lambda model, out: model.save(out),
}


@pytest.mark.parametrize("change", [overwrite, shorten])
def test_a_loaded_model_is_refused_after_its_file_was_changed(
    folder: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    model = ch.load(folder, device="cpu")
    change(weights_of(folder))
    for use in USES.values():
        with pytest.raises(InputError, match=CHANGED):
            use(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("change", [Path.unlink, lambda file: file.with_name("new").replace(file)])
def test_a_file_that_is_removed_or_replaced_changes_nothing(folder: Path, change: Callable[[Path], object]) -> None:
    model = ch.load(folder, device="cpu")
    before = model.score("the cat sat").log_probability
    shutil.copy(__file__, folder / "new")
    change(weights_of(folder))
    assert model.score("the cat sat").log_probability == before


def test_a_copy_in_memory_does_not_depend_on_its_file(folder: Path) -> None:
    model = ch.load(folder, device="cpu", precision="fp32")
    before = model.score("the cat sat").log_probability
    shorten(weights_of(folder))
    assert model.score("the cat sat").log_probability == before


def test_no_token_follows_a_change(folder: Path) -> None:
    model = ch.load(folder, device="cpu")
    pieces = model.stream("the cat", max_new_tokens=9, min_new_tokens=9, temperature=0)
    next(pieces)
    overwrite(weights_of(folder))
    with pytest.raises(InputError, match=CHANGED):
        list(pieces)


@pytest.mark.parametrize("words", [["generate", "--prompt", "a"], ["convert", "out", "--precision", "int8"]])
@pytest.mark.parametrize("change", ["overwrite", "unlink", "replace"])
def test_a_change_during_a_load_or_a_conversion_is_refused(
    original: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    change: str,
) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    file, convert_weight = weights_of(folder), WeightPlan.hold
    shutil.copy(file, tmp_path / "new")
    changes = {"overwrite": overwrite, "unlink": Path.unlink, "replace": (tmp_path / "new").replace}

    def hold(plan: WeightPlan, address: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if changes:
            changes[change](file)
            changes.clear()
        return convert_weight(plan, address, tensor)

    monkeypatch.setattr(WeightPlan, "hold", hold)
    monkeypatch.chdir(tmp_path)
    precision = [] if "--precision" in words else ["--precision", "int8"]
    assert main([words[0], "model", *words[1:], *precision]) == 2
    message = capfd.readouterr().err
    assert "model.safetensors" in message and message.count("clearhead: ") == 1, message
    assert "load it again" in message or "load the model again" in message
    assert {path.name for path in tmp_path.iterdir()} <= {"model", "new"}


CHILD = """
import os, sys
from pathlib import Path
from clearhead.apps.cli.main import main
from clearhead.checkpoints.hf.files.tensor_files import TensorFiles
from clearhead.generate.continuation import RequestStarter
from clearhead.model import loading

def truncate_before(owner, name):
    function = getattr(owner, name)
    def run(*args, **options):
        os.truncate(sys.argv[2], 4096)
        return function(*args, **options)
    setattr(owner, name, run)

moment, file, *words = sys.argv[1:]
if moment == "pass":
    truncate_before(RequestStarter, "start")
elif moment == "load":
    truncate_before(loading, "refuse_nan")
else:
    read = TensorFiles.read
    def truncate_after(self, name):
        tensor = read(self, name)
        os.truncate(sys.argv[2], 4096)
        return tensor
    TensorFiles.read = truncate_after
sys.exit(main(words))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows refuses to cut off a mapped file")
@pytest.mark.parametrize(
    ("moment", "kernels", "words"),
    [
        ("load", "auto", ["generate", "model", "--prompt", "the cat"]),
        ("pass", "auto", ["generate", "model", "--prompt", "the cat"]),
        ("pass", "plain", ["generate", "model", "--prompt", "the cat"]),
        ("read", "auto", ["convert", "model", "out", "--precision", "int8"]),
    ],
)
def test_a_file_that_is_cut_off_while_it_is_read_ends_in_one_message(
    original: Path, tmp_path: Path, moment: str, kernels: str, words: list[str]
) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, moment, str(folder / "model.safetensors"), *words],
        capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", "CLEARHEAD_KERNELS": kernels},
    )  # fmt: skip
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert CHANGED in done.stderr and done.stderr.count("clearhead: ") == 1, done.stderr
    assert "Traceback" not in done.stderr and done.stdout.strip() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


THREADS = """
import ctypes, mmap, os, sys, threading
from pathlib import Path
from clearhead.base.mapped_files import MappedFile, ending_at_bus_errors

path = Path(sys.argv[1])
observed = MappedFile.observe(path)
with path.open("r+b") as file, ending_at_bus_errors():
    content = mmap.mmap(file.fileno(), 0)
    os.truncate(path, 0)
    address, copy = ctypes.addressof(ctypes.c_char.from_buffer(content)), ctypes.CDLL(None).memcpy
    start = threading.Barrier(16)

    def read(index):
        buffer = ctypes.create_string_buffer(1)
        start.wait()
        copy(buffer, ctypes.c_void_p(address + index * 4096), ctypes.c_size_t(1))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows refuses to cut off a mapped file")
def test_threads_that_fail_together_write_one_message(tmp_path: Path) -> None:
    for _ in range(5):
        (tmp_path / "weights").write_bytes(bytes(2**16))
        done = subprocess.run(
            [sys.executable, "-c", THREADS, str(tmp_path / "weights")],
            capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 2 and CHANGED in done.stderr and done.stderr.count("\n") == 1, done.stderr
