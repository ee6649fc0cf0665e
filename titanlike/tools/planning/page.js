// The page of `titanlike plan --html`. Its controls choose among candidates that were planned: nothing is interpolated.

const { candidates, available, categories } = data;
const GIB = 2 ** 30;
const HEIGHT = 300, LEFT = 46, RIGHT = 14, TOP = 22, BOTTOM = 40; // of charts
// Okabe and Ito's palette, which color-blind readers can distinguish.
const COLORS = {
  parameters: "#0072B2", gradients: "#56B4E9", optimizer: "#009E73", gathered: "#F0E442", activations: "#E69F00", loss: "#D55E00",
  temporary: "#CC79A7", workspaces: "#999999",
};

const gib = (bytes) => (bytes / GIB).toFixed(1);
const whole = (value) => Math.round(value).toLocaleString("en-US");
function number(value) {
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : value >= 1 ? 2 : 4;
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
const plural = (count, noun) => `${count.toLocaleString("en-US")} ${noun}${count > 1 ? "s" : ""}`;

// From the outermost: the values of a control are those that exist with the values of the controls before it.
const CONTROLS = {
  gpus: { label: "number of GPUs", text: (each) => plural(each.gpus, "GPU") },
  seq_len: { label: "sequence length", text: (each) => plural(each.seq_len, "token") },
  layout: { label: "layout, fastest first", text: (each) => each.layout },
  precision: { label: "precision", text: (each) => each.precision, isList: true },
  batch: { label: "micro-batch", text: (each) => `${plural(each.batch, "sequence")}, ${each.microbatches} per step` },
  mode: { label: "activation checkpointing", text: (each) => each.mode, isList: true },
};
let current = candidates[parseInt(location.hash.slice(1), 10)] ?? candidates[data.initial], cursor = null;

/** Returns the candidates that agree with the current one in these controls. */
const alike = (names) => candidates.filter((each) => names.every((name) => each[name] === current[name]));

/** Returns the first candidate of each value of a control, of those that agree with the current one in the controls before it. */
function choices(name) {
  const names = Object.keys(CONTROLS), same = alike(names.slice(0, names.indexOf(name)));
  return same.filter((each, i) => each[name] !== same[i - 1]?.[name]); // the candidates are in the order of the controls
}
const isNearer = (name, a, b) => typeof a[name] === "number"
  && Math.abs(Math.log(a[name] / current[name])) < Math.abs(Math.log(b[name] / current[name]));

/** Shows the candidate with this value of a control, the same values of those before it, and the nearest ones of the others. */
function choose(name, value) {
  let rest = candidates;
  for (const each of Object.keys(CONTROLS)) {
    const wanted = each === name ? value : current[each];
    const exact = rest.filter((other) => other[each] === wanted);
    const nearest = exact[0] ?? rest.reduce((best, other) => (isNearer(each, other, best) ? other : best));
    rest = rest.filter((other) => other[each] === nearest[each]);
  }
  show(rest[0]);
}

const make = (name, text = "") => Object.assign(document.createElement(name), { textContent: text });
function addControls() {
  for (const [name, control] of Object.entries(CONTROLS)) {
    const box = make("div"), label = Object.assign(make("label", control.label), { htmlFor: name });
    control.input = Object.assign(make(control.isList ? "select" : "input"), { id: name });
    control.output = make("output");
    if (!control.isList) Object.assign(control.input, { type: "range", min: 0, step: 1 });
    box.append(label, control.input, ...(control.isList ? [] : [control.output]));
    box.hidden = name === "gpus" && candidates.every((each) => each.gpus === current.gpus);
    control.input.addEventListener("input", () => choose(name, choices(name)[control.input.value][name]));
    byId("controls").append(box);
  }
}
function updateControls() {
  for (const [name, { input, output, text, isList }] of Object.entries(CONTROLS)) {
    const values = choices(name);
    if (isList) input.replaceChildren(...values.map((each, i) => new Option(text(each), i)));
    else input.max = values.length - 1;
    input.value = values.findIndex((each) => each[name] === current[name]);
    input.disabled = values.length === 1;
    output.textContent = text(current);
    input.setAttribute("aria-valuetext", text(current));
  }
}

function show(candidate) {
  if (candidate.moments !== current.moments) cursor = null;
  current = candidate;
  history.replaceState(null, "", "#" + candidates.indexOf(current));
  updateControls();
  const { fits, reserved, speed, hours, dollars, range: [low, high] } = current;
  const left = gib(Math.abs(available - reserved));
  byId("verdict").className = fits ? "" : "over";
  byId("verdict").textContent = fits
    ? `Fits: ${gib(reserved)} of ${gib(available)} GiB, ${left} GiB remain`
    : `Does not fit: needs ${gib(reserved)} GiB, ${gib(available)} GiB are available, ${left} GiB are missing`;
  const tile = (id, text, range) => byId(id).replaceChildren(text, make("small", range));
  tile("speed", whole(speed), `${whole(speed * low)} to ${whole(speed * high)}, MFU ${(current.mfu * 100).toFixed(1)}%`);
  const [unit, time] = hours < 1 ? ["minutes", hours * 60] : ["hours", hours];
  tile("hours", `${number(time)} ${unit}`, `${number(time / high)} to ${number(time / low)} ${unit}`);
  if (dollars === null) tile("dollars", "unknown", "the hardware file has no price");
  else tile("dollars", `$${number(dollars)}`, `$${number(dollars / high)} to $${number(dollars / low)}`);
  byId("limit").textContent = current.limit;
  byId("source").textContent = `Predictions. The ranges contain ${data.sources[current.source]}.`;
  const words = `${data.command} --gpus ${current.gpus} ${current.flags}`.trim().split(" "); // lines break between them
  byId("command").replaceChildren(...words.flatMap((word, i) => [i ? " " : "", make("span", word)]));
  draw();
}

// Charts, in pixels of the page.
function add(parent, name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  parent.append(made);
  return made;
}
function chart(id) {
  const svg = byId(id), width = svg.clientWidth || 480;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  return [svg, width];
}
function ticks(limit) {
  const power = 10 ** Math.floor(Math.log10(limit / 4)), step = power * [1, 2, 5, 10].find((each) => each * power >= limit / 6);
  return Array.from({ length: Math.floor(limit / step) + 1 }, (_, i) => i * step);
}
function grid(svg, width, limit, y) {
  for (const value of ticks(limit)) {
    add(svg, "path", { d: `M${LEFT},${y(value)}H${width - RIGHT}`, stroke: "var(--line)" });
    add(svg, "text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, value.toLocaleString("en-US"));
  }
}

const height = (value, top) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
function usageOf(name, i) {
  const found = current.usage[name]; // one number, if it is the same in all moments
  return (Array.isArray(found) ? found[i] : found) / 1024;
}

function drawMemory() {
  const [svg, width] = chart("memory"), labels = data.moments[current.moments], names = Object.keys(current.usage);
  const totals = labels.map((_, i) => names.reduce((sum, name) => sum + usageOf(name, i), 0));
  const at = cursor ?? totals.indexOf(Math.max(...totals)), limit = available / GIB, reserved = current.reserved / GIB;
  const top = 1.1 * Math.max(limit, reserved), y = (value) => height(value, top);
  const x = (i) => LEFT + (i / labels.length) * (width - LEFT - RIGHT);
  grid(svg, width, top, y);
  let below = labels.map(() => 0);
  for (const name of names) {
    const above = below.map((value, i) => value + usageOf(name, i));
    // A moment is the maximum of a phase, so each phase is one step of the staircase.
    const edge = (values) => values.flatMap((value, i) => [[x(i), y(value)], [x(i + 1), y(value)]]);
    add(svg, "polygon", { points: [...edge(above), ...edge(below).reverse()].join(" "), fill: COLORS[name] });
    below = above;
  }
  const phase = { x: x(at), y: TOP, width: Math.max(x(1) - x(0), 2), height: HEIGHT - TOP - BOTTOM };
  add(svg, "rect", { ...phase, fill: "var(--text)", "fill-opacity": 0.2, stroke: "var(--text)" });
  for (const [value, other, text, color] of [
    [reserved, limit, `${gib(current.reserved)} reserved`, "var(--text)"],
    [limit, reserved, `${gib(available)} available`, "var(--bad)"],
  ]) {
    const isUnder = value < other && y(value) - y(other) < 20; // the two texts would overlap
    add(svg, "path", { d: `M${LEFT},${y(value)}H${width - RIGHT}`, class: "limit", stroke: color });
    add(svg, "text", { x: LEFT + 6, y: y(value) + (isUnder ? 15 : -5), class: "note", style: `fill: ${color}` }, text);
  }
  for (const [name, from, to] of phasesOf(labels)) {
    if (x(to) - x(from) < 8 * name.length) continue;
    add(svg, "text", { x: x((from + to) / 2), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, name);
  }
  const rank = current.rank === null ? "" : `pipeline rank ${current.rank}, `;
  byId("moment").textContent = `${cursor === null ? "At the peak: " : ""}${rank}${labels[at]}`;
  const rows = names.map((name) => [categories[name], usageOf(name, at), COLORS[name]]).reverse();
  byId("usage").replaceChildren(...[["allocated", totals[at], "none"], ...rows].map(usageRow));
  const valuetext = `${labels[at]}: ${totals[at].toFixed(1)} GiB`;
  const values = { valuemin: 0, valuemax: labels.length - 1, valuenow: at, valuetext };
  for (const [name, value] of Object.entries(values)) svg.setAttribute(`aria-${name}`, value);
  svg.onpointermove = (event) => {
    const share = (event.clientX - svg.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT);
    move(Math.floor(share * labels.length));
  };
  svg.onpointerleave = () => move(null);
  svg.onkeydown = (event) => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: labels.length - 1, Escape: null };
    if (!(event.key in moves)) return;
    event.preventDefault();
    move(moves[event.key]);
  };
  function move(i) {
    cursor = i === null ? null : Math.min(Math.max(i, 0), labels.length - 1);
    drawMemory();
  }
}
function usageRow([label, value, color]) {
  const row = make("li", label);
  row.style.setProperty("--color", color);
  row.append(make("b", value.toFixed(2)));
  return row;
}
/** Returns the parts of a step, such as all of the forward pass, with their first moment and the one after their last. */
function phasesOf(labels) {
  const found = [];
  labels.map((label) => label.split(",")[0]).forEach((name, i) => {
    if (found.at(-1)?.[0] === name) found.at(-1)[2] = i + 1;
    else found.push([name, i, i + 1]);
  });
  return found;
}

function drawFront() {
  const [svg, width] = chart("front");
  const right = 1.5 * available;
  const points = alike(["gpus", "seq_len"]).filter((each) => each.reserved <= right);
  const top = 1.1 * Math.max(current.speed * current.range[1], ...points.map((each) => each.speed));
  const y = (value) => height(value, top);
  const x = (bytes) => LEFT + (Math.min(bytes, right) / right) * (width - LEFT - RIGHT);
  grid(svg, width, top, y);
  for (const value of ticks(right / GIB)) {
    add(svg, "text", { x: x(value * GIB), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, whole(value));
  }
  add(svg, "text", { x: width - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, "GiB reserved at the peak");
  add(svg, "text", { x: LEFT, y: TOP - 8 }, "tokens/s per GPU");
  const beyond = { x: x(available), y: TOP, width: x(right) - x(available), height: HEIGHT - TOP - BOTTOM };
  add(svg, "rect", { ...beyond, fill: "var(--bad)", "fill-opacity": 0.1 });
  add(svg, "text", { x: x(available) + 6, y: TOP + 14, class: "note", style: "fill: var(--bad)" }, "does not fit");
  const front = [];
  for (const each of points.filter((each) => each.fits).sort((a, b) => a.reserved - b.reserved || b.speed - a.speed)) {
    if (each.speed > (front.at(-1)?.speed ?? 0)) front.push(each);
  }
  for (const each of points) {
    const dot = add(svg, "circle", { cx: x(each.reserved), cy: y(each.speed), r: 3.5, class: each.fits ? "fits" : "over" });
    dot.onclick = () => show(each);
    dot.onpointerenter = () => describe(each);
  }
  const steps = front.map((each, i) => `${i ? "H" : "M"}${x(each.reserved)}${i ? "V" : ","}${y(each.speed)}`);
  add(svg, "path", { d: steps.join(""), class: "front" });
  const [low, high] = current.range.map((factor) => y(current.speed * factor));
  add(svg, "path", { d: `M${x(current.reserved)},${low}V${high}m-4,0h8m-4,0V${low}m-4,0h8`, class: "range" });
  add(svg, "circle", { cx: x(current.reserved), cy: y(current.speed), r: 8, class: "chosen" });
  front.forEach((each, i) => {
    const isCurrent = each === current, isStop = isCurrent || (!front.includes(current) && i === 0);
    const dot = add(svg, "circle", {
      cx: x(each.reserved), cy: y(each.speed), r: 5, class: "front", role: "radio", tabindex: isStop ? 0 : -1,
      "aria-checked": isCurrent, "aria-label": textOf(each),
    });
    dot.onclick = () => show(each);
    dot.onpointerenter = dot.onfocus = () => describe(each);
    dot.onkeydown = (event) => {
      const arrows = { ArrowLeft: i - 1, ArrowDown: i - 1, ArrowRight: i + 1, ArrowUp: i + 1 };
      const moves = { ...arrows, Home: 0, End: front.length - 1, " ": i, Enter: i };
      if (!(event.key in moves)) return;
      event.preventDefault();
      show(front[Math.min(Math.max(moves[event.key], 0), front.length - 1)]);
      svg.querySelector("[aria-checked=true]").focus();
    };
  });
  svg.onpointerleave = () => describe(current);
  describe(current);
}
const describe = (each) => (byId("point").textContent = textOf(each));
function textOf(each) {
  const parts = ["layout", "precision", "batch", "mode"].map((name) => CONTROLS[name].text(each)).join(", ");
  return `${gib(each.reserved)} GiB, ${whole(each.speed)} tokens/s per GPU: ${parts}`;
}

function draw() {
  drawMemory();
  drawFront();
}
addControls();
show(current);
addEventListener("resize", draw);
