"""``python -m gossamer`` is the program ``gossamer``."""

import sys

from gossamer.startup import is_foreign

if __name__ == "__main__":
    sys.path.sort(key=is_foreign)  # python -m puts the working directory first, where a random.py may be
    from gossamer.cli import main

    main()
