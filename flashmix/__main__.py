"""`python -m flashmix`, the command line as torchrun starts it."""

import sys

from flashmix.train.cli import main

if __name__ == "__main__":
    sys.exit(main())
