// Values of the page, and helpers for elements, texts and numbers. Names from programs reach the page as text only.
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const data = read("data");
const KINDS = ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"];
const section = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) made.style.setProperty(name, value);
    else if (name === "width") made.style.width = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Text for screen readers only.
function unseen(text) {
  return make("span", { class: "skip" }, text);
}

function draw(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

function digits(value) {
  if (Number.isInteger(value) && value < 1000) return String(value);
  return value < 9.995 ? value.toFixed(2) : value < 99.95 ? value.toFixed(1) : value.toFixed(0);
}

function scaled(value, units) {
  let unit = 0;
  for (; unit < units.length - 1 && Math.abs(value) >= 999.5; unit++) value /= 1000;
  return `${digits(value)} ${units[unit]}`;
}

const bytesText = (n) => (n ? scaled(n, ["B", "kB", "MB", "GB", "TB", "PB"]) : "0 B");
const secondsText = (s) => (!s ? "0 s" : s < 5e-9 ? `${digits(s * 1e9)} ns` : scaled(s * 1e6, ["us", "ms", "s"]));
function percent(part, whole) {
  const share = whole ? part / whole : 0;
  if (share > 0 && share < 1e-5) return "below 0.001%";
  return share >= 0.0995 ? `${(100 * share).toFixed(0)}%` : `${Number((100 * share).toPrecision(2))}%`;
}
const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((a, b) => a + b, 0);
const shown = (text, most = 300) => (text.length > most ? `${text.slice(0, most)}… (${text.length} characters)` : text);

const METRICS = { seconds: ["time", secondsText], bytes: ["bytes", bytesText], runs: ["runs", (n) => n.toLocaleString("en")] };

// A line of the source; its figures are per device and step.
const lines = data.lines.map(([source, functionName, text, compute, sent, bytes, runs, parts], position) => {
  const colon = source.lastIndexOf(":");
  const file = colon < 0 ? source : source.slice(0, colon);
  return { position, source, file, number: source.slice(colon + 1), function: functionName, text, compute, sent, bytes, runs, parts };
});
const lineOf = new Map(lines.map((line) => [line.source, line]));

const linkTo = (line) => make("a", { href: `#line-${line.position}` }, line.source);
const sourceLink = (source) => (lineOf.has(source) ? linkTo(lineOf.get(source)) : source);
const kindText = (kind) => make("span", { class: "kind", "--of": `var(--${kind})` }, kind);
const stacked = (parts, most) =>
  make("span", { class: "bar", "aria-hidden": "true" }, ...parts.map(([color, value, title]) =>
    make("i", { style: `background:var(--${color})`, width: `${most ? (100 * value) / most : 0}%`, title })));

// What is to be done before the page is printed, when all sections are filled, and after that.
const beforePrint = [], afterPrint = [];
const PAPER = 720; // pixels across a sheet

// Charts are redrawn when their width changes; on paper they are scaled from the width of a sheet.
function atWidth(place, paint) {
  let width = 0, printing = false;
  const fit = () => {
    const now = printing ? PAPER : place.clientWidth;
    if (now !== width) paint((width = now));
  };
  new ResizeObserver(fit).observe(place);
  beforePrint.push(() => fit((printing = true)));
  afterPrint.push(() => fit((printing = false)));
}

const tip = document.getElementById("tip");
function showTip(text, x, y) {
  tip.hidden = !text;
  tip.textContent = text;
  const left = Math.max(8, Math.min(x + 14, innerWidth - tip.offsetWidth - 8));
  const below = y + 18 + tip.offsetHeight < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? y + 18 : Math.max(8, y - tip.offsetHeight - 12)}px`;
}
