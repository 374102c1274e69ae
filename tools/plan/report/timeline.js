const data = JSON.parse(document.getElementById("data").textContent);
const time = document.getElementById("time"), memory = document.getElementById("memory"), tip = document.getElementById("tip");
const style = k => getComputedStyle(document.documentElement).getPropertyValue("--" + k).trim();
const widest = data.rows.reduce((n, r) => Math.max(n, r.length), 0);
const LEFT = Math.min(240, 16 + widest * 7.2), AXIS = 22, ROW = data.rows.length > 24 ? 16 : 24, STRIP = 5;
let last = 0;
for (const row of data.boxes) for (const b of row) last = Math.max(last, b[0] + b[1]);
for (const c of data.memory) last = Math.max(last, c.t[c.t.length - 1] || 0);
if (!last) last = 1;
let from = 0, to = last, colours = {};
const hue = n => `hsl(${n * 360 / data.memory.length} 55% 52%)`;
const legend = (id, entries) => { for (const [colour, what] of entries) {
  const span = document.createElement("span"), box = document.createElement("i");
  box.style.background = colour; span.append(box, what); document.getElementById(id).append(span); } };
legend("keys", Object.entries(data.kinds).map(([k, what]) => ["var(--" + k + ")", what]));
const unit = s => { const a = Math.abs(s);
  return !data.units ? [1, ""] : a >= 1 || a === 0 ? [1, "s"] : a >= 1e-3 ? [1e3, "ms"] : [1e6, "us"]; };
const say = s => { const [f, u] = unit(s); return +(s * f).toPrecision(5) + " " + u; };
const size = b => !data.units ? +b.toPrecision(4) : b >= 2 ** 30 ? (b / 2 ** 30).toFixed(2) + " GiB" : b >= 2 ** 20 ? (b / 2 ** 20).toFixed(1) + " MiB" :
  b ? (b / 1024).toFixed(1) + " KiB" : "0";
legend("stages", data.memory.map((c, n) => [hue(n), data.rows[c.row]]));
let most = 0;
for (const c of data.memory) for (const v of c.v) most = Math.max(most, v);
const far = data.limit > 2 * most;  // a line up there would flatten the curves
if (data.limit && most) legend("stages", [[far ? "none" : "var(--bad)", "a device has " + size(data.limit)]]);
if (data.limit && !far) most = Math.max(most, data.limit);
const base = data.units ? 1024 ** Math.floor(Math.log2(most || 1) / 10) : 1, power = 10 ** Math.floor(Math.log10(most / base / 4 || 1));
const memoryStep = [1, 2, 5, 10].map(k => k * power * base).find(v => v >= most / 4);
most = Math.max(1, Math.ceil(most / memoryStep)) * memoryStep;
const x = t => LEFT + (t - from) / (to - from) * (time.clientWidth - LEFT);
const at = px => from + (px - LEFT) / (time.clientWidth - LEFT) * (to - from);
function canvas(c, height) {
  const r = window.devicePixelRatio || 1;
  c.style.height = height + "px"; c.width = c.clientWidth * r; c.height = height * r;
  const g = c.getContext("2d"); g.scale(r, r); g.font = "12px system-ui, sans-serif"; g.textBaseline = "middle"; return g;
}
function ticks(g, height) {
  const step0 = (to - from) / 8, power = 10 ** Math.floor(Math.log10(step0));
  const step = [1, 2, 5, 10].map(k => k * power).find(k => k >= step0), [f, u] = unit(to);
  g.textAlign = "center";
  for (let n = Math.ceil(from / step); n * step <= to; n++) {
    g.fillStyle = colours.line; g.fillRect(x(n * step), AXIS, 1, height - AXIS);
    if (x(n * step) < g.canvas.clientWidth - 30) { g.fillStyle = colours.soft;
      g.fillText(+(n * step * f).toPrecision(6) + " " + u, x(n * step), AXIS / 2); }
  }
}
function first(row, t) {  // boxes may overlap a little, so look a few back
  let low = 0, high = row.length;
  while (low < high) { const m = (low + high) >> 1; if (row[m][0] < t) low = m + 1; else high = m; }
  while (low > 0 && row[low - 1][0] + row[low - 1][1] > t) low--;
  return Math.max(0, low - 1);
}
function draw() {
  for (const k of ["ink", "soft", "line", "card", "on-fill", "bad", ...Object.keys(data.kinds)]) colours[k] = style(k);
  const height = AXIS + data.rows.length * ROW, g = canvas(time, height), width = time.clientWidth;
  ticks(g, height);
  data.boxes.forEach((row, r) => {
    const y = AXIS + r * ROW;
    g.fillStyle = colours.card; g.fillRect(LEFT, y + 1, width - LEFT, ROW - 2);
    g.save(); g.beginPath(); g.rect(LEFT, y, width - LEFT, ROW); g.clip();
    let painted = -1;
    for (let i = first(row, from); i < row.length && row[i][0] <= to; i++) {
      const [start, long, kind, , label] = row[i], a = x(start), b = x(start + long);
      if (b < LEFT || b - painted < .25) continue;
      painted = b;
      g.fillStyle = colours[kind]; g.fillRect(a, y + 2, Math.max(b - a - (b - a > 3 ? .7 : 0), .4), ROW - 4);
      if (label && b - a > 7 * label.length + 4) {
        g.fillStyle = colours["on-fill"]; g.textAlign = "center";
        g.fillText(label, (Math.max(a, LEFT) + Math.min(b, width)) / 2, y + ROW / 2 + .5);
      }
    }
    const sends = data.sends[r];
    g.fillStyle = colours.S;
    for (let i = first(sends, from); i < sends.length && sends[i][0] <= to; i++) {
      const a = x(sends[i][0]), b = x(sends[i][0] + sends[i][1]);
      if (b - a > .5) g.fillRect(a, y + ROW - STRIP, b - a, STRIP - 1);
    }
    g.restore();
    g.fillStyle = colours.ink; g.textAlign = "left"; g.fillText(data.rows[r], 2, y + ROW / 2, LEFT - 6);
  });
  if (data.memory.length) drawMemory(); else memory.style.display = "none";
}
function drawMemory() {
  const height = 240, g = canvas(memory, height), width = memory.clientWidth, low = height - 8, high = AXIS + 6;
  const y = v => low - v / (most * 1.04) * (low - high);
  ticks(g, height);
  g.textAlign = "left"; g.fillStyle = colours.soft; g.fillText(LEFT > 120 ? "memory of a device" : "memory", 2, AXIS / 2);
  for (let v = 0; v <= most; v += memoryStep) {
    g.fillStyle = colours.line; g.fillRect(LEFT, y(v), width - LEFT, 1);
    g.fillStyle = colours.soft; g.fillText(size(v), 2, Math.min(y(v), height - 7)); }
  g.save(); g.beginPath(); g.rect(LEFT, 0, width - LEFT, height); g.clip();
  data.memory.forEach((c, n) => {
    g.strokeStyle = hue(n); g.lineWidth = 1.3; g.beginPath();
    c.t.forEach((t, i) => { if (i) g.lineTo(x(t), y(c.v[i - 1])); else g.moveTo(x(t), y(c.v[0])); g.lineTo(x(t), y(c.v[i])); });
    g.lineTo(x(last), y(c.v[c.v.length - 1])); g.stroke();
  });
  if (data.limit && !far) { g.strokeStyle = colours.bad; g.setLineDash([5, 4]); g.beginPath(); g.moveTo(LEFT, y(data.limit));
    g.lineTo(width, y(data.limit)); g.stroke(); g.setLineDash([]); }
  g.restore();
}
function show(a, b) {
  const least = last * 1e-6, long = Math.min(Math.max(b - a, least), last * 1.02), middle = (a + b) / 2;
  from = Math.max(-last * .01, Math.min(middle - long / 2, last * 1.01 - long)); to = from + long; draw();
}
const zoom = (factor, t) => show(t - (t - from) * factor, t + (to - t) * factor);
const whole = () => show(0, last * 1.02);
for (const c of [time, memory]) {
  c.addEventListener("wheel", e => { e.preventDefault(); zoom(e.deltaY > 0 ? 1.25 : .8, at(e.offsetX)); }, { passive: false });
  let held = null;
  c.addEventListener("pointerdown", e => { held = e.offsetX; c.setPointerCapture(e.pointerId); });
  c.addEventListener("pointerup", () => { held = null; });
  c.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  c.addEventListener("pointermove", e => {
    if (held !== null) { const by = at(held) - at(e.offsetX); held = e.offsetX; show(from + by, to + by); return; }
    const lines = c === time ? boxAt(e.offsetX, e.offsetY) : memoryAt(e.offsetX);
    tip.style.display = lines ? "block" : "none";
    if (lines) { tip.textContent = lines; tip.style.left = Math.min(e.clientX + 14, innerWidth - 350) + "px";
      tip.style.top = Math.min(e.clientY + 14, innerHeight - 110) + "px"; }
  });
}
function boxAt(px, py) {
  const r = Math.floor((py - AXIS) / ROW);
  if (!data.boxes[r] || px < LEFT) return "";
  const low = py - AXIS - r * ROW > ROW - STRIP - 1;
  return (low && inRow(data.sends[r], r, px)) || inRow(data.boxes[r], r, px);
}
function inRow(row, r, px) {
  const t = at(px), slack = (to - from) / (time.clientWidth - LEFT);
  for (let i = first(row, t - slack); i < row.length && row[i][0] <= t + slack; i++) {
    const [start, long, kind, text] = row[i];
    if (t >= start - slack && t <= start + long + slack)
      return text + "\n" + data.kinds[kind] + "\nstart " + say(start) + ", duration " + say(long) + "\n" + data.rows[r];
  }
  return "";
}
function memoryAt(px) {
  if (px < LEFT) return "";
  const t = at(px);
  return data.memory.slice(0, 20).map(c => { let i = 0; while (i + 1 < c.t.length && c.t[i + 1] <= t) i++;
    return data.rows[c.row] + ": " + size(c.v[i]); }).join("\n");
}
document.getElementById("all").onclick = whole;
document.getElementById("in").onclick = () => zoom(.5, (from + to) / 2);
document.getElementById("out").onclick = () => zoom(2, (from + to) / 2);
addEventListener("keydown", e => { const t = (from + to) / 2, s = (to - from) / 5;
  if (e.key === "+" || e.key === "=") zoom(.5, t); else if (e.key === "-") zoom(2, t); else if (e.key === "0") whole();
  else if (e.key === "ArrowLeft") show(from - s, to - s); else if (e.key === "ArrowRight") show(from + s, to + s); });
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
whole();
