"""The program `clearhead`, also `python -m clearhead`: its command line, imported where Ctrl-C leaves no traceback."""

import sys

from clearhead.cli.console import print_message


def main() -> int:
    """Run the command line of this process and return its exit code."""
    try:
        from clearhead.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print_message("clearhead: interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
