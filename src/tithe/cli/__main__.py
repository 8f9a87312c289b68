"""`python -m tithe.cli` is `tithe`."""

import sys

from tithe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
