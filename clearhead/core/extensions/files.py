"""Import of Python files with custom modules, only if the user names them and never from a model's folder."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from clearhead.base.commands import EXTENSIONS
from clearhead.base.errors import InputError, within
from clearhead.base.files import explain_absent
from clearhead.spec.registry import kinds_of_file, unregister_on_failure

_MODULE: Final = "clearhead_parts_"


def load_parts(files: str | Path | Sequence[str | Path]) -> None:
    """Import files that register custom modules; imported files that have not changed are skipped.

    Args:
        files: Python files with custom modules.

    Raises:
        InputError: a file is missing, lies in the folder of a model, cannot be imported, or registers nothing.
    """
    for file in [files] if isinstance(files, str | Path) else files:
        _load(Path(file).expanduser())
        if (loaded := EXTENSIONS.get()) is not None and str(file) not in loaded:
            loaded.append(str(file))


def parts_options() -> list[str]:
    """Return the `--parts` options by which a command imports the same extension files as this process."""
    files = dict.fromkeys(str(module.__file__) for name, module in sys.modules.items() if name.startswith(_MODULE))
    return [word for file in files for word in ("--parts", file)]


def _load(path: Path) -> None:
    if not path.is_file():
        raise InputError(f"{path}: {explain_absent(path, 'file with custom modules')}")
    if path.suffix != ".py":
        raise InputError(f"{path} is no Python file: expected a file with custom modules, such as mine.py")
    _refuse_folder_of_model(path)
    resolved, digest = path.resolve(), hashlib.sha256(path.read_bytes()).hexdigest()
    if any(kind.source.sha256 == digest for kind in kinds_of_file(str(resolved))):
        return
    name = f"{_MODULE}{digest[:16]}"
    try:
        with within(str(path)), unregister_on_failure():
            _import(path, name)
            if not kinds_of_file(str(resolved)):
                raise InputError("it registers no custom module; put @clearhead.register(...) over a class")
    except BaseException:
        # A refused file must not reach the processes that `parts_options` starts.
        sys.modules.pop(name, None)
        raise


def _refuse_folder_of_model(path: Path) -> None:
    """Raise `InputError` if an extension file lies in a model's folder: loading must not run code from there."""
    for folder in {*path.absolute().parents, *path.resolve().parents}:
        if any(folder.glob("checkpoints/step-*")) or any(folder.glob("*.safetensors")):
            raise InputError(
                f"{path} lies in the folder of a model, {folder}, from which no code is imported: check the file, and "
                "copy it to another folder"
            )


def _import(path: Path, name: str) -> None:
    specification = importlib.util.spec_from_file_location(name, path.resolve())
    assert specification is not None and specification.loader is not None, "the file ends in .py"
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        specification.loader.exec_module(module)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        line = _line_of(error, path.resolve())
        raise InputError(f"it cannot be imported: {type(error).__name__}: {error}{line}") from error


def _line_of(error: BaseException, path: Path) -> str:
    """Return " (line N)" for the line of the file `path` that raised an error, or an empty text."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" (line {line})"
