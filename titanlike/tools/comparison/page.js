// The page of `titanlike compare`. The view is in the address, so a reload and a copied link keep it.

const { runs, refresh } = data;
const COLORS = ["#3f83e0", "#e0781a", "#2aa36a", "#c9498f", "#8d6bdb", "#d1493f", "#1f9fb5", "#9a8420", "#7c8796", "#b0683c"];
const DASHES = ["solid", "dash", "dot", "dashdot"]; // runs beyond the number of colors
const UNITS = { step: "step", tokens: "tokens", hours: "wall time, hours" };
const LOGARITHMIC = ["loss", "validation_loss", "grad_norm"];
const TITLES = {
  loss: "training loss", validation_loss: "validation loss", tokens_per_second: "tokens/s", mfu: "model FLOPs utilization",
  memory_gib: "peak memory, GiB", grad_norm: "gradient norm", learning_rate: "learning rate",
};
const charts = Object.keys(TITLES).filter((id) => runs.some((run) => run.series[id]));

const parameters = new URLSearchParams(location.hash.slice(1));
const view = { hidden: new Set(parameters.getAll("hidden")), zoom: null, reload: parameters.get("reload") !== "off" };
const savedZoom = (parameters.get("zoom") || "").split(",").map(Number);
if (savedZoom.length === 2 && savedZoom[0] < savedZoom[1]) view.zoom = savedZoom;
for (const name of ["x", "y", "smoothing"]) {
  const control = byId(name), wanted = parameters.get(name);
  if ([...control.options].some((option) => option.value === wanted)) control.value = wanted;
  control.addEventListener("change", () => {
    if (name === "x") view.zoom = null;
    draw();
  });
}
const chosen = (name) => byId(name).value;

function saveView() {
  const saved = new URLSearchParams({ x: chosen("x"), y: chosen("y"), smoothing: chosen("smoothing") });
  if (view.zoom) saved.set("zoom", view.zoom.join());
  if (!view.reload) saved.set("reload", "off");
  view.hidden.forEach((name) => saved.append("hidden", name));
  history.replaceState(null, "", "#" + saved);
}

function convert(run, steps) {
  const known = run.axis.step, to = run.axis[chosen("x")];
  if (to === known) return steps;
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
  return values.map((_, i) => {
    const reach = Math.min(Math.floor(width / 2), i, values.length - 1 - i); // narrower at the ends, so that they are not biased
    const from = i - reach, to = i + reach + 1, count = counts[to] - counts[from];
    return count ? (sums[to] - sums[from]) / count : null;
  });
}

function tracesOf(id, number, range) {
  const suffix = number ? number + 1 : "", smoothing = Number(chosen("smoothing"));
  return runs.flatMap((run, i) => {
    const series = run.series[id];
    if (!series) return [];
    const common = {
      name: run.name, legendgroup: run.name, visible: view.hidden.has(run.name) ? "legendonly" : true, showlegend: false,
      xaxis: "x" + suffix, yaxis: "y" + suffix, mode: "lines", hoverinfo: "skip",
    };
    const line = { color: COLORS[i % COLORS.length], dash: DASHES[Math.floor(i / COLORS.length) % DASHES.length], width: 1.5 };
    const [steps, means] = series.means ? [series.mean_x, series.means] : [series.x, series.y];
    const isSmooth = smoothing && smoothing * means.length >= 2 && id !== "validation_loss";
    const markers = series.x.length <= 50 && id === "validation_loss" ? "lines+markers" : "lines";
    const isFirst = charts.find((each) => run.series[each]) === id;
    const x = convert(run, series.x), bad = x.filter((_, j) => series.y[j] === null);
    return [
      { ...common, x, y: series.y, line, mode: markers, opacity: isSmooth ? 0.35 : 1, showlegend: isFirst, hoverinfo: "x+y+name" },
      ...(isSmooth ? [{ ...common, x: convert(run, steps), y: average(means, smoothing * means.length), line }] : []),
      // Values that are not finite are crosses at the top.
      ...(bad.length ? [{ ...common, x: bad, y: bad.map(() => range[1]), mode: "markers", marker: { symbol: "x", color: line.color } }] : []),
    ];
  });
}

function draw() {
  const style = getComputedStyle(document.body), color = (name) => style.getPropertyValue(name);
  const columns = innerWidth > 900 ? 2 : 1, rows = Math.ceil(charts.length / columns);
  const layout = {
    grid: { rows, columns, pattern: "independent" }, height: 60 + 290 * rows, margin: { l: 60, r: 20, t: 20, b: 40 },
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: style.color }, hovermode: "x unified",
    hoverlabel: { bgcolor: color("--card") }, legend: { orientation: "h", y: 1 + 0.1 / rows, yanchor: "bottom" },
  };
  const traces = charts.flatMap((id, number) => {
    const visible = runs.filter((run) => run.series[id] && !view.hidden.has(run.name));
    const values = visible.flatMap((run) => run.series[id].y).filter((value) => value !== null).sort((a, b) => a - b);
    const cut = chosen("y") === "clip" ? Math.floor(values.length * 0.02) : 0, isLog = chosen("y") === "log" && LOGARITHMIC.includes(id);
    const range = [values[cut] ?? 0, values[values.length - 1 - cut] ?? 1], suffix = number ? number + 1 : "";
    layout["xaxis" + suffix] = {
      title: { text: UNITS[chosen("x")] }, gridcolor: color("--line"), zeroline: false, ...(number ? { matches: "x" } : {}),
      ...(view.zoom ? { range: [...view.zoom] } : { autorange: true }),
    };
    layout["yaxis" + suffix] = {
      title: { text: TITLES[id] }, gridcolor: color("--line"), zeroline: false, fixedrange: true, exponentformat: id === "learning_rate" ? "e" : "B", type: isLog ? "log" : "linear",
      ...(cut && range[0] < range[1] ? { range } : { autorange: true }),
    };
    return tracesOf(id, number, range);
  });
  Plotly.react("charts", traces, layout, { responsive: true, displayModeBar: false });
  saveView();
}

draw();
const div = byId("charts");
div.on("plotly_relayout", () => {
  view.zoom = div.layout.xaxis.autorange ? null : div.layout.xaxis.range.map(Number);
  saveView();
});
div.on("plotly_restyle", () => {
  view.hidden = new Set(div.data.filter((trace) => trace.visible === "legendonly").map((trace) => trace.name));
  saveView();
});
let cursor = null;
div.addEventListener("keydown", (event) => {
  const [low, high] = div.layout.xaxis.range, size = high - low, middle = (low + high) / 2;
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
  if (move) {
    cursor = Math.min(Math.max((cursor ?? middle) + (move * size) / 100, low), high);
    Plotly.Fx.hover(div, { xval: cursor }, "xy");
  } else if (factor) Plotly.relayout(div, { "xaxis.range": [middle - (size / 2) * factor, middle + (size / 2) * factor] });
  else if (event.key === "Escape") Plotly.relayout(div, { "xaxis.autorange": true });
  else return;
  event.preventDefault();
});
if (refresh) {
  byId("reload").checked = view.reload;
  byId("reload").addEventListener("change", (event) => {
    view.reload = event.target.checked;
    saveView();
  });
  setInterval(() => view.reload && location.reload(), refresh * 1000);
}
