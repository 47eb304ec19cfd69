"""Records the golden hashes for this kind of machine: ``python tests/golden/record.py``.

If they have changed, the records of other kinds of machines are outdated and are removed.

``python tests/golden/record.py --runs FOLDER`` keeps the runs, so that those of two versions can be compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from golden_hashes import RECORDED, measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="a new folder for the runs, which are kept")
    chosen = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        measurement = measured("simulate", chosen or Path(folder))
    failed = {
        name: hashes["error"] for name, hashes in measurement["experiments"].items() if "error" in hashes
    }
    for name, error in failed.items():
        print(f"{name}: {error}")
    if failed:
        raise SystemExit(f"nothing was recorded: {', '.join(failed)} failed")
    del measurement["used"]
    record = RECORDED / f"{measurement['probe']}.json"
    before = json.loads(record.read_text())["experiments"] if record.exists() else {}
    if before and before != measurement["experiments"]:
        for other in set(RECORDED.glob("*.json")) - {record}:
            other.unlink()
    record.write_text(json.dumps(measurement, indent=1) + "\n")
    for name, hashes in measurement["experiments"].items():
        old = before.get(name, {})
        changed = [part for part in hashes if hashes[part] != old.get(part)]
        if changed:
            print(f"{name}: {', '.join(changed) if old else 'new'}")


if __name__ == "__main__":
    main()
