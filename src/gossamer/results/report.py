"""The report: one HTML page that shows runs without a network, and its exports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import polars as pl

from gossamer.errors import BadInput
from gossamer.numerics import summary as summary_of_numerics
from gossamer.results.folder import write_text, writing
from gossamer.results.formatting import (
    NOTHING,
    bytes_text,
    count_text,
    faults_text,
    metric_title,
    seconds_text,
    value_text,
)
from gossamer.results.groups import Group, several
from gossamer.results.groups import groups as group_runs
from gossamer.results.page_data import page_data
from gossamer.results.plots import write_pngs
from gossamer.results.run import Run, cell_names, labels
from gossamer.results.tidy import AXES, STATISTICS, Final, FinalSummary, final_summary, main_metric
from gossamer.results.time_to import note, tables
from gossamer.results.timeline import Window

_PAGE = files("gossamer.results") / "page"
_COMINGS = ("lost", "left", "joined", "returned", "frozen", "thawed")
_MOST_NAMED = 12
_DESCRIBED = ("task", "partition", "topology", "algorithm", "network", "compute", "engine")
_UNENDED = {
    "stopped": "was stopped before its end; the page shows what was recorded until then.",
    "running or killed": "is still running, or was killed; the page shows what was recorded so far.",
}


def write_report(
    runs: Sequence[Run],
    out: Path,
    *,
    png: Path | None = None,
    csv: Path | None = None,
    groups: Sequence[Group] | None = None,
    time_to: pl.DataFrame | None = None,
    baseline: str | None = None,
    within: Window | None = None,
) -> Path:
    """Write one self-contained HTML page on one or several runs, which needs no network; gives its path.

    Args:
        runs: in the order of their colours.
        out: the page; a folder stands for ``report.html`` in it.
        png: a folder for pictures of all curves, ``<metric>-vs-<axis>.png``.
        csv: a folder for ``curves.csv`` and ``metrics.csv``; or a file ``X.csv``, with ``X-metrics.csv`` next to it.
        groups: of the runs; None groups those that differ only in their seed.
        time_to, baseline: rows of :func:`gossamer.results.time_to.time_to`, and the title of the baseline.
        within: the part of the run's timeline that is shown; None is all of it.

    Raises:
        BadInput: without runs, without plotly (or matplotlib, for ``png``), or where a file can't be written.
    """
    if not runs:
        raise BadInput("report: got no run; accepted: one or more")
    path = Path(out) / "report.html" if Path(out).is_dir() else Path(out)
    groups = group_runs(runs) if groups is None else groups
    text = render(runs, groups, time_to, baseline, within)
    with writing(f"--out {out}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    if png is not None:
        write_pngs(runs, Path(png), groups if several(groups) else None)
    if csv is not None:
        write_csvs(runs, Path(csv))
    return path


def render(
    runs: Sequence[Run],
    groups: Sequence[Group] | None = None,
    time_to: pl.DataFrame | None = None,
    baseline: str | None = None,
    within: Window | None = None,
) -> str:
    """The page as text; arguments as for :func:`write_report`. Everything that comes from an experiment is escaped."""
    cells = cell_names(runs)
    called = cells if len(cells) == len(runs) else [run.name for run in runs]
    names = labels(runs)
    named = list(zip(runs, names, strict=True))
    alone = len(runs) == 1
    return Template(_read("report.html")).substitute(
        title=escape(names[0] if alone else " · ".join(dict.fromkeys(called))),
        kicker=_kicker(runs),
        style=_read("report.css"),
        subtitle=_subtitle(runs),
        notices="".join(_notice(run, "" if alone else f" {escape(name)}") for run, name in named),
        figures=_cards(runs[0]) if alone else _table(named),
        times=_times(time_to, baseline),
        events="".join(_events(run, "" if alone else f"<h3>{escape(name)}</h3>") for run, name in named),
        sources="".join(_sources(run, name) for run, name in named),
        data=embed(page_data(runs, groups, within)),
        plotly=_plotly(),
        script=_read("report.js"),
    )


def embed(value: Any) -> str:
    """JSON that can stand inside ``<script type="application/json">``, whatever texts it holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def write_csvs(runs: Sequence[Run], place: Path) -> None:
    """Write the curves (a row per run, metric and point) and the recorded metrics of all runs."""
    named = [(run, pl.lit(label).alias("run")) for run, label in zip(runs, labels(runs), strict=True)]
    curves = pl.concat(run.curves.select(label, "metric", *AXES, *STATISTICS) for run, label in named)
    metrics = pl.concat([run.metrics.select(label, pl.all()) for run, label in named], how="diagonal_relaxed")
    whole = place.suffix == ".csv"
    path = place if whole else place / "curves.csv"
    with writing(f"--csv {place}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        curves.write_csv(path)
        metrics.write_csv(path.with_name(f"{path.stem}-metrics.csv" if whole else "metrics.csv"))


def write_time_to(rows: pl.DataFrame, page: Path) -> Path:
    """Write rows of :func:`gossamer.results.time_to.time_to` as a CSV file next to a page; gives its path."""
    path = page.with_name(f"{page.stem}-time-to.csv")
    with writing(str(path)):
        rows.write_csv(path)
    return path


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise BadInput("the report needs plotly: pip install 'gossamer[report]'") from error
    # Inside a script element, this is the only text that would end it.
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _kicker(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs compared"
    environment = runs[0].environment
    numerics = environment.get("resumed", [environment])[-1].get("numerics")
    where = "" if numerics is None else f" · {escape(summary_of_numerics(numerics))}"
    return f"run {escape(runs[0].id)} {_badge(runs[0])}{where}"


def _badge(run: Run) -> str:
    kind = "failed" if run.status == "failed" else "done" if run.outcome == "done" else "open"
    return f'<span class="badge {kind}">{escape(run.outcome)}</span>'


def _subtitle(runs: Sequence[Run]) -> str:
    """The components that all runs share, by name."""
    shared = []
    for key in _DESCRIBED:
        values = [run.experiment.get(key) or "" for run in runs]
        found = {str(value.get("name", "") if isinstance(value, dict) else value) for value in values}
        if len(found) == 1 and (name := found.pop()):
            shared.append(f"<span><b>{key}</b> {escape(name)}</span>")
    return "".join(shared)


def _notice(run: Run, of: str) -> str:
    """How a run ended, unless it is done, and which nodes were lost, came and went."""
    if run.status == "failed":
        cause = escape((run.error or "no cause was recorded").strip())
        return f'<div class="notice failed"><strong>Run{of} failed.</strong><pre>{cause}</pre></div>'
    notice = ""
    if run.status in _UNENDED:
        notice = f'<div class="notice"><strong>Run{of}</strong> {_UNENDED[run.status]}</div>'
    events = run.events.filter(pl.col("event").is_in(_COMINGS), pl.col("detail").is_not_null()).sort("time_s")
    if not run.lost and events.is_empty():
        return notice
    said = [
        row["detail"] if row["time_s"] is None else f"{row['time_s']:8.1f} s  {row['detail']}"
        for row in events.head(_MOST_NAMED).to_dicts()
    ]
    if len(events) > _MOST_NAMED:
        said.append(f"and {len(events) - _MOST_NAMED} more")
    title = f"<strong>Run{of}</strong>: nodes came and went."
    if run.lost:
        nodes = "node" if len(run.lost) == 1 else "nodes"
        title = f"<strong>Run{of} lost {nodes} {_named(run.lost)}</strong> and went on."
    return f'{notice}<div class="notice">{title}<pre>{escape(chr(10).join(said))}</pre></div>'


def _cards(run: Run) -> str:
    final, main = final_summary(run), main_metric(run)
    shown: list[tuple[str, str, str]] = []
    if main is not None and (value := final.metrics.get(main)) is not None:
        spread = f"std {value_text(main, value.std)} over {value.count} nodes" if value.count > 1 else ""
        if final.rounds is not None and value.round < final.rounds and run.status != "done":
            spread += f" in round {value.round:.4g}, the last complete evaluation"
        shown.append((f"final {metric_title(main)}", value_text(main, value.mean), spread))
        if (best := value.best) is not None:
            title = f"best {metric_title(main)}"
            shown.append((title, value_text(main, best.mean), f"mean, in round {best.round:.4g}"))
    shown += [(title, text, note) for title, (text, note) in _figures(run, final).items()]
    if (shares := run.link_shares) is not None:
        note = f"mean of those that carried anything, {100 * shares['max']:.3g} % of the busiest"
        shown.append(("use of inner links", f"{100 * shares['mean']:.3g} %", note))
    cards = "".join(
        f'<div class="card"><dt>{escape(title)}</dt><dd>{escape(text)}</dd><small>{escape(note)}</small></div>'
        for title, text, note in shown
    )
    return f'<dl class="cards">{cards}</dl>'


def _figures(run: Run, final: FinalSummary) -> dict[str, tuple[str, str]]:
    """Title -> (value, note) of everything that does not depend on the task."""
    behind = final.least_rounds is not None and final.least_rounds != final.rounds
    slowest = f", {final.least_rounds:,} of the slowest" if behind else ""
    return {
        "rounds": (count_text(final.rounds), f"of the furthest node{slowest}"),
        "time": (seconds_text(final.time_s), "virtual" if run.virtual else "real"),
        "wall time": (seconds_text(final.wall_s), "real"),
        "sent": (bytes_text(final.bytes_sent), "by all nodes"),
        "sent per node": (bytes_text(final.bytes_per_node), "mean"),
        "messages": (count_text(final.messages.get("sent")), faults_text(final.messages)),
        "nodes": (count_text(final.nodes), ""),
        "parameters": (count_text(final.parameters), "of each model" if final.parameters else "not recorded"),
    }


def _table(named: Sequence[tuple[Run, str]]) -> str:
    mains = list(dict.fromkeys(main for run, _ in named if (main := main_metric(run)) is not None))
    titles: list[str] = []
    rows = []
    for index, (run, name) in enumerate(named):
        final = final_summary(run)
        titles = list(_figures(run, final))
        rows.append(
            [
                f'<i class="key" data-run="{index}"></i>{escape(name)}',
                _badge(run),
                *(escape(text) for main in mains for text in _final_and_best(main, final.metrics.get(main))),
                *(escape(value) for value, _ in _figures(run, final).values()),
            ]
        )
    ends = [f"{which} {metric_title(main)}" for main in mains for which in ("final", "best")]
    return _html_table(["run", "status", *ends, *titles], rows, kind="runs")


def _final_and_best(name: str, value: Final | None) -> tuple[str, str]:
    if value is None:
        return NOTHING, NOTHING
    best = NOTHING
    if value.best is not None:
        best = f"{value_text(name, value.best.mean)} (round {value.best.round:.4g})"
    return f"{value_text(name, value.mean)}, std {value_text(name, value.std)}", best


def _times(rows: pl.DataFrame | None, baseline: str | None) -> str:
    if rows is None or rows.is_empty():
        return ""
    shown = "".join(
        f"<h3>{escape(title)}</h3>{_html_table(head, [map(escape, line) for line in lines], 'times')}"
        for title, head, lines in tables(rows, baseline)
    )
    said = f'<p class="note">{escape(note(baseline))}</p>'
    return f'<section id="time-to"><h2>Time to accuracy</h2>{shown}{said}</section>'


def _html_table(head: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    """A table of cells that are already HTML; the first of each row is its heading."""
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    table = f'<table class="{kind}"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _events(run: Run, caption: str) -> str:
    """A row for each kind of event."""
    if run.events.is_empty():
        return ""
    kinds = run.events.group_by("event", maintain_order=True).agg(
        pl.len().alias("count"),
        pl.col("node").drop_nulls().unique().sort(),
        pl.col("time_s").min().alias("first"),
        pl.col("time_s").max().alias("last"),
        pl.col("detail").drop_nulls().first(),
    )
    rows = []
    for event, count, nodes, first, last, detail in kinds.rows():
        times = seconds_text(first), seconds_text(last)
        rows.append((escape(event), count_text(count), _named(nodes), *times, escape(detail or "")))
    return caption + _html_table(("event", "count", "nodes", "first at", "last at", "for example"), rows)


def _named(nodes: Sequence[int]) -> str:
    text = ", ".join(map(str, nodes[:_MOST_NAMED]))
    return f"{text} and {len(nodes) - _MOST_NAMED} more" if len(nodes) > _MOST_NAMED else text


def _sources(run: Run, name: str) -> str:
    environment = json.dumps(run.environment, indent=1, ensure_ascii=False)
    return "".join(
        f"<details><summary>{escape(name)}: {title}</summary><pre>{escape(text)}</pre></details>"
        for title, text in (("experiment", run.experiment_text), ("environment", environment))
    )
