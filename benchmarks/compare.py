"""The benchmark of `python -m mha_ext bench`, with its results beside this file. Takes the same arguments."""

import sys
from pathlib import Path

from mha_ext._bench.compare import main

if __name__ == "__main__":
    sys.exit(main(out=Path(__file__).parent / "results"))
