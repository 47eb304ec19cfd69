"""Which files of a folder are read, and to which split each belongs, by their names.

A guess that could be wrong is refused, and a file of data that is left aside is listed, so that nothing is decided in
silence."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from gossamer.errors import BadInput

KINDS = {
    "Parquet": ("parquet",),
    "Arrow": ("arrow",),
    "image": ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff"),
    "CSV": ("csv", "tsv", "data"),
    "JSON Lines": ("jsonl",),
    "text": ("txt",),
}
"""The kinds of files that can be read, and their suffixes, in any case."""
_GZIPPED = [end for kind in ("CSV", "JSON Lines", "text") for end in KINDS[kind]]  # also with .gz
_SUFFIXES = [end for ends in KINDS.values() for end in ends]
ACCEPTED = f"{', '.join(f'.{end}' for end in _SUFFIXES)} (the last {len(_GZIPPED)} also with .gz)"
_ENDS = [f".{end}" for end in [*(f"{end}.gz" for end in _GZIPPED), *_SUFFIXES]]
PATTERNS = tuple(f"*{case}" for end in _ENDS for case in (end, end.upper()))
"""Names of files of data. (A download from the hub is by exact names.)"""

# Suffixes of other files that may be meant as data; a script or a licence next to the data is not worth a word.
_UNREAD = re.compile(
    "arff|avro|bin|bz2|dat|feather|gz|h5|hdf5|json|mat|npy|npz|orc|pickle|pkl|pt|rar|svmlight|tar|ubyte|xls|xlsx|xml"
    "|xz|zip|avif|cr2|dcm|dds|dib|dng|exr|hdr|heic|heif|ico|j2k|jfif|jp2|jpe|jpx|jxl|nef|nii|pbm|pcx|pgm|pnm|ppm|psd|raw|tga"
)
# What the package datasets writes beside its data.
_METADATA = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")

_FORMS = {
    "train": re.compile(r"train(ing|set|data|images?|labels?)?"),
    "test": re.compile(r"test(ing|set|data|images?|labels?)?"),
    "validation": re.compile(r"valid(ation)?|val|dev|eval(uation)?|holdout"),
}
"""The usual names of splits, in lower case."""


@dataclass(frozen=True)
class Files:
    """The files of a data set below ``root`` (a folder, or the only file), in the order in which they are read.

    ``train`` and ``test`` are of one ``kind``; without a test split, ``test`` is empty. ``aside`` are other files that may
    hold data, and are not read."""

    root: Path
    kind: str
    train: tuple[Path, ...]
    test: tuple[Path, ...]
    aside: tuple[Path, ...]

    @property
    def all(self) -> tuple[Path, ...]:
        """The files of both splits, those for training first."""
        return (*self.train, *self.test)

    def name(self, path: Path) -> str:
        """A file's name for the user, relative to the folder."""
        return path.name if path == self.root else path.relative_to(self.root).as_posix()

    def owner(self, path: Path, each: Literal["file", "folder"]) -> str:
        """The owner of a file's rows: the folders that lead to it, without those that name a split and an image's class; if
        each file is an owner, its own name too. BadInput for a file that is in no such folder."""
        *folders, name = self.name(path).split("/")
        if self.kind == "image":
            folders = folders[:-1]
        owned = [folder for folder in folders if split_of((folder,)) is None]
        if each == "file":
            owned.append(name[: len(name) - len(_end(name))])
        if not owned:
            problem = f"{each}, but {self.name(path)} is in no folder of an owner below {self.root}"
            raise BadInput(f"task.owner.each: {problem}; accepted: a folder for each owner, or each: file")
        return "/".join(owned)


def find(root: Path, train: str = "train", test: str = "test", *, tables: bool = False) -> Files:
    """The files of the splits ``train`` and ``test``, each the name of a split or a pattern.

    A pattern has one of the characters ``*?[/.`` and is compared with the path of a file below ``root``, as by the shell;
    ``*`` stands for any characters, ``/`` included. Other names are words of the path, in any case, or another of their usual
    forms (``Train.csv``, ``X_train.csv``, ``training/a.png``). The outermost part of the path that names one split decides,
    but for folders that all files share, if the files differ below them (:func:`_base`). If nothing is named ``train``, the
    files of no split are for training. Hidden files and folders, and the caches of ``datasets``, are not looked at.

    ``tables``: if all files are texts, they are read as CSV files.

    BadInput if there is nothing to read; for files of several kinds, unless the other ones are texts of no split
    (``README.txt``); for a split in a file that can't be read next to ones that can; for a file of both splits; and for
    images of no split next to images of splits, where a class may have the name of a split."""
    paths = [root] if root.is_file() else sorted(filter(_visible(root), root.rglob("*")))
    kinds = {path: kind for path in paths if (kind := kind_of(path)) is not None}
    if not kinds:
        problem = f"{root} has no file that can be read" if root.is_dir() else f"{root} can't be read"
        found = f" ({some([path.name for path in paths])})" if root.is_dir() and paths else ""
        raise BadInput(f"task: {problem}{found}; accepted: files in {ACCEPTED}")
    if tables and set(kinds.values()) == {"text"}:
        kinds = dict.fromkeys(kinds, "CSV")
    base = _base(root, kinds, (train, test))
    named = {path: _split(base, path, (train, test)) for path in paths}
    chosen = {name: _chosen(root, list(kinds), name, named) for name in dict.fromkeys((train, test))}
    if len({kinds[path] for paths in chosen.values() for path in paths}) > 1:
        loose = {path for path in kinds if kinds[path] == "text" and named[path] is None}
        chosen = {name: tuple(p for p in paths if p not in loose) for name, paths in chosen.items()}
    read = {path for paths in chosen.values() for path in paths}
    aside = [path for path in paths if path not in read and (path in kinds or _is_data(path))]
    kind = next((kinds[path] for path in paths if path in read), "")
    files = Files(root, kind, chosen[train], chosen[test], tuple(aside))
    _check_unread(files, kinds, named, train, test)
    for field, name in (("train", train), ("test", test)):
        if not chosen[name] and (field, name) != ("test", "test"):
            problem = f"{root} has no rows of the split {name!r} ({_listed(files, kinds, named)})"
            raise BadInput(f"task.{field}: {problem}; accepted: a split with rows, or patterns")
    _check_kinds(files, kinds, base, train)
    if both := set(files.train) & set(files.test):
        problem = f"{files.name(min(both))} is in both splits"
        raise BadInput(f"task.test: {problem}; accepted: other names or patterns in task.train and task.test")
    return files


def some(names: Iterable[str], most: int = 3) -> str:
    """The first names of many."""
    names = list(names)
    rest = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def split_of(parts: Sequence[str], asked: Collection[str] = ()) -> str | None:
    """The split that the parts of a path name: that of the outermost part with words of a single split. ``asked`` are
    names of further splits."""
    for part in parts:
        named = {split for word in _words(part) if (split := _split_named(word, asked)) is not None}
        if len(named) == 1:
            return named.pop()
    return None


def _words(part: str) -> list[str]:
    """The words of a name in lower case: ``X_trainSet-01.csv`` has x, train, set and csv."""
    found = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", part)
    return [word.lower() for word in [*found, *re.split(r"[-_. ]", part)]]


def _split_named(word: str, asked: Collection[str]) -> str | None:
    for name in asked:
        if word == name.lower():
            return name
    return next((split for split, form in _FORMS.items() if form.fullmatch(word)), None)


def _is_pattern(name: str) -> bool:
    return any(character in name for character in "*?[/.")


def _chosen(
    root: Path, paths: Sequence[Path], name: str, named: Mapping[Path, str | None]
) -> tuple[Path, ...]:
    """The files of a split or a pattern."""
    if _is_pattern(name):
        return tuple(path for path in paths if fnmatchcase(path.relative_to(root).as_posix(), name))
    usual = _split_named(name.lower(), ()) or name  # "dev" also finds validation.csv
    found = [path for path in paths if named[path] == name] or [p for p in paths if named[p] == usual]
    if name == "train" and not found:
        found = [path for path in paths if named[path] is None]
    return tuple(found)


def _base(root: Path, paths: Collection[Path], asked: Collection[str]) -> Path:
    """The folder below which names of splits are looked for: that which all paths share (``test-data`` of
    ``test-data/train.csv`` and ``test-data/test.csv``), if below it each path names a split or several splits are named, and
    otherwise the root, since in ``train/car/1.png`` and ``train/test/1.png`` the class is called test."""
    if root.is_file():
        return root
    shared = Path(os.path.commonpath([path.parent for path in paths]))
    below = {_split(shared, path, asked) for path in paths}
    return shared if None not in below or len(below) > 2 else root


def _split(base: Path, path: Path, asked: Collection[str]) -> str | None:
    """The split that a path names, as seen from the base."""
    return split_of(Path(os.path.relpath(path, base)).parts, asked)


def _listed(files: Files, paths: Iterable[Path], named: Mapping[Path, str | None]) -> str:
    """The files of each split, for the user."""
    by_split: dict[str, list[str]] = {}
    for path in paths:
        by_split.setdefault(named[path] or "no split", []).append(files.name(path))
    return "; ".join(f"{split}: {some(names)}" for split, names in by_split.items())


def _check_kinds(files: Files, kinds: Mapping[Path, str], base: Path, train: str) -> None:
    """Refuse files of several kinds, and images of no split next to images of splits, unless a pattern chose them."""
    by_kind: dict[str, list[str]] = {}
    for path in files.all:
        by_kind.setdefault(kinds[path], []).append(files.name(path))
    cure = "patterns in task.train and task.test, such as '*.png'"
    if len(by_kind) > 1:
        found = "; ".join(f"{kind}: {some(names)}" for kind, names in by_kind.items())
        raise BadInput(
            f"task: {files.root} has files of several kinds ({found}); accepted: one kind, or {cure}"
        )
    loose = [path for path in files.aside if kinds.get(path) == "image" and _split(base, path, ()) is None]
    if loose and "image" in by_kind and not _is_pattern(train):
        problem = f"images of no split ({some(map(files.name, loose))}) next to images of splits"
        raise BadInput(f"task: {files.root} has {problem}; accepted: all of them in splits, or {cure}")


def _check_unread(
    files: Files, kinds: Mapping[Path, str], named: Mapping[Path, str | None], train: str, test: str
) -> None:
    """Refuse a split that only files that can't be read have, since another file would take its place."""
    read = {named[path] for path in files.all}
    for field, name in (("train", train), ("test", test)):
        unread = [path for path in files.aside if path not in kinds and named[path] == name]
        if unread and name not in read:
            problem = f"{some(map(files.name, unread))} can't be read"
            raise BadInput(f"task.{field}: {problem}; accepted: files in {ACCEPTED}")


def _is_data(path: Path) -> bool:
    """Whether a file that can't be read may be meant as data."""
    name = path.name.lower()
    suffix = name.rpartition(".")[2].rpartition("-")[2]
    return _UNREAD.fullmatch(suffix) is not None and name not in _METADATA


def _visible(root: Path) -> Callable[[Path], bool]:
    def visible(path: Path) -> bool:
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        try:
            return not hidden and not path.name.startswith("cache-") and path.is_file()
        except OSError as error:
            problem = f"{path} can't be read ({error.strerror})"
            raise BadInput(f"task: {problem}; accepted: a folder whose files can be read") from None

    return visible


def kind_of(path: Path) -> str | None:
    """The kind of a file, by its suffix; None if it can't be read."""
    suffix = suffix_of(path)
    return next((kind for kind, suffixes in KINDS.items() if suffix in suffixes), None)


def suffix_of(path: Path) -> str:
    """The suffix of a file that can be read, in lower case, without ``.gz``; "" for other files."""
    return _end(path.name).removesuffix(".gz")[1:]


def _end(name: str) -> str:
    """What follows a file's own name, such as ``.csv.gz``, in lower case."""
    return next((end for end in _ENDS if name.lower().endswith(end)), "")
