"""`python -m hf_dpzero.cli`: the same as `hf-dpzero`."""

import sys

from hf_dpzero.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
