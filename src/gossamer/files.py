"""The only reader of files that may be damaged or hostile: all files in the folder of a run, and experiment
files; and the rule for every other file that a run reads (:func:`check_fits`).

The size, depth and number of values of files are limited. Files of a run have to be regular, and links must
not lead out of its folder. Any problem raises BadInput: one line that names the file. Nothing is unpickled.

JSON that gossamer writes is *sealed*: its first field is a checksum (CRC-32) of the rest."""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from contextlib import suppress
from gzip import GzipFile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import msgspec
import yaml
from yaml.composer import Composer

from gossamer.errors import BadInput
from gossamer.process_memory import available_bytes

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

MAX_BYTES = 2**24
"""Maximum bytes of a file of settings or figures."""
MAX_YAML_BYTES = 2**22
MAX_ROWS_BYTES = 2**38
"""Maximum bytes of a table, a segment or a file of models."""
MAX_VALUES = 10**8
"""Maximum number of values in a JSON file, and of those that a member of a run reports."""
MAX_YAML_VALUES = 10**5
"""Maximum number of values in a YAML file, with aliases expanded."""
MAX_DEPTH = 100
MAX_DIGITS = 400
"""Maximum digits of a number in YAML."""

_SEAL = re.compile(rb'\{"crc32": "([0-9a-f]{8})"(?:,|(?=\}))')
_CHUNK = 2**20
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_GZIP, _ZLIB, _ZSTD, _PARQUET = b"\x1f\x8b", (b"x\x01", b"x\x9c", b"x\xda"), b"\x28\xb5\x2f\xfd", b"PAR1"
"""The first bytes of files whose contents are larger than the files."""
_MOST_DEFLATED = 1032
"""Bytes that one byte of gzip or zlib becomes, at most."""
_VIEW_BYTES = 16
"""Bytes that a text or binary value of a table takes, beside its contents."""


def cache_folder() -> Path:
    """The folder for data that can be rebuilt: ``$GOSSAMER_CACHE``, else ``$XDG_CACHE_HOME/gossamer``, else
    ``~/.cache/gossamer``. It may be impossible to create, as for a user without a home."""
    if folder := os.environ.get("GOSSAMER_CACHE"):
        return Path(folder)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "gossamer"
    try:
        return Path.home() / ".cache" / "gossamer"
    except RuntimeError:  # the user is in no list of users
        return Path(os.devnull) / "gossamer"


# --- opening


def checked(path: Path, cap: int = MAX_BYTES, root: Path | None = None, accepted: str = "a file") -> Path:
    """Check that a path is a regular file of at most ``cap`` bytes in the folder ``root``, or a link to one
    there. Without a folder, it may be any file or pipe named by the user."""
    try:
        status = path.stat()
        outside = root is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise BadInput(f"{path}: {getattr(error, 'strerror', None) or error}; accepted: {accepted}") from None
    if outside:
        raise BadInput(f"{path}: leads to {os.path.realpath(path)}; accepted: a file in {root}")
    if not stat.S_ISREG(status.st_mode) and (root is not None or not stat.S_ISFIFO(status.st_mode)):
        raise BadInput(f"{path}: not a regular file; accepted: {accepted}")
    if status.st_size > cap:
        raise BadInput(f"{path}: {status.st_size:,} bytes; accepted: {accepted} of at most {cap:,}")
    return path


def opened(path: Path, cap: int = MAX_BYTES, root: Path | None = None, accepted: str = "a file") -> BinaryIO:
    """A file opened for reading. Arguments are as in :func:`checked`."""
    try:
        return open(checked(path, cap, root, accepted), "rb", opener=_without_waiting)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}; accepted: {accepted}") from None


def _without_waiting(path: str, flags: int) -> int:
    """Open a file. A pipe that nobody writes to is empty, instead of waiting for a writer."""
    if not hasattr(os, "O_NONBLOCK"):  # Windows, which has no such pipes
        return os.open(path, flags)
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def read(path: Path, cap: int = MAX_BYTES, root: Path | None = None, accepted: str = "a file") -> bytes:
    """The bytes of a file. Arguments are as in :func:`checked`."""
    with opened(path, cap, root, accepted) as file:
        chunks, left = list[bytes](), cap
        while chunk := file.read(_CHUNK):
            chunks.append(chunk)
            if (left := left - len(chunk)) < 0:  # a pipe, or a file that grows
                raise BadInput(f"{path}: more than {cap:,} bytes; accepted: {accepted} of at most {cap:,}")
    return b"".join(chunks)


def read_text(path: Path, cap: int = MAX_BYTES, root: Path | None = None, accepted: str = "a file") -> str:
    """The text of a UTF-8 file. Arguments are as in :func:`checked`."""
    try:
        return read(path, cap, root, accepted).decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: {error}; accepted: {accepted}") from None


# --- sizes


def check_fits(where: str, *paths: Path, times: float = 1) -> None:
    """Check that files are regular ones whose contents, as they are unpacked, fit the memory that is free. Only files that
    are mapped, or read in parts, need no check. BadInput otherwise; OSError for a path without a file.

    Args:
        where: the field and the file, in messages.
        paths: files whose contents are in memory at the same time.
        times: how many bytes a byte of the contents takes, at least, while they are read."""
    free, size = available_bytes(), 0
    for path in paths:
        status = path.stat()
        if (kind := _KINDS.get(stat.S_IFMT(status.st_mode))) is not None:
            raise BadInput(f"{where}: {kind}; accepted: a regular file")
        if free is not None:
            size += _unpacked_bytes(path, status.st_size, int(free / times) - size)
    check_room(f"{where}: unpacked and read, the contents", size * times, free)


def check_room(what: str, needed: float, free: int | None = None) -> None:
    """Check that something that takes ``needed`` bytes fits the memory that is free (by default as it is now). BadInput
    otherwise."""
    free = available_bytes() if free is None else free
    if free is not None and needed > free:
        raise BadInput(
            f"{what} take at least {needed / 2**30:.3g} GiB of memory, and {free / 2**30:.3g} GiB are free; accepted: less"
            " data, or a machine with more memory"
        )


def _unpacked_bytes(path: Path, size: int, limit: int) -> int:
    """The bytes of a file's contents, at least; counted no further than just beyond the limit. A damaged file counts as
    far as it can be read: its reader reports the damage."""
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(0)
        if head == _PARQUET:
            return max(size, _table_bytes(path))
        if head.startswith(_ZLIB):
            return size * _MOST_DEFLATED
        if head.startswith(_GZIP) and size * _MOST_DEFLATED > limit:
            return _counted(GzipFile(fileobj=file), limit, OSError, EOFError, zlib.error)
        if head == _ZSTD:
            from zstandard import ZstdDecompressor, ZstdError

            return _counted(ZstdDecompressor().stream_reader(file, read_across_frames=True), limit, ZstdError)
    return size


def _counted(stream: Any, limit: int, *damage: type[Exception]) -> int:
    """The bytes of an unpacked stream, counted up to its damage, and no further than just beyond the limit."""
    count = 0
    with suppress(*damage):
        while count <= limit and (chunk := stream.read(_CHUNK)):
            count += len(chunk)
    return count


def _table_bytes(path: Path) -> int:
    """The bytes that the values of a Parquet file take in memory, at least; 0 for a damaged file. (Equal values take hardly
    any bytes in the file.)"""
    import polars as pl
    from polars.exceptions import PanicException, PolarsError

    try:
        lazy = pl.scan_parquet(path, glob=False)
        schema = lazy.collect_schema()
        size = lazy.select(pl.len()).collect().item() * sum(map(_value_bytes, schema.values()))
        inner: Any
        for name, inner in schema.items():
            lists = pl.col(name)
            while isinstance(inner, pl.List):
                count = lazy.select(lists.list.len().sum()).collect(engine="streaming").item()
                lists, inner = lists.explode(), inner.inner
                size += count * _value_bytes(inner)
    except (PolarsError, PanicException, OSError):
        return 0
    return int(size)


def _value_bytes(kind: Any) -> float:
    """The bytes of one value of a type of polars, without the contents of a text or a list."""
    import polars as pl

    if isinstance(kind, pl.Struct):
        return sum(_value_bytes(field.dtype) for field in kind.fields)
    if isinstance(kind, pl.Array):
        return kind.size * _value_bytes(kind.inner)
    if kind in (pl.String, pl.Binary):
        return _VIEW_BYTES
    with_validity = pl.Series(dtype=kind).clear(1000).estimated_size() / 1000
    return max(with_validity - 1 / 8, 0)  # without the bit that says whether it is missing


# --- checksums


def seal(text: bytes, before: int = 0) -> tuple[bytes, int]:
    """A JSON object with a checksum as its first field, and the checksum. ``before`` is the checksum of the
    preceding data."""
    rest, crc = text[1:], zlib.crc32(text[1:], before)
    return b'{"crc32": "%08x"%s%s' % (crc, b"" if rest.startswith(b"}") else b",", rest), crc


def unseal(text: bytes, before: int | None = 0) -> tuple[bytes, int | None]:
    """A sealed object without its checksum, and the checksum (None if there is none). ValueError if the
    checksum does not match. If ``before`` is None, any checksum is accepted."""
    if (match := _SEAL.match(text)) is None:
        return text, None
    rest, crc = text[match.end() :], int(match[1], 16)
    if before is not None and zlib.crc32(rest, before) != crc:
        raise ValueError("its checksum does not match: it is damaged, or not of this run")
    return b"{" + rest, crc


def crc32(path: Path, root: Path, accepted: str = "a file") -> str:
    """The checksum of a file. Arguments are as in :func:`checked`."""
    crc = 0
    with opened(path, MAX_ROWS_BYTES, root, accepted) as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


# --- formats


def parse_json(text: bytes, source: str) -> Any:
    """The value in a JSON text from ``source``."""
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise BadInput(f"{source}: too many values; accepted: at most {MAX_VALUES:,}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{source}: {error}; accepted: JSON") from None


def read_json(path: Path, kind: Any, root: Path | None = None, cap: int = MAX_BYTES) -> Any:
    """The value in a JSON file, which must be of the type ``kind`` (a type for msgspec). Keys beyond those of
    a TypedDict are kept. Other arguments are as in :func:`checked`."""
    try:
        text, _ = unseal(read(path, cap, root, "a JSON file"))
    except ValueError as error:
        raise BadInput(f"{path}: {error}; accepted: a file written by gossamer") from None
    return conforming(parse_json(text, str(path)), kind, str(path))


def conforming(value: Any, kind: Any, source: str) -> Any:
    """The same value, if it is of the type ``kind`` (a type for msgspec)."""
    try:
        msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise BadInput(f"{source}: {error}; accepted: data written by gossamer") from None
    return value


def shallow(value: Any, source: str, left: int = MAX_DEPTH) -> Any:
    """The same value, if its lists and mappings are nested less deeply than :data:`MAX_DEPTH`."""
    if isinstance(value, dict | list):
        if not left:
            raise BadInput(f"{source}: nested too deeply; accepted: a depth of at most {MAX_DEPTH}")
        for item in value.values() if isinstance(value, dict) else value:
            shallow(item, source, left - 1)
    return value


def read_table(path: Path, root: Path | None = None) -> pl.DataFrame:
    """The table in a Parquet file. Other arguments are as in :func:`checked`."""
    import polars as pl
    from polars.exceptions import PanicException, PolarsError

    check_fits(str(path), checked(path, MAX_ROWS_BYTES, root, "a Parquet file"))
    try:
        return pl.read_parquet(path, glob=False)
    except (PolarsError, PanicException, OSError) as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"{path}: {reason:.200}; accepted: a Parquet file") from None


def read_tensors(path: Path, root: Path | None = None) -> dict[str, Tensor]:
    """The tensors in a safetensors file. Other arguments are as in :func:`checked`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    checked(path, MAX_ROWS_BYTES, root, "safetensors")
    try:
        return load_file(path)
    except (SafetensorError, OSError, MemoryError) as error:
        with path.open("rb") as file:
            start = file.read(4)
        accepted = "safetensors"
        if not start:
            problem = "an empty file"
        elif start.startswith((b"PK\x03\x04", b"\x80")):  # a pickle, in a ZIP archive or by itself
            problem = "a file of torch.save or of pickle, which may run code when it is read"
            accepted += ", as from safetensors.torch.save_model(module, file)"
        elif start == b"\x89HDF":
            problem = "HDF5"
        else:
            problem = f"damaged, or not safetensors ({error})"
        raise BadInput(f"{path}: {problem}; accepted: {accepted}") from None


class XML(NamedTuple):
    """The root of an XML text, and the line of each element, from 1."""

    root: Element
    lines: dict[Element, int]


def parse_xml(text: bytes, source: str) -> XML:
    """The elements of an XML text from ``source``. A document type is refused, because its entities could expand to
    anything."""
    lines: dict[Element, int] = {}
    tree, parser = TreeBuilder(), expat.ParserCreate()

    def start(tag: str, attributes: dict[str, str]) -> None:
        lines[tree.start(tag, attributes)] = parser.CurrentLineNumber

    def refuse(*_: object) -> None:
        raise BadInput(
            f"{source}, line {parser.CurrentLineNumber}: a document type; accepted: XML without one"
        )

    parser.StartElementHandler, parser.EndElementHandler = start, tree.end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = tree.data, refuse
    try:
        parser.Parse(text, True)
        return XML(tree.close(), lines)
    except expat.ExpatError as error:
        where = f", line {error.lineno}, column {error.offset + 1}"
        raise BadInput(
            f"{source}{where}: {expat.ErrorString(error.code)}; accepted: well-formed XML"
        ) from None
    except (LookupError, ValueError) as error:  # an unknown encoding
        raise BadInput(f"{source}: {error}; accepted: XML in UTF-8") from None


_IN_ANOTHER_BASE = re.compile(r"[-+]?(0[0-7_]+|[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Numbers that YAML 1.1 reads in base 8 (010) or 60 (1:30)."""


class _Loader(Composer, yaml.CSafeLoader):
    """A safe loader with libyaml's parser. It refuses duplicate keys, of which YAML would silently keep the
    last one, numbers in base 8 or 60, which most people read as others, and values that would exhaust a
    reader: nested too deeply, containing themselves, or too many after aliases are expanded."""

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        Composer.__init__(self)
        self._depth = self._nodes = 0
        self._sizes: dict[int, int] = {}  # sizes of completed nodes, in nodes

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        before, self._depth, self._nodes = self._nodes, self._depth + 1, self._nodes + 1
        self._refuse(self._depth > MAX_DEPTH, f"nested more than {MAX_DEPTH} deep", event)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            self._refuse(id(node) not in self._sizes, f"{event.anchor!r} contains itself", event)
            self._nodes += self._sizes[id(node)]
        self._refuse(self._nodes > MAX_YAML_VALUES, f"more than {MAX_YAML_VALUES:,} values", event)
        number = isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":str")
        self._refuse(number and len(node.value) > MAX_DIGITS, f"more than {MAX_DIGITS} digits", event)
        if number and _IN_ANOTHER_BASE.fullmatch(node.value):
            meant = yaml.safe_load(node.value)
            accepted = f"{meant}, or {node.value!r} for a text"
            self._refuse(True, f"{node.value} would mean {meant}; accepted: {accepted}", event)
        self._sizes[id(node)] = self._nodes - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            self._refuse((key.tag, str(key.value)) in seen, f"{key.value!r} appears twice", key)
            seen.add((key.tag, str(key.value)))
        return node

    def _refuse(self, wrong: bool, problem: str, at: Any) -> None:
        if wrong:
            raise yaml.constructor.ConstructorError(None, None, problem, at.start_mark)


def parse_yaml(text: str, source: str) -> Any:
    """The value in a YAML text from ``source``."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: e.g. for the date 2026-13-01
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise BadInput(f"{source}{where}: not YAML: {problem}") from None
