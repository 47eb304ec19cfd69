"""``python -m gossamer`` is the program ``gossamer``."""

from gossamer.cli import main

main()
