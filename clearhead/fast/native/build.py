"""Native libraries: compile them for this processor, cache them, and test them in another process before use.

A library is loaded from the cache only if this user wrote it and it is undamaged. The cache also keeps the result of
its test, under a digest of all facts that it depends on. So each library is tested once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from filelock import FileLock

from clearhead.base.errors import program_name
from clearhead.base.files import cache_root
from clearhead.fast.native.options import INFERENCE, LEVELS, PACKAGED, TRAINING, command, library_name
from clearhead.fast.probe import processor

FOLDER: Final = Path(__file__).parent
_COMPILERS: Final = "g++", "clang++", "c++"
_SECONDS: Final = 120
# A separate name, so that a command shows these messages wherever its output goes.
_LOGGER = logging.getLogger("clearhead.fast.native")
NAME: Final = "native"
LOCK: Final = "lock"
LARGEST: Final = 2**28
_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_EVERYTHING: Final = stat.S_IRWXG | stat.S_IRWXO
VERDICT_SUFFIX: Final = ".verdict"
PASSED: Final = "passed"
TEST_SECONDS: Final = 60
"""A test takes two seconds; one that takes this long hangs."""
_TEST: Final = Path(__file__).parent.parent / "selftest.py"
_TEST_CODE: Final = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from clearhead.fast import selftest; "
_TICK: Final = 0.1
_SIGNALS: Final = "SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT"
_CRASHES: Final = {getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)}  # Windows has no SIGBUS


def compile_library(options: Sequence[str], kernels: str = INFERENCE) -> Path:
    """Return the library of a kernel folder, from the cache or newly compiled.

    Args:
        options: additional compiler options, which depend on the processor.
        kernels: name of the folder.

    Raises:
        OSError: there is no compiler, or it failed, or the cache cannot be written or is open to other users.
    """
    call, sources, file = _locate(options, kernels)
    if fault_of(file) is not None:
        with lock_cache(file.parent):
            if (fault := fault_of(file)) is not None:
                _compile(call, sources, file, fault, "training" if kernels == TRAINING else "inference")
    return file


def find_compiled(options: Sequence[str], kernels: str) -> Path | None:
    """Return the library that `compile_library` has made from the same arguments; None if it must be compiled.

    Raises:
        OSError: there is no compiler, or the cache cannot be written or is open to other users.
    """
    file = _locate(options, kernels)[2]
    return file if fault_of(file) is None else None


def _locate(options: Sequence[str], kernels: str) -> tuple[list[str], list[Path], Path]:
    """Return the compiler command for a kernel folder, its sources, and the path of the library in the cache."""
    compiler = _compiler()
    call = command(compiler, kernels, options)
    sources = sorted((FOLDER / kernels).glob("*.cpp"))
    return call, sources, kernel_folder() / f"{_key(compiler, call, sources)}.so"


def find_packaged(kernels: str) -> Path | None:
    """Return the best library of a wheel for this processor; None if the package has no compiled libraries.

    Raises:
        OSError: the wheel has no library for this processor.
    """
    if not (FOLDER / PACKAGED).is_dir():
        return None
    for level, (needed, _) in reversed(LEVELS.items()):
        file = FOLDER / PACKAGED / library_name(kernels, level)
        if processor().isa.issuperset(needed) and file.exists():
            return file
    raise OSError("the package has no kernels for this processor")


def _compiler() -> str:
    named = os.environ.get("CXX")
    compiler = shutil.which(named) if named else next(filter(None, map(shutil.which, _COMPILERS)), None)
    if sys.platform != "linux":
        raise OSError("the kernels need Linux")
    if compiler is None:
        raise OSError(
            f"there is no compiler {program_name(named)}: correct the environment variable CXX"
            if named
            else "there is no C++ compiler: install g++"
        )
    return compiler


def _threads_of_torch() -> list[str]:
    """Return the options that link torch's OpenMP library: a second library would have its own threads."""
    folder = Path(torch.__file__).parent / "lib"
    libraries = sorted(folder.glob("libgomp*.so*"))
    return [f"-L{folder}", f"-l:{libraries[0].name}"] if libraries else []


def _key(compiler: str, command: Sequence[str], sources: Sequence[Path]) -> str:
    """Return a digest of all facts that the compiled file depends on."""
    compiler_status = Path(compiler).resolve().stat()
    texts = [file.read_text(encoding="utf-8") for file in (*sources, *sorted(FOLDER.rglob("*.h")))]
    flags = processor().description
    parts = [
        *texts,
        *command,
        *_threads_of_torch(),
        *flags,
        compiler_status.st_size,
        compiler_status.st_mtime_ns,
        torch.__version__,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _compile(command: Sequence[str], sources: Sequence[Path], file: Path, fault: str, use: str) -> None:
    """Compile the sources in parallel; `use`, such as "inference", appears in messages."""
    if os.path.lexists(file):
        text = "compiling kernels for %s again, which takes about 10 s: the library in %s %s"
        _LOGGER.warning(text, use, file.parent, fault)
    else:
        text = "compiling kernels for %s on this processor, once, which takes about 10 s; they are kept in %s"
        _LOGGER.info(text, use, file.parent)
    began = time.monotonic()
    with work_folder(file.parent) as folder:
        linked = folder / file.name
        objects = {source: folder / f"{source.stem}.o" for source in sources}
        _run([[*command, "-c", str(source), "-o", str(result)] for source, result in objects.items()])
        _run([[*command, "-shared", *map(str, objects.values()), *_threads_of_torch(), "-o", str(linked)]])
        install_library(linked, file)
    _LOGGER.info("kernels for %s compiled in %.1f s", use, time.monotonic() - began)


def _run(commands: Sequence[Sequence[str]]) -> None:
    """Run commands in parallel; if one fails or the program is stopped, all are killed."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(_start_process(command)) for command in commands]
        end = time.monotonic() + _SECONDS
        for process, command in zip(running, commands, strict=True):
            try:
                _, errors = process.communicate(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise OSError(f"{Path(command[0]).name} took more than {_SECONDS} s") from None
            if process.returncode:
                raise OSError(f"{Path(command[0]).name} failed: {_first_error(errors)}")


@contextlib.contextmanager
def _start_process(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    # A compiler starts other programs; a process group allows killing all of them.
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["no message"]
    return lines[0].strip()


def kernel_folder() -> Path:
    """Return the folder of compiled kernels, created if missing and closed to other users.

    Raises:
        OSError: the folder or the cache root belongs to another user, is writable by others, or cannot be created.
    """
    root = cache_root()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    (root / NAME).mkdir(mode=0o700, exist_ok=True)
    root, folder = root.resolve(), (root / NAME).resolve()
    if not os.environ.get("CLEARHEAD_CACHE"):
        # A root of the default name is not shared on purpose: a umask of 002 opened it.
        _remove_permissions(root, _WRITE)
    if _remove_permissions(folder, _EVERYTHING) & _WRITE:
        # A lock file of another user could be held forever.
        (folder / LOCK).unlink(missing_ok=True)
    for directory in (root, folder):
        if (fault := _open_to_others(directory.stat())) is not None:
            raise OSError(f"{directory} {fault}: change that, or set CLEARHEAD_CACHE to a new folder")
    return folder


@contextlib.contextmanager
def lock_cache(folder: Path) -> Iterator[None]:
    """Let one process at a time compile; processes that start together, such as those of a training, wait."""
    with FileLock(folder / LOCK):
        yield


@contextlib.contextmanager
def work_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary work folder and delete those of killed processes; the cache must be locked."""
    for left in folder.glob("tmp*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        yield Path(name)


def install_library(linked: Path, file: Path) -> None:
    """Move a library into the cache, with its size and digest; other processes see a whole file or none.

    Args:
        linked: the library, in a folder of the cache.
        file: its final path.
    """
    record = _record_of(linked)
    record.write_text(_digest_line(file, linked.read_bytes()), encoding="ascii")
    for path in (record, linked):
        path.chmod(0o700)  # whatever the umask is
    os.replace(record, _record_of(file))
    os.replace(linked, file)


def fault_of(file: Path) -> str | None:
    """Return the reason why a library in the kernel folder must not be loaded, or None."""
    if not os.path.lexists(_record_of(file)):
        return "has no digest"
    try:
        is_whole = read_private(_record_of(file)) == _digest_line(file, read_private(file)).encode("ascii")
    except OSError as error:
        return f"is not to be trusted ({error.strerror or error})"
    return None if is_whole else "is damaged"


def _remove_permissions(folder: Path, modes: int) -> int:
    """Remove permissions of other users if possible; return the permissions that they had."""
    status = folder.stat()
    open_modes = status.st_mode & modes
    if os.name == "posix" and open_modes and status.st_uid == os.geteuid():
        with contextlib.suppress(OSError):  # a read-only disk
            folder.chmod(stat.S_IMODE(status.st_mode) & ~modes)
    return open_modes


def _open_to_others(status: os.stat_result) -> str | None:
    """Return the reason why others could change a file or folder, or None; root can change everything anyway."""
    if os.name != "posix":
        return None
    if status.st_uid not in (0, os.geteuid()):
        return "belongs to another user"
    return "can be written by others" if status.st_mode & _WRITE else None


def _record_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest_line(file: Path, content: bytes) -> str:
    # The name is included: it is the key, so a library of other kernels does not pass for this one.
    return f"{hashlib.sha256(content).hexdigest()} {len(content)} {file.name}\n"


def write_private(path: Path, content: bytes) -> None:
    """Write a file into the kernel folder, which others see whole or not at all; the cache must be locked."""
    with work_folder(path.parent) as folder:
        (folder / path.name).write_bytes(content)
        (folder / path.name).chmod(0o700)
        os.replace(folder / path.name, path)


def read_private(path: Path) -> bytes:
    """Return the content of a file that only this user or root can have written.

    Raises:
        OSError: others could have written the file, or it is not a regular file, or it is too large.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            raise OSError("it is not a regular file, or too large")
        if (fault := _open_to_others(status)) is not None:
            raise OSError(f"it {fault}")
        return opened.read()


def refuse_untried(file: Path, kernels: str) -> None:
    """Refuse a library that crashes, hangs or computes wrong on this machine.

    Args:
        file: path of the library.
        kernels: name of the folder of its sources.

    Raises:
        OSError: the library fails its test, or cannot be tested; the message says what happened.
    """
    facts = sorted(processor().isa), processor().description, torch.__version__, kernels
    parts = file.read_bytes(), _TEST.read_bytes(), repr(facts).encode()
    verdict = recall_verdict(parts, lambda: _try_library(file, kernels))
    if verdict.text != PASSED:
        raise OSError(f"{verdict.text} (to try again, delete {verdict.file})")


@dataclass(frozen=True)
class Verdict:
    """Result of a test on this machine.

    Attributes:
        text: result, in words or as JSON.
        file: file that stores it. None means that the cache cannot be written.
    """

    text: str
    file: Path | None


def recall_verdict(facts: Sequence[bytes], judge: Callable[[], str]) -> Verdict:
    """Return the cached verdict for equal facts; without one, run the test and cache its result.

    Args:
        facts: all facts that the result depends on.
        judge: function that runs the test and returns its result.

    Raises:
        OSError: the cache cannot be written or is open to other users, or the test could not be run.
    """
    digest = hashlib.sha256(b"".join(hashlib.sha256(fact).digest() for fact in facts)).hexdigest()
    file = kernel_folder() / f"{digest}{VERDICT_SUFFIX}"
    if not file.exists():
        with lock_cache(file.parent):
            if not file.exists():
                write_private(file, judge().encode())
    return Verdict(read_private(file).decode(), file)


def _try_library(file: Path, kernels: str) -> str:
    """Test a library in another process; return a description of the fault, or `PASSED`."""
    # The child process gets this process's module paths, not those of the working directory.
    command = [sys.executable, "-I", "-c", f"{_TEST_CODE}selftest.main(*sys.argv[1:])", str(file), kernels]
    # Other programs may run, and threads that wait busily would take their time.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, json.dumps(sys.path)], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=environment
    ) as child:
        try:
            # Short ticks: suspending both processes, for example by closing a laptop's lid, does not count as a hang.
            for _ in range(int(TEST_SECONDS / _TICK)):
                try:
                    output, errors = child.communicate(timeout=_TICK)
                    break
                except subprocess.TimeoutExpired:
                    continue
            else:
                return f"a test of the kernels on this machine did not end within {TEST_SECONDS} s"
        finally:
            child.kill()
    if -child.returncode in _CRASHES:
        return f"a test of the kernels on this machine ended with {signal.Signals(-child.returncode).name}"
    if child.returncode:
        # A failure that may be temporary, such as too little memory, is not cached.
        last = errors.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise OSError(f"a test of the kernels on this machine failed: {last[0]}")
    return output or PASSED
