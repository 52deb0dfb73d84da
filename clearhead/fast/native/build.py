"""Compilation of the kernels, once for a processor, a compiler and a source; what is compiled is kept in the cache."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch

from clearhead.base.errors import program_name
from clearhead.fast.native.cache import fault_of, keep, kernel_folder, locked, workplace
from clearhead.fast.native.options import INFERENCE, LEVELS, PACKAGED, TRAINING, command, library_name
from clearhead.fast.probe import processor

FOLDER: Final = Path(__file__).parent
_COMPILERS: Final = "g++", "clang++", "c++"
_SECONDS: Final = 120
# Of its own, so that a command shows these messages wherever its output goes.
_LOGGER = logging.getLogger("clearhead.fast.native")


def compiled(options: Sequence[str], kernels: str = INFERENCE) -> Path:
    """Compile the kernels of a folder, or find them in the cache, and return their file.

    Args:
        options: of the compiler, beside the usual ones; they say what the processor can do.
        kernels: the folder.

    Raises:
        OSError: there is no compiler, or it failed, or the cache cannot be written or is open to other users.
    """
    call, sources, file = _place(options, kernels)
    if fault_of(file) is not None:
        with locked(file.parent):
            if (fault := fault_of(file)) is not None:
                _compile(call, sources, file, fault, "training" if kernels == TRAINING else "inference")
    return file


def kept(options: Sequence[str], kernels: str) -> Path | None:
    """Return the file that `compiled` has made of the same arguments; None: it would compile it now.

    Raises:
        OSError: there is no compiler, or the cache cannot be written or is open to other users.
    """
    file = _place(options, kernels)[2]
    return file if fault_of(file) is None else None


def _place(options: Sequence[str], kernels: str) -> tuple[list[str], list[Path], Path]:
    """Return how the kernels of a folder are compiled, their sources, and the place of the library in the cache."""
    compiler = _compiler()
    call = command(compiler, kernels, options)
    sources = sorted((FOLDER / kernels).glob("*.cpp"))
    return call, sources, kernel_folder() / f"{_key(compiler, call, sources)}.so"


def packaged(kernels: str) -> Path | None:
    """Return the library of a wheel that is the best for this processor; None: the package is no wheel with any.

    Raises:
        OSError: the wheel has none for this processor.
    """
    if not (FOLDER / PACKAGED).is_dir():
        return None
    for level, (needed, _) in reversed(LEVELS.items()):
        file = FOLDER / PACKAGED / library_name(kernels, level)
        if processor().isa.issuperset(needed) and file.exists():
            return file
    raise OSError("the package has none for this processor")


def _compiler() -> str:
    named = os.environ.get("CXX")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, _COMPILERS)), None)
    if sys.platform != "linux":
        raise OSError("they are for Linux")
    if found is None:
        raise OSError(
            f"there is no compiler {program_name(named)}" if named else "there is no C++ compiler; install g++"
        )
    return found


def _threads_of_torch() -> list[str]:
    """Return the options that link the OpenMP library of torch: a second one would have threads of its own."""
    folder = Path(torch.__file__).parent / "lib"
    found = sorted(folder.glob("libgomp*.so*"))
    return [f"-L{folder}", f"-l:{found[0].name}"] if found else []


def _key(compiler: str, command: Sequence[str], sources: Sequence[Path]) -> str:
    """Return a digest of all that the compiled file depends on."""
    made = Path(compiler).resolve().stat()
    texts = [file.read_text(encoding="utf-8") for file in (*sources, *sorted(FOLDER.rglob("*.h")))]
    flags = processor().description
    parts = [*texts, *command, *_threads_of_torch(), *flags, made.st_size, made.st_mtime_ns, torch.__version__]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _compile(command: Sequence[str], sources: Sequence[Path], file: Path, fault: str, use: str) -> None:
    """Compile the sources side by side, for a use that messages name, such as "inference"."""
    if os.path.lexists(file):
        text = "kernels for %s are compiled anew, in about 10 s: the library in %s %s"
        _LOGGER.warning(text, use, file.parent, fault)
    else:
        text = "compiling kernels for %s on this processor, once, which takes about 10 s; they are kept in %s"
        _LOGGER.info(text, use, file.parent)
    began = time.monotonic()
    with workplace(file.parent) as folder:
        linked = folder / file.name
        objects = {source: folder / f"{source.stem}.o" for source in sources}
        _run([[*command, "-c", str(source), "-o", str(result)] for source, result in objects.items()])
        _run([[*command, "-shared", *map(str, objects.values()), *_threads_of_torch(), "-o", str(linked)]])
        keep(linked, file)
    _LOGGER.info("kernels for %s compiled in %.1f s", use, time.monotonic() - began)


def _run(commands: Sequence[Sequence[str]]) -> None:
    """Run commands side by side; none is left running where one fails or the program is stopped."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(_started(command)) for command in commands]
        end = time.monotonic() + _SECONDS
        for process, command in zip(running, commands, strict=True):
            try:
                _, errors = process.communicate(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise OSError(f"{Path(command[0]).name} took more than {_SECONDS} s") from None
            if process.returncode:
                raise OSError(f"{Path(command[0]).name} failed: {_first_error(errors)}")


@contextlib.contextmanager
def _started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    # A compiler starts programs of its own; as a group all of them can be ended.
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    ) as one:
        try:
            yield one
        finally:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["no message"]
    return lines[0].strip()
