// The predicted step in time: computing, and one lane per group of mesh axes. Nothing overlaps.
const LANE = 34;

function showTimeline(place) {
  if (data.pipeline) showPipeline(place, data.pipeline);
  const fields = ["lane", "name", "phase", "line", "start", "seconds", "trips", "number"];
  const events = data.events.map((row) => Object.fromEntries(row.map((value, i) => [fields[i], value])));
  if (!events.length) return void place.append(make("p", {}, "The plan takes no time."));
  events.sort((a, b) => a.start - b.start);
  const end = Math.max(...events.map((event) => event.start + event.seconds));
  const view = { from: 0, to: end };
  const height = data.lanes.length * LANE + 30;
  const label = `Timeline of ${secondsText(end)} in ${plural(data.lanes.length, "lane")}: ${data.lanes.join("; ")}. Arrow keys move along, plus and minus zoom.`;
  const chart = draw("svg", { role: "img", tabindex: "0", "aria-label": label, height });
  let width = 0;
  const paint = () => width && paintTimeline(chart, events, view, width, height);
  const x = (i) => across(events[i].start + events[i].seconds / 2, view, width);
  function zoom(factor, middle = (view.from + view.to) / 2) {
    const span = Math.min(end, Math.max(end / 2000, (view.to - view.from) * factor));
    const share = (middle - view.from) / (view.to - view.from || 1);
    pan(Math.max(0, Math.min(end - span, middle - share * span)), span);
  }
  function pan(from, span = view.to - view.from) {
    view.from = Math.max(0, Math.min(end - span, from));
    view.to = view.from + span;
    paint();
  }
  const button = (text, label, act) => make("button", { type: "button", "aria-label": label, onclick: act }, text);
  const span = () => view.to - view.from;
  place.append(make("p", { class: "soft" }, "Computing and communication one after the other, as the planner counts them; a loop is shown once, as long as all its iterations. Overlap is not shown."),
    make("div", { class: "controls" }, button("+", "Zoom in", () => zoom(0.5)), button("−", "Zoom out", () => zoom(2)), button("←", "Earlier", () => pan(view.from - span() / 3)), button("→", "Later", () => pan(view.from + span() / 3)), button("whole step", "Show the whole step", () => zoom(Infinity)),
      ...PHASES.map((phase) => make("span", { class: "kind", "--of": `var(--${phase})` }, phase)), ...KINDS.filter((kind) => events.some((event) => event.name === kind)).map(kindText)), chart, pictureButtons(chart, "timeline"));
  atWidth(chart, (now) => { width = now; paint(); });
  chart.addEventListener("keydown", (event) => {
    if (event.key === "+" || event.key === "=") zoom(0.5);
    if (event.key === "-") zoom(2);
  });
  chart.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const at = (event.clientX - chart.getBoundingClientRect().left - LEFT) / (width - LEFT - 8);
    zoom(event.deltaY > 0 ? 1.25 : 0.8, view.from + at * span());
  }, { passive: false });
  cursorOn(chart, () => events.length, 0, x, (i) => eventText(events[i]), (i) => showLine(events[i].line));
}

// Forward and backward tasks of every rank, to scale, with their microbatches: in lockstep, as it runs, and asynchronously.
const TASKS = { F: "forward", B: "backward", I: "backward", W: "optimizer" };
const DRAWN_AS = { "in lockstep": "pipeline", asynchronous: "asynchronous pipeline" };

function showPipeline(place, { text, drawn, kept }) {
  place.append(make("p", {}, text));
  if (drawn.length) place.append(make("p", { class: "soft" }, "In lockstep every rank waits for the tick to end; asynchronously each task begins as soon as its inputs have arrived. Embedding, head and other work that all ranks share is counted but not drawn."));
  for (const { name, seconds, ranks } of drawn) {
    const height = ranks.length * ROW + 8, said = `${name}${seconds === null ? "" : `: ${secondsText(seconds)} a step`}`;
    const chart = draw("svg", { role: "img", "aria-label": `${text}; ${said}`, height });
    place.append(make("h3", {}, `Ranks ${said}`), chart, pictureButtons(chart, DRAWN_AS[name]));
    atWidth(chart, (width) => paintRanks(chart, ranks, width, height));
  }
  if (!drawn.length || !kept.length) return;
  const head = ["rank", "stashed stage inputs", "stash bytes", "memory needed"].map((title) => make("th", { scope: "col", class: "number" }, title));
  const rows = kept.map(([count, bytes, memory], rank) => make("tr", {}, ...[rank, count, bytesText(bytes), bytesText(memory)].map((cell) => make("td", { class: "number" }, String(cell)))));
  place.append(make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows))));
}

const ROW = 24;

function paintRanks(chart, ranks, width, height) {
  const scale = (width - LEFT - 8) / 1e5, x = (time) => LEFT + time * scale;
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.replaceChildren();
  ranks.forEach((tasks, rank) => {
    const top = 6 + rank * ROW;
    chart.append(draw("text", { x: 8, y: top + 14 }, `rank ${rank}`));
    for (const [kind, phase] of Object.entries(TASKS)) {
      const own = tasks.filter((task) => task[0] === kind);
      const d = own.map(([, , from, to]) => `M${x(from).toFixed(1)} ${top}h${Math.max(0.5, (to - from) * scale - 0.8).toFixed(1)}v18H${x(from).toFixed(1)}Z`).join("");
      if (d) chart.append(draw("path", { d, style: `fill:var(--${phase})` }));
      const wide = own.filter(([, , from, to]) => (to - from) * scale > 16);
      chart.append(...wide.map(([, microbatch, from, to]) => draw("text", { x: x((from + to) / 2), y: top + 13, "text-anchor": "middle", class: "inside" }, String(microbatch))));
    }
  });
}

const LEFT = 92;
const across = (time, view, width) => LEFT + ((width - LEFT - 8) * (time - view.from)) / (view.to - view.from);

function eventText(event) {
  const many = event.number > 1 ? `${plural(event.number, "event")}, most ` : "";
  const trips = event.trips > 1 ? `, ${plural(event.trips, "trip")}` : "";
  return `${many}${event.name}, ${lines[event.line].source}, ${event.phase}: ${secondsText(event.seconds)}${trips}, from ${secondsText(event.start)}`;
}

function paintTimeline(chart, events, view, width, height) {
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.replaceChildren();
  for (let i = 0; i <= 4; i++) {
    const at = LEFT + ((width - LEFT - 8) * i) / 4;
    chart.append(draw("line", { class: "axis", x1: at, x2: at, y1: 0, y2: height - 22 }));
    if (i % 2 === 0 || width > 600) chart.append(draw("text", { x: at, y: height - 7, "text-anchor": i === 4 ? "end" : i ? "middle" : "start" }, secondsText(view.from + ((view.to - view.from) * i) / 4)));
  }
  data.lanes.forEach((lane, row) => {
    const top = 8 + row * LANE;
    const paths = new Map();
    for (const event of events) {
      if (event.lane !== lane || event.start > view.to || event.start + event.seconds < view.from) continue;
      const color = KINDS.includes(event.name) ? event.name : event.phase;
      const from = Math.max(LEFT, across(event.start, view, width)), to = Math.min(width - 8, across(event.start + event.seconds, view, width));
      paths.set(color, `${paths.get(color) || ""}M${from.toFixed(1)} ${top}h${Math.max(0.6, to - from).toFixed(1)}v${LANE - 10}H${from.toFixed(1)}Z`);
    }
    for (const [color, d] of paths) chart.append(draw("path", { d, style: `fill:var(--${color})` }));
    const name = draw("text", { x: 8, y: top + LANE / 2 }, lane.length > 14 ? `${lane.slice(0, 13)}…` : lane);
    name.append(draw("title", {}, lane));
    chart.append(name);
  });
}
