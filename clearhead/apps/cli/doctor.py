"""`clearhead doctor`: report the hardware and software of this machine, and advice on what is missing."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from clearhead.apps.cli.console import print_either
from clearhead.apps.cli.options import Json
from clearhead.base.commands import list_requirements, make_install_command, quote
from clearhead.base.errors import program_name, shorten
from clearhead.base.printing import human_bytes

_CPUINFO: Final = Path("/proc/cpuinfo")
_PROCESSOR_FIELDS: Final = "model name", "Model", "Hardware"
_SETTINGS: Final = """
    CLEARHEAD_CACHE CLEARHEAD_KERNELS CLEARHEAD_HIDE_ISA CLEARHEAD_DEVICE_CHECK CXX OMP_NUM_THREADS MKL_NUM_THREADS
    OMP_WAIT_POLICY ONEDNN_MAX_CPU_ISA CUDA_VISIBLE_DEVICES HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE NO_COLOR PYTHONUTF8
    PYTHONIOENCODING
""".split()
"""Environment variables that change the behaviour of clearhead; none is secret, but arguments in CXX may be."""
_MAX_REASON_LENGTH: Final = 300


@dataclass
class _Section:
    """One section of the report on this machine, such as its packages or devices.

    Attributes:
        facts: the values of the section for JSON.
        lines: the section as lines of text.
        advice: sentences with the fix for each problem.
    """

    facts: dict[str, Any]
    lines: list[str]
    advice: list[str] = field(default_factory=list)


def doctor(as_json: Json = False) -> None:
    """Report the state of this machine, and what to do if something is missing.

    \b
    Example:
      clearhead doctor
      clearhead doctor --json > doctor.json

    Paste the output into a bug report. It shows versions, processor, kernels with their instruction sets, memory and
    GPU. It also shows cache folders with their size and the command that empties them, the console, and environment
    variables.

    Every device computes attention, softmax, norms, products, lookups and samples. The table has the largest error of
    each operation against double precision on the CPU. Nothing is compiled, downloaded or timed; clearhead bench
    measures speed. Your home folder is written as ~.

    A line that cannot be determined gives the reason, and the last lines give advice. With --json, the last line
    is {"clearhead", "python", "packages", "torch", "processor", "kernels", "memory", "gpu", "devices", "cache", "hub",
    "console", "settings", "advice"}; a section that failed is {"error"}.
    """
    record: dict[str, Any] = {}
    lines, advice = list[str](), list[str]()
    for topic, examine in _EXAMINATIONS.items():
        section = _run_examination(examine)
        record[topic] = section.facts
        lines += [f"{topic:<11} {line}" for line in section.lines]
        advice += section.advice
    record["advice"] = list(dict.fromkeys(advice))
    lines += [f"{'advice':<11} {line}" for line in record["advice"] or ["nothing is missing"]]
    print_either(as_json, record, *map(_without_home, lines))


def _run_examination(examine: Callable[[], _Section]) -> _Section:
    try:
        return examine()
    except Exception as error:  # noqa: BLE001 - the command must also run on a broken installation
        text = _reason(error)
        return _Section({"error": text}, [f"unknown, the check failed: {text}"])


def _reason(error: Exception) -> str:
    return shorten(" ".join(f"{type(error).__name__}: {error}".split()), _MAX_REASON_LENGTH)


def _without_home(line: str) -> str:
    home = str(Path.home())
    # A shell does not expand ~ inside quotes.
    return line if len(home) < 2 else line.replace(f"'{home}/", "~/'").replace(home, "~")


def _clearhead() -> _Section:
    import clearhead
    from clearhead.version import __version__

    install_folder = str(Path(clearhead.__file__).parent)
    return _Section({"version": __version__, "place": install_folder}, [f"{__version__}, {install_folder}"])


def _python() -> _Section:
    version, system = f"{platform.python_version()} ({platform.python_implementation()})", platform.platform()
    facts = {"version": version, "executable": sys.executable, "system": system, "machine": platform.machine()}
    return _Section(facts, [f"{version}, {sys.executable}", f"{system}"])


def _packages() -> _Section:
    """Compare the installed packages with the requirements of clearhead, without importing them."""
    needed = {requirement.name: _version(requirement.name) for requirement in list_requirements()}
    faults = _unmet_requirements("")
    extras = {
        extra: _unmet_requirements(extra) for extra in metadata.metadata("clearhead").get_all("Provides-Extra") or ()
    }
    complete = [extra for extra, lacking in extras.items() if not lacking]
    lines = [", ".join(f"{name} {version or 'MISSING'}" for name, version in needed.items())]
    lines += [f"with the extras {', '.join(complete) or 'none'}"]
    for extra, lacking in extras.items():
        if lacking:
            lines.append(f"without {extra}: {', '.join(lacking)}; install: {make_install_command(extra=extra)}")
    advice = [f"install the missing packages: {make_install_command(*faults)}"] if faults else []
    return _Section({"needed": needed, "unmet": faults, "extras_without": extras}, lines, advice)


def _unmet_requirements(extra: str) -> list[str]:
    """Return the packages of an optional extra that are missing or too old; extra "" means the required packages."""
    versions = {requirement: _version(requirement.name) for requirement in list_requirements(extra)}
    return [
        str(requirement)
        for requirement, version in versions.items()
        if version is None or not requirement.specifier.contains(version, prereleases=True)
    ]


def _version(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _torch() -> _Section:
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a library that PyTorch needs may be missing or broken
        advice = "PyTorch cannot be imported: install it again (README names the smaller build for a CPU)"
        return _Section({"error": _reason(error)}, [f"cannot be imported: {_reason(error)}"], [advice])
    facts = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    built = "for the CPU only" if torch.version.cuda is None else f"with CUDA {torch.version.cuda}"
    one_dnn = "with" if facts["mkldnn"] else "without"
    line = f"{torch.__version__}, built {built}, {one_dnn} oneDNN; {facts['threads']} threads, {facts['capability']}"
    return _Section(facts, [line])


def _processor() -> _Section:
    name, usable = _processor_name(), _usable_processors()
    facts: dict[str, Any] = {"name": name, "processors": os.cpu_count(), "usable": usable}
    section = _Section(facts, [f"{name}; {usable} of {os.cpu_count()} processors are available to this process"])
    try:
        from clearhead.fast.probe import HIDE, NEEDS, processor

        has = processor()
    except Exception as error:  # noqa: BLE001 - without PyTorch only the name is known
        section.lines.append(f"instructions unknown: {_reason(error)}")
        return section
    facts |= {"isa": _sort_instructions(has.isa), "hidden": _sort_instructions(has.hidden), "known": list(NEEDS)}
    section.lines.append(f"instructions {', '.join(facts['isa']) or 'none that the kernels use'}")
    if has.hidden:
        section.lines.append(f"supported but not used: {', '.join(facts['hidden'])}")
        section.advice.append(f"instructions are hidden by {HIDE} or by the system: unset {HIDE} to use them")
    return section


def _sort_instructions(isa: frozenset[str]) -> list[str]:
    from clearhead.fast.probe import NEEDS

    return [name for name in NEEDS if name in isa]


def _processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in _CPUINFO.read_text("utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in _PROCESSOR_FIELDS and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def _usable_processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _kernels() -> _Section:
    from clearhead.fast.native.load import KERNELS, find_library, isa, uses_kernels
    from clearhead.fast.native.options import INFERENCE, PACKAGED, TRAINING

    section = _Section({}, [])
    if not uses_kernels():
        advice = [f"kernels are turned off by {KERNELS}=plain: unset the variable to use them"]
        return _Section({"wanted": False}, [f"no clearhead kernels: {KERNELS} is plain"], advice)
    for purpose, kernels in (("inference", INFERENCE), ("training", TRAINING)):
        try:
            served = find_library(kernels)
        except OSError as error:
            section.facts[purpose] = {"served": False, "why": f"{error}"}
            section.lines.append(f"{purpose}: PyTorch's kernels, because clearhead's cannot be used: {error}")
            section.advice += _advice_on_kernels(f"{error}")
            continue
        if served is None:
            section.facts[purpose] = {"served": None, "why": "not compiled yet"}
            section.lines.append(f"{purpose}: not compiled yet; the first use compiles them in about 10 s")
            continue
        file, names = served[0], _sort_instructions(isa(served[1]))
        origin = f"from the wheel, {file.stem}" if file.parent.name == PACKAGED else "compiled on this machine"
        section.facts[purpose] = {"served": True, "file": str(file), "isa": names}
        section.lines.append(f"{purpose}: clearhead kernels, for {', '.join(names)}; {origin}")
    return section


def _advice_on_kernels(reason: str) -> Iterator[str]:
    if "compiler" in reason:
        yield "for faster models, install a C++ compiler (Debian: apt install g++) or a wheel with kernels"
    elif sys.platform == "linux":
        yield "kernels cannot be used: report this text; PyTorch's kernels give the same results, but slower"


def _memory() -> _Section:
    from clearhead.base.machine import free_memory, total_memory

    total, free = total_memory(), free_memory()
    line = f"{human_bytes(total)}, {human_bytes(free)} of it free for this process"
    return _Section({"total": total, "free": free}, [line])


def _gpu() -> _Section:
    import torch

    names, lines = list[dict[str, Any]](), list[str]()
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        names.append({"device": f"cuda:{number}", "name": properties.name, "memory": properties.total_memory})
        lines.append(f"cuda:{number}: {properties.name}, {human_bytes(properties.total_memory)}")
    if torch.backends.mps.is_available():
        names.append({"device": "mps", "name": "Apple"})
        lines.append("mps: the GPU of this Mac")
    advice = []
    if not names and (Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi")):
        reason = "was built without CUDA" if torch.version.cuda is None else "cannot use it: its driver is too old"
        advice = [f"there is an NVIDIA GPU, but PyTorch {reason}; see pytorch.org/get-started/locally"]
    return _Section({"devices": names}, lines or ["none that PyTorch can use"], advice)


def _devices() -> _Section:
    """Compare the results of every device with double precision on the CPU."""
    import torch

    from clearhead.base.machine import DEVICE_CHECK, needs_check
    from clearhead.fast.device_check import BOUNDS, advise, check_device, device_name, find_faults, largest_errors

    needs_check(torch.device("cpu"))  # raises InputError for an unknown setting
    if os.environ.get(DEVICE_CHECK) == "off":
        return _Section({"checked": False}, [f"not checked: {DEVICE_CHECK} is off"])
    names = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    names += ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    report = _Section({}, [])
    for name in names:
        began = time.monotonic()
        results = check_device(torch.device(name), tuple(BOUNDS))
        seconds, faults, errors = time.monotonic() - began, find_faults(results), largest_errors(results)
        facts = {"name": device_name(torch.device(name)), "seconds": round(seconds, 2), "errors": errors}
        report.facts[name] = facts | {"faults": [asdict(fault) for fault in faults]}
        report.lines.append(_table_line(f"{name}, {seconds:.1f} s", BOUNDS))
        wrong = {(fault.operation, fault.precision) for fault in faults}
        report.lines += [_error_line(operation, row, wrong) for operation, row in errors.items()]
        report.lines.append(_error_line("rounding, at most", BOUNDS, ()))
        report.advice += [f"{name} computes wrong results: {fault}; {advise(faults)}" for fault in faults]
    return report


def _error_line(operation: str, errors: Mapping[str, float | None], wrong: Collection[tuple[str, str]]) -> str:
    """Return a table line with the errors of an operation; errors larger than rounding are marked WRONG."""
    cells = ("none" if error is None else f"{error:.1e}" for error in errors.values())
    marks = (" WRONG" if (operation, precision) in wrong else "" for precision in errors)
    return _table_line(operation, map(str.__add__, cells, marks))


def _table_line(name: str, cells: Iterable[str]) -> str:
    return f"{name:<18}" + "".join(f"  {cell:<13}" for cell in cells).rstrip()


def _cache() -> _Section:
    from clearhead.base.files import cache_root

    root = cache_root()
    sizes = {kind.name: _size(kind) for kind in sorted(root.iterdir()) if kind.is_dir()} if root.is_dir() else {}
    shown = f" ({', '.join(f'{kind} {human_bytes(size)}' for kind, size in sizes.items())})" if sizes else ""
    section = _Section(
        {"folder": str(root), "bytes": sum(sizes.values()), "kinds": sizes},
        [f"{root}: {human_bytes(sum(sizes.values()))}{shown}; to empty it: {_delete_command(root)}"],
    )
    nearest = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(nearest, os.W_OK):
        section.lines.append(f"{nearest} cannot be written")
        section.advice.append("set CLEARHEAD_CACHE to a writable folder, for prepared data and kernels")
    return section


def _hub() -> _Section:
    from huggingface_hub.constants import HF_HUB_CACHE

    root = Path(HF_HUB_CACHE)
    cached_bytes = sum(_size(repository / "blobs") for repository in root.glob("*--*")) if root.is_dir() else 0
    line = (
        f"{root}: {human_bytes(cached_bytes)} of downloaded checkpoints; to choose and delete: hf cache ls, hf cache rm"
    )
    return _Section({"folder": str(root), "bytes": cached_bytes}, [line])


def _delete_command(folder: Path) -> str:
    return f"{'rmdir /s' if os.name == 'nt' else 'rm -r'} {quote(str(folder))}"


def _size(folder: Path) -> int:
    """Return the total bytes of the files in a folder; unreadable files count as 0."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_size
    return total


def _console() -> _Section:
    encoding, columns = sys.stdout.encoding, shutil.get_terminal_size().columns
    kind = "a terminal" if sys.stdout.isatty() else "no terminal"
    return _Section({"encoding": encoding, "columns": columns}, [f"{kind}, {encoding}, {columns} columns"])


def _settings() -> _Section:
    settings = {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    if "CXX" in settings:
        settings["CXX"] = program_name(settings["CXX"])
    return _Section(settings, [" ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items()) or "none"])


_EXAMINATIONS: Mapping[str, Callable[[], _Section]] = {
    "clearhead": _clearhead,
    "python": _python,
    "packages": _packages,
    "torch": _torch,
    "processor": _processor,
    "kernels": _kernels,
    "memory": _memory,
    "gpu": _gpu,
    "devices": _devices,
    "cache": _cache,
    "hub": _hub,
    "console": _console,
    "settings": _settings,
}
