"""The fingerprint of an experiment: own modules that it names and those that they import, and the files that it reads."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from importlib import import_module, reload
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gossamer
from gossamer import Experiment, digests
from gossamer.digests import digest
from gossamer.errors import BadInput
from gossamer.fingerprint import DataEntry, Fingerprint, Present, _is_data, code, differences, sources
from gossamer.runtime.setup import prepare

BASE: dict[str, Any] = {
    "nodes": 2,
    "task": {"name": "least-squares", "samples": 16, "features": 3, "test_samples": 20},
    "algorithm": "d-psgd",
    "evaluation": {"every_rounds": 2},
    "stop": {"rounds": 2},
}
ALGORITHM = "from gossamer.algorithms import DPSGD\nclass Mine(DPSGD):\n    pass\n"
TASK = """
import numpy as np
import torch
from gossamer.tasks import Task

def load(data_root=None, folder=None):
    x = torch.from_numpy(np.load({path}))
    return Task(model=lambda: torch.nn.Linear(3, 1), train=(x, x[:, :1]), test=(x, x[:, :1]), loss=torch.nn.functional.mse_loss)
"""


def experiment(**fields: Any) -> Experiment:
    return Experiment.of({**BASE, **fields})


def sha256(path: Path | str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


# --- code


def test_own_modules_are_followed_through_their_imports(here: Path) -> None:
    """Absolute, relative, nested and late imports; neither Python's library, nor packages, nor gossamer."""
    write(
        {
            "mine.py": "import os, helper\nimport numpy as np\nfrom lab.steps import size\n" + ALGORITHM,
            "helper.py": "def late():\n    import only_late\n",
            "only_late.py": "raise SystemExit('it must not be executed')\n",
            "unrelated.py": "x = 1\n",
            "lab/__init__.py": "",
            "lab/steps.py": "from . import inner\nfrom .deep.below import *\nsize = 1\n",
            "lab/inner.py": "from torch import nn\n",
            "lab/other.py": "",
            "lab/deep/__init__.py": "",
            "lab/deep/below.py": "from .. import other\n",
        }
    )
    found = code(experiment(algorithm="mine:Mine"))
    files = {
        "mine": "mine.py",
        "helper": "helper.py",
        "only_late": "only_late.py",
        "lab": "lab/__init__.py",
        "lab.steps": "lab/steps.py",
        "lab.inner": "lab/inner.py",
        "lab.other": "lab/other.py",
        "lab.deep": "lab/deep/__init__.py",
        "lab.deep.below": "lab/deep/below.py",
    }
    assert found == {name: sha256(path) for name, path in files.items()}
    assert "only_late" not in sys.modules
    kept = sources(experiment(algorithm="mine:Mine"), {**found, "helper": "another version"})
    assert kept == {path: Path(path).read_bytes() for name, path in files.items() if name != "helper"}


@pytest.mark.parametrize(
    "fields",
    [
        {"algorithm": "mine:Mine"},
        {"task": {**BASE["task"], "model": "mine:model"}},
        {
            "task": {
                "name": "hub",
                "path": "d.csv",
                "inputs": "a",
                "targets": "b",
                "transform": "mine:transform",
            }
        },
        {
            "task": {
                "name": "hub",
                "path": "d.csv",
                "inputs": "a",
                "targets": "b",
                "metrics": {"m": "mine:metric"},
            }
        },
    ],
)
def test_every_component_and_function_that_is_named_counts(here: Path, fields: dict[str, Any]) -> None:
    write({"mine.py": ALGORITHM + "def model(shape, classes): ...\n", "d.csv": "a,b\n1,2\n"})
    assert code(experiment(**fields)) == {"mine": sha256("mine.py")}


def test_built_in_components_have_no_own_code(here: Path) -> None:
    write({"digits.py": "x = 1\n", "mlp.py": "x = 1\n"})
    assert code(experiment(task={"name": "digits", "model": "mlp"})) == {}


def test_trackers_do_not_change_results(here: Path) -> None:
    write({"tracked.py": "from gossamer.results.trackers import Tracker\nclass T(Tracker):\n    pass\n"})
    assert code(experiment(trackers=[{"name": "tracked:T"}])) == {}


def test_line_endings_are_hashed_as_they_are(here: Path) -> None:
    write({"mine.py": ALGORITHM})
    before = code(described := experiment(algorithm="mine:Mine"))
    Path("mine.py").write_bytes(ALGORITHM.replace("\n", "\r\n").encode())
    assert code(described)["mine"] == sha256("mine.py") != before["mine"]


def test_loaded_code_is_that_which_the_process_executes(here: Path) -> None:
    """An edit counts for this process once the module is loaded again, and for new processes at once."""
    write({"mine.py": ALGORITHM})
    described = experiment(algorithm="mine:Mine")
    first = code(described, loaded=True)
    write({"mine.py": ALGORITHM + "# edited\n"})
    assert code(described, loaded=True) == first
    assert code(described)["mine"] == sha256("mine.py") != first["mine"]
    reload(sys.modules["mine"])
    assert code(described, loaded=True)["mine"] == sha256("mine.py")


def test_module_edited_after_its_import_is_not_known(here: Path) -> None:
    """The run executes what was imported, of which there is no hash; until the module is loaded again."""
    write({"mine.py": "import helper\n" + ALGORITHM, "helper.py": "x = 1\n"})
    mine = import_module("mine")
    write({"helper.py": "x = 2  # edited\n"})
    later_ns = Path("helper.py").stat().st_mtime_ns + 10**9  # the clock of a file system is coarse
    os.utime("helper.py", ns=(later_ns, later_ns))
    found = prepare(experiment(algorithm=mine.Mine)).fingerprint
    assert found["code"] == {"mine": sha256("mine.py")}
    assert found["unknown"] == ["module helper (maybe edited after its import)"]
    os.utime("helper.py", (0, 0))
    reload(sys.modules["helper"])
    reload(mine)
    found = prepare(experiment(algorithm=mine.Mine)).fingerprint
    assert found["code"] == {"mine": sha256("mine.py"), "helper": sha256("helper.py")}
    assert found["unknown"] == []


def test_class_of_a_notebook_is_said_not_to_be_fingerprinted(
    here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notebook = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    exec("from gossamer.algorithms import DPSGD\nclass Cell(DPSGD):\n    pass\n", vars(notebook))
    with caplog.at_level(logging.INFO, logger="gossamer"):
        run = gossamer.run(experiment(algorithm=notebook.Cell), here / "runs")
    assert run.environment["fingerprint"]["unknown"] == ["__main__:Cell (of a notebook)"]
    assert run.environment["fingerprint"]["code"] == {}
    assert "not fingerprinted: __main__:Cell (of a notebook)" in caplog.text


# --- data


def data_of(**fields: Any) -> dict[str, str]:
    """The hashes of what a run reads, by name."""
    entries = prepare(experiment(**fields)).fingerprint["data"]
    return {"/".join(filter(None, (entry["of"], entry["path"]))): entry["sha256"] for entry in entries}


def test_files_that_the_experiment_names_are_data(here: Path) -> None:
    write({"ring.txt": "0 1\n", "d.csv": "a,b\n" + "1,2\n" * 20})
    task = {"name": "hub", "path": "d.csv", "inputs": "a", "targets": "b", "loss": "regression"}
    found = data_of(task={**task, "model": "linear"}, topology={"name": "edge-list", "path": "ring.txt"})
    assert found == {"task.path": sha256("d.csv"), "topology.path": sha256("ring.txt")}


TABLES = {
    "name": "hub",
    "path": "d",
    "inputs": "a",
    "targets": "b",
    "loss": "regression",
    "model": "linear",
}
"""A task with tables in the folder ``d``."""


def test_files_of_a_named_folder_are_data(here: Path) -> None:
    write({f"d/{split}.csv": "a,b\n" + "1,2\n" * 20 for split in ("train", "test")} | {"d/notes.md": "x"})
    [entry] = prepare(experiment(task=TABLES)).fingerprint["data"]
    assert entry["of"] == "task.path"
    assert entry.get("files") == {f"{split}.csv": sha256(f"d/{split}.csv") for split in ("test", "train")}


def test_ratings_below_the_data_root_are_data(here: Path) -> None:
    file = "movielens/ml-latest-small/ratings.csv"
    rows = [f"{user},{film},{1 + (user + film) % 5},0" for user in (1, 2, 3) for film in range(1, 9)]
    write({f"root/{file}": "userId,movieId,rating,timestamp\n" + "\n".join(rows) + "\n"})
    found = data_of(task={"name": "movielens"}, data_root="root")
    assert found == {f"data_root/{file}": sha256(f"root/{file}")}


def test_tasks_built_in_code_and_from_packages_have_no_files(here: Path) -> None:
    assert data_of() == {}
    assert data_of(task="digits") == {}


@pytest.mark.parametrize(
    ("path", "fields", "of"),
    [
        ("'x.npy'", {}, "."),
        ("data_root / 'x.npy'", {"data_root": "."}, "data_root"),
        ("'{outside}/x.npy'", {}, "/"),
    ],
)
def test_files_that_an_own_task_opens_are_data(
    here: Path, tmp_path: Path, path: str, fields: dict[str, Any], of: str
) -> None:
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    write({"mine.py": TASK.format(path=path).replace("{outside}", str(outside))})
    np.save("x.npy", np.ones((8, 3), np.float32))
    shutil.copy("x.npy", outside)
    [entry] = prepare(experiment(task="mine:load", **fields)).fingerprint["data"]
    assert (entry["of"], entry["path"]) == (of, f"{outside}/x.npy" if of == "/" else "x.npy")
    assert entry["sha256"] == sha256("x.npy")


def test_own_task_that_reads_the_data_root_unseen_is_named(here: Path) -> None:
    """Only the data root can hold what such a reader reads, so without one there is nothing to say."""
    write({"mine.py": TASK.format(path="'x.npy'").replace("np.load('x.npy')", "np.ones((8, 3), np.float32)")})
    [text] = prepare(experiment(task="mine:load", data_root=".")).fingerprint["unknown"]
    assert text == "what mine:load reads below data_root, if anything"
    assert prepare(experiment(task="mine:load")).fingerprint["unknown"] == []


@pytest.mark.parametrize(("reader", "says"), [("polars", True), ("json", False)])
def test_own_task_with_a_reader_that_opens_files_unseen_is_named(here: Path, reader: str, says: bool) -> None:
    """Until a file of it is seen."""
    text = f"import {reader}\n" + TASK.format(path="'x.npy'")
    write({"quiet.py": text.replace("np.load('x.npy')", "np.ones((8, 3), np.float32)"), "seen.py": text})
    np.save("x.npy", np.ones((8, 3), np.float32))
    said = ["what quiet:load reads with polars, if anything"] if says else []
    assert prepare(experiment(task="quiet:load")).fingerprint["unknown"] == said
    assert prepare(experiment(task="seen:load")).fingerprint["unknown"] == []


def test_hidden_file_of_an_own_task_is_named(here: Path) -> None:
    """It may be data or settings. Files of a project in a hidden folder are not hidden."""
    Path(".data").mkdir()
    np.save(".data/x.npy", np.ones((8, 3), np.float32))
    write({"mine.py": TASK.format(path="'.data/x.npy'"), ".data/inside.py": TASK.format(path="'x.npy'")})
    found = prepare(experiment(task="mine:load")).fingerprint
    assert (found["data"], found["unknown"]) == ([], ["the hidden file .data/x.npy"])
    os.chdir(".data")
    found = prepare(experiment(task="inside:load")).fingerprint
    assert ([entry["path"] for entry in found["data"]], found["unknown"]) == (["x.npy"], [])


def test_memory_disks_and_mounted_media_can_hold_data(here: Path) -> None:
    described = experiment()
    paths = (
        "/dev/shm/x.npy",
        "/run/media/me/x.npy",
        "/usr/local/data/x.npy",
        "/usr/share/x",
        "/dev/x",
        f"{sys.prefix}/lib/x",
    )
    assert [_is_data(Path(path), described, {}) for path in paths] == [True] * 3 + [False] * 3


def test_files_that_an_own_model_or_partition_of_a_built_in_task_opens_are_data(here: Path) -> None:
    model = "import numpy as np\nimport torch\ndef model(shape, classes):\n    np.load('w.npy')\n"
    write({"mine.py": model + "    return torch.nn.Linear(shape[0], classes)\n"})
    np.save("w.npy", np.ones(3))
    task = {**BASE["task"], "model": "mine:model"}
    assert data_of(task=task) == {"./w.npy": sha256("w.npy")}


def test_own_task_that_reads_a_named_folder_unseen_is_named(here: Path) -> None:
    """Until it notes what it reads."""
    text = TASK.format(path="'x.npy'").replace("np.load('x.npy')", "np.ones((8, 3), np.float32)")
    text = text.replace("data_root=None, folder=None", "folder: Path").replace(
        "import torch\n", "import torch\nfrom pathlib import Path\n", 1
    )
    write({"mine.py": text, "d/a.parquet": "1", "d/b/c.parquet": "2", "d/notes.md": "3"})
    task = {"name": "mine:load", "folder": "d"}
    assert prepare(experiment(task=task)).fingerprint["unknown"] == [
        "what is read in task.folder, if anything"
    ]
    noted = "from gossamer.reads import note\n" + text.replace(
        "    x = ", "    note(folder, ['*.parquet'])\n    x = "
    )
    write({"noted.py": noted})
    found = prepare(experiment(task={"name": "noted:load", "folder": "d"})).fingerprint
    assert found["unknown"] == []
    assert found["data"][0].get("files") == {
        name: sha256(f"d/{name}") for name in ("a.parquet", "b/c.parquet")
    }


def test_many_files_have_one_hash(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.fingerprint.MAX_NAMED", 1)
    write({f"d/{split}.csv": "a,b\n" + "1,2\n" * 20 for split in ("train", "test")})
    before = prepare(experiment(task=TABLES)).fingerprint
    assert "files" not in before["data"][0]
    write({"d/test.csv": "a,b\n" + "1,3\n" * 20})
    assert differences(before, prepare(experiment(task=TABLES)).fingerprint) == (["task.path (2 files)"], [])


def entry(of: str, path: str, contents: str, *patterns: str) -> DataEntry:
    return {"of": of, "path": path, "patterns": [*patterns], "count": 1, "sha256": contents}


def test_what_only_one_of_two_machines_has_differs_unless_it_may_be_elsewhere() -> None:
    """The same contents count as the same data wherever they are. A data set of the hub may be below a data root."""
    nothing: Fingerprint = {"code": {}, "data": [], "packages": {}, "unknown": []}

    def with_(*entries: DataEntry) -> Fingerprint:
        return {**nothing, "data": [*entries]}

    mine, theirs = (
        with_(entry(".", "a.csv", "A"), entry("/", "/b", "B")),
        with_(entry("/", "/srv/a.csv", "A")),
    )
    assert differences(mine, theirs) == ([], ["/b"])
    assert differences(nothing, with_(entry(".", "a.csv", "A"))) == (["a.csv (new)"], [])
    assert differences(with_(entry("task.path", "a.csv", "A")), nothing) == (
        ["task.path/a.csv (missing)"],
        [],
    )
    hub, root = (
        entry("/", "/cache/digits", "H", "*.parquet"),
        entry("data_root", "hub/digits", "R", "*.parquet"),
    )
    assert differences(with_(hub), with_(root)) == ([], ["data_root/hub/digits"])
    assert differences(nothing, with_(root)) == ([], ["data_root/hub/digits"])  # it was decoded before
    assert differences(with_(root), nothing) == (["data_root/hub/digits (missing)"], [])


def test_many_opened_files_are_recorded_by_their_folders(here: Path) -> None:
    """A file of its own keeps its name, and an edited one is noticed."""
    write({f"d/{number % 3}/{number}.csv": "1\n" for number in range(600)})
    write({f"e/{number}/one.csv": "1\n" for number in range(600)} | {"labels.txt": "1\n"})
    read = "    for path in [*Path('d').rglob('*.csv'), *Path('e').rglob('*.csv'), Path('labels.txt')]:\n"
    text = TASK.replace("    x = ", read + "        path.read_text()\n    x = ").format(path="'x.npy'")
    write({"mine.py": "from pathlib import Path\n" + text})
    np.save("x.npy", np.ones((8, 3), np.float32))
    before = prepare(described := experiment(task="mine:load")).fingerprint["data"]
    found = {entry["path"]: (entry["patterns"], entry["count"]) for entry in before}
    folders = {f"d/{number}": (["*.csv"], 200) for number in range(3)} | {"e": (["*.csv"], 600)}
    assert found == {"labels.txt": ([], 1), "x.npy": ([], 1), **folders}
    assert len(json.dumps(before)) < 3000
    write({"e/7/one.csv": "2\n"})
    assert Present().changed_data(before, described) == (["e (600 files)"], [])


# --- comparison


def fingerprinted(root: Path, **code: str) -> tuple[Experiment, Fingerprint]:
    """An experiment with ratings below a root, and its fingerprint."""
    described = experiment(task={"name": "movielens"}, data_root=str(root))
    found = prepare(described).fingerprint
    return described, {**found, "code": code}


def test_moved_data_is_the_same(here: Path) -> None:
    rows = [f"{user},{film},3,0" for user in (1, 2, 3) for film in range(1, 9)]
    write({"a/movielens/ml-latest-small/ratings.csv": "userId,movieId,rating,timestamp\n" + "\n".join(rows)})
    shutil.copytree("a", "b")
    (_, first), (moved, second) = fingerprinted(Path("a"), mine="1"), fingerprinted(Path("b"), mine="1")
    assert differences(first, second) == ([], [])
    assert Present().changed_data(first["data"], moved) == ([], [])
    file = Path("b/movielens/ml-latest-small/ratings.csv")
    file.write_text(file.read_text().replace(",3,", ",4,"))
    changed = "data_root/movielens/ml-latest-small/ratings.csv"
    assert Present().changed_data(first["data"], moved) == ([changed], [])
    other = {**prepare(moved).fingerprint, "code": {"mine": "2"}}
    assert differences(first, other) == (["module mine (missing)", changed], [])
    file.unlink()
    assert Present().changed_data(first["data"], moved) == ([], [changed])
    assert Present().changed_data(first["data"], moved.override(data_root=None)) == ([], [changed])


def test_new_and_missing_files_of_a_folder_are_named(here: Path) -> None:
    write({f"d/{split}.csv": "a,b\n" + "1,2\n" * 20 for split in ("train", "test")})
    before = prepare(described := experiment(task=TABLES)).fingerprint["data"]
    Path("d/test.csv").rename("d/test-1.csv")
    assert Present().changed_data(before, described)[0] == [
        "task.path/test-1.csv (new)",
        "task.path/test.csv (missing)",
    ]


# --- hashes


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last changes of files count as long ago, and all files as large."""
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**18))
    monkeypatch.setattr(digests, "SMALL", 1)


def test_large_file_is_read_once_by_all_processes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write({"x": "one"})
    settled(monkeypatch)
    assert digest(Path("x")) == sha256("x")
    monkeypatch.setattr(digests, "_known", {})  # as in another process
    monkeypatch.setattr(digests, "_sha256", lambda path: pytest.fail(f"{path} is read again"))
    assert digest(Path("x")) == sha256("x")
    assert digest(Path("x")) == sha256("x")


def test_edit_of_equal_size_and_time_is_read_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, and by another file under the same name."""
    write({"x": "one", "y": "two"})
    settled(monkeypatch)
    status = Path("x").stat()
    assert digest(Path("x")) == sha256("x")
    os.utime("y", ns=(status.st_atime_ns, status.st_mtime_ns))
    Path("y").rename("x")
    assert digest(Path("x")) == hashlib.sha256(b"two").hexdigest()
    changed_ns = Path("x").stat().st_ctime_ns
    while Path("x").stat().st_ctime_ns == changed_ns:  # until the next tick of the file system's clock
        Path("x").write_text("six")
    os.utime("x", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest(Path("x")) == hashlib.sha256(b"six").hexdigest()


def test_file_that_has_just_been_written_is_read_each_time(here: Path) -> None:
    """Two changes within a tick of the clock have equal times."""
    write({"x": "one"})
    assert digest(Path("x")) == sha256("x")
    assert digests._known == {}


@pytest.mark.parametrize(
    "damage", ["", "{}", '{"sha256": []}', '{"sha256": 1}', '{"crc32": "00000000", "sha256": ["0"]}']
)
def test_damaged_hashes_are_computed_again(here: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    write({"x": "one"})
    settled(monkeypatch)
    digest(Path("x"))
    [kept] = (here.parent / "cache" / "digests").iterdir()
    kept.write_text(damage)
    monkeypatch.setattr(digests, "_known", {})
    assert digest(Path("x")) == sha256("x")


def test_unwritable_cache_is_only_logged(
    here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write({"x": "one", "file": ""})
    settled(monkeypatch)
    monkeypatch.setenv("GOSSAMER_CACHE", str(here / "file" / "cache"))
    assert digest(Path("x")) == sha256("x")
    assert "set GOSSAMER_CACHE" in caplog.text


def test_file_that_cannot_be_read_is_named(here: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        digest(Path("nothing"))
    with pytest.raises(BadInput, match="task.path"):
        prepare(experiment(task={"name": "hub", "path": "nothing", "inputs": "a", "targets": "b"}))
