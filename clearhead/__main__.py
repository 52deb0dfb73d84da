"""`python -m clearhead`: the command line."""

import sys

from clearhead.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
