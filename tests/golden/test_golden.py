"""A golden record sees every changed bit on its machine, and allows only rounding on another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.golden import entries
from tests.golden.comparison import compare_device
from tests.golden.records import Entry, Golden, describe_machine

pytestmark = pytest.mark.slow
RNG = np.random.default_rng(3)
WEIGHTS = RNG.normal(size=(5, 7)).astype(np.float32)


def golden(array: np.ndarray, name: str = "logits/x/0", **machine: str) -> Golden:
    return Golden({**describe_machine(), **machine}, {name: Entry.of_array(array)})


def change_one_value(relative: float) -> np.ndarray:
    """Return the weights with one sampled value moved by a share of their root mean square."""
    array = WEIGHTS.copy()
    array[0, 0] += relative * np.sqrt(np.mean(WEIGHTS**2))
    return array


def test_one_bit_is_seen_on_the_same_machine() -> None:
    array = WEIGHTS.copy()
    array[2, 3] = np.nextafter(array[2, 3], np.float32(9))
    assert len(golden(WEIGHTS).differences(golden(array))) == 1
    assert not golden(WEIGHTS).differences(golden(WEIGHTS.copy()))


@pytest.mark.parametrize(("relative", "num_differences"), [(1e-4, 0), (1e-2, 1)])
def test_another_machine_may_round_otherwise_but_not_compute_otherwise(relative: float, num_differences: int) -> None:
    assert len(golden(WEIGHTS).differences(golden(change_one_value(relative), processor="another"))) == num_differences


@pytest.mark.parametrize("array", [WEIGHTS.T, WEIGHTS.astype(np.float64), WEIGHTS.reshape(7, 5)])
def test_shape_and_dtype_count_on_every_machine(array: np.ndarray) -> None:
    for machine in ({}, {"processor": "another"}):
        assert len(golden(WEIGHTS).differences(golden(array, **machine))) == 1


def test_missing_and_new_entries_are_named() -> None:
    lines = golden(WEIGHTS, "logits/a").differences(golden(WEIGHTS, "logits/b"))
    assert lines == ["missing: logits/a", "new: logits/b"]


def test_text_beside_floats_counts_on_every_machine() -> None:
    values = [[{"text": "a", "score": 1.0}], [{"text": "a", "score": 1.00001}], [{"text": "b", "score": 1.0}]]
    first, near, other = (Entry.of_json(value) for value in values)
    assert first.digest != near.digest
    assert first.is_near(near)
    assert not first.is_near(other)


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = Golden(describe_machine(), {"logits/a": Entry.of_array(WEIGHTS), "page/b": Entry.of_json({"x": [1, 2.5]})})
    record.write(tmp_path / "record.json")
    assert Golden.read(tmp_path / "record.json") == record


@pytest.mark.parametrize(
    ("facts", "relative", "code", "expected"),
    [
        ({}, 0.0, 0, "1 entries compared bitwise: 0 differ"),
        ({}, 1e-6, 1, "1 entries compared bitwise: 1 differ"),
        ({"processor": "another"}, 1e-6, 0, "1 entries compared within the bounds"),
        ({"torch": "0.1"}, 1e-2, 0, "no record of cpu with torch"),
        ({"device": "cuda GPU"}, 1e-2, 0, "no record of cpu with torch"),
    ],
)
def test_a_device_is_compared_with_the_record_of_its_kind_and_version(
    facts: dict[str, str], relative: float, code: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden(WEIGHTS, device="mps").write(tmp_path / "record-mps.json")
    golden(WEIGHTS, **facts).write(tmp_path / "record.json")
    computed: list[str] = []

    def compute(device: str) -> Golden:
        computed.append(device)
        return golden(change_one_value(relative))

    assert compare_device("cpu", tmp_path, compute) == code
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(expected) and bool(computed) == ("compared" in expected)


def test_a_gpu_may_add_in_any_order() -> None:
    both = (golden(array, device="cuda GPU") for array in (WEIGHTS, change_one_value(1e-5)))
    assert not next(both).differences(next(both))


def test_a_run_repeats_to_the_last_bit_and_a_changed_one_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = entries.record_run("classify", tmp_path / "first")
    assert entries.record_run("classify", tmp_path / "second") == first
    monkeypatch.setattr(entries, "DROPOUT", 0.11)
    other = entries.record_run("classify", tmp_path / "third")
    assert other.keys() == first.keys()
    groups = {name.partition("/")[0] for name in first if first[name] != other[name]}
    assert {"weights", "optimizer", "metrics", "predictions", "page"} <= groups


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_checkpoint_repeats_to_the_last_bit(name: str, tmp_path: Path) -> None:
    first = entries.record_checkpoint(name, tmp_path / "first")
    assert entries.record_checkpoint(name, tmp_path / "second") == first
    assert {f"cache/{name}/self/0", f"logits/{name}/1"} <= first.keys()
    assert not any(entry == replace(entry, rms=0.0) for entry in first.values())
