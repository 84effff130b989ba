"""`python -m jaxaccel` is the `jaxaccel` command."""

import sys

from jaxaccel.cli import main


if __name__ == "__main__":
    sys.exit(main())
