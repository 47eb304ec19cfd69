"use strict";
// Draws the page from the JSON in #data. All that can be changed is in `state`, which the address's fragment can set:
// #x=bytes&lines=0&band=1&log=1&together=1&run=0&colour=test_accuracy&own=1&point=3&hide=1,2

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const MOST_LINES = 100;
  const FRAME_MS = 250;
  const TOGGLES = ["band", "lines", "log", "together", "own"];
  const axes = data.axes.filter((axis) => data.runs.some((run) => run.points[axis.name]));
  const metricOf = Object.fromEntries(data.metrics.map((metric) => [metric.name, metric]));

  const state = {
    x: axes.length ? axes[0].name : "round",
    band: true,
    lines: data.runs.length === 1,
    log: false,
    together: data.together, // one line a group of runs, not one a run
    hidden: new Set(), // places in the legend: of runs, or of groups
    run: 0,
    colour: null,
    own: false, // the colour scale spans one moment instead of the whole run
    point: Infinity, // the last one
  };
  let timer = null;

  function readFragment() {
    const given = new URLSearchParams(location.hash.slice(1));
    if (axes.some((axis) => axis.name === given.get("x"))) state.x = given.get("x");
    for (const name of TOGGLES) if (given.has(name)) state[name] = given.get(name) === "1";
    if (given.has("run") && data.runs[Number(given.get("run"))]) state.run = Number(given.get("run"));
    if (metricOf[given.get("colour")]) state.colour = given.get("colour");
    if (given.has("point")) state.point = Number(given.get("point"));
    if (given.has("hide")) state.hidden = new Set(given.get("hide").split(",").filter(Boolean).map(Number));
  }

  // ---- words and colours

  function css(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function safe(text) {
    // plotly reads some HTML in its texts
    return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  function faded(colour, opacity) {
    const part = (start) => parseInt(colour.slice(start, start + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${opacity})`;
  }

  function format(metric, value) {
    if (value === null || value === undefined) return "–";
    return metric.share ? `${(100 * value).toFixed(1)} %` : String(Number(value.toPrecision(4)));
  }

  function place(axis, value) {
    if (value === null || value === undefined) return "–";
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    if (axis === "bytes") {
      const power = Math.min(units.length - 1, value < 1 ? 0 : Math.floor(Math.log10(value) / 3));
      return `${Number((value / 1000 ** power).toPrecision(3))} ${units[power]}`;
    }
    return axis === "round" ? `round ${Number(value.toFixed(1))}` : `${Number(value.toPrecision(4))} s`;
  }

  function layout(extra) {
    const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, automargin: true, ticks: "" };
    return {
      margin: { l: 56, r: 12, t: 30, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: css("--ink") },
      hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--ink") }, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--accent") },
      showlegend: false,
      hovermode: "closest",
      ...extra,
      xaxis: { ...axis, ...extra.xaxis },
      yaxis: { ...axis, ...extra.yaxis },
    };
  }

  const config = {
    responsive: true,
    displaylogo: false,
    // Named one by one, since plotly's own choice has buttons that hand the data to its maker's site.
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]],
    toImageButtonOptions: { format: "svg" },
  };

  // ---- curves

  /** Traces of one metric of one run: single nodes, spread, average model, mean. */
  function curves(run, metric) {
    const series = run.metrics[metric.name];
    const xs = run.points[state.x];
    if (!series || !xs) return [];
    const log = state.log && metric.low;
    const shown = (value) => value !== null && (!log || value > 0);
    // Points are not in the order of every axis: nodes of different pace end, in the mean, in a round long past.
    const placed = xs.map((_, i) => i).filter((i) => xs[i] !== null).sort((a, b) => xs[a] - xs[b]);
    const kept = placed.filter((i) => shown(series.mean[i]));
    const pick = (column) => kept.map((i) => column[i]);
    const lone = kept.length === 1;
    const traces = [];
    if (state.lines) traces.push(...nodeLines(run, metric));
    if (state.band && !lone) {
      const upper = kept.map((i) => series.mean[i] + series.std[i]);
      const lower = kept.map((i) => series.mean[i] - series.std[i]);
      const floor = log ? lower.map((v, i) => (v > 0 ? v : Math.max(series.min[kept[i]], series.mean[kept[i]] / 100))) : lower;
      traces.push({
        x: [...pick(xs), ...pick(xs).reverse()], y: [...upper, ...floor.reverse()], fill: "toself", mode: "lines",
        fillcolor: faded(run.colour, 0.16), line: { width: 0 }, hoverinfo: "skip",
      });
    }
    if (series.average) {
      traces.push({
        x: placed.map((i) => xs[i]), y: placed.map((i) => series.average[i]), mode: lone ? "markers" : "lines", connectgaps: true,
        line: { color: run.colour, width: 1.6, dash: "dash" }, marker: { color: run.colour, symbol: "diamond-open", size: 9 },
        text: placed.map((i) =>
          `${safe(run.label)}<br>average model: ${format(metric, series.average[i])}<br>${place(state.x, xs[i])}`),
        hovertemplate: "%{text}<extra></extra>",
      });
    }
    traces.push({
      x: pick(xs), y: pick(series.mean), mode: lone ? "markers" : "lines",
      line: { color: run.colour, width: 2.4 }, marker: { color: run.colour, size: 9 },
      error_y: lone && state.band ? { type: "data", array: pick(series.std), color: run.colour, thickness: 1.4 } : undefined,
      text: kept.map((i) => {
        const spread = series.count[i] > 1
          ? ` ± ${format(metric, series.std[i])}<br>from ${format(metric, series.min[i])} to ` +
            `${format(metric, series.max[i])} over ${series.count[i]} nodes` : "";
        return `<b>${safe(run.label)}</b><br>${format(metric, series.mean[i])}${spread}<br>${place(state.x, xs[i])}`;
      }),
      hovertemplate: "%{text}<extra></extra>",
    });
    return traces;
  }

  /** Traces of one metric of a group of runs: confidence interval and mean. */
  function groupCurves(group, metric) {
    const series = group.metrics[metric.name];
    const xs = series && series.points[state.x];
    if (!xs) return [];
    const log = state.log && metric.low;
    const kept = xs.map((_, i) => i)
      .filter((i) => xs[i] !== null && series.mean[i] !== null && (!log || series.mean[i] > 0)).sort((a, b) => xs[a] - xs[b]);
    const x = kept.map((i) => xs[i]);
    const mean = kept.map((i) => series.mean[i]);
    const half = kept.map((i) => series.half[i] || 0);
    const traces = [];
    if (state.band && group.runs > 1) {
      const lower = mean.map((v, i) => (log ? Math.max(v - half[i], v / 100) : v - half[i]));
      traces.push({
        x: [...x, ...[...x].reverse()], y: [...mean.map((v, i) => v + half[i]), ...lower.reverse()], fill: "toself", mode: "lines",
        fillcolor: faded(group.colour, 0.16), line: { width: 0 }, hoverinfo: "skip",
      });
    }
    traces.push({
      x, y: mean, mode: kept.length === 1 ? "markers" : "lines",
      line: { color: group.colour, width: 2.4 }, marker: { color: group.colour, size: 9 },
      text: kept.map((i, k) => {
        const spread = series.half[i] === null ? "" : ` ± ${format(metric, half[k])}`;
        return `<b>${safe(group.label)}</b><br>${format(metric, mean[k])}${spread} over ${series.count[i]} ` +
          `run${series.count[i] > 1 ? "s" : ""}<br>${place(state.x, x[k])}`;
      }),
      hovertemplate: "%{text}<extra></extra>",
    });
    return traces;
  }

  /** All single nodes as one trace with gaps, which is many times faster than a trace a node. */
  function nodeLines(run, metric) {
    const values = run.nodes.values[metric.name];
    if (!values || run.nodes.ranks.length < 2) return [];
    const stride = Math.ceil(values.length / MOST_LINES);
    const own = run.nodes.places[state.x];
    const shared = run.points[state.x];
    const trace = {
      x: [], y: [], text: [], mode: run.nodes.at.length === 1 ? "markers" : "lines", connectgaps: false,
      line: { color: faded(run.colour, 0.3), width: 0.8 },
      marker: { color: faded(run.colour, 0.4), size: 5 }, hovertemplate: "%{text}<extra></extra>",
    };
    for (let node = 0; node < values.length; node += stride) {
      run.nodes.at.forEach((point, k) => {
        const x = own ? own[node][k] : shared[point];
        if (values[node][k] === null || x === null) return;
        trace.x.push(x);
        trace.y.push(values[node][k]);
        trace.text.push(`node ${run.nodes.ranks[node]}: ${format(metric, values[node][k])}<br>${place(state.x, x)}`);
      });
      trace.x.push(null);
      trace.y.push(null);
      trace.text.push("");
    }
    return [trace];
  }

  /** What the legend names: runs, or groups of them. */
  function named() {
    return state.together ? data.groups : data.runs;
  }

  function drawn() {
    return named().filter((_, index) => !state.hidden.has(index));
  }

  /** The x axis from 0 to a little beyond the last point, so that lines end before the edge and the last tick shows. */
  function range() {
    const xs = state.together
      ? drawn().flatMap((group) => Object.values(group.metrics).flatMap((series) => series.points[state.x] || []))
      : drawn().flatMap((run) => [...(run.points[state.x] || []), ...(run.nodes.places[state.x] || []).flat()]);
    const last = xs.reduce((a, b) => Math.max(a, b), 0);
    return last > 0 ? { range: [0, 1.03 * last] } : { rangemode: "tozero" };
  }

  function drawCurves() {
    const title = data.axes.find((axis) => axis.name === state.x).title;
    return data.metrics.map((metric, index) => {
      const traces = drawn().flatMap((one) => (state.together ? groupCurves(one, metric) : curves(one, metric)));
      const log = state.log && metric.low;
      return Plotly.react(byId(`curve-${index}`), traces, layout({
        xaxis: {
          title: { text: title, standoff: 8 }, ...range(),
          ...(state.x === "bytes" ? { tickformat: "~s", ticksuffix: "B" } : {}),
        },
        yaxis: {
          type: log ? "log" : "linear", tickformat: metric.share ? ".2~%" : log ? "~g" : "", exponentformat: "power",
          ...(log ? { dtick: undefined, nticks: 6 } : {}),
          ...(metric.share ? { rangemode: "nonnegative" } : {}), // a share that is always 0 too
        },
      }), { ...config, toImageButtonOptions: { format: "svg", filename: `${metric.name}-${state.x}` } });
    });
  }

  // ---- the network at a moment

  function moment(run) {
    return Math.max(0, Math.min(Math.floor(state.point), run.nodes.at.length - 1)) || 0;
  }

  function colourMetric(run) {
    const names = data.metrics.map((metric) => metric.name).filter((name) => run.nodes.values[name]);
    return names.includes(state.colour) ? state.colour : names[0];
  }

  function drawTopology() {
    const run = data.runs[state.run];
    const graph = run.topology;
    if (!graph) return [];
    const k = moment(run);
    const name = colourMetric(run);
    const metric = metricOf[name];
    const values = name ? run.nodes.values[name].map((line) => line[k]) : graph.positions.map(() => null);
    const all = (name ? (state.own ? values : run.nodes.values[name].flat()) : []).filter((value) => value !== null);
    const low = all.reduce((a, b) => Math.min(a, b), Infinity);
    const high = all.reduce((a, b) => Math.max(a, b), -Infinity);
    const edges = graph.graphs[graph.held[k] || 0];
    const size = Math.max(6, Math.min(20, 130 / Math.sqrt(graph.positions.length)));
    const lines = { x: [], y: [] };
    for (let e = 0; e < edges.length; e += 2) {
      const [a, b] = [graph.positions[edges[e]], graph.positions[edges[e + 1]]];
      lines.x.push(a[0], b[0], null);
      lines.y.push(a[1], b[1], null);
    }
    const arrows = graph.directed && edges.length <= 1500;
    const traces = [{
      ...lines, mode: arrows ? "lines+markers" : "lines", hoverinfo: "skip",
      line: { color: css("--soft"), width: edges.length > 1200 ? 0.4 : 0.9 }, opacity: edges.length > 1200 ? 0.4 : 0.65,
      marker: {
        symbol: "arrow", angleref: "previous", standoff: size / 2, color: css("--soft"),
        size: arrows ? lines.x.map((_, i) => (i % 3 === 1 ? 8 : 0)) : 0,
      },
    }];
    const hover = graph.positions.map((_, i) => {
      const rank = run.nodes.ranks[i];
      const degree = graph.degrees ? `<br>${graph.degrees[i]} neighbours` : "";
      const samples = run.samples ? `<br>${run.samples[rank]} training samples` : "";
      const source = run.poisoned.includes(rank) ? ", poisoned" : "";
      return `<b>node ${rank}</b>${source}${name ? `<br>${metric.title}: ${format(metric, values[i])}` : ""}${degree}${samples}`;
    });
    const nodes = (keep, marker) => {
      const kept = graph.positions.map((_, i) => i).filter(keep);
      return {
        x: kept.map((i) => graph.positions[i][0]), y: kept.map((i) => graph.positions[i][1]), mode: "markers",
        text: kept.map((i) => hover[i]), hovertemplate: "%{text}<extra></extra>",
        marker: { size, opacity: 1, line: { color: css("--panel"), width: 1.5 }, ...marker },
      };
    };
    if (name) {
      traces.push(nodes((i) => values[i] !== null, {
        color: values.filter((value) => value !== null),
        colorscale: "Viridis", cmin: low, cmax: high > low ? high : low + 1e-9, reversescale: metric.low,
        colorbar: {
          title: { text: metric.title, side: "right" }, thickness: 12, outlinewidth: 0, len: 0.9,
          tickformat: metric.share ? ".2~%" : "",
        },
      }));
      traces.push(nodes((i) => values[i] === null, { color: css("--panel"), line: { color: css("--soft"), width: 1.5 } }));
    } else {
      traces.push(nodes(() => true, { color: run.colour }));
    }
    const poisoned = graph.positions.map((_, i) => run.poisoned.includes(run.nodes.ranks[i]));
    if (poisoned.includes(true)) {
      const ring = { color: data.ring, symbol: "circle-open", size: size + 6, line: { width: 2.5 } };
      traces.push({ ...nodes((i) => poisoned[i], ring), hovertemplate: null, hoverinfo: "skip" });
    }
    const bare = { visible: false, range: [-1.12, 1.12], fixedrange: true };
    const plot = Plotly.react(byId("topology"), traces, layout({
      margin: { l: 4, r: 4, t: 4, b: 4 }, xaxis: bare, yaxis: { ...bare, scaleanchor: "x" },
    }), { ...config, displayModeBar: false });
    const drawn = graph.positions.length;
    byId("topology-note").textContent = [
      drawn < graph.nodes ? `${drawn} of ${graph.nodes} nodes are drawn, those nearest to node ${run.nodes.start}.` : `${graph.nodes} nodes`,
      `${graph.edges[graph.held[k] || 0]} ${graph.directed ? "directed " : ""}edges` +
        (drawn === graph.nodes && edges.length / 2 < graph.edges[graph.held[k] || 0] ? `, ${edges.length / 2} of them drawn` : ""),
      graph.graphs.length > 1 ? "the graph changes with the slider" : "",
      poisoned.includes(true) ? "ringed: poisoned training data" : "",
      values.includes(null) && name ? "hollow: no value at this point" : "",
    ].filter(Boolean).join(" · ");
    return [plot];
  }

  function drawMoment() {
    const run = data.runs[state.run];
    const count = run.nodes.at.length;
    const k = moment(run);
    byId("slider-panel").hidden = count < 2;
    byId("slider").max = Math.max(0, count - 1);
    byId("slider").value = k;
    byId("moment").textContent = count
      ? ["round", "time_s"].filter((axis) => run.points[axis])
        .map((axis) => place(axis, run.points[axis][run.nodes.at[k]])).join(" · ")
      : "";
    document.body.dataset.point = String(k);
    return drawTopology();
  }

  function drawLabels() {
    const run = data.runs[state.run];
    const counts = run.labels;
    if (byId("labels-panel").hidden) return [];
    const nodeAxis = { title: { text: "node", standoff: 6 }, showgrid: false };
    if (!counts || !counts.length) {
      byId("labels-title").textContent = "Training samples of each node";
      byId("labels-note").textContent = "";
      const bars = { type: "bar", y: run.samples, marker: { color: run.colour }, hovertemplate: "node %{x}: %{y} samples<extra></extra>" };
      return [Plotly.react(byId("labels"), [bars], layout({ xaxis: nodeAxis, yaxis: { title: { text: "samples" } } }), config)];
    }
    const classes = counts[0].map((_, c) => (run.classes && run.classes[c] !== undefined ? String(run.classes[c]) : String(c)));
    const totals = counts.map((row) => row.reduce((a, b) => a + b, 0));
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const trace = {
      type: "heatmap", z: classes.map((_, c) => counts.map((row) => row[c])), y: classes.map((_, c) => c), xgap: counts.length > 120 ? 0 : 1,
      ygap: 1, hoverongaps: false,
      colorscale: [[0, dark ? "#232b34" : "#f3f6f9"], [0.5, dark ? "#2b77a8" : "#7fb6dc"], [1, dark ? "#a9dcff" : "#00446b"]],
      text: classes.map((label, c) => counts.map((row, node) =>
        `<b>node ${node}</b>, class ${safe(label)}<br>${row[c]} of ${totals[node]} samples` +
        (totals[node] ? ` (${(100 * row[c] / totals[node]).toFixed(0)} %)` : ""))),
      hovertemplate: "%{text}<extra></extra>",
      colorbar: { title: { text: "samples", side: "right" }, thickness: 12, outlinewidth: 0, len: 0.9 },
    };
    byId("labels-title").textContent = "Labels of each node";
    const sorted = [...totals].sort((a, b) => a - b);
    byId("labels-note").textContent =
      `Training samples of each class. Samples of a node: ${sorted[0]} at least, ${sorted[Math.floor(sorted.length / 2)]} in ` +
      `the median, ${sorted[sorted.length - 1]} at most.`;
    return [Plotly.react(byId("labels"), [trace], layout({
      xaxis: nodeAxis,
      yaxis: {
        title: { text: "class", standoff: 6 }, showgrid: false, autorange: "reversed",
        ...(classes.length <= 40 && { tickvals: classes.map((_, c) => c), ticktext: classes.map(safe) }),
      },
    }), config)];
  }

  /** A lane a node: what it computed above what it sent; it waited where there is nothing. */
  function drawTimeline() {
    const timeline = data.runs[state.run].timeline;
    if (!timeline) return [];
    const lane = Object.fromEntries(timeline.nodes.map((node, index) => [node, index]));
    const traces = Object.entries(timeline.kinds).map(([kind, rows]) => ({
      type: "bar", orientation: "h", width: 0.36, base: rows.start, x: rows.end.map((end, i) => end - rows.start[i]),
      y: rows.node.map((node) => lane[node] + (kind === "send" ? 0.19 : -0.19)),
      marker: { color: timeline.colours[kind], line: { color: css("--panel"), width: rows.node.length < timeline.edged ? 0.6 : 0 } },
      text: rows.node.map((node, i) => `<b>node ${node}</b>: ${kind}` +
        (rows.to ? ` to node ${rows.to[i]}, ${place("bytes", rows.bytes[i])}` : "") +
        `<br>${place("time_s", rows.start[i])} to ${place("time_s", rows.end[i])}`),
      textposition: "none", hovertemplate: "%{text}<extra></extra>",
    }));
    byId("timeline-key").replaceChildren(...Object.keys(timeline.kinds).map((kind) =>
      element("span", {}, key(timeline.colours[kind]), kind)));
    byId("timeline-note").textContent = "Above: what a node computes; below: what its uplink carries. It waits where there is neither." +
      (timeline.cut ? ` Only the first part is drawn, to ${place("time_s", timeline.to)}.` : "");
    byId("timeline").style.height = `${Math.max(180, 90 + 30 * timeline.nodes.length)}px`;
    return [Plotly.react(byId("timeline"), traces, layout({
      barmode: "overlay",
      xaxis: { title: { text: data.axes.find((axis) => axis.name === "time_s").title, standoff: 8 }, range: [timeline.from, timeline.to] },
      yaxis: {
        title: { text: "node", standoff: 6 }, showgrid: false, range: [timeline.nodes.length - 0.5, -0.5],
        tickvals: timeline.nodes.map((_, index) => index), ticktext: timeline.nodes.map(String),
      },
    }), { ...config, toImageButtonOptions: { format: "svg", filename: "timeline" } })];
  }

  // ---- controls

  function element(tag, properties, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  function key(colour) {
    const square = element("i", { className: "key" });
    square.style.background = colour;
    return square;
  }

  function build() {
    const words = { round: "rounds", time_s: data.virtual ? "virtual time" : "time", wall_s: "wall time", bytes: "bytes" };
    for (const axis of axes) {
      const button = element("button", { type: "button", textContent: words[axis.name] });
      button.dataset.x = axis.name;
      button.addEventListener("click", () => { state.x = axis.name; draw(); });
      byId("axis").append(button);
    }
    for (const name of TOGGLES) {
      byId(name).addEventListener("change", (event) => {
        state[name] = event.target.checked;
        if (name === "together") state.hidden.clear();
        draw();
      });
    }
    byId("together-choice").hidden = !data.groups.length;
    if (data.runs.length > 1) {
      data.runs.forEach((run, index) => byId("run").append(element("option", { value: String(index), textContent: run.label })));
      byId("run-choice").hidden = false;
    }
    document.querySelectorAll(".key[data-run]").forEach((square) => {
      square.style.background = data.runs[Number(square.dataset.run)].colour;
    });
    data.metrics.forEach((metric, index) => {
      byId("curves").append(element("figure", { className: "panel" },
        element("figcaption", {}, element("h3", { textContent: metric.title })),
        element("div", { id: `curve-${index}`, className: "plot" })));
    });
    byId("dashed").hidden = !data.runs.some((run) => Object.values(run.metrics).some((series) => series.average));
    byId("controls").hidden = data.metrics.length === 0;
    byId("run").addEventListener("change", (event) => { state.run = Number(event.target.value); draw(); });
    byId("colour").addEventListener("change", (event) => { state.colour = event.target.value; drawMoment(); });
    byId("slider").addEventListener("input", (event) => { stop(); state.point = Number(event.target.value); drawMoment(); });
    byId("play").addEventListener("click", () => (timer ? stop() : play()));
    window.addEventListener("hashchange", () => { readFragment(); draw(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  }

  function play() {
    const last = data.runs[state.run].nodes.at.length - 1;
    if (moment(data.runs[state.run]) >= last) state.point = -1;
    byId("play").textContent = "❚❚";
    timer = setInterval(() => {
      state.point = Math.min(state.point + 1, last);
      drawMoment();
      if (state.point >= last) stop();
    }, FRAME_MS);
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    byId("play").textContent = "▶";
  }

  function showLegend() {
    const buttons = named().map((one, index) => {
      const button = element("button", { type: "button", title: "show or hide" }, key(one.colour), one.label);
      button.setAttribute("aria-pressed", String(!state.hidden.has(index)));
      button.addEventListener("click", () => {
        if (!state.hidden.delete(index)) state.hidden.add(index);
        draw();
      });
      return button;
    });
    byId("legend").replaceChildren(...(data.runs.length > 1 ? buttons : []));
  }

  /** Make the controls say what the state is. */
  function showState() {
    document.body.dataset.x = state.x;
    showLegend();
    byId("caption").hidden = data.metrics.length === 0 || state.together;
    byId("caption-together").hidden = data.metrics.length === 0 || !state.together;
    for (const button of byId("axis").children) button.setAttribute("aria-pressed", String(button.dataset.x === state.x));
    for (const name of TOGGLES) byId(name).checked = state[name];
    byId("run").value = String(state.run);
    const run = data.runs[state.run];
    byId("colour").replaceChildren(...data.metrics.filter((metric) => run.nodes.values[metric.name])
      .map((metric) => element("option", { value: metric.name, textContent: metric.title })));
    byId("colour").value = colourMetric(run) || "";
    byId("colour-choice").hidden = !colourMetric(run);
    // Panels share the width, so all are shown before one is drawn.
    byId("topology-panel").hidden = !run.topology;
    byId("labels-panel").hidden = !(run.labels && run.labels.length) && !(run.samples && run.samples.length);
    byId("timeline-panel").hidden = !run.timeline;
    byId("network").hidden = !data.runs.some((one) => one.topology || one.labels || one.samples || one.timeline);
  }

  function draw() {
    showState();
    const plots = [...(data.metrics.length ? drawCurves() : []), ...drawMoment(), ...drawLabels(), ...drawTimeline()];
    return Promise.all(plots).then(() => { document.body.dataset.drawn = String(plots.length); });
  }

  readFragment();
  build();
  draw();
})();
