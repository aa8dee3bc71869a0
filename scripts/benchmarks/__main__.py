"""`python -m scripts.benchmarks`: the same as `hf-dpzero bench`; memory is measured through it."""

import sys

from scripts.benchmarks.command import main

if __name__ == "__main__":
    sys.exit(main())
