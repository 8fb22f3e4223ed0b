"use strict";
(() => {
// Text from the record reaches the page through textContent and canvas text only.
const BLOCK = 64, CODES = 253, GUTTER = 72, FOOT = 18;
const MARKS = { // kind: [glyph, colour, name, name of its row if shorter]; the glyphs tell them apart without colour
  incident: ["▼", "--b", "incident"], rollback: ["◀", "--a", "rollback"], replay: ["↻", "--a", "replay"], experiment: ["⚗", "--d", "experiment"],
  data: ["✕", "--e", "data left out", "data out"], lr: ["◆", "--d", "LR or clip changed", "LR, clip"], good: ["●", "--c", "checkpoint, good", "good save"], checkpoint: ["○", "--c", "checkpoint, not judged", "saved"],
  bad: ["⊗", "--bad", "checkpoint, bad or abandoned", "not used"], restart: ["┃", "--ink", "restart"], shift: ["⇅", "--e", "expected shift", "shift"], overflow: ["△", "--e", "overflow"],
  failure: ["✖", "--bad", "failure"], stop: ["■", "--bad", "stop"], action: ["◇", "--a", "other action", "other"]};
const COLOURS = ["--a", "--b", "--c", "--d", "--e", "--ink", "--dim"], DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3], [1, 3], [9, 2], [4, 4]];
const COSTS = { // every part of the time has the same colour on all pages
  productive: "--c", restart: "--b", rollback: "--a", experiment: "--d", "data wait": "--e", unknown: "--dim",
  checkpoint: "--a striped", straggler: "--b striped", guard: "--d striped", "between steps": "--e striped", start: "--dim striped"};
const paint = (node, name) => { const [colour, ...more] = name.split(" "); node.style.background = `var(${colour})`; node.classList.add(...more); return node; };
const data = JSON.parse(document.getElementById("data").textContent), root = document.getElementById("page");
const el = (tag, props = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (key in node && key !== "list") node[key] = value; else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};
const refill = (container, ...children) => { // puts new content in place, and the focus and the scrolling back where they were
  const key = document.activeElement && container.contains(document.activeElement) ? document.activeElement.dataset.key : undefined, old = container.querySelector(".scroll"), left = old ? old.scrollLeft : 0;
  container.replaceChildren(...children);
  const next = key === undefined ? null : [...container.querySelectorAll("[data-key]")].find((node) => node.dataset.key === key), box = container.querySelector(".scroll");
  if (next) next.focus({preventScroll: true});
  if (box) box.scrollLeft = left;
};
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const number = (v) => v === null || v === undefined ? "" : Number.isNaN(v) ? "NaN" : !Number.isFinite(v) ? (v > 0 ? "Inf" : "-Inf")
  : Math.abs(v) >= 1e6 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(3).replace(/\.?0+e/, "e") : String(+v.toPrecision(5));
const whole = (v) => Math.round(v).toLocaleString("en-US");
const theme = (name) => { document.documentElement.dataset.theme = name; redraw(); };

// ---- points

const inflate = async (text) => {
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
};

class Curve {
  // Holds points by rising x. Of every whole block of points it keeps the extremes, so that a pixel is drawn from few numbers.
  constructor(name) { Object.assign(this, {name, n: 0, x: new Float64Array(64), y: new Float32Array(64), built: 0, low: [], high: [], odd: []}); }

  static async unpack(spec) {
    const curve = new Curve(spec.name), n = curve.n = spec.n;
    curve.thinned = spec.thinned;
    if (spec.x.raw) curve.x = new Float64Array(await inflate(spec.x.raw));
    else {
      curve.x = new Float64Array(n);
      let i = 0;
      for (const [start, distance, count] of spec.x.runs) for (let k = 0; k < count; k++) curve.x[i++] = start + k * distance;
    }
    if (spec.y.f4) curve.y = new Float32Array(await inflate(spec.y.f4));
    else {
      const [codes, low, high] = [new Uint8Array(await inflate(spec.y.codes)), new Float32Array(await inflate(spec.y.low)), new Float32Array(await inflate(spec.y.high))];
      curve.y = new Float32Array(n);
      for (let i = 0; i < n; i++) {
        const b = (i / spec.y.bucket) | 0, code = codes[i];
        curve.y[i] = code === CODES - 1 ? high[b] : code < CODES ? low[b] + (high[b] - low[b]) * code / (CODES - 1)
          : code === CODES ? NaN : code === CODES + 1 ? Infinity : -Infinity;
        if (code < CODES && high[b] === low[b]) curve.y[i] = low[b];
      }
    }
    return curve;
  }

  push(x, y) {
    if (this.n === this.x.length) {
      const grow = (old, type) => { const bigger = new type(Math.max(64, old.length * 2)); bigger.set(old); return bigger; };
      this.x = grow(this.x, Float64Array); this.y = grow(this.y, Float32Array);
    }
    this.x[this.n] = x; this.y[this.n++] = y;
  }

  cut(n) { this.n = n; this.built = Math.min(this.built, (n / BLOCK) | 0); }

  find(x) { // the first point at x or later
    let low = 0, high = this.n;
    while (low < high) { const middle = (low + high) >> 1; if (this.x[middle] < x) low = middle + 1; else high = middle; }
    return low;
  }

  build() {
    for (; (this.built + 1) * BLOCK <= this.n; this.built++) {
      const b = this.built, [low, high, odd] = this.scan(b * BLOCK, (b + 1) * BLOCK, [Infinity, -Infinity, 0]);
      this.low[b] = low; this.high[b] = high; this.odd[b] = odd;
    }
  }

  scan(from, to, best) {
    const y = this.y;
    for (let i = from; i < to; i++) {
      const v = y[i];
      if (v - v !== 0) best[2]++; else { if (v < best[0]) best[0] = v; if (v > best[1]) best[1] = v; }
    }
    return best;
  }

  extremes(from, to) { // [lowest, highest, count of values that are not finite]
    const best = [Infinity, -Infinity, 0], first = Math.ceil(from / BLOCK), last = Math.min(this.built, (to / BLOCK) | 0);
    if (last <= first) return this.scan(from, to, best);
    this.scan(from, first * BLOCK, best);
    for (let b = first; b < last; b++) {
      if (this.low[b] < best[0]) best[0] = this.low[b];
      if (this.high[b] > best[1]) best[1] = this.high[b];
      best[2] += this.odd[b];
    }
    return this.scan(last * BLOCK, to, best);
  }

  locate(value, from, to) { // the first point of this value
    for (let i = from; i < to; i++) {
      if (i % BLOCK === 0) while (((i / BLOCK) | 0) < this.built && i + BLOCK <= to && !(this.low[i / BLOCK] <= value && this.high[i / BLOCK] >= value)) i += BLOCK;
      if (i < to && this.y[i] === value) return i;
    }
    return -1;
  }
}

// ---- plots

const view = {low: 0, high: 1, all: [0, 1], hidden: new Set(), plots: []};
let queued = false;
function redraw() { if (!queued) { queued = true; requestAnimationFrame(() => { queued = false; view.plots.forEach((plot) => plot.draw()); }); } }
function show(low, high) {
  const [first, last] = view.all, least = Math.max(1e-9, (last - first) / 1e9, 2);
  let width = Math.min(Math.max(high - low, least), Math.max(last - first, least));
  low = Math.max(first, Math.min(low, last - width)); view.low = low; view.high = low + width;
  for (const [id, value] of [["from", view.low], ["to", view.high]]) { const input = document.getElementById(id); if (input && input !== document.activeElement) input.value = Math.round(value); }
  redraw();
}
const zoom = (factor, at = (view.low + view.high) / 2) => show(at - (at - view.low) * factor, at + (view.high - at) * factor);
const pan = (share) => { const by = (view.high - view.low) * share; show(view.low + by, view.high + by); };

function ticks(low, high, count, least = 0) {
  const rough = Math.max((high - low) / count, least), power = 10 ** Math.floor(Math.log10(rough)), unit = [1, 2, 5, 10].find((m) => m * power >= rough) * power, found = [];
  if (!(unit > 0) || !Number.isFinite(unit)) return [low];
  for (let v = Math.ceil(low / unit) * unit; v <= high + unit / 1e6 && found.length < 20; v += unit) found.push(Math.abs(v) < unit / 1e6 ? 0 : v);
  return found;
}

class Plot {
  constructor(spec, curves, undone, range, height) {
    Object.assign(this, {spec, curves, undone, range, height: height || 190, log: null});
    this.canvas = el("canvas", {tabIndex: 0, role: "img"});
    this.cursor = el("div", {className: "cursor"}); this.pick = el("div", {className: "pick"});
    this.readout = el("output", {className: "small"});
    this.scale = el("button", {type: "button", textContent: "log", title: "logarithmic or linear scale", on: {click: () => { this.log = !this.isLog; this.draw(); }}});
    const names = curves.length > 1 ? curves.map((c, i) => el("span", {}, this.swatch(i), this.label(c))) : [];
    this.node = el("figure", {}, el("figcaption", {}, el("b", {textContent: spec.title}), this.scale, el("span", {className: "wide", textContent: spec.help || ""}), ...names, this.readout),
      el("div", {className: "plot"}, this.canvas, this.cursor, this.pick));
    if (!range) this.listen();
    view.plots.push(this);
  }

  swatch(i) { return paint(el("i", {className: "swatch"}), COLOURS[i % COLOURS.length] + (i < COLOURS.length ? "" : " striped")); }
  label(curve) { const at = curve.name.indexOf(".") + 1, shared = curve.name.slice(0, at); return this.curves.every((c) => c.name.startsWith(shared)) ? curve.name.slice(at) : curve.name; }
  get low() { return this.range ? this.range[0] : view.low; }
  get high() { return this.range ? this.range[1] : view.high; }
  x(step) { return GUTTER + (step - this.low) / (this.high - this.low) * this.width; }
  step(x) { return this.low + (x - GUTTER) / this.width * (this.high - this.low); }

  listen() {
    const at = (event) => this.step(event.clientX - this.canvas.getBoundingClientRect().left);
    let start = null, last = null;
    this.canvas.addEventListener("pointerdown", (event) => { start = last = at(event); if (event.pointerType === "mouse") this.canvas.setPointerCapture(event.pointerId); });
    this.canvas.addEventListener("pointermove", (event) => {
      const now = at(event);
      if (start !== null && event.pointerType !== "mouse") { show(view.low + last - now, view.high + last - now); last = at(event); return; }
      if (start !== null) { Object.assign(this.pick.style, {display: "block", left: `${Math.min(this.x(start), this.x(now))}px`, width: `${Math.abs(this.x(now) - this.x(start))}px`}); }
      view.plots.forEach((plot) => plot.hover(now));
    });
    const end = (event) => {
      const now = at(event);
      this.pick.style.display = "none";
      if (start !== null && event.type === "pointerup" && event.pointerType === "mouse") {
        if (Math.abs(this.x(now) - this.x(start)) > 6) show(Math.min(start, now), Math.max(start, now)); else this.clicked(now);
      } else if (start !== null && event.type === "pointerup" && Math.abs(now - start) * this.width < 6 * (view.high - view.low)) this.clicked(now);
      start = null;
    };
    for (const name of ["pointerup", "pointercancel"]) this.canvas.addEventListener(name, end);
    this.canvas.addEventListener("pointerleave", () => view.plots.forEach((plot) => plot.hover(null)));
    this.canvas.addEventListener("dblclick", () => show(...view.all));
    this.canvas.addEventListener("wheel", (event) => { if (event.ctrlKey || event.shiftKey || event.metaKey) { event.preventDefault(); zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, at(event)); } }, {passive: false});
    this.canvas.addEventListener("keydown", (event) => {
      const keys = {ArrowLeft: () => pan(-.2), ArrowRight: () => pan(.2), "+": () => zoom(.5), "=": () => zoom(.5), "-": () => zoom(2), 0: () => show(...view.all),
        Home: () => show(...view.all), n: () => nextIncident(1), p: () => nextIncident(-1), l: () => { this.log = !this.isLog; this.draw(); }};
      if (keys[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); keys[event.key](); }
    });
  }

  clicked(step) {
    const slack = 8 / this.width * (view.high - view.low);
    const index = (page.incidents || []).findIndex((i) => step >= i.onset - slack && step <= i.last + slack);
    if (index >= 0) openIncident(index);
  }

  bounds() { // [lowest, highest, not finite, where the lowest is, where the highest is] in view
    let best = [Infinity, -Infinity, 0, null, null];
    for (const curve of this.curves) {
      curve.build();
      const from = curve.find(this.low), to = curve.find(this.high + 1e-9), [low, high, odd] = curve.extremes(from, to);
      if (low < best[0]) best[0] = low, best[3] = curve.x[curve.locate(low, from, to)];
      if (high > best[1]) best[1] = high, best[4] = curve.x[curve.locate(high, from, to)];
      best[2] += odd;
    }
    return best;
  }

  median() { // of some of the values in view
    const some = [];
    for (const curve of this.curves) {
      const from = curve.find(this.low), to = curve.find(this.high + 1e-9);
      for (let i = from; i < to; i += Math.ceil((to - from) / 256)) if (Number.isFinite(curve.y[i])) some.push(curve.y[i]);
    }
    return some.sort((a, b) => a - b)[some.length >> 1];
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, box = this.canvas.parentNode.clientWidth;
    if (!box) return;
    this.width = box - GUTTER - 6;
    this.canvas.width = box * ratio; this.canvas.height = this.height * ratio; this.canvas.style.height = `${this.height}px`;
    const pen = this.pen = this.canvas.getContext("2d"), bottom = this.height - FOOT, best = this.bounds();
    pen.scale(ratio, ratio); pen.font = "11px system-ui,sans-serif"; pen.lineWidth = 1;
    let [low, high] = best;
    if (this.undone) { const [a, b] = this.undone.extremes(this.undone.find(this.low), this.undone.find(this.high + 1e-9)); low = Math.min(low, a); high = Math.max(high, b); }
    this.isLog = low > 0 && (this.log ?? (high > 30 * low && this.median() < .1 * high));
    this.scale.setAttribute("aria-pressed", String(this.isLog));
    if (!(high >= low)) [low, high] = [0, 1];
    if (high === low) { const by = Math.abs(low) * .05 || 1; low -= by; high += by; }
    const f = this.isLog ? Math.log10 : (v) => v, top = 14, lo = f(low), hi = f(high), y = (v) => Math.min(bottom, Math.max(top - 4, bottom - 3 - (f(v) - lo) / (hi - lo) * (bottom - top - 3)));
    this.bands(pen, bottom); this.axes(pen, low, high, y, bottom);
    pen.save(); pen.beginPath(); pen.rect(GUTTER, 0, this.width, bottom); pen.clip();
    this.curves.forEach((curve, i) => this.line(pen, curve, i, y, top));
    if (this.undone) this.crosses(pen, y, top);
    pen.restore();
    this.describe(best);
  }

  bands(pen, bottom) {
    if (view.hidden.has("incident")) return;
    let free = 0;
    (page.incidents || []).forEach((incident, i) => {
      if (incident.last < this.low || incident.onset > this.high) return;
      const left = Math.max(GUTTER, this.x(incident.onset)), width = Math.max(3, Math.min(GUTTER + this.width, this.x(incident.last)) - left);
      pen.fillStyle = css("--band"); pen.fillRect(left, 0, width, bottom);
      pen.fillStyle = css("--b"); pen.fillRect(left, 0, width, 2); pen.textAlign = "left";
      const name = (incident.title.match(/^\d+/) || [""])[0];
      if (left >= free && name) { pen.fillText(name, left + 6, 12); free = left + 12 + pen.measureText(name).width; }
    });
  }

  axes(pen, low, high, y, bottom) {
    pen.fillStyle = css("--dim"); pen.strokeStyle = css("--grid"); pen.textAlign = "right";
    let marks = this.isLog ? [] : ticks(low, high, 4);
    if (!this.isLog && marks.length < 2) marks = ticks(low, high, 8);
    const decades = Math.log10(high / low), every = Math.ceil(decades / 8);
    if (this.isLog) for (let e = Math.ceil(Math.floor(Math.log10(low)) / every) * every; e <= Math.log10(high); e += every) for (const m of decades > 4 ? [1] : [1, 2, 5]) if (m * 10 ** e >= low && m * 10 ** e <= high) marks.push(m * 10 ** e);
    if (marks.length < 2) marks = [low, high];
    marks.forEach((v) => { pen.beginPath(); pen.moveTo(GUTTER, y(v) + .5); pen.lineTo(GUTTER + this.width, y(v) + .5); pen.stroke(); pen.fillText(number(v), GUTTER - 5, y(v) + 4); });
    pen.strokeStyle = css("--line"); pen.beginPath(); pen.moveTo(GUTTER, bottom + .5); pen.lineTo(GUTTER + this.width, bottom + .5); pen.stroke();
    pen.textAlign = "center";
    ticks(this.low, this.high, Math.max(2, Math.min(8, this.width / 70)), 1).forEach((v) => { const x = this.x(v); if (x > GUTTER + 12 && x < GUTTER + this.width - 12) pen.fillText(Number.isInteger(v) ? whole(v) : number(v), x, bottom + 14); });
  }

  line(pen, curve, i, y, top) {
    const from = Math.max(0, curve.find(this.low) - 1), to = Math.min(curve.n, curve.find(this.high + 1e-9) + 1), odd = [];
    pen.strokeStyle = pen.fillStyle = css(COLOURS[i % COLOURS.length]); pen.setLineDash(i >= COLOURS.length ? [3, 2] : to - from < this.width ? DASHES[i] : []); pen.lineWidth = 1.3; pen.globalAlpha = this.curves.length > 1 ? .8 : 1; pen.beginPath();
    if (to - from <= 2 * this.width) {
      let isDown = false;
      for (let k = from; k < to; k++) {
        const v = curve.y[k], x = this.x(curve.x[k]);
        if (v - v !== 0) { odd.push(x); isDown = false; } else { if (isDown) pen.lineTo(x, y(v)); else pen.moveTo(x, y(v)); isDown = true; }
      }
      pen.stroke();
      if (to - from < this.width / 4) for (let k = from; k < to; k++) if (Number.isFinite(curve.y[k])) pen.fillRect(this.x(curve.x[k]) - 1.5, y(curve.y[k]) - 1.5, 3, 3);
    } else {
      let k = from, isDown = false;
      for (let column = 0; column <= this.width; column++) { // one stroke a pixel, from the lowest to the highest value in it
        const next = Math.min(to, curve.find(this.step(GUTTER + column + 1)));
        if (next <= k) continue;
        const [low, high, count] = curve.extremes(k, next), x = GUTTER + column + .5;
        if (count) odd.push(x);
        if (high >= low) { if (isDown) pen.lineTo(x, y(high)); else pen.moveTo(x, y(high)); pen.lineTo(x, y(low) + .5); isDown = true; }
        k = next;
      }
      pen.stroke();
    }
    pen.setLineDash([]); pen.globalAlpha = 1; pen.fillStyle = css("--bad"); pen.textAlign = "center";
    odd.filter((x, k) => k === 0 || x - odd[k - 1] > 3 || k % 8 === 0).forEach((x) => pen.fillText("✖", x, top));
  }

  crosses(pen, y, top) { // attempts that did not stay
    const {undone} = this, from = undone.find(this.low), to = undone.find(this.high + 1e-9), stride = Math.max(1, Math.ceil((to - from) / 8000));
    pen.strokeStyle = css("--b"); pen.lineWidth = 1.2; pen.beginPath();
    for (let k = from; k < to; k += stride) {
      let v = undone.y[k];
      if (stride > 1) v = undone.extremes(k, Math.min(to, k + stride))[1];
      const x = this.x(undone.x[k]), h = Number.isFinite(v) ? y(v) : top - 5;
      pen.moveTo(x - 3, h - 3); pen.lineTo(x + 3, h + 3); pen.moveTo(x - 3, h + 3); pen.lineTo(x + 3, h - 3);
    }
    pen.stroke();
  }

  describe([low, high, odd, lowAt, highAt]) {
    const text = high >= low ? `lowest ${number(low)} at ${page.axis} ${whole(lowAt)}, highest ${number(high)} at ${page.axis} ${whole(highAt)}${odd ? `, ${whole(odd)} not finite` : ""}` : odd ? `${whole(odd)} values, none finite` : "no point in view";
    this.readout.textContent = this.undone ? `${text}; crosses: attempts that were undone` : text;
    this.canvas.setAttribute("aria-label", `${this.spec.title}, ${page.axis}s ${whole(this.low)} to ${whole(this.high)}: ${text}. Keys: arrows move, plus and minus zoom, 0 shows all, n and p go to the next and previous incident.`);
  }

  hover(step) {
    const inside = step !== null && step >= this.low && step <= this.high && this.width && !this.range;
    this.cursor.style.display = inside ? "block" : "none";
    if (!inside) { if (this.wasInside) this.describe(this.bounds()); this.wasInside = false; return; }
    this.wasInside = true; this.cursor.style.left = `${this.x(step)}px`;
    const near = this.curves.map((curve) => { let i = curve.find(step); if (i > 0 && (i === curve.n || step - curve.x[i - 1] < curve.x[i] - step)) i--; return i < curve.n ? [curve, i] : null; }).filter(Boolean);
    if (near.length) this.readout.textContent = `${page.axis} ${whole(near[0][0].x[near[0][1]])}: ${near.map(([curve, i]) => (near.length > 1 ? `${this.label(curve)} ` : "") + number(curve.y[i])).join(", ")}`;
  }
}

class Lanes extends Plot { // one row for each kind of mark
  constructor() { super({title: "What was done", help: "point at a mark to read it"}, [], null); this.scale.remove(); }
  kinds() { return Object.keys(MARKS).filter((kind) => !view.hidden.has(kind) && page.marks.some((m) => m[0] === kind)); }
  draw() {
    const kinds = this.kinds(), ratio = window.devicePixelRatio || 1, box = this.canvas.parentNode.clientWidth;
    if (!box) return;
    this.width = box - GUTTER - 6; this.height = kinds.length * 18 + 6;
    this.canvas.width = box * ratio; this.canvas.height = this.height * ratio; this.canvas.style.height = `${this.height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio); pen.font = "11px system-ui,sans-serif";
    this.spots = [];
    kinds.forEach((kind, row) => {
      const middle = row * 18 + 12, [glyph, colour] = MARKS[kind];
      pen.strokeStyle = css("--grid"); pen.beginPath(); pen.moveTo(GUTTER, middle + .5); pen.lineTo(GUTTER + this.width, middle + .5); pen.stroke();
      pen.fillStyle = css("--dim"); pen.textAlign = "right"; pen.fillText(MARKS[kind][3] || MARKS[kind][2], GUTTER - 9, middle + 4);
      pen.fillStyle = pen.strokeStyle = css(colour); pen.textAlign = "center";
      let last = -9;
      for (const [of, step, text, to] of page.marks) {
        if (of !== kind || step < view.low || step > view.high) continue;
        const x = this.x(step);
        this.spots.push([x, middle, `${MARKS[kind][2]} at ${page.axis} ${whole(step)}: ${text}`]);
        if (Math.abs(x - last) < 2) continue;
        last = x;
        if (to !== null && to !== undefined) { pen.lineWidth = 2; pen.beginPath(); pen.moveTo(Math.max(GUTTER, this.x(to)), middle); pen.lineTo(x, middle); pen.stroke(); pen.lineWidth = 1; }
        pen.fillText(glyph, x, middle + 4);
      }
    });
    this.canvas.setAttribute("aria-label", kinds.map((kind) => `${page.marks.filter((m) => m[0] === kind).length} ${MARKS[kind][2]}`).join(", "));
    this.describe();
    if (!this.hasReader) { this.hasReader = true; this.canvas.addEventListener("pointermove", (event) => this.read(event)); }
  }
  describe() { this.readout.textContent = ""; }
  bounds() { return []; }
  read(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const near = this.spots.filter((s) => Math.abs(s[1] - y) < 10).sort((a, b) => Math.abs(a[0] - x) - Math.abs(b[0] - x))[0];
    this.readout.textContent = near && Math.abs(near[0] - x) < 10 ? near[2] : "";
  }
}

// ---- text

const parts = (list) => list.map((part) => {
  if (part.type === "paragraph") return el("p", {textContent: part.text});
  if (part.type === "bullets") return el("ul", {className: "text"}, ...part.items.map((item) => el("li", {textContent: item})));
  if (part.type === "command") return el("pre", {textContent: part.text});
  const head = part.head.some(Boolean) ? [el("thead", {}, el("tr", {}, ...part.head.map((cell) => el("th", {textContent: cell, scope: "col"}))))] : [];
  const body = el("tbody", {}, ...part.rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {textContent: cell, className: /^[\d.,]+( to \d+)?$/.test(cell) ? "number" : ""})))));
  return el("div", {className: "scroll", tabIndex: 0}, el("table", {}, ...head, body));
});

const details = (summary, fill, props = {}) => {
  const node = el("details", props, summary), body = el("div", {className: "body"});
  const open = () => { if (node.open && !body.parentNode) { node.append(body); body.append(...fill()); redraw(); } };
  node.addEventListener("toggle", open);
  node.fill = () => { node.open = true; open(); };
  return node;
};

let page = {incidents: [], marks: [], plots: [], axis: "step"}, incidentNodes = [];
function openIncident(index) {
  const node = incidentNodes[index];
  if (!node) return;
  node.fill(); node.scrollIntoView({block: "start"}); node.querySelector("summary").focus({preventScroll: true});
}
const around = (incident) => { const reach = Math.max(30, 1.5 * (incident.last - incident.onset)); return [Math.max(view.all[0], incident.onset - reach), Math.min(view.all[1], incident.last + reach)]; };
let current = -1;
function nextIncident(by) {
  if (!page.incidents.length) return;
  current = (current + by + page.incidents.length) % page.incidents.length;
  show(...around(page.incidents[current]));
}

function story(incident) {
  const range = around(incident), views = page.plots.filter((p) => p.live && p.live.curves.some((c) => incident.signals.includes(c.name))).map((p) => {
    const plot = new Plot({title: p.title}, p.live.curves, p.live.undone, range, 150);
    return plot.node;
  });
  const zoomTo = el("button", {type: "button", textContent: "Show on the curves", on: {click: () => { show(...range); document.getElementById("curves").scrollIntoView(); }}});
  return [zoomTo, el("h3", {textContent: "Evidence", className: "evidence"}), ...views, ...parts(incident.parts)];
}

function incidentList(container) {
  const open = new Set(incidentNodes.filter((n) => n.open).map((n) => n.dataset.key));
  incidentNodes = page.incidents.map((incident) => {
    const node = details(el("summary", {"data-key": `focus ${incident.title}`}, el("b", {textContent: incident.title}), el("span", {className: "dim small", textContent: incident.line})), () => story(incident), {className: "incident"});
    node.dataset.key = incident.title;
    return node;
  });
  view.plots = view.plots.filter((plot) => !plot.range);
  refill(container, ...(incidentNodes.length ? incidentNodes : [el("p", {className: "dim", textContent: "None."})]));
  incidentNodes.forEach((node) => { if (open.has(node.dataset.key)) node.fill(); });
}

function verdictBox() {
  const {tone, label, text} = page.verdict;
  return el("div", {className: `verdict ${tone}`, role: "status"}, el("b", {textContent: `${{good: "✓", warn: "!", bad: "✖", live: "●"}[tone] || ""} ${label}`}), el("span", {textContent: text}));
}
const cardList = () => el("div", {className: `cards ${page.kind}`}, ...page.cards.map(([name, value, help]) => el("div", {className: "card"}, el("span", {textContent: name}), el("b", {textContent: value}), el("span", {textContent: help}))));
function costBar() {
  const total = page.costs.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!total) return "";
  const bar = el("div", {className: "bar", "aria-hidden": "true"}), key = el("ul", {className: "key"});
  page.costs.forEach(([name, seconds]) => {
    const colour = COSTS[name] || "--ink", piece = paint(el("div"), colour), mark = paint(el("i", {className: "swatch"}), colour);
    piece.style.width = `${100 * seconds / total}%`;
    bar.append(piece); key.append(el("li", {}, mark, `${name}: ${(100 * seconds / total).toFixed(1)}%`));
  });
  return el("section", {"aria-label": "where the time went"}, bar, key);
}

const button = (text, label, click) => el("button", {type: "button", textContent: text, title: label, "aria-label": label, on: {click}});
function toolbar() {
  const field = (id, name) => el("input", {id, type: "number", "aria-label": name, title: name});
  const go = () => { const [a, b] = ["from", "to"].map((id) => parseFloat(document.getElementById(id).value)); if (b > a) show(a, b); };
  const node = el("form", {className: "tools", on: {submit: (event) => { event.preventDefault(); go(); }}}, button("◀", "move left", () => pan(-.3)), button("+", "zoom in", () => zoom(.5)), button("−", "zoom out", () => zoom(2)), button("▶", "move right", () => pan(.3)),
    button("all", "show the whole run", () => show(...view.all)), el("label", {className: "small"}, `${page.axis}s `, field("from", `first ${page.axis}`)), el("label", {className: "small"}, "to ", field("to", `last ${page.axis}`)), el("button", {textContent: "show"}));
  if (page.incidents.length) node.append(button("next incident", "zoom to the next incident", () => nextIncident(1)));
  return node;
}
function markButtons() {
  return el("div", {className: "marks"}, ...Object.keys(MARKS).filter((kind) => page.marks.some((m) => m[0] === kind)).map((kind) => {
    const [glyph, colour, name] = MARKS[kind], sign = el("span", {textContent: `${glyph} `});
    sign.style.color = `var(${colour})`;
    const node = el("button", {type: "button", "data-key": kind, "aria-pressed": String(!view.hidden.has(kind)), on: {click: () => { if (!view.hidden.delete(kind)) view.hidden.add(kind); node.setAttribute("aria-pressed", String(!view.hidden.has(kind))); redraw(); }}}, sign, `${name} (${page.marks.filter((m) => m[0] === kind).length})`);
    return node;
  }));
}
const topBar = (title, subtitle, ...more) => el("header", {}, el("div", {}, el("h1", {textContent: title}), el("p", {className: "dim small", textContent: subtitle})),
  el("div", {className: "theme"}, ...more, button("◐", "dark or light", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"))));

function setRange() {
  let low = Infinity, high = -Infinity;
  for (const plot of page.plots) for (const curve of [...plot.live.curves, ...(plot.live.undone ? [plot.live.undone] : [])]) if (curve.n) { low = Math.min(low, curve.x[0]); high = Math.max(high, curve.x[curve.n - 1]); }
  const steps = (page.marks || []).map((mark) => mark[1]).filter(Number.isFinite), first = Math.min(...steps), last = Math.max(...steps), near = Math.max(1, .1 * (high - low));
  if (high < low && steps.length) [low, high] = [first, last]; // a run that was killed before its first row
  if (first < low && low - first <= near) low = first; // such as a checkpoint from before the first step
  if (last > high && last - high <= near) high = last; // such as a failure in the step after the last one
  const old = view.all, isAll = view.low <= old[0] && view.high >= old[1];
  view.all = high > low ? [low, high] : high === low ? [low - 1, low + 1] : [0, 1];
  if (isAll) show(...view.all); else if (view.high >= old[1]) show(view.low + view.all[1] - old[1], view.all[1]); else redraw();
}

async function showRun(content, back) {
  page = content; view.plots = []; incidentNodes = []; [view.low, view.high, view.all] = [0, 1, [0, 1]];
  for (const plot of page.plots) plot.live = {curves: await Promise.all(plot.curves.map(Curve.unpack)), undone: plot.undone ? await Curve.unpack({name: "undone", ...plot.undone}) : null};
  const top = el("div", {id: "top"}), lanes = el("div"), marks = el("div"), list = el("div", {id: "incidents"});
  const refreshTop = () => { top.replaceChildren(verdictBox(), cardList(), costBar()); refill(marks, markButtons()); };
  const figures = page.plots.map((plot) => new Plot(plot, plot.live.curves, plot.live.undone).node), lane = page.marks.length || page.kind === "run" && back ? new Lanes() : null;
  if (lane) lanes.append(lane.node);
  const sections = page.sections.map((section) => details(el("summary", {}, el("b", {textContent: section.title})), () => parts(section.parts), {open: false}));
  root.replaceChildren(topBar(page.title, page.subtitle, back || ""), top,
    el("div", {id: "curves"}, toolbar(), figures[0] || el("p", {className: "dim", textContent: "No metric is recorded."}), lanes, marks), ...(page.kind === "run" ? [el("h2", {textContent: "Incidents"}), list] : []),
    figures.length > 1 ? el("h2", {textContent: "More curves"}) : "", el("div", {id: "more"}, ...figures.slice(1)), el("h2", {textContent: "Record"}), ...sections, el("footer", {textContent: `Holdfast ${page.version}. Drag over a curve to zoom, double-click for all; with a curve in focus: arrows, + and -, 0, n and p, l.`}));
  page.sections.forEach((section, i) => { if (section.is_open) sections[i].fill(); });
  refreshTop(); incidentList(list); setRange();
  document.body.dataset.ready = "1";
  return {refresh: () => { refreshTop(); incidentList(list); redraw(); }};
}

// ---- live

const ask = async (path) => { const answer = await fetch(path, {cache: "no-store"}); if (!answer.ok) throw Object.assign(new Error(await answer.text()), {status: answer.status}); return answer.json(); };
const complain = (error) => { let box = document.getElementById("problem"); if (!box) { box = el("p", {id: "problem", role: "alert"}); root.prepend(box); } box.textContent = !error ? "" : error.status ? `The server has nothing new: ${error.message}` : `The server does not answer: ${error.message}`; };

function addRows(rows) { // as the importer does: a step that is trained again replaces the later ones
  const find = (name) => { for (const plot of page.plots) for (const curve of plot.live.curves) if (curve.name === name) return [plot, curve]; return null; };
  for (const row of rows) for (const [name, value] of Object.entries(row.values)) {
    let found = find(name);
    if (!found) {
      const plot = {title: name, live: {curves: [new Curve(name)], undone: null}};
      page.plots.push(plot); found = [plot, plot.live.curves[0]];
      document.getElementById("more").append(new Plot(plot, plot.live.curves, null).node);
    }
    const [plot, curve] = found, y = value === "NaN" ? NaN : value === "Infinity" ? Infinity : value === "-Infinity" ? -Infinity : value;
    const keepUndone = (step, v) => {
      if (name !== "loss" && name !== "grad_norm") return;
      if (!plot.live.undone) { plot.live.undone = new Curve("undone"); view.plots.filter((p) => p.curves === plot.live.curves).forEach((p) => { p.undone = plot.live.undone; }); }
      const undone = plot.live.undone, at = undone.find(step + 1e-9);
      undone.push(step, v);
      for (let k = undone.n - 1; k > at; k--) { undone.x[k] = undone.x[k - 1]; undone.y[k] = undone.y[k - 1]; }
      undone.x[at] = step; undone.y[at] = v; undone.built = 0;
    };
    if (!row.kept) { keepUndone(row.step, y); continue; }
    const from = curve.find(row.step);
    for (let k = from; k < curve.n; k++) keepUndone(curve.x[k], curve.y[k]);
    curve.cut(from); curve.push(row.step, y);
  }
}

function countSteps() { // the figures that follow the curve and not the journal
  const loss = page.plots.length && page.plots[0].live.curves[0], set = (name, ...values) => { const card = page.cards.find((c) => c[0] === name); if (card) card.splice(1, 2, ...values); };
  if (!loss || !loss.n) return;
  const last = loss.x[loss.n - 1];
  set("steps", whole(last), `${whole(loss.n)} recorded`);
  if (loss.name === "loss") set("last loss", number(loss.y[loss.n - 1]), `lowest ${number(loss.y.slice(0, loss.n).reduce((low, v) => Number.isFinite(v) && v < low ? v : low, Infinity))}`);
  if (page.verdict.status === "training") page.verdict.text = page.verdict.text.replace(/^[\d,]+ steps?/, `${whole(last)} steps`);
  document.querySelector(".cards").replaceWith(cardList());
  document.querySelector(".verdict").replaceWith(verdictBox());
}

async function follow(name) {
  const path = `/api/run?name=${encodeURIComponent(name)}`;
  let first = await ask(path), state = first.state;
  const shown = await showRun(first.page, el("a", {href: "/", textContent: "all runs"}));
  for (;;) {
    await new Promise((done) => setTimeout(done, data.poll));
    try {
      const news = await ask(`${path}&metrics=${state.metrics}&journal=${state.journal}`);
      complain(null); state = news.state;
      if (news.page) { location.reload(); return; } // the files were replaced
      addRows(news.rows); countSteps();
      if (news.story) { Object.assign(page, news.story); shown.refresh(); }
      if (news.rows.length) setRange();
    } catch (error) { complain(error); }
  }
}

const COLUMNS = [["name", "run"], ["status", "status"], ["step", "step"], ["loss", "loss"], ["goodput", "goodput"], ["incidents", "incidents"], ["updated", "updated"]];
const sorting = {by: "updated", down: true}, picked = new Set();
function spark(points) {
  const canvas = el("canvas", {width: 300, height: 56, role: "img", "aria-label": "loss, sampled"}), pen = canvas.getContext("2d"), good = points.filter((p) => p !== null).flat();
  const low = Math.min(...good), high = Math.max(...good), y = (v) => 52 - (v - low) / (high - low || 1) * 48;
  pen.strokeStyle = css("--a"); pen.lineWidth = 2; pen.beginPath();
  points.forEach((p, i) => { if (p) { const x = i / Math.max(1, points.length - 1) * 296 + 2; pen.lineTo(x, y(p[0])); pen.lineTo(x, y(p[1]) + 1); } });
  pen.stroke();
  return canvas;
}
const ago = (seconds) => seconds < 90 ? `${Math.round(seconds)} s ago` : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} d ago`;
function runTable(runs, container, filter) {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean), rank = (run) => { const v = run[sorting.by]; return v === null || v === undefined ? -Infinity : v; };
  const rows = runs.filter((run) => words.every((word) => `${run.name} ${run.status}`.toLowerCase().includes(word)))
    .sort((a, b) => (rank(a) < rank(b) ? -1 : rank(a) > rank(b) ? 1 : a.name < b.name ? -1 : 1) * (sorting.down ? -1 : 1));
  const head = COLUMNS.map(([key, title]) => el("th", {scope: "col", "aria-sort": sorting.by === key ? (sorting.down ? "descending" : "ascending") : "none"}, el("button", {type: "button", "data-key": `sort ${key}`, textContent: title + (sorting.by === key ? (sorting.down ? " ▾" : " ▴") : ""), on: {click: () => { sorting.down = sorting.by === key ? !sorting.down : key !== "name"; sorting.by = key; runTable(runs, container, filter); }}})));
  const compare = el("a", {textContent: "compare the two picked runs", href: "#", "data-key": "compare"});
  compare.hidden = picked.size !== 2; compare.href = `/compare?${[...picked].map((name, i) => `${"ab"[i]}=${encodeURIComponent(name)}`).join("&")}`;
  const body = rows.map((run) => {
    const box = el("input", {type: "checkbox", "data-key": `pick ${run.name}`, checked: picked.has(run.name), "aria-label": `pick ${run.name} to compare`, on: {change: () => { if (!picked.delete(run.name)) picked.add(run.name); runTable(runs, container, filter); }}});
    return el("tr", {}, el("td", {}, box), el("td", {}, el("a", {"data-key": `open ${run.name}`, href: `/run?name=${encodeURIComponent(run.name)}`, textContent: run.name})), el("td", {className: run.tone}, el("span", {className: "tag", textContent: run.label})),
      el("td", {className: "number", textContent: run.step === null ? "" : whole(run.step)}), el("td", {className: "number", textContent: typeof run.loss === "string" ? run.loss : number(run.loss)}), el("td", {}, run.spark.length ? spark(run.spark) : ""),
      el("td", {className: "number", textContent: run.goodput === null ? "" : `${(100 * run.goodput).toFixed(1)}%`}), el("td", {className: "number", textContent: `${run.incidents}${run.open ? ` (${run.open} open)` : ""}`}), el("td", {className: "number", textContent: ago(run.age)}));
  });
  head.splice(4, 0, el("th", {scope: "col", textContent: "course"}));
  refill(container, el("p", {className: "small dim"}, `${rows.length} of ${runs.length} runs. `, compare), el("div", {className: "scroll runs"}, el("table", {}, el("thead", {}, el("tr", {}, el("th"), ...head)), el("tbody", {}, ...body))));
  container.querySelector(".scroll").style.maxHeight = "none";
}
async function showList() {
  const container = el("div"), filter = el("input", {type: "search", placeholder: "filter by name or status", "aria-label": "filter by name or status"});
  let runs = [];
  filter.addEventListener("input", () => runTable(runs, container, filter));
  root.replaceChildren(topBar("Runs", data.folder), filter, container, el("footer", {textContent: `Holdfast ${data.version}. Pick two runs to compare them.`}));
  for (;;) {
    try { runs = (await ask("/api/runs")).runs; complain(null); runTable(runs, container, filter); document.body.dataset.ready = "1"; } catch (error) { complain(error); }
    await new Promise((done) => setTimeout(done, 2 * data.poll));
  }
}

document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
addEventListener("resize", redraw);
let before = null;
addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; document.documentElement.dataset.theme = "light"; incidentNodes.forEach((node) => node.fill()); view.plots.forEach((plot) => plot.draw()); });
addEventListener("afterprint", () => theme(before));
if (data.kind === "list") showList(); else if (data.kind === "live") follow(data.name).catch(complain); else showRun(data, data.back ? el("a", {href: "/", textContent: "all runs"}) : null);
})();
