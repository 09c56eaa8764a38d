// Communication by axes, kind and phase as bars, and by function and line as a treemap.
function showCommunication(place) {
  if (!data.cells.length) return void place.append(make("p", {}, "The plan communicates nothing."));
  const bars = make("div", { class: "columns" });
  const metric = choice("measure of communication", { seconds: "time", bytes: "bytes", runs: "runs" }, (value) => paintBars(bars, value));
  const kinds = KINDS.filter((kind) => data.cells.some((cell) => cell[1] === kind));
  place.append(make("div", { class: "controls" }, metric, ...kinds.map(kindText)), bars);
  paintBars(bars, "seconds");
  const map = draw("svg", { class: "treemap", role: "group", "aria-label": "Lines by area" });
  let area = "sent", width = 0;
  const paint = () => width && paintTreemap(map, area, width);
  const areas = { sent: "communication time", bytes: "bytes sent", compute: "computing time", all: "all time" };
  place.append(make("h3", {}, "By function and line"), make("div", { class: "controls" }, choice("area of a line", areas, (value) => { area = value; paint(); })), map, pictureButtons(map, "treemap"));
  atWidth(map, (now) => { width = now; paint(); });
}

const MEASURE = { runs: 3, bytes: 4, seconds: 5 };

function paintBars(place, metric) {
  const [, text] = METRICS[metric], at = MEASURE[metric];
  const tables = [["mesh axes", 0], ["kind", 1], ["phase", 2]].map(([label, by]) => {
    const groups = [...Map.groupBy(data.cells, (cell) => cell[by])].map(([key, cells]) => ({ key, cells, total: sum(cells.map((cell) => cell[at])) }));
    groups.sort((a, b) => b.total - a.total);
    const rows = groups.map(({ key, cells, total }) => {
      const parts = KINDS.map((kind) => [kind, sum(cells.filter((cell) => cell[1] === kind).map((cell) => cell[at]))]);
      const titled = parts.map(([kind, value]) => [kind, value, `${kind} ${text(value)}`]);
      return make("tr", {}, make("th", { scope: "row" }, key), make("td", { class: "share" }, stacked(titled, groups[0].total)), make("td", { class: "number" }, text(total)));
    });
    const head = make("tr", {}, make("th", { scope: "col" }, `by ${label}`), make("th", { scope: "col" }, unseen(`${METRICS[metric][0]}, drawn`)), make("th", { scope: "col", class: "number" }, METRICS[metric][0]));
    return make("div", { class: "wide" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
  });
  place.replaceChildren(...tables);
}

const AREAS = { sent: [(l) => l.sent, secondsText], bytes: [(l) => l.bytes, bytesText], compute: [(l) => l.compute, secondsText], all: [(l) => l.compute + l.sent, secondsText] };
const SHOWN = 150; // lines; smaller ones cannot be seen

function paintTreemap(place, area, width) {
  const [of, text] = AREAS[area], whole = sum(lines.map(of));
  const largest = lines.filter((line) => of(line) > 0).sort((a, b) => of(b) - of(a)).slice(0, SHOWN);
  const groups = [...Map.groupBy(largest, (line) => `${line.file} ${line.function}`).values()];
  const sized = groups.map((own) => ({ own, size: sum(own.map(of)) })).sort((a, b) => b.size - a.size);
  const blocks = [], height = place.clientHeight;
  squarify(sized, (group) => group.size, { x: 0, y: 0, w: width, h: height }, (group, box) => {
    const hue = (210 + 137 * blocks.length) % 360;
    const tiles = [];
    squarify(group.own, of, box, (line, tile) => tiles.push(tileOf(line, tile, `hsl(${hue} 38% 44%)`, text(of(line)), percent(of(line), whole))));
    blocks.push(tiles);
  });
  place.setAttribute("viewBox", `0 0 ${width} ${height}`);
  place.setAttribute("height", height);
  place.replaceChildren(...blocks.flat());
}

const LETTER = 6.6; // width of a character in a tile, about

function tileOf(line, { x, y, w, h }, color, amount, share) {
  const title = `${line.source} ${amount} ${line.function}: ${share}\n${line.text.trim()}`;
  const tile = draw("a", { href: `#line-${line.position}` });
  const sides = { x: x.toFixed(1), y: y.toFixed(1), width: Math.max(0, w - 1).toFixed(1), height: Math.max(0, h - 1).toFixed(1) };
  tile.append(draw("title", {}, title), draw("rect", { ...sides, style: `fill:${color}` }));
  const letters = Math.floor((w - 8) / LETTER), named = `${line.source} ${amount}`;
  const said = [w > 60 && h > 18 ? (named.length > letters ? line.source : named) : "", w > 90 && h > 40 ? line.function : ""];
  said.filter(Boolean).forEach((text, row) => tile.append(draw("text", { x: x + 5, y: y + 14 + 15 * row }, text.slice(0, letters))));
  return tile;
}

// Squarified treemap (Bruls, Huizing, van Wijk 2000): rows along the shorter side, as long as its tiles get squarer.
function squarify(items, size, box, put) {
  let rest = items, { x, y, w, h } = box;
  let scale = (w * h) / (sum(items.map(size)) || 1);
  while (rest.length && w > 0 && h > 0) {
    const side = Math.min(w, h);
    let n = 1;
    while (n < rest.length && worst(rest.slice(0, n + 1), size, scale, side) <= worst(rest.slice(0, n), size, scale, side)) n++;
    const row = rest.slice(0, n), thick = (sum(row.map(size)) * scale) / side;
    let along = 0;
    for (const item of row) {
      const length = (size(item) * scale) / thick;
      put(item, w >= h ? { x, y: y + along, w: thick, h: length } : { x: x + along, y, w: length, h: thick });
      along += length;
    }
    if (w >= h) [x, w] = [x + thick, w - thick];
    else [y, h] = [y + thick, h - thick];
    rest = rest.slice(n);
  }
}

function worst(row, size, scale, side) {
  const areas = row.map((item) => size(item) * scale), total = sum(areas);
  return Math.max(...areas.map((area) => Math.max((side * side * area) / total ** 2, total ** 2 / (side * side * area))));
}
