"""Run `python -m flowgrpo` as the command `flowgrpo`."""

import sys

from flowgrpo.cli import main

if __name__ == "__main__":
    sys.exit(main())
