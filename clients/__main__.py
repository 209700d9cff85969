"""`python -m clients`."""

import sys

from clients.command import main

if __name__ == "__main__":
    sys.exit(main())
