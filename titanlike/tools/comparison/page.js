"use strict";
// The page of `titanlike compare`. The view is in the address, so a reload and a copied link keep it.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const COLORS = ["#3f83e0", "#e0781a", "#2aa36a", "#c9498f", "#8d6bdb", "#d1493f", "#1f9fb5", "#9a8420", "#7c8796", "#b0683c"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3"]; // runs beyond the number of colors
runs.forEach((run, i) => {
  run.color = COLORS[i % COLORS.length];
  run.dash = DASHES[Math.floor(i / COLORS.length) % DASHES.length];
});
const CHARTS = [
  { id: "loss", title: "Training loss", smooth: true, log: true, digits: 4 },
  { id: "validation_loss", title: "Validation loss", log: true, points: true, digits: 4 },
  { id: "tokens_per_second", title: "Throughput, tokens/s", smooth: true, zero: true },
  { id: "bars" },
  { id: "mfu", title: "Model FLOPs utilization", zero: true },
  { id: "memory_gib", title: "Peak memory, GiB", zero: true },
  { id: "grad_norm", title: "Gradient norm", smooth: true, log: true },
  { id: "learning_rate", title: "Learning rate", zero: true },
];
const MARGIN = { left: 62, right: 14, top: 12, bottom: 34 };
const HEIGHT = 260;

// Elements

const byId = (id) => document.getElementById(id);
function make(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "path", "line", "text", "rect", "circle", "g", "clipPath"].includes(tag);
  const element = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const swatch = (run) =>
  make("svg", { class: "swatch", viewBox: "0 0 22 8", "aria-hidden": "true" },
    make("path", { d: "M0 4H22", stroke: run.color, "stroke-width": 3, "stroke-dasharray": run.dash }));

// The view, and the address that has it

const parameters = new URLSearchParams(location.hash.slice(1));
const choice = (name, values, fallback) => (values.includes(parameters.get(name)) ? parameters.get(name) : fallback);
const view = {
  x: choice("x", ["step", "tokens", "seconds"], "step"),
  y: choice("y", ["full", "clip", "log"], "full"),
  smoothing: choice("smoothing", ["0", "0.01", "0.03", "0.1"], "0.01"),
  hidden: new Set(parameters.getAll("hidden")),
  zoom: null,
  reload: parameters.get("reload") !== "off",
};
const savedZoom = (parameters.get("zoom") || "").split(",").map(Number);
if (savedZoom.length === 2 && savedZoom[0] < savedZoom[1]) view.zoom = savedZoom;

function saveView(extra = {}) {
  const saved = new URLSearchParams({ x: view.x, y: view.y, smoothing: view.smoothing, ...extra });
  if (view.zoom) saved.set("zoom", view.zoom.join());
  if (!view.reload) saved.set("reload", "off");
  view.hidden.forEach((name) => saved.append("hidden", name));
  history.replaceState(null, "", "#" + saved);
}
const visible = () => runs.filter((run) => !view.hidden.has(run.name));

// Numbers

const known = (value) => value !== null && value !== undefined;
function short(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (digits > 3 && size >= 1e3 && size < 1e6) return Math.round(value).toLocaleString("en");
  for (const [unit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]])
    if (size >= unit) return +(value / unit).toPrecision(digits) + suffix;
  return size < 1e-3 ? value.toExponential().replace(/(\.\d\d)\d*/, "$1") : String(+value.toPrecision(digits + 1));
}
const duration = (seconds) => {
  const total = Math.round(seconds), two = (value) => String(value).padStart(2, "0");
  return `${Math.floor(total / 3600)}:${two(Math.floor(total / 60) % 60)}:${two(total % 60)}`;
};
const formatX = (value) =>
  view.x === "seconds" ? duration(value) : view.x === "tokens" ? short(value, 4) : Math.round(value).toLocaleString("en");
const formatY = (chart, value) => (chart.digits ? value.toFixed(chart.digits) : short(value, 4));

const X_TICKS = 6;
const TIMES = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800, 43200, 86400];
function ticks(low, high, count, isTime = false) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const decimal = [1, 2, 5, 10].map((base) => base * power).find((size) => size >= rough) || rough;
  const step = (isTime && rough >= 1 && TIMES.find((size) => size >= rough)) || decimal;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(+value.toPrecision(12));
  return found;
}
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= high; power++)
    for (const base of high - low > 3 ? [1] : [1, 2, 5]) {
      const value = power + Math.log10(base);
      if (value >= low && value <= high) found.push(value);
    }
  return found.length > 2 ? found : ticks(10 ** low, 10 ** high, 4).filter((value) => value > 0).map(Math.log10);
}

// Points: x in the units of the x axis, y, and the smoothed curve

function convert(run, steps) {
  if (view.x === "step") return steps;
  const known = run.axis.step, to = run.axis[view.x];
  let i = 1;
  return steps.map((step) => {
    while (i < known.length - 1 && known[i] < step) i++;
    if (known.length < 2) return to.length ? to[0] : null;
    const part = Math.min(1, (step - known[i - 1]) / (known[i] - known[i - 1])); // a validation may follow the last record
    return to[i] === null || to[i - 1] === null ? null : to[i - 1] + part * (to[i] - to[i - 1]);
  });
}
function average(values, width) {
  const sums = [0], counts = [0];
  values.forEach((value, i) => {
    sums.push(sums[i] + (value ?? 0));
    counts.push(counts[i] + (value === null ? 0 : 1));
  });
  const half = Math.floor(width / 2);
  return values.map((_, i) => {
    const reach = Math.min(half, i, values.length - 1 - i); // narrower at the ends, so that they are not biased
    const from = i - reach, to = i + reach + 1, count = counts[to] - counts[from];
    return count ? (sums[to] - sums[from]) / count : null;
  });
}
const cache = new Map();
function points(run, chart) {
  const key = [run.name, chart.id, view.x, view.smoothing].join("\n");
  if (!cache.has(key)) {
    const series = run.series[chart.id];
    const found = { x: convert(run, series.x), y: series.y };
    const [steps, means] = series.means ? [series.mean_x, series.means] : [series.x, series.y];
    const width = Math.round(view.smoothing * means.length);
    if (chart.smooth && width >= 2) found.smooth = { x: convert(run, steps), y: average(means, width) };
    cache.set(key, found);
  }
  return cache.get(key);
}
