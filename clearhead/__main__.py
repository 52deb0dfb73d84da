"""Entry point of the program `clearhead` and of `python -m clearhead`; Ctrl-C prints no traceback."""

import contextlib
import os
import sys

from clearhead.apps.cli.console import print_message


def main() -> int:
    """Run the command line of this process and return its exit code."""
    try:
        from clearhead.apps.cli.main import main as run

        code = run()
    except KeyboardInterrupt:
        print_message("clearhead: interrupted")
        code = 130
    if code in (130, 143):
        # All files are closed; unloading torch could take more than the second that a command has to end.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
