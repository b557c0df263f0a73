"""`python -m fedentopt` is the command `fedentopt`."""

from __future__ import annotations

from fedentopt.cli import main

if __name__ == "__main__":
    main()
