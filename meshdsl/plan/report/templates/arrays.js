// Inputs with their layouts as coloured blocks on the mesh: devices of one colour hold the same block.
const ACROSS = 8; // devices that are drawn along the last mesh axis ...
const DOWN = [1, 8, 4, 2]; // ... and along each of the others, by how many these are

const COLLAPSED = 4; // rows of replicated inputs, from which on they are shown on demand

const drawnAxes = () => data.mesh.map(([name, size], i) => {
  const most = i === data.mesh.length - 1 ? ACROSS : DOWN[Math.min(data.mesh.length - 1, 3)];
  return { name, size, drawn: Math.min(size, most) };
});

function showArrays(place) {
  const drawn = drawnAxes().some((axis) => axis.size > axis.drawn) ? "; of long axes only the first devices are drawn" : "";
  const names = data.mesh.map(([name]) => name), across = names.pop(), down = names.length ? `, ${names.join(" and ")} downwards` : "";
  const replicated = data.arrays.filter((a) => !a.splits.length && !a.pinned), collapsed = replicated.length >= COLLAPSED;
  place.append(make("p", { class: "soft" }, `Devices of one colour hold the same block; grey: all hold everything. ${across} runs to the right${down}${drawn}.`));
  inputs(place, "Inputs", collapsed ? data.arrays.filter((a) => a.splits.length || a.pinned) : data.arrays);
  if (!collapsed) return;
  const count = plural(sum(replicated.map((a) => a.number)), "input");
  const unfold = () => rest.childElementCount > 1 || inputs(rest, "Replicated inputs", replicated);
  const rest = make("details", { ontoggle: unfold }, make("summary", {}, `${count} whole on every device: ${bytesText(sum(replicated.map((a) => a.bytes)))} of each`));
  beforePrint.push(() => { rest.open = true; unfold(); });
  place.append(rest);
}

function inputs(place, name, rows) {
  table(place, {
    name,
    noun: "row",
    rows,
    text: (a) => `${a.name} ${a.type} ${a.layout} ${a.pinned}`,
    filters: { layout: (a) => a.layout, pinned: (a) => (a.pinned ? "pinned" : "planned") },
    columns: [
      { label: "input", class: "long", key: (a) => a.name, cell: (a) => make("code", { class: "clip" }, a.name, a.number > 1 ? make("span", { class: "soft" }, ` ×${a.number}`) : "") },
      { label: "type", class: "type", key: (a) => a.type, cell: (a) => make("code", { class: "clip" }, a.type) },
      { label: "on the mesh", cell: meshOf },
      { label: "layout", key: (a) => a.layout, cell: (a) => make("span", { class: "clip" }, ...a.layout.split(" ").map((part, i) => make("code", { class: "chip", title: a.meanings[i] }, part))) },
      { label: "pinned", key: (a) => a.pinned, cell: (a) => a.pinned },
      { label: "on a device", key: (a) => a.local.join(","), cell: (a) => make("code", {}, `[${a.local.join(",")}]`) },
      { label: "bytes per device", class: "number", first: "descending", start: true, key: (a) => a.bytes, cell: (a) => bytesText(a.bytes) },
    ],
  });
}

function meshOf(a) {
  const dims = new Map();
  for (const [axis, dim] of a.splits) dims.set(dim, [...(dims.get(dim) || []), axis]);
  const axes = drawnAxes();
  const width = axes.length ? axes.at(-1).drawn : 1;
  const blocks = [...dims.values()], count = (names) => names.reduce((n, name) => n * axes.find((axis) => axis.name === name).drawn, 1);
  const whole = blocks.reduce((n, names) => n * count(names), 1);
  const cells = positions(axes).map((at) => {
    const block = blocks.flat().reduce((n, name) => n * count([name]) + at.get(name), 0);
    return make("i", { "--of": whole > 1 ? `hsl(${(210 + (330 * block) / whole) % 360} 42% 56%)` : "var(--compute)" });
  });
  const devices = data.mesh.reduce((n, [, size]) => n * size, 1);
  const held = a.splits.reduce((n, [axis]) => n * data.mesh.find(([name]) => name === axis)[1], 1);
  const title = held > 1 ? `${plural(held, "block")}, each on ${plural(devices / held, "device")}` : "the same on every device";
  const grid = make("div", { class: "mesh", role: "img", "aria-label": title, title }, ...cells);
  grid.style.gridTemplateColumns = `repeat(${width}, 7px)`;
  return grid;
}

// Coordinates of the drawn devices, the last axis fastest.
function positions(axes) {
  return axes.reduce((found, axis) => found.flatMap((at) => Array.from({ length: axis.drawn }, (_, i) => new Map(at).set(axis.name, i))), [new Map()]);
}
