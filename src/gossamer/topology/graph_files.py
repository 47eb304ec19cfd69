"""Text files of graphs and matrices: their numbers or, for a file of another kind, one line that says what it is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from gossamer import files
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph

EDGES = 'two ranks per line, "i j", from 0'
MATRIX = "a square matrix of numbers"

_BYTES = (
    (b"\xef\xbb\xbf", "UTF-8 with a byte order mark", "save it as UTF-8 without one"),
    (b"\xff\xfe", "UTF-16", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16", "save it as UTF-8"),
    (b"\x1f\x8b", "compressed by gzip", "unpack it"),
    (b"BZh", "compressed by bzip2", "unpack it"),
    (b"\xfd7zXZ", "compressed by xz", "unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack it"),
    (b"PK\x03\x04", "a ZIP archive, such as .npz and .xlsx are", "write its numbers as text"),
    (b"\x93NUMPY", "an array of NumPy", 'numpy.savetxt(path, array, fmt="%g")'),
    (b"\x80", "a pickle, which could run code", "write its numbers as text"),
)
"""The first bytes of a file, what it is, and the way to a file that is read."""

_PROLOGUE = r"\s*(?:<[?!][^>]*>\s*)*<(?:\w+:)?"  # of XML
_TEXTS = (
    (rf"{_PROLOGUE}graphml\b", "GraphML", "topology.name: graphml"),
    (rf"{_PROLOGUE}gexf\b", "GEXF", "read_gexf"),
    (r"\s*<", "XML", ""),
    (r"%%MatrixMarket", "Matrix Market", "scipy.io.mmread reads it"),
    (r"\s*[\[{]", "JSON", "node_link_graph"),
    (r"(?:(?:Creator|Version|Comment)\b.*\s+|#.*\n|\s+)*graph\s*\[", "GML", "read_gml"),
    (r"\s*(?:strict\s+)?(?:di)?graph\b[^\[\n]*\{", "DOT", "nx_pydot.read_dot"),
    (r"\s*\*(?:vertices|network)\b", "a network of Pajek", "read_pajek"),
    (r">>(?:di)?graph6<<", "graph6", "read_graph6"),
    (r">>sparse6<<", "sparse6", "read_sparse6"),
)
"""The first characters of a text, its format, and what reads it: a function of networkx, if it is a single word."""

_MANY = 40  # characters of a cell that a message shows


@dataclass(frozen=True, eq=False)
class Table:
    """The numbers of a file: ``values`` has a row for each line of the file in ``lines``, which count from 1. ``field`` holds
    the file in the experiment, and ``accepted`` says what it may be."""

    path: Path
    field: str
    accepted: str
    lines: Sequence[int]
    values: Float[np.ndarray, "rows columns"]

    def refused(self, problem: str, cure: str = "", row: int | None = None) -> BadInput:
        """The error for a problem of the file or of a row, as :func:`refused`."""
        line = None if row is None else self.lines[row]
        return refused(self.path, self.field, problem, self.accepted, cure, line)


def refused(
    path: Path, field: str, problem: str, accepted: str, cure: str = "", line: int | None = None
) -> BadInput:
    """The error for a problem of a file, or of a line, in a field of the experiment. ``cure`` is the way to a file that is
    read."""
    place = "" if line is None else f", line {line}"
    return BadInput(f"{field}: {path}{place}: {problem}; accepted: {accepted}{cure and f' ({cure})'}")


def read_text(path: Path, field: str, accepted: str) -> str:
    """The text of a file. BadInput for a file that is not text in UTF-8; ``field`` and ``accepted`` are for the message."""
    if path.exists():
        files.check_fits(f"{field}: {path}", path, times=5)
    try:
        data = files.read(path, files.MAX_ROWS_BYTES, accepted=accepted)
    except BadInput as error:
        raise error.within(field) from None
    for start, kind, cure in _BYTES:
        if data.startswith(start):
            raise refused(path, field, kind, accepted, cure)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise refused(path, field, "not UTF-8", accepted, "save it as UTF-8", line) from None


def format_of(text: str) -> tuple[str, str] | None:
    """The format of a text in which other programs keep graphs, and the way to a file that is read; None for another text."""
    for start, kind, reader in _TEXTS:
        if re.match(start, text[:10_000], re.IGNORECASE):
            function = reader.isidentifier() or reader.startswith("nx_")
            cure = f"networkx.{reader} reads it; docs/experiments.md shows how to write its edges"
            return kind, cure if function else reader
    return None


def read_numbers(path: Path, field: str, accepted: str) -> Table:
    """The finite numbers of a text file, one row per line, separated by spaces or commas; ``#`` starts a comment. BadInput
    for any other file; ``field`` and ``accepted`` are for its message."""
    text = read_text(path, field, accepted)
    lines, rows = list[int](), list[list[str]]()
    for line, row in enumerate(text.replace(",", " ").splitlines(), 1):
        if words := row.partition("#")[0].split():
            lines.append(line)
            rows.append(words)
    try:
        values = np.array(rows, dtype=np.float64, ndmin=2)
    except ValueError:
        if (known := format_of(text)) is not None:
            raise refused(path, field, known[0], accepted, known[1]) from None
        problem, cure, bad = _explained(rows)
        raise refused(path, field, problem, accepted, cure, lines[bad]) from None
    table = Table(path, field, accepted, lines, values)
    if not rows:
        raise table.refused("no numbers")
    if len(wrong := np.argwhere(~np.isfinite(values))):
        row, column = wrong[0].tolist()
        raise table.refused(f"{rows[row][column]!r} is not finite", "finite numbers", row)
    return table


def read_matrix(path: Path, field: str, accepted: str = MATRIX) -> Table:
    """The square matrix in a file, as :func:`read_numbers`."""
    table = read_numbers(path, field, accepted)
    height, width = table.values.shape
    if height != width:
        if _are_neighbours(table.values.tolist()):
            raise table.refused(*_NEIGHBOURS)
        cure = "for edges, topology.name: edge-list" if width == 2 else ""
        raise table.refused(f"{height} lines of {width} numbers", cure)
    return table


def read_edges(path: Path, field: str, nodes: int, *, directed: bool) -> Graph:
    """The graph of a file with an edge per line."""
    table = read_numbers(path, field, EDGES)
    values = table.values
    width = values.shape[1]
    if width != 2:
        raise table.refused(*_not_edges(values))
    if len(wrong := np.flatnonzero((values % 1 != 0).any(axis=1))):
        first, second = values[wrong[0]].tolist()
        raise table.refused(f"{second if first % 1 == 0 else first:g} is not a rank", "", int(wrong[0]))
    source, target = values.T
    if len(loops := np.flatnonzero(source == target)):
        raise table.refused(f"a loop at {source[loops[0]]:.0f}", "delete the line", int(loops[0]))
    if len(outside := np.flatnonzero(((values < 0) | (values >= nodes)).any(axis=1))):
        raise table.refused(*_not_ranks(values, nodes, int(outside[0])))
    pairs = values.astype(np.int64)
    graph = Graph(nodes, ((i, j) for i, j in pairs.tolist()), directed=directed)
    _check_not_neighbours(table, pairs, graph)
    return graph


def _not_edges(values: Float[np.ndarray, "rows columns"]) -> tuple[str, str]:
    """What a file has instead of two numbers per line, and the cure."""
    height, width = values.shape
    if _are_neighbours(values.tolist()):
        return _NEIGHBOURS
    if width == height and np.isin(values, (0, 1)).all():
        return "a matrix of 0 and 1", "topology.name: adjacency"
    if width == 3:
        return (
            "3 numbers per line, as if edges had weights",
            "delete the third; topology.weights sets those of mixing",
        )
    return f"{width} number{'s' * (width > 1)} per line", ""


def _not_ranks(values: Float[np.ndarray, "edges 2"], nodes: int, row: int) -> tuple[str, str, int]:
    """What is wrong with the ranks of a file if those of a row are not below ``nodes``, the cure, and the row."""
    low, high, distinct = int(values.min()), int(values.max()), len(np.unique(values))
    outside = next(int(rank) for rank in values[row].tolist() if not 0 <= rank < nodes)
    problem = f"node {outside} in a graph of {nodes} nodes"
    if low == 1 and high == distinct:
        return f"{problem}; the file's are 1 to {high}", f"subtract 1 from each, and set nodes: {high}", row
    if distinct < high - low + 1:
        problem += f"; the file has {distinct:,} of the numbers from {low} to {high}"
        return problem, f"number them from 0 to {distinct - 1}; docs/experiments.md shows how", row
    return problem, f"0 to {nodes - 1}", row


_NEIGHBOURS = (
    "lists of the neighbours of each node, as in DecentralizePy's .adj files",
    "write a line for each edge; docs/experiments.md shows how",
)


def _are_neighbours(rows: Sequence[Sequence[float]], first: int = 0) -> bool:
    """Whether the numbers of row i can be the neighbours of node ``first`` + i: whom a row has, has it too."""
    lists = [{number - first for number in row} for row in rows]
    size = range(len(lists))
    return all(
        peer in size and peer != rank and rank in lists[int(peer)]
        for rank, others in enumerate(lists)
        for peer in others
    )


def _check_not_neighbours(table: Table, pairs: Int[np.ndarray, "edges 2"], graph: Graph) -> None:
    """Refuse a file that may list the two neighbours of node i in line i (DecentralizePy's .adj files, of a graph where every
    node has two): a line for each node, which names each other, and another graph than the edges in the lines."""
    if len(pairs) != graph.nodes or not _are_neighbours(pairs.tolist()):
        return
    ways = ((rank, peer) for rank, line in enumerate(pairs.tolist()) for peer in line)
    if Graph(graph.nodes, ways, directed=graph.directed) != graph:
        problem = "each line i has two nodes whose lines have i, as in a list of the neighbours of each node"
        raise table.refused(problem, "if these are edges, in another order")


def _explained(rows: Sequence[Sequence[str]]) -> tuple[str, str, int]:
    """Why the words of a file are no table of numbers, the cure, and the row to blame."""
    wrong = [[not _is_number(word) for word in row] for row in rows]
    bad = next((k for k, row in enumerate(wrong) if any(row)), None)
    if bad is None:
        return _uneven([[float(word) for word in row] for row in rows])
    word = rows[bad][wrong[bad].index(True)]
    if word.startswith("{"):
        cure = "networkx.write_edgelist(graph, path, data=False)"
        return "attributes after the ranks, as networkx writes them", cure, bad
    if word.startswith(("%", "//")):
        return (
            f"{word[:_MANY]!r} starts no comment here",
            "# does; KONECT's and Matrix Market's ranks count from 1",
            bad,
        )
    if separator := re.search("[;|]", word):
        return (
            f"{word[:_MANY]!r}: values separated by {separator[0]!r}",
            "separate them by spaces or commas",
            bad,
        )
    if len(rows) > 1 and not any(map(any, wrong[1:])):
        return "a header", "delete the line, or begin it with #", bad
    if len(rows) > 2 and all(row[0] and not any(row[1:]) and len(row) == len(rows) for row in wrong[1:]):
        return _NAMED
    return f"{word[:_MANY]!r} is not a number", "ranks in place of names; docs/experiments.md shows how", bad


_NAMED = (
    "names of rows and columns, as pandas writes them",
    "DataFrame.to_csv(path, header=False, index=False)",
    0,
)


def _uneven(rows: Sequence[Sequence[float]]) -> tuple[str, str, int]:
    """What rows of numbers with different lengths are, the cure, and the row to blame."""
    first, rest = rows[0], rows[1:]
    widths = [len(row) for row in rows]
    if len(first) == 1 and first[0] == len(rest) and _are_neighbours(rest):
        problem = "the number of nodes and the neighbours of each, as in DecentralizePy's .adj files"
        return problem, _NEIGHBOURS[1], 0
    if len(first) == 1 and set(widths[1:]) == {2}:
        return "one number, the number of nodes as in DecentralizePy's .edges files", "delete the line", 0
    if _are_neighbours(rows):
        return *_NEIGHBOURS, 0
    if len(first) > 1 and first[0] == len(rest) and _are_neighbours(rest, 1):
        return "the neighbours of each node, from 1, as in METIS files", _NEIGHBOURS[1], 0
    if widths[1:] == [len(first) + 1] * len(rest) and list(first) == [row[0] for row in rest]:
        return _NAMED
    [(usual, times)] = Counter(widths).most_common(1)
    if len({row[0] for row in rows}) == len(rows) and times < len(rows) - 1:
        problem = "a node and its neighbours per line, as in networkx's adjacency lists"
        return problem, "networkx.read_adjlist reads it; docs/experiments.md shows how to write its edges", 0
    odd = next(k for k, width in enumerate(widths) if width != usual)
    return f"{widths[odd]} numbers, and {usual} in most lines", "as many in each line", odd


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
