"""`python -m pallas_kernels.bench OP --json FILE`: measures an op and its peers."""

import sys

from pallas_kernels._common.bench_command import main


if __name__ == "__main__":
    sys.exit(main())
