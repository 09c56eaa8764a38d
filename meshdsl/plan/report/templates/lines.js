const FILES = 12; // that are listed from the start

// The user's source, with the cost of every line in the margin and its collectives below it.
function showSource(place) {
  const most = Math.max(...lines.map((line) => line.compute + line.sent), 0);
  const files = Map.groupBy(lines.filter((line) => line.source !== "?"), (line) => line.file);
  const rows = [...files].map(([file, own]) => ({ file, own, seconds: sum(own.map((line) => line.compute + line.sent)) }));
  rows.sort((a, b) => b.seconds - a.seconds);
  place.append(make("p", { class: "soft" }, "Predicted time per step beside every line; a button shows the collectives of its line, and why they are there."));
  rows.slice(0, FILES).forEach((row, i) => place.append(fileOf(row, most, i < 2)));
  const rest = rows.slice(FILES).map((row) => fileOf(row, most, false));
  if (rest.length) place.append(make("details", {}, make("summary", {}, plural(rest.length, "more file")), ...rest));
  const lost = lineOf.get("?");
  if (lost && lost.compute + lost.sent) place.append(make("p", { class: "soft" }, `${secondsText(lost.compute + lost.sent)} belong to no line.`));
}

function fileOf({ file, own, seconds }, most, open) {
  const bytes = sum(own.map((line) => line.bytes));
  const title = make("summary", {}, make("code", {}, shown(file)), make("span", { class: "soft" }, `  ${secondsText(seconds)}, ${bytesText(bytes)} sent`));
  const details = make("details", { ontoggle: fill }, title);
  function fill() {
    if (!details.open || details.childElementCount > 1) return;
    const body = make("tbody");
    let last = null;
    for (const line of own) {
      if (last !== null && Number(line.number) > last + 1) body.append(make("tr", {}, make("td", { class: "soft number", colspan: "4" }, "⋯"), make("td", {})));
      last = Number(line.number);
      body.append(rowOf(line, most));
    }
    const heads = [["time", "number"], [unseen("time, drawn"), "share"], ["sent", "number"], ["line", "number"], [shown(file, 80), "code"]];
    const head = make("thead", {}, make("tr", {}, ...heads.map(([label, kind]) => make("th", { scope: "col", class: kind }, label))));
    details.append(make("div", { class: "wide tall", tabindex: "0", role: "region", "aria-label": `Source of ${shown(file, 80)}` }, make("table", { class: "lines" }, head, body)));
  }
  details.fill = fill;
  for (const line of own) line.details = details;
  if (open) {
    details.open = true;
    fill();
  }
  return details;
}

function rowOf(line, most) {
  const total = line.compute + line.sent;
  const sent = make("td", { class: "number" }, ...(line.runs ? [reasonsButton(line)] : []));
  const bar = stacked([["compute", line.compute, `computing ${secondsText(line.compute)}`], ["sent", line.sent, `communication ${secondsText(line.sent)}`]], most);
  return make("tr", { id: `line-${line.position}`, tabindex: "-1", class: total ? "hot" : "", "--heat": most ? ((16 * total) / most).toFixed(1) : 0 },
    make("td", { class: "number" }, total ? secondsText(total) : ""), make("td", { class: "share" }, total ? bar : ""), sent,
    make("td", { class: "number soft" }, line.number), make("td", { class: "code" }, ...(line.text ? highlighted(line) : [line.function ? `(in ${line.function})` : ""])));
}

// The parts of a line in the colours of Python: each has a class and a number of characters.
function highlighted({ text, parts }) {
  const characters = [...text];
  let from = 0;
  return parts.map(([kind, length]) => {
    const part = characters.slice(from, (from += length)).join("");
    return kind ? make("span", { class: kind }, part) : part;
  });
}

function reasonsButton(line) {
  const button = make("button", { type: "button", "aria-expanded": "false", "aria-label": `${bytesText(line.bytes)} sent in ${plural(line.runs, "collective")} of line ${line.number}`, onclick: toggle }, `${bytesText(line.bytes)} ▸`);
  function toggle() {
    const row = button.closest("tr"), open = button.getAttribute("aria-expanded") === "true";
    if (open) row.nextSibling.remove();
    else row.after(reasonsOf(line));
    button.setAttribute("aria-expanded", String(!open));
    button.textContent = `${bytesText(line.bytes)} ${open ? "▸" : "▾"}`;
  }
  return button;
}

function reasonsOf(line) {
  const own = data.collectives.filter((c) => c.source === line.source).sort((a, b) => b.seconds - a.seconds);
  const items = own.map((c) => make("li", {}, kindText(c.kind), ` over ${c.axes}, ${c.phase}: ${runsText(c)} of ${bytesText(c.each)}, ${secondsText(c.seconds)}. `, make("span", { class: "soft" }, shown(c.reason, 1000))));
  return make("tr", { class: "why" }, make("td", { colspan: "5" }, make("ul", {}, ...items)));
}

const runsText = (c) => `${c.estimated ? "~" : ""}${plural(c.runs, "run")}`;

// Links to lines open the file and highlight the line.
function showLine(position) {
  const line = lines[position];
  if (!line || !line.details) return;
  for (let at = line.details; at; at = at.parentElement.closest("details")) at.open = true;
  line.details.fill();
  document.querySelectorAll(".found").forEach((row) => row.classList.remove("found"));
  const row = document.getElementById(`line-${position}`);
  row.classList.add("found");
  row.scrollIntoView({ block: "center" });
  row.focus({ preventScroll: true });
}
