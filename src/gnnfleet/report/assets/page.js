"use strict";
// Draws the data of the page. Strings are inserted as text, never as markup.

const COLOURS = ["#2463c4", "#d2690e", "#0d8577", "#8447c4", "#c22f3d", "#6f7d12", "#b8428c", "#4f5b66"];
// Curves that coincide stay visible: the first is solid, later ones have ever larger gaps.
const DASHES = [null, "9 5", "5 9", "2 6", "9 4 2 4", "5 4 2 8", "2 10", "12 8"];
const PHASES = { compute: "#3f7fd0", exchange: "#e2a32e", wait: "#c5ccd5" };
const SVG = "http://www.w3.org/2000/svg";
const hidden = new Set(); // names of hidden runs
const sorting = { key: null, down: false };
let data = JSON.parse(document.getElementById("data").textContent);

// -- helpers --

function make(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "g", "rect", "line", "path", "circle", "text"].includes(tag);
  const node = isSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const colourOf = (index) => COLOURS[index % COLOURS.length];
const dashOf = (index) => DASHES[index % DASHES.length];
const visibleRuns = () => data.runs.map((run, index) => ({ ...run, colour: colourOf(index), dash: dashOf(index) })).filter((run) => !hidden.has(run.name));

function short(value, digits = 4) {
  if (!isNumber(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

function bytes(value) {
  if (!isNumber(value)) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1024 || unit === "TiB") return (unit === "B" ? value : value.toFixed(value < 10 ? 2 : 1)) + " " + unit;
    value /= 1024;
  }
  return "";
}

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 1e-3) return (value * 1e6).toFixed(0) + " µs";
  if (value < 1) return (value * 1e3).toPrecision(3) + " ms";
  return value < 120 ? value.toPrecision(3) + " s" : (value / 60).toFixed(1) + " min";
}

const tip = make("div", { class: "tip", hidden: "" });
function point(text) {
  return {
    onmousemove: (event) => {
      tip.textContent = typeof text === "function" ? text(event) : text;
      tip.hidden = !tip.textContent;
      tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
      tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
    },
    onmouseleave: () => { tip.hidden = true; },
  };
}

const card = (title, ...children) => make("div", { class: "card" }, title ? make("h3", {}, title) : null, ...children);
const plot = (name, width, height, ...children) =>
  make("svg", { viewBox: `0 0 ${width} ${height}`, class: "plot", "data-plot": name, role: "img", "aria-label": name }, ...children);

function ticks(low, high, count = 5) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const positions = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) positions.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return positions;
}

// -- lines over steps or seconds --

function curves(title, runs, xAxis, value, note = null) {
  const width = 560, height = 270, left = 54, right = 14, top = 10, bottom = 40;
  const series = runs.map((run) => ({ name: run.name, colour: run.colour, dash: run.dash, points: pointsOf(run, xAxis, value) }));
  const points = series.flatMap((curve) => curve.points);
  if (!points.length) return card(title, make("p", { class: "note" }, "no measurements yet"));
  const most = Math.max(...points.map((p) => p[0])) || 1;
  let [low, high] = [Math.min(...points.map((p) => p[1])), Math.max(...points.map((p) => p[1]))];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.1;
  [low, high] = [low - margin, high + margin];
  const x = (at) => left + (at / most) * (width - left - right);
  const y = (at) => height - bottom - ((at - low) / (high - low)) * (height - top - bottom);
  const parts = ticks(low, high).flatMap((at) => [
    make("line", { x1: left, x2: width - right, y1: y(at), y2: y(at), class: "axis" }),
    make("text", { x: left - 7, y: y(at) + 4, "text-anchor": "end", class: "soft" }, short(at, 3)),
  ]);
  parts.push(...ticks(0, most, 6).map((at) => make("text", { x: x(at), y: height - bottom + 17, "text-anchor": "middle", class: "soft" }, short(at, 3))));
  parts.push(make("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle", class: "soft" }, xAxis === "step" ? "optimizer steps" : "seconds of training"));
  for (const [index, { colour, dash, points: own }] of series.entries()) {
    const path = own.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    parts.push(make("path", { d: path, fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-dasharray": dash, "stroke-linejoin": "round" }));
    const radius = Math.min(2 + 0.7 * (series.length - 1 - index), 5);  // rings where points coincide
    if (own.length < 40) parts.push(...own.map((p) => make("circle", { cx: x(p[0]), cy: y(p[1]), r: radius.toFixed(1), fill: colour })));
  }
  const cursor = make("line", { y1: top, y2: height - bottom, stroke: "#9aa5b1", "stroke-dasharray": "3 3", visibility: "hidden" });
  const drawing = plot(title, width, height, ...parts, cursor);
  const hover = point((event) => {
    const box = drawing.getBoundingClientRect();
    const at = (((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * most;
    if (at < 0 || at > most * 1.02) return "";
    cursor.setAttribute("x1", x(at)); cursor.setAttribute("x2", x(at)); cursor.setAttribute("visibility", "visible");
    return series.filter((curve) => curve.points.length).map((curve) => {
      const closest = curve.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
      return `${curve.name}: ${short(closest[1])} (epoch ${closest[2]}, ${xAxis === "step" ? closest[0] + " steps" : seconds(closest[0])})`;
    }).join("\n");
  });
  drawing.addEventListener("mousemove", hover.onmousemove);
  drawing.addEventListener("mouseleave", () => { hover.onmouseleave(); cursor.setAttribute("visibility", "hidden"); });
  return card(title, note ? make("p", { class: "note" }, note) : null, drawing);
}

function pointsOf(run, xAxis, value) {
  let passed = 0;
  const points = [];
  for (const row of run.rows) {
    passed += isNumber(row.seconds) ? row.seconds : 0;
    const at = xAxis === "step" ? (isNumber(row.step) ? row.step : row.epoch) : passed;
    if (isNumber(row[value])) points.push([at, row[value], row.epoch]);
  }
  return points;
}

// -- bars --

function bars(name, rows, text, keys) {
  // rows: [{label, group?, parts: {key: value}}]
  const width = 560, left = 150, right = 74, high = 20, gap = 5;
  const most = Math.max(...rows.map((row) => Object.values(row.parts).reduce((a, b) => a + b, 0))) || 1;
  const parts = [];
  let at = 4;
  for (const row of rows) {
    if (row.group) {
      parts.push(make("text", { x: 0, y: at + 14, "font-weight": 600 }, row.group));
      at += 21;
    }
    const all = Object.values(row.parts).reduce((a, b) => a + b, 0);
    let from = left;
    parts.push(make("text", { x: left - 8, y: at + 14, "text-anchor": "end", class: "soft" }, row.label));
    for (const [key, value] of Object.entries(row.parts)) {
      const wide = (value / most) * (width - left - right);
      const share = all ? ` (${((100 * value) / all).toFixed(0)} %)` : "";
      parts.push(make("rect", { x: from, y: at, width: Math.max(wide, 0), height: high, fill: keys[key] ?? row.colour, ...point(`${row.label}: ${key} ${text(value)}${share}`) }));
      from += wide;
    }
    parts.push(make("text", { x: from + 6, y: at + 14 }, text(all)));
    at += high + gap;
  }
  return plot(name, width, at + 2, ...parts);
}

const keyLegend = (keys) => make("div", { class: "legend" }, ...Object.entries(keys).map(([key, colour]) =>
  make("span", { class: "key" }, make("span", { class: "swatch", style: `background:${colour}` }), key)));

function timeSplit(runs) {
  const rows = runs.flatMap((run) => run.split.map((parts, w) => ({ group: w ? null : run.name, label: run.workers_named[w] ?? "", parts })));
  return rows.length ? card("Epoch time by worker", keyLegend(PHASES), bars("time split", rows, seconds, PHASES)) : null;
}

function memory(runs) {
  const rows = runs.flatMap((run) => (run.peaks ?? []).map((peak, w) => ({ group: w ? null : run.name, label: run.workers_named[w] ?? "", parts: { "peak memory": peak }, colour: run.colour })));
  return rows.length ? card("Peak memory by worker", bars("memory", rows, bytes, {})) : null;
}

// -- bytes from worker to worker --

function heat(run) {
  const matrix = run.bytes, count = matrix.length;
  const size = Math.max(22, Math.min(62, 240 / (count + 1))), left = 92, top = 46;
  const width = left + size * (count + 1) + 12, height = top + size * count + 8;
  const most = Math.max(1, ...matrix.flat());
  const names = run.workers_named.map((name) => name.replace("coordinator", "coord.").replace("trainer", "tr."));
  const parts = [...names, "all"].map((name, q) => make("text", { x: left + (q + 0.5) * size, y: top - 8, "text-anchor": "middle", class: "soft" }, count > 8 ? name.replace(/\D+/, "") : name));
  parts.push(make("text", { x: left + (size * (count + 1)) / 2, y: 14, "text-anchor": "middle", class: "soft" }, "to"));
  matrix.forEach((row, p) => {
    parts.push(make("text", { x: left - 8, y: top + (p + 0.5) * size + 4, "text-anchor": "end", class: "soft" }, names[p] ?? p));
    row.forEach((value, q) => {
      const strength = value ? 0.12 + 0.88 * Math.sqrt(value / most) : 0;
      const fill = p === q ? "#f1f3f5" : `rgba(36, 99, 196, ${strength.toFixed(3)})`;
      const receiver = q < count ? run.workers_named[q] : "all ranks (collectives)";
      parts.push(make("rect", { x: left + q * size, y: top + p * size, width: size - 2, height: size - 2, rx: 3, fill, stroke: "#e1e5ea", ...point(`${run.workers_named[p]} → ${receiver}: ${bytes(value)}`) }));
      if (size > 46 && value) parts.push(make("text", { x: left + (q + 0.5) * size - 1, y: top + (p + 0.5) * size + 3, "text-anchor": "middle", style: `font-size:9.5px;pointer-events:none;fill:${strength > 0.6 ? "#fff" : "#1d2733"}` }, bytes(value)));
    });
  });
  const drawing = plot("bytes " + run.name, width, height, ...parts);
  drawing.style.maxWidth = width * 1.25 + "px";
  return card(run.name, drawing);
}

// -- classes of the test split --

function confusion(run) {
  const { classes, confusion: matrix } = run.summary.classes, count = classes.length;
  const size = Math.max(9, Math.min(44, 420 / count)), left = 116, top = 42;
  const width = left + size * count + 12, height = top + size * count + 8;
  const areShort = classes.every((name) => name.length < 4);
  const brief = (name) => (name.length > 12 ? name.slice(0, 11) + "…" : name);
  const parts = [make("text", { x: left + (size * count) / 2, y: 14, "text-anchor": "middle", class: "soft" }, "predicted")];
  matrix.forEach((row, t) => {
    const total = row.reduce((a, b) => a + b, 0), middle = (t + 0.5) * size;
    if (size > 16) {
      parts.push(make("text", { x: left + middle, y: top - 8, "text-anchor": "middle", class: "soft" }, areShort ? classes[t] : t + 1));
      parts.push(make("text", { x: left - 8, y: top + middle + 4, "text-anchor": "end", class: "soft" }, areShort ? classes[t] : `${brief(classes[t])}  ${t + 1}`));
    }
    row.forEach((value, p) => {
      const share = total ? value / total : 0, strength = value ? 0.1 + 0.9 * share : 0;
      const fill = `rgba(${p === t ? "36, 99, 196" : "194, 47, 61"}, ${strength.toFixed(3)})`;
      const hover = `${classes[t]} predicted as ${classes[p]}: ${value} of ${total} (${(100 * share).toFixed(1)} %)`;
      parts.push(make("rect", { x: left + p * size, y: top + t * size, width: size - 1, height: size - 1, rx: 2, fill, stroke: "#e1e5ea", ...point(hover) }));
      if (size > 30 && value) parts.push(make("text", { x: left + (p + 0.5) * size - 1, y: top + middle + 4, "text-anchor": "middle", style: `font-size:10px;pointer-events:none;fill:${strength > 0.6 ? "#fff" : "#1d2733"}` }, value));
    });
  });
  const drawing = plot("confusion " + run.name, width, height, ...parts);
  drawing.style.maxWidth = width * 1.25 + "px";
  return drawing;
}

function classesOf(run) {
  const report = run.summary.classes;
  const shade = (value) => make("span", { class: "shade", style: `background:rgba(36, 99, 196, ${(0.45 * value).toFixed(3)})` }, value.toFixed(3));
  const rows = report.classes.map((name, i) => ({ name, ...Object.fromEntries(["precision", "recall", "f1", "support"].map((key) => [key, report[key][i]])) }));
  const measures = ["precision", "recall", "f1"].map((key) => ({ key, title: key === "f1" ? "F1" : key, show: shade }));
  const list = table([{ key: "name", title: "class", isText: true }, ...measures, { key: "support", title: "nodes" }], rows);
  return [card(run.name, list), ...(report.confusion.length ? [card(run.name + ": true and predicted classes", confusion(run))] : [])];
}

// -- tables --

function table(columns, rows, { sortable = false, id = null } = {}) {
  // columns: [{key, title, isText?, show?}]; rows: objects, optionally with a colour
  const head = columns.map((column) => {
    const arrow = sortable && sorting.key === column.key ? make("span", { class: "arrow" }, sorting.down ? "▾" : "▴") : null;
    const on = sortable ? { onclick: () => sortBy(column.key), onkeydown: (event) => { if (event.key === "Enter") sortBy(column.key); }, tabindex: 0, "data-key": column.key } : {};
    return make("th", { class: (column.isText ? "text" : "") + (sortable ? " sortable" : ""), ...on }, column.title, arrow);
  });
  const body = rows.map((row) => make("tr", {}, ...columns.map((column, index) => {
    const value = column.show ? column.show(row[column.key], row) : isNumber(row[column.key]) ? short(row[column.key]) : row[column.key] ?? "–";
    const swatch = index === 0 && row.colour ? make("span", { class: "swatch", style: `background:${row.colour}` }) : null;
    return make("td", { class: column.isText ? "text" : "" }, swatch, value instanceof Node ? value : String(value));
  })));
  return make("div", { class: "scroll" }, make("table", id ? { id } : {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)));
}

function sortBy(key) {
  sorting.down = sorting.key === key ? !sorting.down : false;
  sorting.key = key;
  draw();
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return isNumber(a) && isNumber(b) ? a - b : String(a).localeCompare(String(b));
}

function runsTable() {
  const rows = data.runs.map((run, index) => ({ ...run, ...run.summary, requested: run.epochs, colour: colourOf(index) }));
  if (sorting.key) rows.sort((a, b) => compare(a[sorting.key], b[sorting.key]) * (sorting.down ? -1 : 1));
  const metrics = [...new Set(rows.map((row) => row.metric).filter(Boolean))];
  const suffix = metrics.length === 1 ? " " + metrics[0] : "";
  const columns = [
    { key: "name", title: "run", isText: true },
    { key: "strategy", title: "strategy", isText: true },
    { key: "workers", title: "workers" },
    { key: "model", title: "model", isText: true },
    { key: "epochs", title: "epochs", show: (value, row) => (row.state === "finished" ? value : `${value} of ${row.requested}`) },
    { key: "loss", title: "train loss" },
    { key: "val", title: "val" + suffix },
    { key: "test", title: "test" + suffix },
    { key: "baseline", title: "EdgeBank" },
    { key: "epoch_seconds", title: "epoch time", show: seconds },
    { key: "bytes", title: "sent", show: bytes },
    { key: "rounds", title: "rounds" },
    { key: "peak_rss", title: "peak memory", show: bytes },
    { key: "state", title: "state", isText: true, show: (value) => make("span", { class: "badge " + value }, value) },
  ];
  if (metrics.length > 1) columns.splice(6, 0, { key: "metric", title: "metric", isText: true });
  if (rows.some((row) => row.equals)) columns.splice(-1, 0, { key: "equals", title: "equals local", isText: true });
  const redundant = [];  // columns that say the same in every row
  if (rows.every((row) => row.name === row.strategy)) redundant.push("strategy");
  if (rows.every((row) => row.state === "finished")) redundant.push("state");
  if (!rows.some((row) => isNumber(row.baseline))) redundant.push("baseline");
  return table(columns.filter((column) => !redundant.includes(column.key)), rows, { sortable: true, id: "runs" });
}

function settings() {
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.config)))].filter((key) => !key.startsWith("report."));
  const setting = (run, key) => (key in run.config ? JSON.stringify(run.config[key]) : "–");
  const differ = keys.filter((key) => new Set(data.runs.map((run) => setting(run, key))).size > 1);
  const columns = [{ key: "setting", title: "setting", isText: true }, ...data.runs.map((run, i) => ({ key: "r" + i, title: run.name, isText: true }))];
  const rowsOf = (some) => some.map((key) => ({ setting: key, ...Object.fromEntries(data.runs.map((run, i) => ["r" + i, setting(run, key)])) }));
  const same = keys.filter((key) => !differ.includes(key));
  return card(null,
    data.runs.length > 1 && differ.length ? table(columns, rowsOf(differ)) : null,
    make("details", {}, make("summary", {}, data.runs.length > 1 ? "settings shared by all runs" : "all settings"), table(data.runs.length > 1 ? columns.slice(0, 2) : columns, rowsOf(same))));
}

function partitions() {
  const measured = data.runs.filter((run) => run.parts).map((run) => ({ name: run.name, method: run.parts.method, ...run.parts.quality }));
  const rows = [...data.partitions, ...measured].map((row) => ({ ...row, nodes: row.balance?.nodes, edges: row.balance?.edges, train: row.balance?.train }));
  if (!rows.length) return null;
  const percent = (value) => (isNumber(value) ? (100 * value).toFixed(1) + " %" : "–");
  return card(null, table([
    { key: "name", title: "graph or run", isText: true }, { key: "method", title: "method", isText: true }, { key: "parts", title: "parts" },
    { key: "kept_share", title: "edges kept", show: percent }, { key: "volume", title: "rows sent per layer Σ(λ−1)", show: (v) => (isNumber(v) ? v.toLocaleString("en") : "–") },
    { key: "replication", title: "replication" }, { key: "nodes", title: "nodes max/mean" }, { key: "edges", title: "edges max/mean" }, { key: "train", title: "training nodes max/mean" },
  ], rows));
}

// -- tma's rounds --

function rounds(run) {
  const rows = run.rows.filter((row) => isNumber(row.trainers));
  const width = 560, height = 130, left = 40, bottom = 26, top = 8;
  const wide = (width - left - 10) / rows.length, most = Math.max(run.workers, ...rows.map((row) => row.trainers));
  const tall = (count) => (count / most) * (height - top - bottom);
  const parts = rows.flatMap((row, i) => {
    const present = tall(row.trainers), absent = tall(Math.max(0, run.workers - row.trainers));
    const hover = point(`round ${row.epoch}: ${row.trainers} of ${run.workers} trainers, ${row.steps ?? "–"} steps, ${seconds(row.round_seconds)}`);
    const box = { x: left + i * wide, width: Math.max(wide - (wide > 4 ? 1 : 0), 0.5), ...hover };
    return [
      make("rect", { ...box, y: height - bottom - present, height: present, fill: run.colour }),
      absent ? make("rect", { ...box, y: height - bottom - present - absent, height: absent, fill: "#e7a49c" }) : null,
    ];
  });
  for (let count = 0; count <= most; count += Math.max(1, Math.ceil(most / 4))) {
    parts.push(make("text", { x: left - 6, y: height - bottom - tall(count) + 4, "text-anchor": "end", class: "soft" }, count));
  }
  parts.push(make("text", { x: left, y: height - 8, class: "soft" }, "round 1"), make("text", { x: width - 10, y: height - 8, "text-anchor": "end", class: "soft" }, "round " + (rows.at(-1)?.epoch ?? "")));
  const missed = rows.reduce((sum, row) => sum + Math.max(0, run.workers - row.trainers), 0);
  const share = rows.at(-1)?.kept_edges;
  const note = `${rows.length} rounds, ${missed} missing trainer contributions` + (isNumber(share) ? `; trained on ${(100 * share).toFixed(0)} % of the edges` : "");
  return card(run.name, make("p", { class: "note" }, note), keyLegend({ "contributed weights": run.colour, missing: "#e7a49c" }), plot("rounds " + run.name, width, height, ...parts.filter(Boolean)));
}

// -- the page --

function legend() {
  return make("div", { class: "legend" }, ...data.runs.map((run, index) =>
    make("button", { class: hidden.has(run.name) ? "off" : "", onclick: () => { if (!hidden.delete(run.name)) hidden.add(run.name); draw(); } },
      make("svg", { class: "sample", viewBox: "0 0 30 10" }, make("line", { x1: 0, x2: 30, y1: 5, y2: 5, stroke: colourOf(index), "stroke-width": 2.5, "stroke-dasharray": dashOf(index) })), run.name)));
}

// Explains val curves whose candidates differ from those of the table.
function onVal(runs) {
  const drawn = runs.filter((run) => run.strategy === "temporal" && run.config.task !== "edge");
  if (!drawn.length) return null;
  const counts = [...new Set(drawn.map((run) => run.config["strategy.eval_negatives"]).filter(isNumber))];
  const few = counts.length === 1 ? counts[0] + " " : "";
  return `${drawn.map((run) => run.name).join(", ")}: curves rank among ${few}sampled destinations, the table among all.`;
}

function section(title, note, ...children) {
  const present = children.filter((child) => child !== null);
  return present.length ? [make("h2", {}, title), note ? make("p", { class: "note" }, note) : null, ...present].filter(Boolean) : [];
}

function draw() {
  const runs = visibleRuns(), names = [...new Set(runs.map((run) => run.summary.metric).filter(Boolean))];
  const metric = "Val " + (names.length === 1 ? names[0] : "metric");
  const sent = runs.filter((run) => run.bytes && run.bytes.flat().some(Boolean));
  const classified = runs.filter((run) => run.summary.classes);
  const varies = runs.some((run) => new Set(run.rows.map((row) => row.lr)).size > 1);
  const trained = runs.filter((run) => run.rows.some((row) => isNumber(row.trainers)));
  const pictures = runs.flatMap((run) => Object.entries(run.pictures).map(([what, image]) =>
    card(`${run.name}: ${what}`, make("img", { class: "picture", src: image, alt: what, "data-plot": what }))));
  const remarks = runs.filter((run) => run.remarks.length).map((run) => card(run.name, make("ul", { class: "remarks" }, ...run.remarks.map((text) => make("li", {}, text)))));
  document.querySelector("main").replaceChildren(
    make("h1", {}, data.title),
    make("p", { class: "note" }, data.runs.map((run) => run.store).filter((name, i, all) => name && all.indexOf(name) === i).join(", ")),
    ...section("Runs", "Click a heading to sort. Epoch time is the median, bytes are summed over workers, memory is that of the largest worker.", card(null, runsTable())),
    ...section("Loss and metric", null, data.runs.length > 1 ? legend() : null, make("div", { class: "grid" },
      curves("Training loss over steps", runs, "step", "train_loss"), curves("Training loss over seconds", runs, "seconds", "train_loss"),
      curves(metric + " over steps", runs, "step", "val", onVal(runs)), curves(metric + " over seconds", runs, "seconds", "val", onVal(runs)),
      ...(varies ? [curves("Learning rate over steps", runs, "step", "lr")] : []))),
    ...section("Classes of the test split", "A row of the matrix has the nodes of one class, by predicted class; blue is right.", classified.length ? make("div", { class: "grid" }, ...classified.flatMap(classesOf)) : null),
    ...section("Time and memory", "Mean over epochs without the first. Exchange: packing, posting and unpacking messages. Wait: blocked until messages are sent or received. Compute: the rest.",
      make("div", { class: "grid" }, ...[timeSplit(runs), memory(runs)].filter(Boolean))),
    ...section("Traffic between workers", "Payload bytes as sent, evaluations included. Collectives over all ranks (gradients, losses) have their own column.",
      sent.length ? make("div", { class: "grid three" }, ...sent.map(heat)) : null),
    ...section("Partitions", "Exact counts. A max/mean of 1 is balanced.", partitions()),
    ...section("Schedules", null, pictures.length ? make("div", { class: "grid one" }, ...pictures) : null),
    ...section("Rounds", null, trained.length ? make("div", { class: "grid" }, ...trained.map(rounds)) : null),
    ...section("Messages", null, remarks.length ? make("div", { class: "grid" }, ...remarks) : null),
    ...section("Settings", null, settings()),
    make("footer", {}, "Written by gnnfleet report. The page is a single file without external resources."),
    tip,
  );
}

async function refresh() {
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    if (answer.ok) data = await answer.json();
    draw();
  } catch (error) { /* the server has stopped: keep the page as it is */ return; }
  if (data.live) setTimeout(refresh, 2000);
}

draw();
if (data.live) setTimeout(refresh, 2000);
