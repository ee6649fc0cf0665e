// Tables, controls, and the reload of a page that is rewritten while runs go on

function drawSummary() {
  const dash = (value, format) => (known(value) ? format(value) : "–");
  const columns = [
    ["run", (run) => make("span", {}, swatch(run), " ", run.name)],
    ["state", (run) => run.summary.state, "text"],
    ["steps", (run) => run.summary.step.toLocaleString("en") + (run.summary.num_steps > run.summary.step ? ` of ${run.summary.num_steps.toLocaleString("en")}` : "")],
    ["tokens", (run) => dash(run.summary.tokens, short)],
    ["training loss", (run) => dash(run.summary.training_loss, (value) => value.toFixed(4))],
    ["validation loss", (run) => dash(run.summary.validation_loss, (value) => value.toFixed(4)), ""],
    ["best", (run) => dash(run.summary.best_validation_loss, (value) => `${value.toFixed(4)} at ${run.summary.best_validation_step.toLocaleString("en")}`), "", (run) => (known(run.summary.best_validation_loss) ? -run.summary.best_validation_loss : -Infinity)],
    ["tokens/s", (run) => dash(run.summary.tokens_per_second, (value) => Math.round(value).toLocaleString("en")), "", (run) => run.summary.tokens_per_second ?? -Infinity],
    ["ratio", (run) => dash(run.summary.ratio, (value) => value.toFixed(2) + "×")],
    ["MFU", (run) => dash(run.summary.mfu, (value) => (100 * value).toFixed(1) + "%")],
    ["memory, GiB", (run) => dash(run.summary.peak_memory_gib, (value) => value.toFixed(2))],
    ["wall time", (run) => dash(run.summary.wall_seconds, duration)],
  ];
  const body = runs.map((run) =>
    make("tr", {}, ...columns.map(([name, cell, style, score], i) => {
      const best = score && new Set(runs.map(score)).size > 1 && Number.isFinite(score(run)) && score(run) === Math.max(...runs.map(score));
      return make(i ? "td" : "th", { class: `${style || ""} ${best ? "best" : ""}`, ...(i ? {} : { scope: "row" }) }, cell(run));
    })));
  const head = make("tr", {}, ...columns.map(([name, , style]) => make("th", { scope: "col", class: style || "" }, name)));
  byId("summary").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
  byId("problems").replaceChildren(...data.problems.map((text) => make("li", {}, text)));
}

function drawDifferences() {
  byId("differences").hidden = !data.differences.length;
  const rows = [];
  let section = null;
  for (const each of data.differences) {
    if (each.section !== section) {
      section = each.section;
      if (section) rows.push(make("tr", { class: "section" }, make("th", { colspan: runs.length + 1 }, `[${section}]`)));
    }
    const cells = each.values.map((value) =>
      make("td", { class: value === each.values[0] ? "" : "changed", title: value ?? "not set" }, value ?? "not set"));
    rows.push(make("tr", {}, make("th", { scope: "row" }, each.key), ...cells));
  }
  const head = make("tr", {}, make("th", { scope: "col" }, "key"), ...runs.map((run) => make("th", { scope: "col" }, run.name)));
  byId("differences").querySelector(".scroll").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

function drawLegend() {
  const chips = runs.map((run, i) => {
    const chip = make("button", { type: "button", id: `run-${i}`, "aria-pressed": String(!view.hidden.has(run.name)), title: run.name }, swatch(run), make("span", {}, run.name));
    chip.addEventListener("click", (event) => {
      if (event.shiftKey) view.hidden = new Set(runs.filter((other) => other !== run).map((other) => other.name));
      else view.hidden.has(run.name) ? view.hidden.delete(run.name) : view.hidden.add(run.name);
      updateLegend();
    });
    return chip;
  });
  const all = make("button", { type: "button", id: "all" }, "show all");
  all.addEventListener("click", () => {
    view.hidden.clear();
    updateLegend();
  });
  byId("legend").replaceChildren(...chips, ...(runs.length > 1 ? [all] : []));
}
function updateLegend() {
  runs.forEach((run, i) => byId(`run-${i}`).setAttribute("aria-pressed", String(!view.hidden.has(run.name))));
  drawAll();
}

function connectControls() {
  for (const input of document.querySelectorAll("#x input")) {
    input.id = `x-${input.value}`;
    input.checked = input.value === view.x;
    input.addEventListener("change", () => {
      [view.x, view.zoom] = [input.value, null];
      drawAll();
    });
  }
  for (const name of ["y", "smoothing"]) {
    byId(name).value = view[name];
    byId(name).addEventListener("change", (event) => {
      view[name] = event.target.value;
      drawAll();
    });
  }
  byId("reset").addEventListener("click", () => setZoom(-Infinity, Infinity));
}

function drawCharts() {
  for (const chart of CHARTS) {
    const card = make("div", { class: "card", id: `card-${chart.id}`, ...(chart.id === "bars" ? { tabindex: "0", role: "region", "aria-label": "Throughput" } : {}) });
    if (chart.id === "bars") {
      if (!runs.some((run) => known(run.summary.tokens_per_second))) continue;
      charts.push({ chart, card });
    } else {
      if (!runs.some((run) => run.series[chart.id])) continue;
      const svg = make("svg", { class: "chart", id: `chart-${chart.id}`, tabindex: "0", role: "img", "aria-label": `${chart.title}: curves of the runs. Arrow keys read the values.` });
      card.append(make("h2", {}, chart.title), svg);
      charts.push({ chart, card, svg });
      connect(charts[charts.length - 1]);
    }
    byId("charts").append(card);
  }
}

function reloadLater() {
  const paused = make("input", { type: "checkbox", id: "reload" });
  paused.checked = view.reload;
  paused.addEventListener("change", () => {
    view.reload = paused.checked;
    saveView();
  });
  byId("status").append(make("label", {}, paused, ` reload every ${data.refresh} s`));
  setInterval(() => {
    if (!view.reload || dragging) return;
    saveView({ top: scrollY, focus: document.activeElement?.id || "" });
    location.reload();
  }, data.refresh * 1000);
}

byId("status").append(`${runs.length} run${runs.length > 1 ? "s" : ""}, baseline ${runs[0].name}; written ${data.written}`);
drawSummary();
drawDifferences();
drawLegend();
connectControls();
drawCharts();
drawAll();
if (data.refresh) reloadLater();
if (parameters.get("focus")) byId(parameters.get("focus"))?.focus({ preventScroll: true });
if (parameters.get("top")) scrollTo(0, Number(parameters.get("top")));
let drawnWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== drawnWidth) requestAnimationFrame(drawAll);
  drawnWidth = innerWidth;
});
