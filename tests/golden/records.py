"""Entries of a golden record, and the comparison of two records."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

NUM_SAMPLES = 4
"""The number of values of a tensor in a record, at equal distances, for the comparison on another machine."""
BOUND_ELSEWHERE = 1e-3
"""The largest difference on another machine, relative to the tensor's root mean square."""
NOT_ELSEWHERE = ("weights/", "optimizer/")
"""Entries that are compared on one machine only.

Adam divides a gradient by its own size. Where the exact gradient is zero (biases of keys), rounding decides the sign of
whole steps, so that no bound holds between machines.
"""


@dataclass(frozen=True)
class Entry:
    """One recorded tensor or JSON value.

    Args:
        digest: first 16 hexadecimal digits of the SHA-256 of the bytes.
        form: dtype and shape of a tensor, such as "float32[3, 5]"; for a JSON value, the digest of all but its floats.
        rms: root mean square of the floats; None without floats.
        samples: some of the floats.
    """

    digest: str
    form: str
    rms: float | None = None
    samples: tuple[float, ...] = ()

    @classmethod
    def of_array(cls, array: np.ndarray[Any, Any]) -> Entry:
        """Return the entry of an array: its digest covers dtype, shape and every bit."""
        array = np.ascontiguousarray(array)
        form = f"{array.dtype}{[*array.shape]}"
        digest = digest_of(form.encode() + array.tobytes())
        return cls(digest, form, *_summary(array if array.dtype.kind == "f" else np.empty(0)))

    @classmethod
    def of_json(cls, value: Any) -> Entry:
        """Return the entry of a value of lists, dictionaries, data classes, text and numbers."""
        floats: list[float] = []
        rest = _without_floats(value, floats)
        form = "json " + digest_of(json.dumps(rest, sort_keys=True, ensure_ascii=False).encode())
        return cls(digest_of(form.encode() + np.array(floats).tobytes()), form, *_summary(np.array(floats)))

    def is_near(self, other: Entry) -> bool:
        """Return whether another machine may have computed the other entry."""
        if self.form != other.form:
            return False
        if self.rms is None or other.rms is None:
            return True
        bound = BOUND_ELSEWHERE * max(self.rms, 1e-12)
        pairs = [(self.rms, other.rms), *zip(self.samples, other.samples, strict=True)]
        return all(abs(first - second) <= bound for first, second in pairs)


@dataclass(frozen=True)
class Golden:
    """A record: the machine that computed it, and its entries by name.

    Args:
        machine: facts on which the last bit of a float depends.
        entries: the entries by names such as "weights/classify/encoder.layers.0...".
    """

    machine: Mapping[str, str]
    entries: Mapping[str, Entry]

    @classmethod
    def of_here(cls, entries: Mapping[str, Entry], device: str = "cpu") -> Golden:
        """Return the record of entries that a device of this machine has computed."""
        return cls(describe_machine(device), entries)

    @classmethod
    def find(cls, folder: Path, device: str) -> Golden | None:
        """Return the record in a folder that a device of this kind made with this version of PyTorch, or None."""
        here = describe_machine(device)
        records = (cls.read(file) for file in sorted(folder.glob("record*.json")))
        return next(
            (record for record in records if all(record.machine[key] == here[key] for key in ("device", "torch"))), None
        )

    @classmethod
    def read(cls, file: Path) -> Golden:
        """Read a record."""
        content = json.loads(file.read_text("utf-8"))
        entries = {name: _entry(entry) for name, entry in content["entries"].items()}
        return cls(content["machine"], entries)

    def write(self, file: Path) -> None:
        """Write the record, one line per entry, so that a diff shows which changed."""
        lines = [f"{json.dumps(name)}: {json.dumps(_fields(entry))}" for name, entry in sorted(self.entries.items())]
        text = f'{{"machine": {json.dumps(dict(self.machine))},\n"entries": {{\n' + ",\n".join(lines) + "\n}}\n"
        file.write_text(text, encoding="utf-8")

    def is_bitwise(self, other: Golden) -> bool:
        """Return whether equal code gives equal bits: on one machine, but not on a GPU, which adds in any order."""
        return self.machine == other.machine and self.machine["device"] == "cpu"

    def differences(self, other: Golden) -> list[str]:
        """Return one line per entry that differs; where bits may differ, floats must be within the bounds."""
        is_bitwise = self.is_bitwise(other)
        lines = [f"missing: {name}" for name in sorted(self.entries.keys() - other.entries.keys())]
        lines += [f"new: {name}" for name in sorted(other.entries.keys() - self.entries.keys())]
        for name in sorted(self.entries.keys() & other.entries.keys()):
            expected, received = self.entries[name], other.entries[name]
            if expected.digest == received.digest:
                continue
            if is_bitwise or not (name.startswith(NOT_ELSEWHERE) or expected.is_near(received)):
                lines.append(f"differs: {name}: {_entry_text(expected)}, now {_entry_text(received)}")
        return lines


def digest_of(content: bytes) -> str:
    """Return the first 16 hexadecimal digits of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def describe_machine(device: str = "cpu") -> dict[str, str]:
    """Return the facts on which the last bit of a float depends: device, processor, torch, compiler of the kernels."""
    compiler = shutil.which("g++")
    version = "none"
    if compiler is not None:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    name = f" {torch.cuda.get_device_name(device)}" if device == "cuda" else ""
    return {
        "device": device + name,
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "compiler": version.splitlines()[0],
    }


def _processor() -> str:
    """Return family, model and instruction sets of the processor, as far as the system tells them."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    facts = dict(line.split(":", 1) for line in text.partition("\n\n")[0].splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    names = [facts.get(key, "") for key in ("model name", "cpu family", "model")]
    return " ".join([*names, digest_of(facts.get("flags", "").encode())])


def _summary(array: np.ndarray[Any, Any]) -> tuple[float | None, tuple[float, ...]]:
    """Return the root mean square of an array and some of its values; None and none for an empty one."""
    if not array.size:
        return None, ()
    flat = array.reshape(-1).astype(np.float64)
    chosen = np.linspace(0, flat.size - 1, min(NUM_SAMPLES, flat.size)).round().astype(int)
    return float(np.sqrt(np.mean(flat**2))), tuple(flat[chosen].tolist())


def _without_floats(value: Any, floats: list[float]) -> Any:
    """Return a JSON value with None for every float, and append the floats to a list in the order of the value."""
    if isinstance(value, float | np.floating):
        floats.append(float(value))
        return None
    if is_dataclass(value):
        return {field.name: _without_floats(getattr(value, field.name), floats) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _without_floats(value[key], floats) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_without_floats(item, floats) for item in value]
    return value


def _fields(entry: Entry) -> dict[str, Any]:
    return {key: value for key, value in asdict(entry).items() if value not in (None, ())}


def _entry(content: Mapping[str, Any]) -> Entry:
    return Entry(**{**content, "samples": tuple(content.get("samples", ()))})


def _entry_text(entry: Entry) -> str:
    return f"{entry.form} {entry.digest}" + ("" if entry.rms is None else f" (rms {entry.rms:.6g})")
