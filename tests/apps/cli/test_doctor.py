"""`clearhead doctor`: what there is, why the rest is missing, and nothing that is private."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.apps.cli import doctor
from clearhead.apps.cli.main import main
from clearhead.base.machine import DEVICE_CHECK
from clearhead.fast.device_check import BOUNDS
from clearhead.fast.native import load
from tests.fast import wrong_device
from tests.fast.wrong_device import WrongDevice

TOPICS = (
    "clearhead python packages torch processor kernels memory gpu devices cache hub console settings advice".split()
)


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the devices takes a second, and the tests of `fast.device_check` have it."""
    monkeypatch.setenv(DEVICE_CHECK, "off")


def run_doctor(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["doctor", *words]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    return captured.out


def test_the_report_has_every_part(capfd: pytest.CaptureFixture[str]) -> None:
    lines = run_doctor(capfd).splitlines()
    assert [*dict.fromkeys(line.split()[0] for line in lines)] == TOPICS
    report = json.loads(run_doctor(capfd, "--json"))
    assert [*report] == TOPICS
    assert report["packages"]["unmet"] == [] and "error" not in str({*report} | {*report["kernels"]})
    assert report["memory"]["total"] >= report["memory"]["free"] > 0


def test_the_kernels_that_serve_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    library = load.library()
    kernel_report = json.loads(run_doctor(capfd, "--json"))["kernels"]["inference"]
    if library is None:
        assert kernel_report["served"] is False and kernel_report["why"]
    else:
        assert (
            kernel_report["served"]
            and set(kernel_report["isa"]) == load.isa(library)
            and Path(kernel_report["file"]).is_file()
        )


def test_kernels_that_are_not_compiled_yet_are_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    monkeypatch.setattr("clearhead.fast.native.build._compiler", lambda: sys.executable)
    assert "inference: not compiled yet" in run_doctor(capfd)
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("CXX", "no-such-compiler", "there is no compiler no-such-compiler"),
        ("CLEARHEAD_KERNELS", "plain", "unset the variable to use them"),
        (
            "CLEARHEAD_KERNELS",
            "fast",
            "unknown, the check failed: InputError: the environment variable CLEARHEAD_KERNELS",
        ),
    ],
)
def test_why_kernels_do_not_serve_is_said(
    name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    out = run_doctor(capfd)
    assert expected in out and f"{name}={value}" in out
    assert "nothing is missing" not in out or value == "fast"


def test_the_cache_is_counted_and_no_home_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "a cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / "a cache" / "corpora").mkdir(parents=True)
    (tmp_path / "a cache" / "corpora" / "tokens").write_bytes(bytes(4100))
    out = run_doctor(capfd)
    assert "corpora 4.1 kB" in out and "rm -r ~/'a cache'" in out
    assert str(tmp_path) not in out and "hf_secret" not in out


def test_a_device_that_computes_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "not checked: CLEARHEAD_DEVICE_CHECK is off" in run_doctor(capfd)
    monkeypatch.setenv(DEVICE_CHECK, "auto")
    with WrongDevice("fused attention", wrong_device.mask_by_fours):
        report = run_doctor(capfd)
    (row,) = (line for line in report.splitlines() if line.startswith("devices     fused attention"))
    assert row.count("WRONG") == 1 and report.count("WRONG") == 1
    (advice,) = (line for line in report.splitlines() if line.startswith("advice"))
    assert "cpu computes wrong results: fused attention in bf16 (64 queries on 64 keys" in advice
    assert "as in pytorch #195910; attention uses the eager kernel there" in advice

    def no_number(right: wrong_device.Call, *args: object, **named: object) -> object:
        return right(*args, **named) * float("nan")

    with WrongDevice("softmax", no_number):
        device = json.loads(run_doctor(capfd, "--json"))["devices"]["cpu"]
    assert device["errors"]["softmax"]["bf16"] is None and 0.0 < device["errors"]["softmax"]["fp32"] <= BOUNDS["fp32"]
    fault = next(fault for fault in device["faults"] if fault["operation"] == "softmax")
    assert (fault["precision"], fault["symptom"], fault["error"]) == ("bf16", "is not a number", None)


def test_what_is_too_old_or_missing_is_to_be_installed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    versions = {"numpy": "1.0", "tokenizers": None}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "999"))
    out = run_doctor(capfd)
    assert "tokenizers MISSING" in out
    assert "pip install 'numpy>=1.26' 'tokenizers>=0.20'" in out


def test_a_broken_installation_is_survived(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')", "utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(doctor.__file__).parents[3])])}
    done = subprocess.run(
        [sys.executable, "-m", "clearhead", "doctor"],
        env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = dict(line.split(maxsplit=1) for line in reversed(done.stdout.splitlines()))
    assert "libtorch_cpu.so" in lines["torch"] and "unknown, the check failed" in lines["kernels"]
    assert "processors are available to this process" in lines["processor"] and "to empty it" in lines["cache"]
    assert "install it again" in lines["advice"]


@pytest.mark.parametrize("value", ["private/g++ -DKEY=hunter2 --password hunter2", "hunter2=hunter2 ccache g++"])
def test_arguments_of_the_compiler_are_not_shown(
    value: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", value)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    for words in ((), ("--json",)):
        report = run_doctor(capfd, *words)
        assert "hunter2" not in report and "private" not in report
    assert json.loads(report)["settings"]["CXX"] in ("g++", "ccache")
