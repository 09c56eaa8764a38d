// A second plan beside this one: given when the page was made, or a plan file chosen here, which is read in the page.
function showCompare(place) {
  const file = make("input", { type: "file", accept: ".json,application/json", onclick: () => { file.value = ""; }, onchange: () => load(file.files[0]) });
  const said = make("p", { role: "status" }), found = make("div");
  place.append(make("div", { class: "controls" }, make("label", {}, "Compare with a plan file: ", file)), said, found);
  const other = read("against");
  if (other) show(other);

  async function load(chosen) {
    if (!chosen) return;
    try {
      show(comparable(JSON.parse(await chosen.text())));
    } catch (error) {
      found.replaceChildren();
      said.textContent = `${chosen.name} is not a plan file of this version: ${error.message}`;
    }
  }

  function show(after) {
    said.textContent = `This plan, and ${shown(after.name)} on mesh ${meshText(after)}, topology ${after.topology}.`;
    found.replaceChildren(totals(after));
    const layouts = layoutChanges(after), costs = costChanges(after);
    found.append(make("h3", {}, `Layouts: ${plural(layouts.length, "difference")}`));
    if (layouts.length) table(found, { name: "Layouts that differ", rows: layouts, noun: "layout", text: (row) => row.join(" "), columns: ["input", "this plan", "the other"].map((label, i) => ({ label, class: i ? "reason" : "long", key: (row) => row[i], cell: (row) => make("code", { class: "clip" }, row[i]) })) });
    found.append(make("h3", {}, `Collectives: ${plural(costs.length, "difference")}`));
    if (costs.length) table(found, { name: "Collectives that differ", rows: costs, noun: "purpose", text: (row) => row.purpose, columns: costColumns() });
  }
}

const meshText = (plan) => plan.mesh.map(([axis, size]) => `${axis}=${size}`).join(",");

// A plan file in the form of this page's values. Throws if the text is not a plan file.
function comparable(file) {
  if (file.format !== "meshdsl plan" || file.version !== 1) throw new Error("another format or version");
  const collectives = file.collectives.map((c) => ({ kind: c.kind, axes: c.axes.join(","), phase: c.phase, source: c.source, reason: c.reason, runs: c.trips, bytes: c.trips * c.bytes, seconds: c.trips * c.seconds }));
  return {
    name: file.name,
    mesh: Object.entries(file.mesh),
    topology: file.topology.name,
    seconds: file.seconds,
    lower_bound: file.lower_bound,
    bytes: sum(collectives.map((c) => c.bytes)),
    memory: file.peak,
    layouts: file.inputs.map((array) => [array.path, typeText(array), layoutText(array)]),
    collectives,
  };
}

function typeText({ dtype, shape, dims }) {
  const sizes = shape.map((size, i) => (dims[i] ? `${dims[i]}=${size}` : `${size}`));
  return `${dtype}[${sizes.join(dims.length ? " " : ",")}]`;
}

function layoutText({ layout, dims }) {
  const parts = layout.split(" ").filter((part) => !part.endsWith("=B"));
  return parts.map((part) => part.replace(/S\((\d+)\)$/, (whole, dim) => (dims[dim] ? `S(${dims[dim]})` : whole))).join(" ") || "B";
}

function totals(after) {
  const rows = [["predicted step", "seconds", secondsText], ["lower bound", "lower_bound", secondsText], ["sent per device", "bytes", bytesText], ["peak memory per device", "memory", bytesText]];
  const body = rows.map(([label, key, text]) => make("tr", {}, make("th", { scope: "row" }, label), make("td", { class: "number" }, text(data[key])), make("td", { class: "number" }, text(after[key])), changeCell(data[key], after[key], text)));
  const heads = ["total", "this plan", "the other", "change"].map((label, i) => make("th", { scope: "col", class: i ? "number" : "" }, label));
  return make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...body)));
}

function changeCell(before, after, text) {
  return make("td", { class: `number ${after > before ? "worse" : after < before ? "better" : ""}` }, changeText(before, after, text));
}

function changeText(before, after, text) {
  if (before === after) return "none";
  const share = before ? `, ${after > before ? "+" : "−"}${percent(Math.abs(after - before), before)}` : "";
  return `${after > before ? "+" : "−"}${text(Math.abs(after - before))}${share}`;
}

function layoutChanges(after) {
  const [a, b] = [data, after].map((plan) => new Map(plan.layouts.map(([path, type, layout]) => [path, `${type} ${layout}`])));
  const paths = [...new Set([...a.keys(), ...b.keys()])].filter((path) => a.get(path) !== b.get(path));
  return paths.map((path) => [path, a.get(path) || "none", b.get(path) || "none"]);
}

// Collectives are compared by purpose, as plan.diff does: without lines, and with * for numbers in paths.
function costChanges(after) {
  const [a, b] = [data, after].map(purposes), none = { runs: 0, bytes: 0, seconds: 0 };
  return [...new Set([...a.keys(), ...b.keys()])]
    .map((purpose) => ({ purpose: `${purpose}, at ${linesText((b.get(purpose) || a.get(purpose)).lines)}`, before: a.get(purpose) || none, after: b.get(purpose) || none }))
    .filter(({ before, after }) => before.runs !== after.runs || before.bytes !== after.bytes || Math.abs(before.seconds - after.seconds) > 1e-9 * before.seconds);
}

function purposes(plan) {
  const found = new Map();
  for (const c of plan.collectives) {
    const purpose = `${c.kind} ${c.axes} ${c.phase} ${c.reason.replace(/ \([^()]*:\d+\)/g, "").replace(/(?<=\/)\d+(?=\/|\b)/g, "*")}`;
    const cost = found.get(purpose) || { runs: 0, bytes: 0, seconds: 0, lines: new Set() };
    found.set(purpose, { lines: cost.lines.add(c.source), runs: cost.runs + c.runs, bytes: cost.bytes + c.bytes, seconds: cost.seconds + c.seconds });
  }
  return found;
}

// At most three of the lines that collectives belong to.
const linesText = (lines) => [...[...lines].slice(0, 3), ...(lines.size > 3 ? ["..."] : [])].join(", ");

function costColumns() {
  const costText = (cost) => (cost.runs ? `×${cost.runs} ${bytesText(cost.bytes)} ${secondsText(cost.seconds)}` : "none");
  const change = (row) => row.after.seconds - row.before.seconds;
  return [
    { label: "collective", class: "reason", key: (row) => row.purpose, cell: (row) => make("span", { class: "clip" }, row.purpose) },
    { label: "this plan", class: "number", first: "descending", key: (row) => row.before.seconds, cell: (row) => costText(row.before) },
    { label: "the other", class: "number", first: "descending", key: (row) => row.after.seconds, cell: (row) => costText(row.after) },
    { label: "change", class: "number", first: "descending", start: true, key: change, cell: (row) => make("span", { class: change(row) > 0 ? "worse" : "better" }, changeText(row.before.seconds, row.after.seconds, secondsText)) },
  ];
}
