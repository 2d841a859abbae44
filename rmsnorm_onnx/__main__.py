"""`python -m rmsnorm_onnx`: the command line."""

import sys

from rmsnorm_onnx.cli import main

if __name__ == "__main__":
    sys.exit(main())
