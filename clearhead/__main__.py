"""The program `clearhead`, also `python -m clearhead`: its command line, imported where Ctrl-C leaves no traceback."""

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
        # Everything is closed, and taking torch apart can last longer than the second in which a command leaves.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
