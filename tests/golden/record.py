"""Records the golden hashes for this kind of machine: ``python tests/golden/record.py``.

Where they have changed, those of other kinds are of an older version and are removed.

``python tests/golden/record.py --runs FOLDER`` leaves the runs there, so that those of two versions can be compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from golden_hashes import RECORDED, measured


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
    del found["used"]
    record = RECORDED / f"{found['probe']}.json"
    before = json.loads(record.read_text())["experiments"] if record.exists() else {}
    if before and before != found["experiments"]:
        for other in set(RECORDED.glob("*.json")) - {record}:
            other.unlink()
    record.write_text(json.dumps(found, indent=1) + "\n")
    for name, one in found["experiments"].items():
        old = before.get(name, {})
        changed = [part for part in one if one[part] != old.get(part)]
        if changed:
            print(f"{name}: {', '.join(changed) if old else 'new'}")


if __name__ == "__main__":
    main()
