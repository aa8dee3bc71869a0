"""`python -m hf_dpzero.bench`: the same as `hf-dpzero bench`; memory is measured through it."""

import sys

from hf_dpzero.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
