"""Import the whole package, then train, resume and translate, with the modules of POSIX systems hidden."""

from __future__ import annotations

import builtins
import importlib
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HIDDEN = ("fcntl", "resource", "termios", "pwd", "grp", "tty", "pty")
original = builtins.__import__


def import_for_others(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> object:
    """Refuse imports of hidden modules in clearhead; the standard library may still import them."""
    who = str((globals or {}).get("__name__"))
    if name.partition(".")[0] in HIDDEN and who.partition(".")[0] == "clearhead":
        raise ImportError(f"{who} imports {name}, which exists on POSIX systems only")
    return original(name, globals, locals, fromlist, level)


def run(folder: Path) -> None:
    """Train, resume and translate, the first steps of a user."""
    import clearhead
    from clearhead.apps.cli.main import main
    from tests.apps.cli.tiny_run import write_run_file

    modules = [module.name for module in pkgutil.walk_packages(clearhead.__path__, "clearhead.")]
    for name in modules:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    file = write_run_file(folder)
    text = folder / "text"
    text.write_text("a m u\n", encoding="utf-8")
    for words in (
        ["train", str(file)],
        ["train", str(file), "train.steps=8", "--resume"],
        ["translate", str(folder / "run"), str(text)],
    ):
        assert main(words) == 0, words
    sys.stdout.write(f"imported {len(modules)} modules\n")


if __name__ == "__main__":
    builtins.__import__ = import_for_others  # type: ignore[assignment]
    run(Path(sys.argv[1]))
