"use strict";
// Draws the page as SVG from the JSON in #data. Everything that can change is in `state`, which the URL fragment can set:
// #x=bytes&lines=0&band=1&log=1&together=1&run=0&colour=test_accuracy&own=1&point=3&hide=1,2

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const FRAME_MS = 250;
  const REACH = 40; // maximum distance in pixels at which the pointer selects a point
  const TOGGLES = ["band", "lines", "log", "together", "own"];
  const axes = data.axes;
  const metricOf = Object.fromEntries(data.metrics.map((metric) => [metric.name, metric]));
  const VIRIDIS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];

  const state = {
    x: axes.some((axis) => axis.name === data.axis) ? data.axis : axes.length ? axes[0].name : "round",
    band: true,
    lines: data.runs.length === 1 && !data.runs[0].quantiles,
    log: false,
    together: data.together, // one line per group of runs instead of one per run
    hidden: new Set(), // positions of runs or groups in the legend
    run: 0,
    colour: null,
    own: false, // whether the colour scale spans one evaluation instead of the whole run
    point: Infinity, // the last one
    zoom: null, // the visible part of the horizontal axis of all curves
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

  // ---- words and numbers

  function safe(text) {
    return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");
  }

  function format(metric, value) {
    if (value === null || value === undefined) return "–";
    return metric.share ? `${(100 * value).toFixed(1)} %` : String(Number(value.toPrecision(4)));
  }

  function axisText(axis, value) {
    if (value === null || value === undefined) return "–";
    if (axis === "bytes") return bytes(value);
    if (axis === "round") return Number.isInteger(value) ? `round ${value}` : `round ${value.toFixed(1)} on average`;
    return `${Number(value.toPrecision(4))} s`;
  }

  function bytes(value) {
    const power = Math.min(5, value < 1 ? 0 : Math.floor(Math.log10(value) / 3));
    return `${Number((value / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB", "PB"][power]}`;
  }

  const plain = (value) => String(Number(value.toPrecision(6)));
  const colourOf = (item) => `var(--c${item.colour})`; // of a run, a group or a ring
  const minimum = (values) => values.reduce((a, b) => Math.min(a, b), Infinity); // Math.min(...values) fails for long arrays
  const maximum = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

  // ---- charts

  /** About `count` round numbers from low to high; powers of ten on a logarithmic axis. */
  function ticks(low, high, count, log) {
    if (log) {
      const powers = [];
      for (let e = Math.ceil(Math.log10(low) - 1e-9); e <= Math.log10(high) + 1e-9; e++) powers.push(10 ** e);
      if (powers.length > 1) return powers.filter((_, i) => i % Math.ceil(powers.length / count) === 0);
    }
    const rough = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const values = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) values.push(k * step);
    return values;
  }

  /**
   * Draws a chart. An axis has `low`, `high` and `title`, and may have `log`, `format` and `ticks` (pairs [value, text]).
   * `inside(px, py)` returns the marks; the pointer can select the `points` ({x, y, text}).
   */
  function chart(id, label, xAxis, yAxis, inside, points) {
    const panel = byId(id);
    const [width, height] = [panel.clientWidth || 480, panel.clientHeight || 300];
    const box = { left: yAxis.wide || 58, right: width - 14, top: 10, bottom: height - 42 };
    const along = (axis, from, to) => {
      const at = axis.log ? Math.log10 : (value) => value;
      const span = at(axis.high) - at(axis.low) || 1;
      return (value) => Number((from + (to - from) * (at(value) - at(axis.low)) / span).toFixed(1));
    };
    const [px, py] = [along(xAxis, box.left, box.right), along(yAxis, box.bottom, box.top)];
    const marked = (axis, count) => axis.ticks ||
      ticks(axis.low, axis.high, count, axis.log).map((value) => [value, (axis.format || plain)(value)]);
    const grid = marked(yAxis, Math.max(3, height / 60)).map(([value, text]) =>
      `<path class="grid" d="M${box.left} ${py(value)}H${box.right}"/>` +
      `<text class="ytick" x="${box.left - 7}" y="${py(value) + 4}" text-anchor="end">${safe(text)}</text>`);
    const below = marked(xAxis, Math.max(2, width / 90)).map(([value, text]) =>
      `<text class="xtick" x="${px(value)}" y="${box.bottom + 17}" text-anchor="middle">${safe(text)}</text>`);
    panel.innerHTML = `<svg role="img" aria-label="${safe(label)}" width="${width}" height="${height}">` +
      `<clipPath id="${id}-clip"><rect x="${box.left}" y="${box.top - 4}" width="${Math.max(0, box.right - box.left + 4)}" ` +
      `height="${Math.max(0, box.bottom - box.top + 8)}"/></clipPath>${grid.join("")}${below.join("")}` +
      `<path class="base" d="M${box.left} ${box.bottom}H${box.right}"/>` +
      `<text class="xtitle" x="${(box.left + box.right) / 2}" y="${height - 6}" text-anchor="middle">${safe(xAxis.title)}</text>` +
      (yAxis.title ? `<text class="ytitle" transform="translate(13 ${(box.top + box.bottom) / 2}) rotate(-90)" ` +
        `text-anchor="middle">${safe(yAxis.title)}</text>` : "") +
      `<g clip-path="url(#${id}-clip)">${inside(px, py, box)}</g><circle class="nearest" r="5" visibility="hidden"/></svg>`;
    panel.points = points.map((point) => ({ ...point, x: px(point.x), y: py(point.y) }));
    panel.toValue = (at) => xAxis.low + (xAxis.high - xAxis.low) * (at - box.left) / (box.right - box.left);
  }

  /** A path through points; null breaks it. */
  function path(points) {
    let pen = "M";
    return points.map((point) => {
      if (point === null) { pen = "M"; return ""; }
      const step = `${pen}${point[0]} ${point[1]}`;
      pen = "L";
      return step;
    }).join("");
  }

  /** Over time and bytes, a value holds until the next one; the points of rounds are joined. */
  function drawn(points) {
    if (state.x === "round") return points;
    return points.flatMap((point, i) => (i ? [[point[0], points[i - 1][1]], point] : [point]));
  }

  function band(upper, lower, colour, opacity) {
    return `<path class="band" d="${path([...upper, ...lower.reverse()])}Z" fill="${colour}" fill-opacity="${opacity}"/>`;
  }

  function line(points, colour, kind = "line") {
    const alone = points.length === 1 ? `<circle class="point" cx="${points[0][0]}" cy="${points[0][1]}" r="4.5" fill="${colour}"/>` : "";
    return `<path class="${kind}" d="${path(points)}" stroke="${colour}"/>${alone}`;
  }

  /** Shows the text of the point nearest to the pointer. */
  function pointAt(event) {
    const panel = event.currentTarget;
    const corner = panel.getBoundingClientRect();
    const [x, y] = [event.clientX - corner.left, event.clientY - corner.top];
    let [nearest, distance] = [null, REACH];
    for (const point of panel.points || []) {
      const away = Math.hypot(point.x - x, point.y - y);
      if (away < distance) [nearest, distance] = [point, away];
    }
    const dot = panel.querySelector(".nearest");
    byId("tip").hidden = !nearest;
    if (dot) dot.setAttribute("visibility", nearest ? "visible" : "hidden");
    if (!nearest) return;
    if (dot) { dot.setAttribute("cx", nearest.x); dot.setAttribute("cy", nearest.y); }
    byId("tip").innerHTML = nearest.text;
    const left = Math.min(event.pageX + 14, document.documentElement.clientWidth - byId("tip").offsetWidth - 8);
    byId("tip").style.left = `${Math.max(8, left)}px`;
    byId("tip").style.top = `${event.pageY + 14}px`;
  }

  function listen(panel, zooms) {
    panel.addEventListener("pointermove", pointAt);
    panel.addEventListener("pointerleave", () => { byId("tip").hidden = true; });
    if (!zooms) return;
    let from = null;
    const at = (event) => event.clientX - panel.getBoundingClientRect().left;
    panel.addEventListener("pointerdown", (event) => { from = event.pointerType === "mouse" ? at(event) : null; });
    panel.addEventListener("pointerup", (event) => {
      if (from === null || Math.abs(at(event) - from) < 8) return;
      state.zoom = [from, at(event)].map(panel.toValue).sort((a, b) => a - b);
      draw();
    });
    panel.addEventListener("dblclick", () => { state.zoom = null; draw(); });
  }

  // ---- curves

  /** The points of a series that can be drawn, in the order of the horizontal axis. */
  function kept(xs, series, log) {
    const shown = (value) => value !== null && (!log || value > 0);
    return xs.map((_, i) => i).filter((i) => xs[i] !== null && shown(series.mean[i])).sort((a, b) => xs[a] - xs[b]);
  }

  /** The curves of a metric of a run: single nodes, spread, average model, mean. */
  function curves(run, metric, log) {
    const byRound = state.x === "round";
    const series = run.metrics[metric.name] && run.metrics[metric.name][byRound ? "points" : "steps"];
    const xs = series && (byRound ? run.points.round : series[state.x]);
    if (!xs) return null;
    const at = kept(xs, series, log);
    const bands = [];
    if (state.band && series.quantiles) {
      for (const [low, high] of [[0, 3], [1, 2]]) bands.push([at.map((i) => series.quantiles[low][i]), at.map((i) => series.quantiles[high][i])]);
    } else if (state.band) {
      bands.push([at.map((i) => series.mean[i] - series.std[i]), at.map((i) => series.mean[i] + series.std[i])]);
    }
    const average = xs.map((_, i) => i).filter((i) => xs[i] !== null && series.average && series.average[i] !== null).sort((a, b) => xs[a] - xs[b]);
    return {
      item: run, x: at.map((i) => xs[i]), y: at.map((i) => series.mean[i]), bands, nodes: state.lines ? nodeLines(run, metric) : [],
      average: average.map((i) => [xs[i], series.average[i]]),
      text: at.map((i) => {
        const spread = series.count[i] > 1
          ? ` ± ${format(metric, series.std[i])}<br>from ${format(metric, series.min[i])} to ` +
            `${format(metric, series.max[i])} over ${series.count[i]} nodes` : "";
        const place = byRound ? run.points.text[i] : axisText(state.x, xs[i]);
        return `<b>${safe(run.label)}</b><br>${format(metric, series.mean[i])}${spread}<br>${place}`;
      }),
    };
  }

  /** The same for a group of runs: confidence interval and mean, or the mean of each run. */
  function groupCurves(group, metric, log) {
    if (group.members.length) {
      return group.members.map((run) => curves(data.runs[run], metric, log)).filter(Boolean)
        .map((curve) => ({ ...curve, bands: [], nodes: [], average: [] }));
    }
    const series = group.metrics[metric.name] && group.metrics[metric.name][state.x];
    const xs = series && series.x;
    if (!xs) return [];
    const at = kept(xs, series, log);
    const half = at.map((i) => series.half[i] || 0);
    const y = at.map((i) => series.mean[i]);
    return [{
      item: group, x: at.map((i) => xs[i]), y, nodes: [], average: [],
      bands: state.band ? [[y.map((v, k) => v - half[k]), y.map((v, k) => v + half[k])]] : [],
      text: at.map((i, k) => {
        const spread = series.half[i] === null ? "" : ` ± ${format(metric, half[k])}`;
        return `<b>${safe(group.label)}</b><br>${format(metric, y[k])}${spread} over ${series.count[i]} ` +
          `runs<br>${axisText(state.x, xs[i])}`;
      }),
    }];
  }

  function nodeLines(run, metric) {
    const values = run.nodes.values[metric.name];
    if (!values || run.nodes.ranks.length < 2) return [];
    const instants = { time_s: "instant_s", bytes: "instant_bytes" };
    const places = (!metric.of_model && run.nodes.places[instants[state.x]]) || run.nodes.places[state.x];
    if (!places) return [];
    return values.map((line, node) => line.map((y, k) => [places[node][k], y]).filter(([x, y]) => x !== null && y !== null));
  }

  /** The items of the legend: runs, or groups of runs. */
  function legendItems() {
    return state.together ? data.groups : data.runs;
  }

  function drawCurves() {
    const title = data.axes.find((axis) => axis.name === state.x).title;
    const shown = legendItems().filter((_, index) => !state.hidden.has(index));
    const all = data.metrics.map((metric) => shown.flatMap((item) =>
      (state.together ? groupCurves : curves)(item, metric, state.log && metric.low)).filter(Boolean));
    // From 0 to a little beyond the last point, so that lines end before the edge.
    const last = maximum(all.flat().flatMap((curve) => [...curve.x, ...curve.nodes.flat().map(([x]) => x)]));
    const [low, high] = state.zoom || [0, last > 0 ? 1.03 * last : 1];
    const xAxis = { title, low, high, format: state.x === "bytes" ? bytes : plain };
    data.metrics.forEach((metric, index) => drawMetric(metric, index, all[index], xAxis));
    return data.metrics.length;
  }

  function drawMetric(metric, index, shown, xAxis) {
    const log = state.log && metric.low;
    const inside = (x) => x >= xAxis.low && x <= xAxis.high;
    const values = shown.flatMap((curve) => [
      ...curve.y, ...curve.bands.flat(2), ...curve.nodes.flat().concat(curve.average).filter(([x]) => inside(x)).map(([, y]) => y),
    ]).filter((value) => value !== null && (!log || value > 0));
    let [low, high] = [values.length ? minimum(values) : 0, values.length ? maximum(values) : 1];
    if (log) {
      low = Math.max(low, minimum(shown.flatMap((curve) => curve.y)) / 100);
      [low, high] = high > low ? [low, high] : [low / 2, low * 2];
    } else {
      const room = 0.05 * (high - low || Math.abs(high) || 1);
      low = metric.system ? 0 : metric.share && low >= 0 ? Math.max(0, low - room) : low - room;
      high += room;
    }
    const yAxis = { low, high, log, format: metric.share ? (value) => `${plain(100 * value)}%` : plain };
    const floor = (value) => (log ? Math.max(value, low) : value);
    const points = shown.flatMap((curve) => curve.x.map((x, k) => ({ x, y: curve.y[k], text: curve.text[k] }))).filter((point) => inside(point.x));
    chart(`curve-${index}`, `${metric.title} against ${xAxis.title}`, xAxis, yAxis, (px, py, box) => shown.map((curve) => {
      const colour = colourOf(curve.item);
      const at = (ys) => drawn(curve.x.map((x, k) => [px(x), py(floor(ys[k]))]));
      const nodes = curve.nodes.length ? `<path class="node" stroke="${colour}" d="${curve.nodes.map((points) =>
        path(drawn(points.filter(([, y]) => !log || y > 0).map(([x, y]) => [px(x), py(y)])))).join("")}"/>` : "";
      return nodes + curve.bands.map(([lower, upper]) => band(at(upper), at(lower), colour, 0.2)).join("") +
        (curve.average.length ? line(curve.average.map(([x, y]) => [px(x), py(floor(y))]), colour, "average") : "") +
        line(at(curve.y), colour);
    }).join("") || (state.x === "round" ? "" : absent(box)), points);
  }

  /** Why a metric has no curve over time. */
  function absent(box) {
    const lines = ["Recorded at equal rounds, which the nodes reached at different times.", "evaluation.every_s records it at instants."];
    return lines.map((text, i) => `<text x="${(box.left + box.right) / 2}" y="${(box.top + box.bottom) / 2 + 18 * i}" text-anchor="middle">${text}</text>`).join("");
  }

  // ---- the network at one evaluation

  function current(run) {
    return Math.max(0, Math.min(Math.floor(state.point), run.nodes.at.length - 1)) || 0;
  }

  function colourMetric(run) {
    const names = data.metrics.map((metric) => metric.name).filter((name) => run.nodes.values[name]);
    return names.includes(state.colour) ? state.colour : names[0];
  }

  function viridis(share) {
    const at = Math.max(0, Math.min(1, share)) * (VIRIDIS.length - 1);
    const k = Math.min(Math.floor(at), VIRIDIS.length - 2);
    const part = (hex, start) => parseInt(hex.slice(start, start + 2), 16);
    const mixed = [1, 3, 5].map((start) => Math.round(part(VIRIDIS[k], start) * (k + 1 - at) + part(VIRIDIS[k + 1], start) * (at - k)));
    return `rgb(${mixed.join(", ")})`;
  }

  function drawTopology() {
    const run = data.runs[state.run];
    const graph = run.topology;
    if (!graph) return 0;
    const k = current(run);
    const name = colourMetric(run);
    const metric = metricOf[name];
    const values = name ? run.nodes.values[name].map((line) => line[k]) : graph.positions.map(() => null);
    const all = (name ? (state.own ? values : run.nodes.values[name].flat()) : []).filter((value) => value !== null);
    const [low, high] = [minimum(all), maximum(all)];
    const version = Math.min(k, graph.graphs.length - 1);
    const edges = graph.graphs[version];
    const panel = byId("topology");
    const [width, height] = [panel.clientWidth || 480, panel.clientHeight || 420];
    const reach = Math.min(width, height - 40) / 2 - 16;
    const at = graph.positions.map(([x, y]) => [width / 2 + reach * x, (height - 40) / 2 - reach * y].map((value) => Number(value.toFixed(1))));
    const radius = Math.max(3, Math.min(10, 65 / Math.sqrt(at.length)));
    let drawn = "";
    for (let e = 0; e < edges.length; e += 2) {
      const [[ax, ay], [bx, by]] = [at[edges[e]], at[edges[e + 1]]];
      drawn += `M${ax} ${ay}L${bx} ${by}`;
      const far = Math.hypot(bx - ax, by - ay);
      if (graph.directed && edges.length <= 1500 && far > 3 * radius) {
        const [ux, uy] = [(bx - ax) / far, (by - ay) / far];
        const [tx, ty] = [bx - ux * radius, by - uy * radius];
        for (const side of [1, -1]) drawn += `M${(tx - 6 * ux + side * 3 * uy).toFixed(1)} ${(ty - 6 * uy - side * 3 * ux).toFixed(1)}L${tx.toFixed(1)} ${ty.toFixed(1)}`;
      }
    }
    const rings = run.rings.map((ring, k) => ({ ...ring, out: 3 + 4 * k, ranks: new Set(ring.ranks) }));
    const ringsOf = (rank) => rings.filter(({ ranks }) => ranks.has(rank));
    const share = (value) => (high > low ? (metric.low ? high - value : value - low) / (high - low) : 0);
    const nodes = at.map(([x, y], i) => {
      const fill = name ? (values[i] === null ? "var(--panel)" : viridis(share(values[i]))) : colourOf(run);
      const drawnRings = ringsOf(run.nodes.ranks[i]).map((ring) => `<circle class="ring" cx="${x}" cy="${y}" r="${radius + ring.out}" stroke="${colourOf(ring)}"/>`);
      return `<circle class="node-mark" cx="${x}" cy="${y}" r="${radius}" fill="${fill}"/>${drawnRings.join("")}`;
    });
    const stops = VIRIDIS.map((colour, i) => `<stop offset="${i / (VIRIDIS.length - 1)}" stop-color="${colour}"/>`).join("");
    const ends = name && all.length ? [format(metric, metric.low ? high : low), format(metric, metric.low ? low : high)] : null;
    const bar = ends ? `<linearGradient id="scale">${stops}</linearGradient>` +
      `<rect x="${width / 2 - 90}" y="${height - 18}" width="180" height="9" fill="url(#scale)"/>` +
      `<text x="${width / 2 - 97}" y="${height - 9}" text-anchor="end">${ends[0]}</text><text x="${width / 2 + 97}" y="${height - 9}">${ends[1]}</text>` +
      `<text x="${width / 2}" y="${height - 24}" text-anchor="middle">${safe(metric.title)}</text>` : "";
    panel.innerHTML = `<svg role="img" aria-label="graph of the nodes" width="${width}" height="${height}">` +
      `<path class="edges" d="${drawn}" stroke-width="${edges.length > 1200 ? 0.4 : 0.9}"/>${nodes.join("")}${bar}</svg>`;
    const count = graph.edges[version];
    const whole = at.length === graph.nodes && edges.length / 2 === count;
    const neighbours = at.map(() => new Set());
    for (let e = 0; e < edges.length; e += 2) {
      neighbours[edges[e]].add(edges[e + 1]);
      neighbours[edges[e + 1]].add(edges[e]);
    }
    panel.points = at.map(([x, y], i) => {
      const rank = run.nodes.ranks[i];
      const chosen = ringsOf(rank).map(({ label }) => `, ${safe(label)}`).join("");
      const value = name ? `<br>${safe(metric.title)}: ${format(metric, values[i])}` : "";
      const degree = whole && graph.used ? `<br>${neighbours[i].size} neighbours` : "";
      return { x, y, text: `<b>node ${rank}</b>${chosen}${value}${degree}${run.samples ? `<br>${run.samples[rank]} training samples` : ""}` };
    });
    byId("topology-note").innerHTML = [
      at.length < graph.nodes ? `${at.length} of ${graph.nodes} nodes are drawn, those nearest to node ${run.nodes.start}.` : `${graph.nodes} nodes`,
      graph.used ? `${count} ${graph.directed ? "directed " : ""}edges` + (at.length === graph.nodes && !whole ? `, ${edges.length / 2} of them drawn` : "") : "",
      graph.graphs.length > 1 ? "the graph changes with the slider" : "",
      rings.length ? `ringed: ${rings.map((ring) => `<span style="color: ${colourOf(ring)}">${safe(ring.label)}</span>`).join(", ")}` : "",
      safe(graph.mixing),
      values.includes(null) && name ? "hollow: no value at this point" : "",
    ].filter(Boolean).join(" · ");
    return 1;
  }

  function drawPoint() {
    const run = data.runs[state.run];
    const count = run.nodes.at.length;
    const k = current(run);
    byId("slider-panel").hidden = count < 2;
    byId("slider").max = Math.max(0, count - 1);
    byId("slider").value = k;
    byId("moment").textContent = count ? run.points.text[run.nodes.at[k]] : "";
    document.body.dataset.point = String(k);
    return drawTopology();
  }

  function drawLabels() {
    const run = data.runs[state.run];
    const counts = run.labels;
    if (byId("labels-panel").hidden) return 0;
    const known = Boolean(counts && counts.length);
    const nodes = known ? counts.length : run.samples.length;
    const xAxis = { title: "node", low: -0.5, high: nodes - 0.5, ticks: ticks(0, nodes - 1, 6).filter(Number.isInteger).map((rank) => [rank, String(rank)]) };
    byId("labels-title").textContent = known ? "Labels of each node" : "Training samples of each node";
    if (!known) {
      byId("labels-note").textContent = "";
      const points = run.samples.map((value, rank) => ({ x: rank, y: value, text: `node ${rank}: ${value} samples` }));
      chart("labels", "training samples of each node", xAxis, { title: "samples", low: 0, high: 1.05 * maximum(run.samples) || 1 }, (px, py) =>
        `<path class="line" stroke="${colourOf(run)}" style="stroke-width: ${Math.max(1, 0.7 * (px(1) - px(0)))}" d="${
          run.samples.map((value, rank) => `M${px(rank)} ${py(0)}V${py(value)}`).join("")}"/>`, points);
      return 1;
    }
    const classes = counts[0].map((_, c) => (run.classes && run.classes[c] !== undefined ? String(run.classes[c]) : String(c)));
    const totals = counts.map((row) => row.reduce((a, b) => a + b, 0));
    const highest = maximum(counts.flat()) || 1;
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const [from, to] = dark ? [[35, 43, 52], [169, 220, 255]] : [[243, 246, 249], [0, 68, 107]];
    const canvas = Object.assign(document.createElement("canvas"), { width: nodes, height: classes.length });
    const picture = canvas.getContext("2d");
    counts.forEach((row, node) => row.forEach((count, c) => {
      picture.fillStyle = `rgb(${from.map((value, i) => Math.round(value + (to[i] - value) * count / highest)).join()})`;
      picture.fillRect(node, c, 1, 1);
    }));
    const few = classes.length <= 20 ? classes.map((label, c) => [c, label]) : ticks(0, classes.length - 1, 8).map((c) => [c, classes[c]]);
    const yAxis = { low: classes.length - 0.5, high: -0.5, ticks: few, wide: 24 + 6.5 * Math.min(14, maximum(few.map(([, label]) => label.length))) };
    const points = counts.flatMap((row, node) => row.map((count, c) => ({
      x: node, y: c, text: `<b>node ${node}</b>, class ${safe(classes[c])}<br>${count} of ${totals[node]} samples`,
    })));
    chart("labels", "training samples of each class and node", xAxis, yAxis, (px, py, box) =>
      `<image href="${canvas.toDataURL()}" x="${box.left}" y="${box.top}" width="${box.right - box.left}" ` +
      `height="${box.bottom - box.top}" preserveAspectRatio="none" style="image-rendering: pixelated"/>`, points);
    const sorted = [...totals].sort((a, b) => a - b);
    byId("labels-note").textContent =
      `Training samples of each class, at most ${highest} per class and node. Samples per node: minimum ${sorted[0]}, ` +
      `median ${sorted[Math.floor(sorted.length / 2)]}, maximum ${sorted[sorted.length - 1]}.`;
    return 1;
  }

  /** One lane per node, with its computations above its transfers; the node waited in the gaps. */
  function drawTimeline() {
    const timeline = data.runs[state.run].timeline;
    if (!timeline) return 0;
    const lane = Object.fromEntries(timeline.nodes.map((node, index) => [node, index]));
    const kinds = Object.entries(timeline.kinds);
    byId("timeline").style.height = `${Math.max(180, 60 + 30 * timeline.nodes.length)}px`;
    const points = kinds.flatMap(([kind, rows]) => rows.node.map((node, i) => ({
      x: (rows.start[i] + rows.end[i]) / 2, y: lane[node] + (kind === "send" ? 0.19 : -0.19),
      text: `<b>node ${node}</b>: ${kind}` + (rows.to ? ` to node ${rows.to[i]}, ${bytes(rows.bytes[i])}` : "") +
        `<br>${axisText("time_s", rows.start[i])} to ${axisText("time_s", rows.end[i])}`,
    })));
    chart("timeline", "timeline of the nodes", {
      title: data.axes.find((axis) => axis.name === "time_s").title, low: timeline.from, high: timeline.to,
    }, { title: "node", low: timeline.nodes.length - 0.5, high: -0.5, ticks: timeline.nodes.map((node, index) => [index, String(node)]) },
    (px, py) => kinds.map(([kind, rows]) => {
      const edge = rows.node.length < 60 * timeline.nodes.length ? ` stroke="var(--panel)" stroke-width="0.6"` : "";
      return `<path class="interval" fill="var(--c${timeline.colours[kind]})"${edge} d="${rows.node.map((node, i) => {
        const top = lane[node] + (kind === "send" ? 0.01 : -0.37);
        return `M${px(rows.start[i])} ${py(top)}H${px(rows.end[i])}V${py(top + 0.36)}H${px(rows.start[i])}Z`;
      }).join("")}"/>`;
    }).join(""), points);
    byId("timeline-key").replaceChildren(...kinds.map(([kind]) => element("span", {}, key(timeline.colours[kind]), kind)));
    byId("timeline-note").textContent = "Above: computations of a node; below: transfers on its uplink. It waits in the gaps.";
    return 1;
  }

  // ---- controls

  function element(tag, properties, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  function key(colour) {
    const square = element("i", { className: "key" });
    square.style.background = `var(--c${colour})`;
    return square;
  }

  function build() {
    const words = { round: "rounds", time_s: data.virtual ? "virtual time" : "time", wall_s: "wall time", bytes: "bytes" };
    for (const axis of axes) {
      const button = element("button", { type: "button", textContent: words[axis.name] });
      button.dataset.x = axis.name;
      button.addEventListener("click", () => { state.x = axis.name; state.zoom = null; draw(); });
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
      square.style.background = colourOf(data.runs[Number(square.dataset.run)]);
    });
    data.metrics.forEach((metric, index) => {
      const panel = element("div", { id: `curve-${index}`, className: "plot" });
      byId(metric.system ? "system-curves" : metric.of_class ? "class-curves" : "curves").append(element("figure", { className: "panel" },
        element("figcaption", {}, element("h3", { textContent: metric.title })), panel));
      listen(panel, true);
    });
    for (const id of ["topology", "labels", "timeline"]) listen(byId(id), false);
    for (const [id, kind] of [["system", "system"], ["classes", "of_class"]]) {
      byId(id).hidden = !data.metrics.some((metric) => metric[kind]);
      byId(id).addEventListener("toggle", draw);
    }
    byId("controls").hidden = data.metrics.length === 0;
    byId("run").addEventListener("change", (event) => { state.run = Number(event.target.value); draw(); });
    byId("colour").addEventListener("change", (event) => { state.colour = event.target.value; drawPoint(); });
    byId("slider").addEventListener("input", (event) => { stop(); state.point = Number(event.target.value); drawPoint(); });
    byId("play").addEventListener("click", () => (timer ? stop() : play()));
    window.addEventListener("hashchange", () => { readFragment(); draw(); });
    window.addEventListener("resize", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  }

  function play() {
    const last = data.runs[state.run].nodes.at.length - 1;
    if (current(data.runs[state.run]) >= last) state.point = -1;
    byId("play").textContent = "❚❚";
    timer = setInterval(() => {
      state.point = Math.min(state.point + 1, last);
      drawPoint();
      if (state.point >= last) stop();
    }, FRAME_MS);
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    byId("play").textContent = "▶";
  }

  function showLegend() {
    const buttons = legendItems().map((item, index) => {
      const button = element("button", { type: "button", title: "show or hide" }, key(item.colour), item.label);
      button.setAttribute("aria-pressed", String(!state.hidden.has(index)));
      button.addEventListener("click", () => {
        if (!state.hidden.delete(index)) state.hidden.add(index);
        draw();
      });
      return button;
    });
    byId("legend").replaceChildren(...(data.runs.length > 1 ? buttons : []));
  }

  /** Make the controls show the state. */
  function showState() {
    document.body.dataset.x = state.x;
    showLegend();
    byId("caption").hidden = data.metrics.length === 0 || state.together;
    byId("caption-together").hidden = data.metrics.length === 0 || !state.together;
    const byRound = state.x === "round";
    for (const text of document.querySelectorAll(".by-round")) text.hidden = !byRound;
    for (const text of document.querySelectorAll(".over-time")) text.hidden = byRound;
    byId("dashed").hidden = !byRound || !data.runs.some((run) => Object.values(run.metrics).some((metric) => metric.points.average));
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
    byId("network").hidden = !data.runs.some((run) => run.topology || run.labels || run.samples || run.timeline);
  }

  function draw() {
    showState();
    const drawn = (data.metrics.length ? drawCurves() : 0) + drawPoint() + drawLabels() + drawTimeline();
    document.body.dataset.drawn = String(drawn);
  }

  readFragment();
  build();
  draw();
})();
