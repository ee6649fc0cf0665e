// Charts: scales, curves, and what the pointer and the keyboard do

const charts = [];

function range(shown, zoom, chart) {
  let values = [];
  for (const { curve } of shown)
    curve.y.forEach((value, i) => {
      if (value !== null && curve.x[i] >= zoom[0] && curve.x[i] <= zoom[1]) values.push(value);
    });
  const log = view.y === "log" && chart.log;
  if (log) values = values.filter((value) => value > 0).map(Math.log10);
  values.sort((a, b) => a - b);
  let [low, high] = [values[0] ?? 0, values[values.length - 1] ?? 1];
  if (view.y === "clip" && chart.smooth && values.length > 50)
    [low, high] = [values[Math.floor(values.length * 0.02)], values[Math.ceil(values.length * 0.98) - 1]];
  if (chart.zero && !log) low = Math.min(0, low);
  const space = (high - low || Math.abs(high) || 1) * 0.05;
  return { log, low: chart.zero && !log ? low : low - space, high: high + space };
}
function pathOf(xs, ys, sx, sy) {
  let text = "", pen = "M", isolated = true;
  xs.forEach((x, i) => {
    const y = x === null || ys[i] === null ? NaN : sy(ys[i]);
    if (!Number.isFinite(y)) {
      if (pen === "L" && isolated) text += "h0.01"; // a point between two gaps
      pen = "M";
      return;
    }
    isolated = pen === "M";
    text += pen + sx(x).toFixed(1) + " " + y.toFixed(1);
    pen = "L";
  });
  return text;
}
const extent = () => {
  let [low, high] = [Infinity, -Infinity];
  for (const run of visible()) {
    const series = Object.keys(run.series).map((id) => points(run, CHARTS.find((chart) => chart.id === id)).x);
    for (const x of series) {
      low = Math.min(low, x.find((value) => value !== null) ?? low);
      high = Math.max(high, x.findLast((value) => value !== null) ?? high);
    }
  }
  return low < high ? [low, high] : [Math.min(low, 0) || 0, Number.isFinite(high) && high > 0 ? high : 1];
};

function draw(item) {
  const { chart, svg } = item;
  const width = Math.max(svg.clientWidth, 240);
  const zoom = view.zoom || extent();
  const shown = visible().filter((run) => run.series[chart.id]).map((run) => ({ run, curve: points(run, chart) }));
  const y = range(shown, zoom, chart);
  const inner = { right: width - MARGIN.right, bottom: HEIGHT - MARGIN.bottom };
  const sx = (value) => MARGIN.left + ((value - zoom[0]) / (zoom[1] - zoom[0])) * (inner.right - MARGIN.left);
  const place = (value) => inner.bottom - ((value - y.low) / (y.high - y.low)) * (inner.bottom - MARGIN.top);
  const sy = y.log ? (value) => (value > 0 ? place(Math.log10(value)) : NaN) : place;
  Object.assign(item, { zoom, sx, sy, inner, shown, toX: (pixel) => zoom[0] + ((pixel - MARGIN.left) / (inner.right - MARGIN.left)) * (zoom[1] - zoom[0]) });
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const clip = `clip-${chart.id}`;
  const parts = [
    make("clipPath", { id: clip }, make("rect", { x: MARGIN.left, y: MARGIN.top - 4, width: inner.right - MARGIN.left, height: inner.bottom - MARGIN.top + 5 })),
  ];
  for (const value of y.log ? logTicks(y.low, y.high) : ticks(y.low, y.high, 5)) {
    const label = short(y.log ? 10 ** value : value, 3);
    parts.push(make("line", { class: "grid", x1: MARGIN.left, x2: inner.right, y1: place(value), y2: place(value) }));
    parts.push(make("text", { x: MARGIN.left - 8, y: place(value) + 4, "text-anchor": "end" }, label));
  }
  for (const value of ticks(zoom[0], zoom[1], width < 420 ? 3 : X_TICKS, view.x === "seconds"))
    parts.push(make("text", { x: sx(value), y: inner.bottom + 16, "text-anchor": inner.right - sx(value) < 16 ? "end" : "middle" }, formatX(value)));
  const unit = { step: "step", tokens: "tokens", seconds: "wall time, h:mm:ss" }[view.x];
  parts.push(make("text", { class: "unit", x: inner.right, y: HEIGHT - 3, "text-anchor": "end" }, unit));
  parts.push(make("line", { class: "axis", x1: MARGIN.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }));
  const group = make("g", { "clip-path": `url(#${clip})` });
  const smoothed = []; // above the other curves
  const opacity = Math.min(0.35, Math.max(0.08, 1.2 / shown.length));
  for (const { run, curve } of shown) {
    const style = { stroke: run.color, "stroke-dasharray": run.dash, "data-run": run.name };
    const raw = curve.smooth ? { class: "curve raw", opacity } : { class: "curve" };
    group.append(make("path", { ...raw, d: pathOf(curve.x, curve.y, sx, sy), ...style }));
    if (curve.smooth) smoothed.push(make("path", { class: "curve smooth", d: pathOf(curve.smooth.x, curve.smooth.y, sx, sy), ...style }));
    if (chart.points && curve.x.length <= 200)
      curve.x.forEach((x, i) => x !== null && curve.y[i] !== null && Number.isFinite(sy(curve.y[i])) &&
        group.append(make("circle", { cx: sx(x).toFixed(1), cy: sy(curve.y[i]).toFixed(1), r: 2.5, fill: run.color })));
    const bad = curve.x.filter((x, i) => x !== null && curve.y[i] === null);
    if (bad.length && chart.digits) // losses that are not finite, as crosses at the top
      group.append(make("path", { class: "nonfinite", d: bad.map((x) => `M${(sx(x) - 4).toFixed(1)} ${MARGIN.top}l8 8m-8 0l8 -8`).join(""), ...style, "stroke-dasharray": "" }));
  }
  group.append(...smoothed);
  item.overlay = make("g");
  svg.replaceChildren(...parts, group, item.overlay);
}

function drawBars(card) {
  const shown = visible().filter((run) => known(run.summary.tokens_per_second));
  const largest = Math.max(...shown.map((run) => run.summary.tokens_per_second));
  const rows = shown.map((run) => {
    const fill = make("div", { class: "fill" });
    fill.style.width = `${(100 * run.summary.tokens_per_second) / largest}%`;
    fill.style.background = run.color;
    const value = make("span", { class: "value" }, Math.round(run.summary.tokens_per_second).toLocaleString("en") + " ");
    value.append(make("b", {}, known(run.summary.ratio) ? run.summary.ratio.toFixed(2) + "×" : ""));
    return make("div", { class: "bar" }, make("span", { class: "name", title: run.name }, run.name), make("div", { class: "track" }, fill), value);
  });
  card.replaceChildren(make("h2", {}, `Throughput, tokens/s, median; ratio to ${runs[0].name}`), ...rows);
}

function drawAll() {
  for (const item of charts) item.svg ? draw(item) : drawBars(item.card);
  byId("reset").disabled = !view.zoom;
  saveView();
}

// The index of the point that is nearest to x
function nearest(xs, x) {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}
function inspect(item, x, left, top) {
  const pixel = item.sx(x);
  item.cursor = x;
  item.overlay.replaceChildren(make("line", { class: "cursor", x1: pixel, x2: pixel, y1: MARGIN.top, y2: item.inner.bottom }));
  const found = [];
  for (const { run, curve } of item.shown) {
    if (!curve.x.length || x < curve.x[0] - (item.zoom[1] - item.zoom[0]) / 50) continue;
    const i = nearest(curve.x, x), value = curve.y[i];
    const smooth = curve.smooth ? curve.smooth.y[nearest(curve.smooth.x, x)] : null;
    found.push({ run, value, smooth });
    if (value !== null)
      item.overlay.append(make("circle", { cx: item.sx(curve.x[i]), cy: item.sy(value), r: 3.5, fill: run.color }));
  }
  found.sort((a, b) => (b.value ?? Infinity) - (a.value ?? Infinity));
  const lines = found.map(({ run, value, smooth }) => {
    const text = value === null ? "not finite" : formatY(item.chart, value);
    const mean = smooth === null ? "" : ` (mean ${formatY(item.chart, smooth)})`;
    return make("div", {}, swatch(run), make("span", {}, run.name), make("b", {}, text), mean);
  });
  const tooltip = byId("tooltip");
  tooltip.replaceChildren(make("div", {}, `${{ step: "step", tokens: "tokens", seconds: "wall time" }[view.x]} ${formatX(x)}`), ...lines);
  tooltip.hidden = false;
  const box = tooltip.getBoundingClientRect();
  tooltip.style.left = `${left + 16 + box.width > innerWidth ? Math.max(0, left - 16 - box.width) : left + 16}px`;
  tooltip.style.top = `${Math.max(0, Math.min(top + 12, innerHeight - box.height - 4))}px`;
}
function leaveChart(item) {
  byId("tooltip").hidden = true;
  item.overlay.replaceChildren();
}
function setZoom(low, high) {
  const [first, last] = extent();
  const wanted = [Math.max(low, first), Math.min(high, last)];
  view.zoom = wanted[1] - wanted[0] < (last - first) * 0.999 && wanted[0] < wanted[1] ? wanted : null;
  drawAll();
}

let dragging = false;
function connect(item) {
  const { svg } = item;
  const at = (event) => Math.min(Math.max(event.clientX - svg.getBoundingClientRect().left, MARGIN.left), item.inner.right);
  let start = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button === 0) [start, dragging] = [at(event), true];
  });
  addEventListener("pointerup", (event) => {
    if (start === null) return;
    const [from, to] = [start, at(event)].sort((a, b) => a - b);
    [start, dragging] = [null, false];
    if (to - from > 5) setZoom(item.toX(from), item.toX(to));
  });
  svg.addEventListener("pointermove", (event) => {
    inspect(item, item.toX(at(event)), event.clientX, event.clientY);
    if (start !== null)
      item.overlay.append(make("rect", { class: "selection", x: Math.min(start, at(event)), width: Math.abs(at(event) - start), y: MARGIN.top, height: item.inner.bottom - MARGIN.top }));
  });
  svg.addEventListener("pointerleave", () => leaveChart(item));
  svg.addEventListener("blur", () => leaveChart(item));
  svg.addEventListener("dblclick", () => setZoom(-Infinity, Infinity));
  svg.addEventListener("keydown", (event) => {
    const [low, high] = item.zoom, size = high - low;
    const inside = item.cursor >= low && item.cursor <= high ? item.cursor : (low + high) / 2;
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (move) item.cursor = Math.min(Math.max(inside + (move * size) / (event.shiftKey ? 10 : 100), low), high);
    else if (factor) setZoom(inside - (inside - low) * factor, inside + (high - inside) * factor);
    else if (event.key === "Escape" || event.key === "0") setZoom(-Infinity, Infinity);
    else return;
    event.preventDefault();
    const box = svg.getBoundingClientRect();
    inspect(item, item.cursor ?? inside, box.left + item.sx(item.cursor ?? inside), box.top + 30);
  });
}
