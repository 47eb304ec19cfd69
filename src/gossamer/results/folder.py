"""The folder of one run, ``<out>/<name>/<id>/`` (docs/experiments.md lists its files). Every file except the
segments is written under another name and then renamed, so that a reader never finds a partial file."""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Shaped
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gossamer import files, numerics
from gossamer.errors import BadInput, RecordError
from gossamer.fingerprint import Fingerprint
from gossamer.results.schema import Environment, Status, StatusFile
from gossamer.results.segment import Segment

if TYPE_CHECKING:
    import polars as pl

SegmentKind = Literal["metrics", "events", "graphs", "timeline"]

_RECORD = (
    *("*.yaml", "environment.json", "setup.json", "code/**/*"),
    *("*.parquet", "*.safetensors", "segments/*.jsonl"),
)
_RESERVED = ".status.json"
_RESERVED_BYTES = 2**14
_LONGEST_ERROR = 2000
_SECRETS = ("--token", "--join")
HIDDEN = "***"
"""What stands in place of a secret."""
_COMPUTING = ("gossamer", "torch", "numpy")
_NOT_OFFERED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
"""What file systems answer to a call that they do not have."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*( [A-Za-z0-9._+-]+)*")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, from :meth:`create` or :meth:`open`."""

    path: Path

    @classmethod
    def create(
        cls,
        out: Path,
        name: str,
        *,
        experiment: str,
        environment: Mapping[str, Any],
        setup: Mapping[str, Any] | None = None,
        sources: Mapping[str, bytes] | None = None,
    ) -> RunFolder:
        """Create the folder of a new run, with ``experiment.yaml``, ``environment.json``, perhaps ``setup.json``, and the
        user's own modules (:meth:`write_sources`). BadInput for a ``name`` that can't be a folder's name, and if these
        files can't be written to ``out``; no folder is left in this case."""
        if not _NAME.fullmatch(name):
            raise BadInput(
                f"name: got {name!r}; accepted: a name for a folder, of letters, digits, '.', '_', '+', '-'"
            )
        with writing(f"--out {out}"):
            # Names sort by time. The suffix is not keyed by the seed, since two runs with the same seed need
            # two folders.
            folder = cls(Path(out) / name / f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{secrets.token_hex(2)}")
            folder.segments.mkdir(parents=True)
            try:
                folder.reserve()
                write_text(folder.path / "experiment.yaml", experiment)
                write_json(folder.path / "environment.json", {"run": folder.path.name, **environment})
                if setup is not None:
                    write_json(folder.path / "setup.json", setup)
                folder.write_sources(sources or {})
            except OSError:
                shutil.rmtree(folder.path, ignore_errors=True)
                raise
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an existing run. BadInput for anything else."""
        if not (path / "experiment.yaml").is_file():
            raise BadInput(
                f"{path}: not a run folder (it has no experiment.yaml); accepted: <out>/<name>/<id>"
            )
        return cls(path)

    @property
    def segments(self) -> Path:
        """Folder of the append-only segments."""
        return self.path / "segments"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints; the engine creates it."""
        return self.path / "checkpoints"

    def restart(self, rank: int) -> Path:
        """A node's own checkpoint, from which it restarts while the others continue."""
        return self.path / "restart" / f"node-{rank}.safetensors"

    def segment(self, kind: SegmentKind, rank: int = 0) -> Segment:
        """Open this process's segment for appending. ``rank`` distinguishes processes.
        :mod:`gossamer.results.reading` describes the rows."""
        return Segment(self.segments / f"{kind}-{rank}.jsonl", run_id(self.path))

    def write_sources(self, sources: Mapping[str, bytes], resumed: int = 0) -> None:
        """Keep the text of the user's own modules, by place, in ``code/``; with ``resumed``, those that had changed when the
        run was resumed for this time, in a folder of their own there."""
        folder = self.path / "code" / f"resumed-{resumed}" if resumed else self.path / "code"
        for place, text in sources.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            with atomic(folder / place) as file:
                file.write_bytes(text)

    def write_models(
        self,
        parameters: Float[Tensor, "nodes params"],
        buffers: Shaped[Tensor, "nodes buffers"] | None = None,
    ) -> None:
        """Write ``models.safetensors``: row i is node i; "parameters" as float32, "buffers" unchanged."""
        tensors = {"parameters": parameters.detach().to("cpu", torch.float32).contiguous()}
        if buffers is not None:
            tensors["buffers"] = buffers.detach().cpu().contiguous()
        with atomic(self.path / "models.safetensors") as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
            # safetensors creates files that only the owner can read.
            shutil.copymode(self.path / "experiment.yaml", temporary)

    def reserve(self) -> None:
        """Reserve the space for ``status.json`` in a file that is overwritten and renamed at the end, which
        takes neither a block nor an inode if the disk is full. RecordError if there is no space."""
        path = self.path / _RESERVED
        try:
            path.write_bytes(bytes(_RESERVED_BYTES))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise RecordError(self.path / "status.json", error) from error

    def write_status(self, status: Status, *, error: str | None = None, **figures: Any) -> None:
        """Write ``status.json``, the last thing a run does, with the checksum of every other file of the
        record. ``stopped`` means by the user, ``diverged`` means that a model was not finite. ``figures`` are
        ``wall_s`` and other figures of an :class:`~gossamer.runtime.outcome.Outcome` that are not in the rows."""
        path, reserved = self.path / "status.json", self.path / _RESERVED
        recorded = [file for pattern in _RECORD for file in sorted(self.path.glob(pattern)) if file.is_file()]
        sums = {str(file.relative_to(self.path)): files.crc32(file, self.path) for file in recorded}
        brief = {"run": run_id(self.path), "status": status, "error": error and error[:_LONGEST_ERROR]}
        try:
            write_json(path, {**brief, "error": error, **figures, "files": sums})
            reserved.unlink(missing_ok=True)
        except RecordError as failure:
            try:  # this fits into the reserved space
                with reserved.open("r+b") as space:
                    space.write(_sealed(brief))
                    space.truncate()
                sync(reserved)
                reserved.replace(path)
            except OSError:
                raise failure from None


def run_id(folder: Path) -> str:
    """The identity of the run in a folder, independent of the folder's name; empty if it is not recorded."""
    return str(read_environment(folder).get("run", ""))


def read_environment(folder: Path) -> dict[str, Any]:
    """The contents of ``environment.json``; empty if it is missing."""
    path = folder / "environment.json"
    recorded = files.read_json(path, Environment, folder) if path.exists() else {}
    found = dict(files.shallow(recorded, str(path)))
    for one in (found, *found.get("resumed", [])):  # an older version has recorded tokens
        if "command" in one:
            one["command"] = without_secrets(one["command"])
    return found


def without_secrets(command: Sequence[str], secret: str | None = None) -> list[str]:
    """A command line with ``***`` in place of tokens: those that options name, and ``secret``."""
    shown, hides = list[str](), False
    for text in command:
        name, sign, _ = text.partition("=")
        if hides:
            shown.append(HIDDEN)
        elif sign and name in _SECRETS:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(text.replace(secret, HIDDEN) if secret else text)
        hides = not hides and text in _SECRETS
    return shown


def read_status(folder: Path) -> dict[str, Any]:
    """The contents of ``status.json``; empty for a run that has not ended."""
    path = folder / "status.json"
    status: dict[str, Any] = files.read_json(path, StatusFile, folder) if path.exists() else {}
    if status.get("run", run := run_id(folder)) != run:
        raise BadInput(f"{path}: its run is {status['run']}, not {run}; accepted: the status of this run")
    return status


def environment(
    command: Sequence[str], *, computes_here: bool = True, fingerprint: Fingerprint | None = None
) -> dict[str, Any]:
    """Command, start, machine, mode of the matrix kernels, versions of gossamer's dependencies, and the fingerprint of own
    code and data, if given. ``computes_here`` tells whether this process computes, or only processes that it starts."""
    return {
        "command": [
            text.encode(errors="surrogateescape").decode(errors="replace")
            for text in without_secrets(command)
        ],
        "started": datetime.now(UTC).isoformat(),
        **this_computer(computes_here=computes_here),
        **({} if fingerprint is None else {"fingerprint": fingerprint}),
    }


def this_computer(*, computes_here: bool = True) -> dict[str, Any]:
    """The part of an environment that is of this machine, and of what is installed here."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": {
            "host": platform.node(),
            "architecture": platform.machine(),
            "cpus": os.cpu_count(),
            # Querying their names would create a CUDA context, which does not survive a fork.
            "gpus": torch.cuda.device_count(),
        },
        "numerics": numerics.describe(computes_here=computes_here),
        "packages": _versions(),
    }


def record_workers(folder: Path, workers: Sequence[Mapping[str, Any]]) -> None:
    """Write to ``environment.json`` which workers compute the run since it began or was resumed."""
    recorded = read_environment(folder)
    if resumed := recorded.get("resumed"):
        recorded["resumed"] = [*resumed[:-1], {**resumed[-1], "workers": workers}]
    else:
        recorded["workers"] = workers
    write_json(folder / "environment.json", recorded)


def latest(recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a recorded environment that is of the last time that the run began or was resumed."""
    environments: Sequence[Mapping[str, Any]] = recorded.get("resumed") or [recorded]
    return environments[-1]


def computers(recorded: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The parts of an environment that describe what has computed: its workers, or else the machine itself."""
    named = recorded.get("fingerprint", {}).get("packages", {})
    workers = list[Mapping[str, Any]]()
    for worker in recorded.get("workers", ()):
        packages = {name: text for name, text in worker.get("packages", {}).items() if name in named}
        workers.append({**worker, "fingerprint": {"packages": packages}})
    return workers or [recorded]


def versions(recorded: Mapping[str, Any]) -> dict[str, str]:
    """The versions in an environment that may change results, by name."""
    packages = recorded.get("packages", {})
    found = {"python": recorded.get("python"), **{name: packages.get(name) for name in _COMPUTING}}
    found |= recorded.get("fingerprint", {}).get("packages", {})
    return {name: str(version) for name, version in found.items() if version is not None}


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock the folder of a run, at most until this process ends. BadInput if another process holds the lock. Yields whether
    there are locks here: Windows has none on folders, nor have many network file systems."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    descriptor, is_locked = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"{folder}: the run is ongoing; accepted: one that has ended") from None
        except OSError:
            is_locked = False
        yield is_locked
    finally:
        os.close(descriptor)


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn errors from unwritable files into BadInput. ``what`` names the option and its value."""
    try:
        yield
    except OSError as error:
        failure = error if isinstance(error, RecordError) else RecordError(error.filename, error)
        reason = f"{failure.reason.lower()} ({failure.path})"
        raise BadInput(f"{what}: {reason}; accepted: a place that can be written to") from error


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path to write to instead of ``path``. It is flushed to disk and renamed when the block
    succeeds. RecordError if it can't be written."""
    # Processes of two machines may have the same number.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)  # the rename is durable once the folder is flushed
    except (OSError, SafetensorError) as error:
        raise RecordError(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file with its checksum atomically."""
    write_text(path, _sealed(value).decode())


def write_table(path: Path, table: pl.DataFrame) -> None:
    """Write a Parquet file atomically. It is encoded in memory first, since polars hides the reason why a
    file can't be written."""
    table.write_parquet(content := BytesIO())
    with atomic(path) as temporary:
        temporary.write_bytes(content.getbuffer())


def _sealed(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
    return files.seal(text.encode())[0]


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk. Where the file system can't, this is said once."""
    folder = path.is_dir()
    unable = (*_NOT_OFFERED, errno.EACCES, errno.EISDIR) if folder else _NOT_OFFERED
    try:
        descriptor = os.open(
            path, os.O_RDONLY if folder else os.O_RDWR
        )  # Windows flushes only what may be written
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in unable:
            raise
        where = path if folder else path.parent
        _say_once(
            f"{'folders' if folder else 'files'} can't be flushed to disk here ({error.strerror})", where
        )


_said: set[str] = set()


def _say_once(what: str, where: Path) -> None:
    if what not in _said:
        _said.add(what)
        log.warning("%s: %s; a power cut may cost the newest files", where, what)


@cache
def _versions() -> dict[str, str]:
    lines = ["gossamer", *(metadata.requires("gossamer") or [])]
    versions: dict[str, str] = {}
    for name in sorted({re.split(r"[^\w.-]", line)[0] for line in lines}):
        with suppress(metadata.PackageNotFoundError):  # an optional dependency
            versions[name] = metadata.version(name)
    return versions
