"""What may change the results of an experiment without being written in it: a user's own modules, and the data.

The fingerprint of a run names the own modules of the experiment and the modules that these import, as far as import
statements say so, with the hash of each source file. A module is a user's own if it is neither gossamer's nor of Python's
library nor in a folder of installed packages. Modules are found and read, but never executed. The data is all files that are
read for the nodes together (:mod:`gossamer.reads`) and the files that the experiment names. Their names do not depend on the
machine: they begin with the field that names them, or "data_root".
"""

from __future__ import annotations

import ast
import hashlib
import re
import site
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from pydantic import BaseModel

from gossamer.config import Experiment
from gossamer.config.registry import Component, FunctionComponent, import_times, script_module
from gossamer.digests import combined, digests
from gossamer.errors import listed
from gossamer.files import cache_folder
from gossamer.reads import Read

MAX_NAMED = 100
"""A folder with more files is recorded by one hash, without their names. Of more opened files, the folders are recorded."""

_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:\w+")
_NOT_READ = ("name", "initial", "checkpoint", "trackers", "data_root")
"""Fields of an experiment that name no data of its tasks. The file of ``initial`` has its own checksum."""
_SYSTEM = ("/bin", "/dev", "/etc", "/lib", "/proc", "/run", "/sys", "/usr")
"""Folders whose files are not data,"""
_FOR_DATA = ("/dev/shm", "/run/media", "/usr/local")
"""except those in these."""
_OF_PYTHON = ("bin", "etc", "include", "lib", "lib64", "share")
_SETTINGS = {".config", ".git", "matplotlib", "__pycache__"}
"""Folders of settings and caches."""
_READERS = {
    "cv2",
    "datasets",
    "duckdb",
    "h5py",
    "pandas",
    "polars",
    "pyarrow",
    "safetensors",
    "sqlite3",
    "tensorflow",
    "zarr",
}
"""Packages that open files unseen."""


class DataEntry(TypedDict):
    """A file, or the files of a folder whose names match ``patterns``. ``path`` is its place in ``of``: the field that names
    it or a folder around it, "data_root", the working directory (".") or the root of the file system ("/"). In the working
    directory, ``absolute`` is the path from the root. With more than :data:`MAX_NAMED` files, only the hash of all of them is
    known."""

    of: str
    path: str
    absolute: NotRequired[str]
    patterns: list[str]
    count: int
    sha256: str
    files: NotRequired[dict[str, str]]


class Fingerprint(TypedDict):
    """The SHA-256 of each own module by its name; the data; versions of the installed packages that the experiment names; and
    what could not be fingerprinted."""

    code: dict[str, str]
    data: list[DataEntry]
    packages: dict[str, str]
    unknown: list[str]


def unknown() -> Fingerprint:
    """The fingerprint of nothing."""
    return {"code": {}, "data": [], "packages": {}, "unknown": []}


def fingerprint(experiment: Experiment, read: Iterable[Read] = ()) -> Fingerprint:
    """The fingerprint of an experiment that has read some files."""
    entries, unread = _data(experiment, read)
    modules = code(experiment, loaded=True)
    return {
        "code": {name: hash_ for name, hash_ in modules.items() if hash_},
        "data": entries,
        "packages": packages(experiment),
        "unknown": [
            *(f"{name} (of a notebook)" for name in _of_notebook(experiment)),
            *(
                f"module {name} (maybe edited after its import)"
                for name, hash_ in modules.items()
                if not hash_
            ),
            *unread,
            *_unseen(experiment, entries, modules),
        ],
    }


# --- code


def code(experiment: Experiment, *, loaded: bool = False) -> dict[str, str]:
    """The SHA-256 of each own module by its name: of its file as it is now or, with ``loaded``, as it was when this process
    imported the module, whose code it goes on executing; "" if that is not known."""
    found: dict[str, str] = {}
    for name, path, text, since in _own_modules(experiment):
        found[name] = hash_ = hashlib.sha256(text).hexdigest()
        loaded_name = "__main__" if name == script_module() else name
        if loaded and (module := sys.modules.get(loaded_name)) is not None:
            edited = path.stat().st_mtime > since.timestamp()
            if (
                name not in _first_seen or _first_seen[name][0] is not module.__spec__
            ):  # it was loaded, or again
                _first_seen[name] = module.__spec__, "" if edited else hash_
            found[name] = _first_seen[name][1]
    return dict(sorted(found.items()))


def sources(experiment: Experiment, code: Mapping[str, str]) -> dict[str, bytes]:
    """The text of each own module with one of these hashes (:func:`code`), by its place below the folder from which it was
    imported, such as "study/attacks.py"."""
    found = {}
    for name, path, text, _ in _own_modules(experiment):
        if hashlib.sha256(text).hexdigest() == code.get(name):
            folders = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            found["/".join([*folders, path.name])] = text
    return dict(sorted(found.items()))


def _own_modules(experiment: Experiment) -> Iterator[tuple[str, Path, bytes, datetime]]:
    """The own modules that an experiment uses: name, file, its text, and when it was imported at the earliest."""
    seen: set[str] = set()
    waiting = [(name, _BEGAN) for name in dict.fromkeys(_modules_named(experiment))]
    while waiting:
        name, since = waiting.pop()
        if name in seen or (path := _own_source(name)) is None:
            continue
        try:
            text = path.read_bytes()
        except OSError:  # importing it will report it
            continue
        seen.add(name)
        # A module whose own time is not known was imported before the one that imports it, or by it.
        since = import_times.get("__main__" if name == script_module() else name, since)
        yield name, path, text, since
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        further = _imports(text, package) + ([name.rpartition(".")[0]] if "." in name else [])
        waiting += [(other, since) for other in further]


_first_seen: dict[str, tuple[ModuleSpec | None, str]] = {}
_BEGAN = datetime.now(UTC)


def _modules_named(experiment: Experiment) -> Iterator[str]:
    """The modules of all components of an experiment, and those of the functions that it names."""
    for value in _values({name: value for name, value in experiment if name != "trackers"}):
        if isinstance(value, str) and _REFERENCE.fullmatch(value):
            yield value.partition(":")[0]
        elif isinstance(value, Component):
            yield value.module_of()
            if ":" in value.name_of():
                yield value.name_of().partition(":")[0]


def _values(value: Any) -> Iterator[Any]:
    """A value, and all values in it."""
    yield value
    if isinstance(value, BaseModel | Mapping):
        for item in dict(value).values():
            yield from _values(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _values(item)


def _of_notebook(experiment: Experiment) -> list[str]:
    """The components of an experiment that are defined in a notebook or at a prompt, and so have no file."""
    if script_module() is not None:
        return []
    named = [v.name_of() if isinstance(v, Component) else v for v in _values(dict(experiment))]
    return list(dict.fromkeys(n for n in named if isinstance(n, str) and n.startswith("__main__:")))


def _own_source(name: str) -> Path | None:
    """The source file of a module, if it is a user's own."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("gossamer", "__main__"):
        return None
    if name == script_module():
        file = sys.modules["__main__"].__file__
    else:
        spec = _spec(name)
        file = None if spec is None or not spec.has_location else spec.origin
    if file is None or not (path := Path(file)).is_file():
        return None
    return None if _is_installed(path.resolve()) else path


def _spec(name: str) -> ModuleSpec | None:
    """Where a module is found, without executing it or its packages."""
    if (module := sys.modules.get(name)) is not None:
        return getattr(module, "__spec__", None)
    parent, inside = name.rpartition(".")[0], None
    if parent:
        above = _spec(parent)
        if above is None or above.submodule_search_locations is None:
            return None
        inside = list(above.submodule_search_locations)
    for finder in sys.meta_path:
        if (spec := finder.find_spec(name, inside, None)) is not None:
            return spec
    return None


@cache
def _installed() -> tuple[Path, ...]:
    """The folders of Python's library, of installed packages and of gossamer."""
    folders = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parent)}
    return tuple(Path(folder).resolve() for folder in folders)


def _is_installed(path: Path) -> bool:
    named = {"site-packages", "dist-packages"} & set(path.parts)
    return bool(named) or any(path.is_relative_to(folder) for folder in _installed())


def _imports(text: bytes, package: str) -> list[str]:
    """The modules that a source imports, in any of its lines; some names may be of other things in a module. ``package`` is
    where relative imports begin."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    names: list[str] = []
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            outer = package.split(".")[: len(package.split(".")) - statement.level + 1]
            base = ".".join([*(outer if statement.level else ()), *filter(None, [statement.module])])
            names += [base, *(f"{base}.{alias.name}" for alias in statement.names)]
    return list(filter(None, names))


def names_own_code(experiment: Experiment) -> bool:
    """Whether an experiment names a component or a function that is not gossamer's."""
    return any(not f"{name}.".startswith("gossamer.") for name in _modules_named(experiment))


def packages(experiment: Experiment) -> dict[str, str]:
    """The versions of the installed packages that an experiment names. (gossamer's own are recorded elsewhere.)"""
    left_out = {"gossamer", "__main__", "", *sys.stdlib_module_names}
    names = sorted({name.partition(".")[0] for name in _modules_named(experiment)} - left_out)
    return {name: version for name in names if (version := _version(name)) is not None}


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def own_sources() -> dict[str, str]:
    """The SHA-256 of each of gossamer's own source files, which may have been edited since its version was released."""
    root = Path(__file__).parent
    names = sorted(path.relative_to(root.parent).as_posix() for path in root.rglob("*.py"))
    return {name: hashlib.sha256((root.parent / name).read_bytes()).hexdigest() for name in names}


# --- data


def paths(experiment: Experiment, left_out: Sequence[str] = _NOT_READ) -> Iterator[tuple[str, Path]]:
    """Every path in a component's parameters, with its field, such as "task.model.path"."""

    def within(value: Any, field: str) -> Iterator[tuple[str, Path]]:
        if isinstance(value, Path):
            yield field, value
        elif isinstance(value, BaseModel | Mapping):
            for name, item in dict(value).items():
                yield from within(item, f"{field}.{name}".lstrip("."))
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                yield from within(item, f"{field}.{number}")

    yield from within({name: value for name, value in experiment if name not in left_out}, "")


def _data(experiment: Experiment, read: Iterable[Read]) -> tuple[list[DataEntry], list[str]]:
    """The data, and what can't be read."""
    fields = dict(paths(experiment))
    places = {(field, ""): Read(path) for field, path in fields.items() if path.is_file()}
    named = {path for path in fields.values() if path.is_file()}
    noted = [item for item in read if not item.opened]
    entries, unread, opened = [], [], list[Path]()
    for item in read:
        if item.path in named or (item.opened and any(other.covers(item.path) for other in noted)):
            continue
        if item.opened and not _is_data(item.path, experiment, fields):
            continue
        if item.opened and _is_hidden(item.path, experiment, fields):
            unread.append(f"the hidden file {_text(*_place(item, experiment, fields))}")
            continue
        if item.opened:
            opened.append(item.path)
        else:
            places.setdefault(_place(item, experiment, fields), item)
    for item in _together(opened):
        places.setdefault(_place(item, experiment, fields), item)
    for (of, path), item in places.items():
        if (entry := _entry(of, path, item)) is None:
            unread.append(_text(of, path))
        else:
            entries.append(entry)
    return entries, unread


def _unseen(experiment: Experiment, entries: Iterable[DataEntry], modules: Iterable[str]) -> Iterator[str]:
    """What may have been read unseen: in a folder that is named, or by an own task below the data root or, if it has read
    nothing seen, with a reader that some own module imports."""
    seen, task = {entry["of"] for entry in entries}, experiment.task
    for field, path in paths(experiment):
        if path.is_dir() and field not in seen:
            yield f"what is read in {field}, if anything"
    own = not task.module_of().startswith("gossamer.")
    takes_root = not isinstance(task, FunctionComponent) or "data_root" in type(task).model_fields
    if own and takes_root and experiment.data_root is not None:
        if "data_root" not in seen:
            yield f"what {task.name_of()} reads below data_root, if anything"
        return
    readers = sorted(_READERS & _packages_imported(modules)) if own else []
    if readers and not any(of in (".", "/") or of.startswith("task.") for of in seen):
        yield f"what {task.name_of()} reads with {listed(readers)}, if anything"


def _packages_imported(modules: Iterable[str]) -> set[str]:
    """The packages that some own modules import."""
    modules = set(modules)
    sources = [path.read_bytes() for name in modules if (path := _own_source(name)) is not None]
    names = {name.partition(".")[0] for text in sources for name in _imports(text, "")}
    return names - {name.partition(".")[0] for name in modules}


def _together(opened: Sequence[Path]) -> list[Read]:
    """At most :data:`MAX_NAMED` files that were opened, or folders around them: full ones, or else the deepest. In a folder,
    all files count that end alike."""
    around = {path: [path] for path in opened}
    while len(around) > MAX_NAMED:
        sizes = Counter(place.parent for place in around)
        depth, most = max(len(place.parts) for place in around), max(sizes.values())
        merged: dict[Path, list[Path]] = {}
        for place, files in around.items():
            outward = sizes[place.parent] == most if most > MAX_NAMED else len(place.parts) == depth
            merged.setdefault(place.parent if outward else place, []).extend(files)
        around = merged
    return [
        Read(
            place,
            () if files == [place] else tuple(sorted({f"*{path.suffix}" for path in files})),
            opened=True,
        )
        for place, files in around.items()
    ]


def _is_data(path: Path, experiment: Experiment, fields: Mapping[str, Path]) -> bool:
    """Whether a file that was opened can be data: it is below a path that the experiment names, or is neither code nor
    settings nor part of what is installed. (A file with an initial model has its own checksum.)"""
    if _is_named(path, experiment, fields):
        return True
    others = [other for field, other in paths(experiment, ()) if field not in fields]
    left_out = [*others, cache_folder().resolve()]
    left_out += [Path(prefix) / name for prefix in (sys.prefix, sys.base_prefix) for name in _OF_PYTHON]
    if (
        path.suffix in (".py", ".pyc", ".so", ".nbc", ".nbi")
        or _SETTINGS & set(path.parts)
        or _is_installed(path)
    ):
        return False
    if any(map(path.is_relative_to, left_out)):
        return False
    return any(map(path.is_relative_to, _FOR_DATA)) or not any(map(path.is_relative_to, _SYSTEM))


def _is_hidden(path: Path, experiment: Experiment, fields: Mapping[str, Path]) -> bool:
    """Whether a file that was opened is hidden, so that it may be data, or settings that change at any time."""
    parts = (path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path).parts
    return any(part.startswith(".") for part in parts) and not _is_named(path, experiment, fields)


def _is_named(path: Path, experiment: Experiment, fields: Mapping[str, Path]) -> bool:
    return any(
        path.is_relative_to(root) for root in (*fields.values(), experiment.data_root) if root is not None
    )


def _place(read: Read, experiment: Experiment, fields: Mapping[str, Path]) -> tuple[str, str]:
    """The name of what was read, by the first of these that it is below: a field, the data root, the working directory."""
    bases = {**fields, "data_root": experiment.data_root, ".": Path.cwd()}
    for of, base in bases.items():
        if base is not None and read.path.is_relative_to(base):
            path = read.path.relative_to(base).as_posix()
            return of, "" if path == "." else path
    return "/", str(read.path)


def _entry(of: str, path: str, read: Read) -> DataEntry | None:
    """The entry of a file or folder; None if it can't be read."""
    try:
        names = read.names()
        hashes = digests([read.path / name for name in names])
    except OSError:
        return None
    entry: DataEntry = {
        "of": of,
        "path": path,
        "patterns": list(read.patterns),
        "count": len(names),
        "sha256": hashes[0] if names == [""] else combined(names, hashes),
    }
    if of == ".":
        entry["absolute"] = str(read.path)
    if names != [""] and len(names) <= MAX_NAMED:
        entry["files"] = dict(zip(names, hashes, strict=True))
    return entry


def _text(of: str, path: str, file: str = "") -> str:
    return "/".join(filter(None, ("" if of in (".", "/") else of, path, file)))


# --- comparison


def differences(elsewhere: Fingerprint, here: Fingerprint) -> tuple[list[str], list[str]]:
    """The modules, files and folders in which this process differs from another one that is to compute the same, and those
    that can't be compared: only one of the two has them, and the other may have the same at another place."""
    pairs = [*_pairs(elsewhere["data"], here["data"])]
    alone = [(there, now) for there, now in pairs if there is None or now is None]
    # The other process may have taken from the hub what this one finds below its data root.
    roots = {"data_root"} & {entry["of"] for entry in elsewhere["data"]}
    differing, apart = list[str](), list[str]()
    for there, now in alone:
        if there is not None and there["of"] != "/":
            differing.append(f"{_text(there['of'], there['path'])} (missing)")
        elif now is not None and now["of"] not in {"/", "data_root"} - roots:
            differing.append(f"{_text(now['of'], now['path'])} (new)")
        elif (entry := there or now) is not None and not _is_download(entry):
            apart.append(_text(entry["of"], entry["path"]))
    code = [
        f"module {name} ({_own_source(name) or 'missing'})"
        for name in changed_code(elsewhere["code"], here["code"])
    ]
    changed = [text for there, now in pairs if there and now for text in _changes(there, now)]
    return code + changed + differing, apart


def files_of(entries: Iterable[DataEntry]) -> dict[str, str]:
    """The hash of each file, or of each folder of many files, by its name in messages."""
    return {
        _text(entry["of"], entry["path"], name): hash_
        for entry in entries
        for name, hash_ in entry.get("files", {"": entry["sha256"]}).items()
    }


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of the modules that differ, and of those that only one of two fingerprints has."""
    both = {**before, **now}
    return [name for name in sorted(both) if before.get(name) != now.get(name)]


def changed_data(before: Iterable[DataEntry], now: Iterable[DataEntry]) -> list[str]:
    """The files, or folders of many files, that differ between two fingerprints. What only one of them has is not compared
    (:func:`not_compared`)."""
    return [text for old, new in _pairs(before, now) if old and new for text in _changes(old, new)]


def not_compared(before: Iterable[DataEntry], now: Iterable[DataEntry]) -> list[str]:
    """The files and folders that only one of two fingerprints has, but for downloads: a data set of the hub that was read
    before is taken by its id."""
    alone = [old or new for old, new in _pairs(before, now) if old is None or new is None]
    return [_text(entry["of"], entry["path"]) for entry in alone if entry and not _is_download(entry)]


def _is_download(entry: DataEntry) -> bool:
    return entry["of"] == "/" and bool(entry["patterns"])


def _pairs(
    before: Iterable[DataEntry], now: Iterable[DataEntry]
) -> Iterator[tuple[DataEntry | None, DataEntry | None]]:
    """The entries of two fingerprints with the same place, by its absolute path or else its name, or else with the same
    contents; None where one has none."""

    def absolute(entry: DataEntry) -> str | None:
        return entry["path"] if entry["of"] == "/" else entry.get("absolute")

    left = {(entry["of"], entry["path"]): entry for entry in before}
    at = {path: key for key, entry in left.items() if (path := absolute(entry)) is not None}
    moved = list[DataEntry]()
    for entry in now:
        key = at.get(absolute(entry) or "", (entry["of"], entry["path"]))
        if key in left:
            yield left.pop(key), entry
        else:
            moved.append(entry)
    for entry in moved:
        alike = (key for key, other in left.items() if other["sha256"] == entry["sha256"])
        yield left.pop(next(alike, ("", "")), None), entry
    yield from ((entry, None) for entry in left.values())


def _changes(before: DataEntry, now: DataEntry) -> list[str]:
    if before["sha256"] == now["sha256"]:
        return []
    of, path = now["of"], now["path"]
    old, new = before.get("files"), now.get("files")
    if old is None or new is None:
        return [f"{_text(of, path)} ({before['count']:,} files)" if before["count"] > 1 else _text(of, path)]
    names = [name for name in sorted({**old, **new}) if old.get(name) != new.get(name)]
    how = {True: "", False: " (new)"}, {True: "", False: " (missing)"}
    return [f"{_text(of, path, name)}{how[0][name in old]}{how[1][name in new]}" for name in names]


class Present:
    """Own code and data as they are at present on this machine. Each file is looked at once, for any number of runs."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Path, tuple[str, ...]], DataEntry | None] = {}
        self._code: dict[frozenset[str], dict[str, str]] = {}

    def changed_code(self, before: Mapping[str, str], experiment: Experiment) -> list[str]:
        """The names of the modules that differ from those of a run of the experiment."""
        named = frozenset(_modules_named(experiment))
        if named not in self._code:
            self._code[named] = code(experiment)
        return changed_code(before, self._code[named])

    def changed_data(
        self, before: Iterable[DataEntry], experiment: Experiment
    ) -> tuple[list[str], list[str]]:
        """The files that differ from those that a run of the experiment has read, and those that are not at hand."""
        changed, absent = [], []
        for entry in before:
            of, path = entry["of"], entry["path"]
            places = {"data_root": experiment.data_root, ".": Path.cwd(), "/": Path("/")}
            base = places.get(of, dict(paths(experiment)).get(of))
            key = (base or Path()) / path, tuple(entry["patterns"])
            if key not in self._entries:
                self._entries[key] = None if base is None else _entry(of, path, Read(*key))
            if (now := self._entries[key]) is None:
                absent.append(_text(of, path))
            else:
                changed += _changes(entry, {**now, "of": of, "path": path})
        return changed, absent


def changed_versions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The versions that differ, as text."""
    return [
        f"{name} {before[name]} (now {now[name]})"
        for name in before
        if name in now and before[name] != now[name]
    ]
