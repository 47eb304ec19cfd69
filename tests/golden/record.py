"""Records the golden hashes anew: ``python tests/golden/record.py``.

``python tests/golden/record.py --runs FOLDER`` leaves the runs there, so that those of two versions can be compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from golden_hashes import GOLDEN, measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="a new folder, in which the runs are left")
    chosen = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        found = measured("simulate", chosen or Path(folder))
    failed = {name: one["error"] for name, one in found["experiments"].items() if "error" in one}
    for name, error in failed.items():
        print(f"{name}: {error}")
    if failed:
        raise SystemExit(f"nothing was recorded: {', '.join(failed)} failed")
    before = json.loads(GOLDEN.read_text())["experiments"] if GOLDEN.exists() else {}
    del found["used"]
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    for name, one in found["experiments"].items():
        old = before.get(name, {})
        changed = [part for part in one if one[part] != old.get(part)]
        if changed:
            print(f"{name}: {', '.join(changed) if old else 'new'}")


if __name__ == "__main__":
    main()
