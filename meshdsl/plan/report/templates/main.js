// The sections of the page; each is filled when it is scrolled near, so that the first screen appears at once.
function showCollectives(place) {
  if (!data.collectives.length) return void place.append(make("p", {}, "The plan communicates nothing."));
  const column = (label, key, text) => ({ label, class: "number", first: "descending", key: (c) => c[key], cell: (c) => text(c[key], c) });
  table(place, {
    name: "Collectives",
    noun: "row",
    rows: data.collectives,
    text: (c) => `${c.kind} ${c.axes} ${c.phase} ${c.source} ${c.reason} ${c.type}`,
    filters: { kind: (c) => c.kind, axes: (c) => c.axes, phase: (c) => c.phase },
    columns: [
      { label: "collective", key: (c) => c.kind, cell: (c) => kindText(c.kind) },
      { label: "axes", key: (c) => c.axes, cell: (c) => c.axes },
      { ...column("time", "seconds", secondsText), start: true },
      ...(data.collectives.some((c) => c.exposed === null) ? [] : [column("exposed", "exposed", secondsText)]),
      column("bytes", "bytes", bytesText),
      column("runs", "runs", (n, c) => `${c.estimated ? "~" : ""}${n.toLocaleString("en")}`),
      column("bytes each", "each", bytesText),
      { label: "phase", key: (c) => c.phase, cell: (c) => c.phase },
      { label: "line", key: (c) => c.source, cell: (c) => sourceLink(c.source) },
      { label: "why", class: "reason", cell: (c) => make("span", { class: "clip" }, c.reason, make("span", { class: "soft" }, `  ${c.type}`)) },
    ],
  });
}

const SECTIONS = { source: showSource, communication: showCommunication, collectives: showCollectives, parameters: showArrays, memory: showMemory, timeline: showTimeline, compare: showCompare };
const drawn = new Set();

function fill(id) {
  if (drawn.has(id)) return;
  drawn.add(id);
  SECTIONS[id](section(id));
}

// Links to a section or a line need the sections above it to be filled.
function follow() {
  const name = decodeURIComponent(location.hash.slice(1));
  const target = name.startsWith("line-") ? "source" : name;
  if (!(target in SECTIONS)) return;
  for (const id of Object.keys(SECTIONS)) {
    fill(id);
    if (id === target) break;
  }
  if (target === "source" && name !== "source") showLine(Number(name.slice(5)));
  else section(target).scrollIntoView();
}

addEventListener("beforeprint", () => {
  Object.keys(SECTIONS).forEach(fill);
  for (const act of beforePrint) act(); // which may add more
});
addEventListener("afterprint", () => afterPrint.forEach((act) => act()));
addEventListener("hashchange", follow);
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='#']");
  if (link && link.hash === location.hash) follow(); // the same place again
});
const near = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => fill(entry.target.id)), { rootMargin: "600px" });
requestAnimationFrame(() => {
  Object.keys(SECTIONS).forEach((id) => near.observe(section(id)));
  follow();
});
