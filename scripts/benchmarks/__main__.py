"""`python -m scripts.benchmarks`; peak memory is measured in child processes of it."""

import sys

from scripts.benchmarks.command import main

if __name__ == "__main__":
    sys.exit(main())
