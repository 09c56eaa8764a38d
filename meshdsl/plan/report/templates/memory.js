// Memory over the program, and the buffers that are live at its peak. A cursor moves with the pointer or the arrow keys.
const PHASES = ["forward", "backward", "optimizer"];

function showMemory(place) {
  const points = data.points;
  if (!points.length) return void place.append(make("p", {}, "The plan has no program points."));
  const peak = points.reduce((best, point, i) => (point[0] > points[best][0] ? i : best), 0);
  const label = `Memory over ${plural(points.length, "program point")}: ${bytesText(data.memory)} at the peak, ${placeOf(points[peak])}. Arrow keys move along.`;
  const chart = draw("svg", { role: "img", tabindex: "0", "aria-label": label, height: "220" });
  const held = make("div", {}, make("h3", {}, `Live at the peak: ${placeOf(points[peak])}`));
  place.append(make("p", { class: "soft" }, "Predicted bytes per device in program order (loops once), coloured by phase: ", ...PHASES.map((phase) => make("span", { class: "kind", "--of": `var(--${phase})` }, `${phase} `))), chart, pictureButtons(chart, "memory"), held);
  let x = (i) => i;
  atWidth(chart, (width) => { x = paintMemory(chart, points, peak, width); });
  cursorOn(chart, () => points.length, peak, (i) => x(i + 0.5), (i) => `${bytesText(points[i][0])} at ${placeOf(points[i])}`, (i) => showLine(points[i][1]));
  table(held, {
    name: "Buffers live at the peak",
    noun: "row",
    rows: data.held,
    text: (row) => row[0],
    columns: [
      { label: "buffer", class: "long", key: (row) => row[0], cell: (row) => make("code", { class: "clip" }, row[0], row[1] > 1 ? make("span", { class: "soft" }, ` ×${row[1]}`) : "") },
      { label: "bytes", class: "number", first: "descending", start: true, key: (row) => row[2], cell: (row) => bytesText(row[2]) },
      { label: "share", class: "number", cell: (row) => percent(row[2], data.memory) },
      { label: unseen("share, drawn"), class: "share", cell: (row) => stacked([["held", row[2], ""]], data.memory) },
    ],
  });
}

const placeOf = ([, line, name, phase]) => `${name}, ${lines[line].source} (${phase})`;

function paintMemory(chart, points, peak, width) {
  const left = 64, right = width - 12, top = 22, bottom = 200;
  const near = data.limit < 1.5 * data.memory, highest = near ? Math.max(data.limit, data.memory) : data.memory;
  const x = (i) => left + ((right - left) * i) / points.length, y = (n) => bottom - ((bottom - top) * n) / (highest || 1);
  chart.setAttribute("viewBox", `0 0 ${width} 220`);
  chart.replaceChildren();
  for (const part of [0, 0.5, 1]) {
    chart.append(draw("line", { class: "axis", x1: left, x2: right, y1: y(part * highest), y2: y(part * highest) }));
    chart.append(draw("text", { x: left - 6, y: y(part * highest) + 4, "text-anchor": "end" }, bytesText(part * highest)));
  }
  for (let from = 0, i = 1; i <= points.length; i++) {
    if (i < points.length && points[i][3] === points[from][3]) continue;
    const steps = points.slice(from, i).map((point, j) => `V${y(point[0]).toFixed(1)}H${x(from + j + 1).toFixed(1)}`).join("");
    chart.append(draw("path", { d: `M${x(from).toFixed(1)} ${bottom}${steps}V${bottom}Z`, style: `fill:var(--${points[from][3]})` }));
    from = i;
  }
  if (near) chart.append(draw("line", { class: "limit", x1: left, x2: right, y1: y(data.limit), y2: y(data.limit) }), draw("text", { x: left + 4, y: y(data.limit) + 13 }, `${data.topology} has ${bytesText(data.limit)}`));
  else chart.append(draw("text", { x: right, y: bottom + 15, "text-anchor": "end" }, `${data.topology} has ${bytesText(data.limit)}, ${digits(data.limit / data.memory)} times the peak`));
  const at = x(peak + 0.5), side = at > width / 2 ? "end" : "start";
  chart.append(draw("circle", { cx: at, cy: y(data.memory), r: 3, style: "fill:var(--text)" }));
  chart.append(draw("text", { x: at + (side === "end" ? -8 : 8), y: y(data.memory) - 8, "text-anchor": side }, `peak ${bytesText(data.memory)}, ${shown(lines[points[peak][1]].source, 40)}`));
  return x;
}

// A cursor over a chart of numbered places: at(i) is the position of one, say(i) its text, go(i) the action of Enter.
function cursorOn(chart, count, first, at, say, go) {
  let now = first, mark = null;
  function move(i, x, y) {
    now = Math.max(0, Math.min(count() - 1, i));
    mark?.remove();
    mark = draw("line", { class: "cursor", x1: at(now), x2: at(now), y1: 14, y2: chart.clientHeight });
    chart.append(mark);
    const box = chart.getBoundingClientRect();
    showTip(say(now), x ?? box.left + at(now), y ?? box.top + 30);
  }
  function nearest(x) {
    let [low, high] = [0, count() - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (at(middle) < x) low = middle + 1;
      else high = middle;
    }
    return low > 0 && x - at(low - 1) < at(low) - x ? low - 1 : low;
  }
  chart.addEventListener("pointermove", (event) => move(nearest(event.clientX - chart.getBoundingClientRect().left), event.clientX, event.clientY));
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -count(), End: count() }[event.key];
    if (step) event.preventDefault(), move(now + step);
    else if (event.key === "Enter") go(now);
    else if (event.key === "Escape") hide();
  });
  chart.addEventListener("click", () => go(now));
  function hide() {
    mark?.remove();
    showTip("");
  }
}
