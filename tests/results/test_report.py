from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import gossamer
from gossamer.errors import BadInput
from gossamer.results.comparison import compare, quantity
from gossamer.results.folder import RunFolder
from gossamer.results.groups import find_baseline, groups
from gossamer.results.report import MAX_NODE_POINTS, embed, page_data, render, write_comparison, write_report
from gossamer.results.run import Run
from synthetic_run import synthetic, timed

CHROMIUM = shutil.which("chromium")
browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def data_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    result: dict[str, Any] = json.loads(match.group(1))
    return result


def opened(page: Path, folder: Path, fragment: str = "") -> str:
    """The DOM of the page after its script has run."""
    assert CHROMIUM is not None
    flags = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    )
    profile = folder / "profile"
    done = subprocess.run(
        [
            *(CHROMIUM, *flags, f"--user-data-dir={profile}", "--virtual-time-budget=20000", "--dump-dom"),
            f"{page.as_uri()}{fragment}",
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    shutil.rmtree(profile)
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


def body(dom: str) -> dict[str, str]:
    tag = re.search(r"<body([^>]*)>", dom)
    assert tag is not None
    return dict(re.findall(r'data-(\w+)="([^"]*)"', tag.group(1)))


def curve_path(dom: str) -> str:
    """The path of the mean in the first chart, its last line."""
    chart = dom[dom.index('id="curve-0"') : dom.index('id="curve-1"')]
    return str(re.findall(r'class="line" d="([^"]*)"', chart)[-1])


def axis_titles(dom: str) -> set[str]:
    return set(re.findall(r'<text class="xtitle"[^>]*>([^<]*)', dom))


def node_colours(dom: str) -> list[str]:
    panel = dom[dom.index('id="topology"') : dom.index('id="slider-panel"')]
    return re.findall(r'class="node-mark"[^>]*fill="(rgb\([^)]*\))', panel)


def test_page_shows_key_figures(tmp_path: Path) -> None:
    run = synthetic(tmp_path, nodes=4, rounds=(0, 50), bytes_a_round=10_000, lost=(2,))
    page = render([run])
    shown = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert shown["rounds"] == "50"
    # By last rows: three nodes of 50 rounds; the fourth was lost in round 0, or later.
    assert shown["sent"] == "at least 1.5 MB"
    assert shown["sent per node"] == "at least 375 kB"
    assert shown["time"] == "3.05 s"
    assert shown["parameters"] == "50"
    final = run.metrics.filter((pl.col("node") >= 0) & (pl.col("round") == 50))["test_accuracy"]
    assert shown["final test accuracy"] == f"{100 * sum(final) / 3:.1f} %"
    assert "Run lost node 2</strong> and went on." in page
    assert "<td>no heartbeat for 5 s</td>" in page
    assert '<span class="badge open">done, 1 node lost</span>' in page


def test_page_shows_fates_of_messages(tmp_path: Path) -> None:
    """The engine's counts are a breakdown that adds up."""
    run = timed(tmp_path, [(0.0, (0.1, 0.2))])
    counts = {"sent": 1000, "received": 700, "lost": 250, "in_flight": 50, "unsent": 144, "cancelled": 3}
    used = {"taken": 590, "late": 5, "superseded": 100, "refused": 2, "unread": 3}
    counted = {f"messages_{fate}": count for fate, count in (counts | used).items()}
    both = {
        "bytes_sent": 10**6,
        "bytes_received": 7 * 10**5,
        "time_s": 1.0,
        "rounds_most": 7,
        "rounds_least": 4,
    }
    RunFolder.open(run.path).write_status("done", totals={**counted, **both, "exact": True})
    page = render([Run(run.path)])
    cards = dict(re.findall(r'<dt>(.*?)</dt><dd>.*?</dd><dd class="small">(.*?)</dd>', page))
    received = "700 received (590 taken, 5 late, 100 superseded, 2 refused, 3 unread)"
    assert cards["messages"] == f"sent: {received}, 250 lost, 50 in flight; 3 cancelled, 144 unsent"
    assert sum(used.values()) == 700
    assert cards["rounds"] == "of the furthest node, 4 of the slowest"
    assert "<dt>messages</dt><dd>1,000</dd>" in page
    assert "<dt>sent</dt><dd>1 MB</dd>" in page


def test_page_of_a_record_without_totals_says_at_least(tmp_path: Path) -> None:
    run = timed(tmp_path, [(0.0, (0.1, 0.2))])
    counters = {"received": 700, "lost": 250, "late": 5, "superseded": 100, "cancelled": 250}
    with RunFolder.open(run.path).segment("metrics") as metrics:
        for node, rounds in ((0, 7), (1, 4)):
            row = {"node": node, "round": rounds, "time_s": 1.0, "messages_sent": 1000 * node}
            metrics.append(row | {f"messages_{fate}": count * node for fate, count in counters.items()})
    page = render([Run(run.path)])
    cards = dict(re.findall(r'<dt>(.*?)</dt><dd>.*?</dd><dd class="small">(.*?)</dd>', page))
    on_record = "700 received (5 late, 100 superseded), 250 lost, 250 cancelled"
    assert cards["messages"] == f"sent; on record are {on_record}"
    assert cards["rounds"] == "of the furthest node, 4 of the slowest; 1 of 7 on record"
    assert "<dt>messages</dt><dd>at least 1,000</dd>" in page


def test_killed_run_is_shown_up_to_last_complete_evaluation(tmp_path: Path) -> None:
    run = synthetic(tmp_path, nodes=3, rounds=(0, 10, 20), status=None)
    segment = run.path / "segments" / "metrics-0.jsonl"
    lines = segment.read_text().splitlines(keepends=True)
    segment.write_text("".join(lines[:-2]))  # the last node's row and the network's
    page = render([Run(run.path)])
    assert (
        "over 3 nodes, rounds 10 to 20" in page
    )  # the newest rows: those of the saved models, if there were any
    assert "<dt>parameters</dt><dd>50</dd>" in page


def test_page_loads_nothing_from_the_network(tmp_path: Path) -> None:
    page = render([synthetic(tmp_path, nodes=3, rounds=(0, 10))])
    assert "default-src 'none'" in page  # the browser refuses all other sources
    assert not re.search(
        r"<(link|img|iframe|base)\b[^>]*(href|src)=",
        re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL),
    )
    assert not re.search(r"<script[^>]*\bsrc=", page)


def test_experiment_texts_are_escaped(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>&\u2028"
    run = synthetic(
        tmp_path,
        nodes=2,
        rounds=(0, 10),
        status="failed",
        error=evil,
        experiment={"algorithm": {"name": evil}, "seed": 1},
    )
    (run.path / "experiment.yaml").write_text(json.dumps({**run.experiment, "name": evil}))
    page = render([Run(run.path)])
    assert "<img" not in page
    assert page.count("<script") == page.count("</script") == 3
    assert data_of(page)["runs"][0]["label"] == f"{evil} (failed)"
    assert json.loads(embed({"a": evil})) == {"a": evil}


def test_page_data_matches_recorded_values(tmp_path: Path) -> None:
    run = synthetic(tmp_path, nodes=3, rounds=(0, 10, 20), asynchronous=True)
    [data] = page_data([run])["runs"]
    assert data["metrics"]["test_accuracy"]["steps"]["time_s"] == [0, 5, 10]
    rounds = run.metrics.filter(pl.col("node") >= 0, pl.col("time_s") == 10)["round"]
    assert data["points"]["text"][2] == f"rounds {rounds.min()} to {rounds.max()} · 10 s"
    for node in range(3):
        recorded = run.metrics.filter(pl.col("node") == node)["test_accuracy"].to_list()
        assert data["nodes"]["values"]["test_accuracy"][node] == pytest.approx(recorded, rel=1e-3)
    assert data["nodes"]["places"]["round"][0] == run.metrics.filter(pl.col("node") == 0)["round"].to_list()
    assert data["labels"] == run.setup["labels"]


def test_rounding_noise_is_not_shown_as_spread(tmp_path: Path) -> None:
    """A chart would show the rounding errors of floats."""
    run = synthetic(tmp_path, nodes=3, rounds=(0, 10))
    noise = run.metrics.with_columns(test_loss=0.8 + 2e-16 * pl.col("node"))
    run.__dict__["metrics"] = noise
    assert noise.filter(pl.col("node") >= 0)["test_loss"].n_unique() == 3
    [data] = page_data([run])["runs"]
    for kind in ("points", "steps"):
        assert data["metrics"]["test_loss"][kind]["std"] == [0, 0]
        assert all(data["metrics"]["test_accuracy"][kind]["std"])


def test_each_point_shows_the_graph_of_its_round(tmp_path: Path) -> None:
    run = synthetic(tmp_path, nodes=8, rounds=(0, 10, 20), changing=True)
    [data] = page_data([run])["runs"]
    for flat, r in zip(data["topology"]["graphs"], ("0", "10", "20"), strict=True):
        assert list(zip(flat[::2], flat[1::2], strict=True)) == [
            tuple(edge) for edge in run.setup["graphs"][r]
        ]


def test_long_runs_are_thinned_only_for_single_nodes(tmp_path: Path) -> None:
    run = synthetic(tmp_path, nodes=2, rounds=range(301))
    [data] = page_data([run])["runs"]
    assert len(data["metrics"]["test_loss"]["points"]["mean"]) == 301
    assert len(data["nodes"]["at"]) == MAX_NODE_POINTS
    assert data["nodes"]["at"][0] == 0
    assert data["nodes"]["at"][-1] == 300


def test_page_needs_writable_path_but_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = synthetic(tmp_path, nodes=1, rounds=(0,))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"--out .*file/report"):
        write_report([run], tmp_path / "file" / "report.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_report([run], tmp_path / "r.html")  # a plain install can write a page


UNUSUAL: dict[str, dict[str, Any]] = {
    "one evaluation": {"rounds": (0,)},
    "one node": {"nodes": 1},
    "no test metric": {"tested": False},
    "no labels": {"labelled": False},
    "failed": {"rounds": (0,), "status": "failed", "error": "node 2: loss is nan"},
    "lost nodes": {"lost": (0, 1), "directed": True},
    "killed": {"status": None},
    "large": {"nodes": 320, "rounds": (0, 10)},
    "no rows": {"rounds": (0,), "status": None},
}


@pytest.fixture(scope="module")
def unusual(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    out = tmp_path_factory.mktemp("unusual")
    runs = []
    for name, options in UNUSUAL.items():
        run = synthetic(out, **{"name": name, "nodes": 6, "rounds": (0, 10, 20), **options})
        if name == "no rows":
            shutil.rmtree(run.path / "segments")
            (run.path / "setup.json").unlink()
        runs.append(Run(run.path))
    return runs


def test_unusual_runs_have_a_page(unusual: list[Run]) -> None:
    for run in unusual:
        assert data_of(render([run]))["runs"][0]["label"] == run.title
    assert len({entry["label"] for entry in page_data(unusual)["runs"]}) == len(UNUSUAL)


def test_spread_of_many_nodes_is_shown_by_quantiles(tmp_path: Path) -> None:
    run = synthetic(tmp_path, nodes=24, rounds=(0, 10))
    [data] = page_data([run])["runs"]
    assert data["quantiles"]
    values = run.metrics.filter(pl.col("node") >= 0, pl.col("round") == 10)["test_loss"]
    for kind in ("points", "steps"):
        quantiles = [series[1] for series in data["metrics"]["test_loss"][kind]["quantiles"]]
        assert quantiles == pytest.approx(np.quantile(values, [0.05, 0.25, 0.75, 0.95]), rel=1e-4)
    assert "the middle 50 % and 90 % of the nodes" in render([run])
    assert "± one standard deviation" in render([synthetic(tmp_path, nodes=20, rounds=(0, 10))])


def test_mean_over_only_fast_nodes_is_not_drawn(tmp_path: Path) -> None:
    run = synthetic(tmp_path, nodes=3, rounds=(0, 10, 20), lost=())
    ahead = run.metrics.filter((pl.col("round") < 20) | (pl.col("node") == 0))
    run.__dict__["metrics"] = ahead
    [data] = page_data([run])["runs"]
    assert [mean is None for mean in data["metrics"]["test_loss"]["points"]["mean"]] == [False, False, True]


def test_default_axis_suits_all_runs(tmp_path: Path) -> None:
    plain = synthetic(tmp_path, nodes=2, rounds=(0, 10))
    own_pace = synthetic(tmp_path, nodes=2, rounds=(0, 10), asynchronous=True)
    assert [page_data(runs)["axis"] for runs in ([plain], [plain, own_pace])] == ["round", "time_s"]


@pytest.mark.slow
def test_page_of_many_runs_is_under_a_megabyte(tmp_path: Path) -> None:
    runs = [synthetic(tmp_path, nodes=40, rounds=range(120), seed=seed, changing=True) for seed in range(6)]
    assert len(render(runs).encode()) < 1_000_000


def test_differing_fields_of_runs_are_listed(tmp_path: Path) -> None:
    page = render(compared(tmp_path))
    [table] = re.findall(r'<table class="differing">(.*?)</table>', page, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in table.split("<tr>")[1:]]
    assert cells == [["field", "batch_size 8", "batch_size 16"], ["batch_size", "8", "16"]]
    assert page.count("<summary>experiment of") == 1


@browser
def test_charts_are_drawn_and_controls_change_them(tmp_path: Path) -> None:
    runs = [synthetic(tmp_path, seed=seed, rate=0.02 * seed, rounds=(0, 5, 40, 80)) for seed in (1, 2)]
    page = write_report(runs, tmp_path / "report.html")
    plain = opened(page, tmp_path)
    assert body(plain) == {"x": "round", "point": "3", "drawn": "6"}
    assert plain.count('class="plot"><svg role="img"') == 4  # and two tall charts
    assert 'id="slider" min="0" value="0" step="1" aria-label="Evaluation" max="3"' in plain
    assert re.findall(r'data-x="(\w+)" aria-pressed="(\w+)"', plain) == [
        ("round", "true"),
        ("time_s", "false"),
        ("wall_s", "false"),
        ("bytes", "false"),
    ]
    changed = opened(page, tmp_path, "#x=bytes&point=0&hide=1&run=1&log=1")
    assert body(changed) == {"x": "bytes", "point": "0", "drawn": "6"}
    assert axis_titles(plain) == {"round", "node"}
    chart = plain[plain.index('id="curve-0"') : plain.index('id="curve-1"')]
    assert re.findall(r'class="xtick"[^>]*>([^<]*)', chart)[-1] == "80"  # the last evaluation's round
    assert '<span id="dashed">' in plain
    assert axis_titles(changed) == {"sent by all nodes / bytes", "node"}
    assert curve_path(plain) != curve_path(changed)
    assert len(node_colours(plain)) == len(node_colours(changed)) == 16
    assert node_colours(plain) != node_colours(changed)


@browser
def test_nodes_are_coloured_by_metric_and_poisoned_ones_ringed(tmp_path: Path) -> None:
    run = synthetic(tmp_path, rounds=(0, 20, 40), poisoned=(3, 5))
    page = write_report([run], tmp_path / "report.html")
    [data] = page_data([run])["runs"]
    assert data["rings"] == [{"label": "patch (poison.0)", "ranks": [3, 5], "colour": 1}]
    shown = opened(page, tmp_path, "#colour=ood_accuracy&point=1")
    panel = shown[shown.index('id="topology"') : shown.index('id="topology-note"')]
    assert panel.count('class="ring"') == 2
    assert "ood accuracy" in panel
    assert 'ringed: <span style="color: var(--c1)">patch (poison.0)</span>' in shown
    assert node_colours(shown) != node_colours(opened(page, tmp_path, "#colour=test_accuracy&point=1"))
    assert "error" not in body(shown)


def test_a_large_poisoned_graph_is_drawn_around_its_source(tmp_path: Path) -> None:
    run = synthetic(tmp_path, nodes=320, rounds=(0,), poisoned=(319,))
    [data] = page_data([run])["runs"]
    near = {end for edge in run.setup["graphs"]["0"] if 319 in edge for end in edge}
    assert near <= set(data["nodes"]["ranks"])
    assert data["nodes"]["start"] == 319


@browser
def test_unusual_runs_are_drawn_without_an_error(unusual: list[Run], tmp_path: Path) -> None:
    together = write_report(unusual, tmp_path / "together.html")
    state = body(opened(together, tmp_path, "#lines=1&log=1&own=1&x=time_s"))
    assert state["drawn"] == "6"
    assert not {"error", "blocked"} & state.keys()
    for name in ("one node", "no rows"):
        run = next(run for run in unusual if run.name == name)
        state = body(opened(write_report([run], tmp_path / "alone.html"), tmp_path))
        assert "drawn" in state, name
        assert not {"error", "blocked"} & state.keys(), (name, state)


@browser
def test_caption_omits_average_model_that_is_not_drawn(tmp_path: Path) -> None:
    run = synthetic(tmp_path, nodes=2, rounds=(0, 10), tested=False)
    assert '<span id="dashed" hidden="">' in opened(write_report([run], tmp_path / "r.html"), tmp_path)


def compared(out: Path) -> list[Run]:
    """Two groups of three seeds; the second reaches its level later."""
    return [
        timed(
            out,
            [(0.0, (0.1, 0.2)), (1.0, (0.5, 0.6 * skill)), (2.0, (0.9, 0.8))],
            seed=seed,
            batch_size=size,
            evaluation={"every_rounds": 1},
        )
        for size, skill in ((8, 1.0), (16, 0.5))
        for seed in (1, 2, 3)
    ]


def test_the_page_compares_groups_of_seeds(tmp_path: Path) -> None:
    runs = compared(tmp_path)
    both = groups(runs)
    page = render(
        runs,
        both,
        compare(
            both,
            [quantity("time_s to test_accuracy=0.5"), quantity("bytes to test_accuracy=0.5")],
            find_baseline("batch_size 16", both),
        ),
    )
    [table] = re.findall(r'<table class="times">(.*?)</table>', page, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in table.split("<tr>")[1:]]
    assert cells == [
        ["group", "runs", "seeds", "pairs", "time", "difference", "ratio", "sent", "difference", "ratio"],
        [
            *("batch_size 8", "3/3", "3", "3", "1 ± 0 s", "-1 ± 0 s", "0.5 ± 0"),
            "200 ± 0 B",
            "-200 ± 0 B",
            "0.5 ± 0",
        ],
        ["batch_size 16", "3/3", "3", "–", "2 ± 0 s", "–", "–", "400 ± 0 B", "–", "–"],
    ]
    assert "<h3>test accuracy ≥ 50 %, against batch_size 16</h3>" in page
    assert page.index('id="comparison"') < page.index('id="controls"')
    data = data_of(page)
    assert data["together"]
    first, second = data["groups"]
    assert (first["label"], first["members"], second["label"]) == ("batch_size 8", [], "batch_size 16")
    curves = first["metrics"]["test_accuracy"]
    places = {"round": [0, 1, 2], "time_s": [0, 1, 2], "bytes": [0, 200, 400]}
    assert {axis: curve["x"] for axis, curve in curves.items()} == places  # no wall time is recorded
    for curve in curves.values():
        assert curve["mean"] == pytest.approx([0.15, 0.55, 0.85])
        assert curve["half"] == pytest.approx([0, 0, 0])
    colours = [run["colour"] for run in data["runs"]]
    assert colours == [first["colour"]] * 3 + [second["colour"]] * 3
    assert 'id="comparison"' not in render(runs)
    alone = data_of(render(runs[:3]))
    assert (len(alone["groups"]), alone["together"]) == (1, False)
    assert data_of(render(runs[::3]))["groups"] == []


def test_comparison_table_is_written_next_to_page(tmp_path: Path) -> None:
    rows = compare(
        groups(compared(tmp_path)),
        [quantity("time_s to test_accuracy=0.5"), quantity("bytes to test_accuracy=0.5")],
    )
    path = write_comparison(rows, tmp_path / "page.html")
    assert path == tmp_path / "page-comparison.csv"
    assert pl.read_csv(path)["mean"].to_list() == [1.0, 2.0, 200.0, 400.0]
    with pytest.raises(BadInput, match="page-comparison.csv"):
        write_comparison(rows, tmp_path / "none" / "page.html")


@browser
def test_groups_and_timelines_are_drawn(tmp_path: Path) -> None:
    runs = compared(tmp_path)
    window = {"every_rounds": 1, "timeline": {"from_s": 0.0, "to_s": 2.0, "nodes": 2}}
    runs.append(timed(tmp_path, [(0.0, (0.1, 0.2)), (2.0, (0.5, 0.6))], evaluation=window))
    with RunFolder.open(runs[-1].path).segment("timeline") as segment:
        for start_s in (0.0, 0.5):
            segment.append({"node": 0, "kind": "train", "start_s": start_s, "end_s": start_s + 0.5})
        segment.append({"node": 1, "kind": "send", "start_s": 0.5, "end_s": 1.0, "to": 0, "bytes": 10})
    page = write_report([Run(run.path) for run in runs], tmp_path / "report.html")
    together = opened(page, tmp_path, "#x=time_s")
    legend = together[together.index('id="legend"') : together.index('id="curves"')]
    assert re.findall(r"</i>([^<]*)</button>", legend) == ["batch_size 8", "batch_size 16", "batch_size –"]
    assert not {"error", "blocked"} & body(together).keys()
    chart = together[together.index('id="curve-0"') :]
    assert (
        len(re.findall(r'class="line" d="M', chart)),
        len(re.findall(r'class="band" d="M', chart)),
    ) == (3, 2)  # bands where there are several seeds
    apart = opened(page, tmp_path, "#x=time_s&together=0&run=6")
    panel = apart[apart.index('id="timeline-panel"') : apart.index('id="events"')]
    assert 'hidden=""' not in panel[: panel.index(">")]
    paths = re.findall(r'class="interval"[^>]* d="([^"]*)"', panel)
    assert [path.count("M") for path in paths] == [2, 1]
    assert re.findall(r"</i>(\w+)</span>", panel) == ["train", "send"]
    assert not {"error", "blocked"} & body(apart).keys()


def test_a_topology_that_is_not_used_is_not_drawn(tmp_path: Path) -> None:
    def played(algorithm: Any) -> Run:
        experiment = {
            "nodes": 6,
            "task": {"name": "least-squares", "features": 3, "samples": 30},
            "topology": "ring",
            "algorithm": algorithm,
            "stop": {"rounds": 2},
            "engine": {"name": "simulate", "trainer": "sequential"},
        }
        return gossamer.run(gossamer.Experiment.of(experiment), tmp_path)

    epidemic, ring, swift = map(played, ({"name": "epidemic-local", "degree": 2}, "d-psgd", "swift"))
    [unused] = page_data([epidemic])["runs"]
    assert unused["topology"]["graphs"] == [[]]
    assert not unused["topology"]["used"]
    text = (
        "epidemic-local does not use the topology ring; it mixes along: new random recipients in every round"
    )
    assert unused["topology"]["mixing"] == text
    assert "<b>topology</b> ring (not used)" in render([epidemic])
    used = page_data([ring, swift])["runs"]
    assert [run["topology"]["edges"] for run in used] == [[6], [6]]
    assert [run["topology"]["mixing"] for run in used] == [
        "graph: the topology · weights: topology.weights",
        "graph: the topology · weights: ccs",
    ]
    assert "<b>topology</b> ring</span>" in render([ring, epidemic])  # one of them uses it


def test_a_compute_profile_is_marked_where_real_steps_take_their_time(tmp_path: Path) -> None:
    for number, (engine, mark) in enumerate(
        [
            ({"name": "processes", "pace": False}, " (not used)"),
            ({"name": "processes", "pace": True}, ""),
            ({"name": "simulate"}, ""),
        ]
    ):
        run = synthetic(
            tmp_path / str(number), experiment={"engine": engine, "compute": {"name": "constant"}}
        )
        assert f"<b>compute</b> constant{mark}</span>" in render([run])


def test_a_record_without_mixing_is_drawn_as_before(tmp_path: Path) -> None:
    run = synthetic(tmp_path)
    [data] = page_data([run])["runs"]
    assert data["topology"]["used"]
    assert data["topology"]["mixing"] == ""
    assert len(data["topology"]["graphs"][0]) == 2 * len(run.setup["graphs"]["0"])
