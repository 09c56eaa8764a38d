// Tables that are searched, filtered and sorted; rows are made as they are scrolled to.
const CHUNK = 60;

/* columns: {label, cell(row) -> text or element, key(row) -> what is sorted by, class, first: "descending"}
   filters: {label: row -> text}; text(row) is what is searched. */
function table(place, { name, rows, columns, filters = {}, text, noun = "row" }) {
  const state = { query: "", picked: {}, column: null, down: false };
  const count = make("span", { class: "soft", role: "status" });
  const body = make("tbody");
  const heads = columns.map((column, i) => make("th", { scope: "col", class: column.class || "" },
    column.key ? make("button", { type: "button", onclick: () => sortBy(i) }, column.label) : column.label));
  const scroller = make("div", { class: "wide tall", tabindex: "0", role: "region", "aria-label": `${name}, table` });
  scroller.append(make("table", {}, make("caption", { class: "skip" }, name), make("thead", {}, make("tr", {}, ...heads)), body));
  const searched = rows.map((row) => text(row).toLowerCase());
  let left = [];

  function sortBy(i) {
    const first = columns[i].first === "descending";
    state.down = state.column === i ? !state.down : first;
    state.column = i;
    heads.forEach((head, j) => (j === i ? head.setAttribute("aria-sort", state.down ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
    update();
  }

  function order(a, b) {
    const x = columns[state.column].key(a), y = columns[state.column].key(b);
    return (x < y ? -1 : x > y ? 1 : 0) * (state.down ? -1 : 1);
  }

  function update() {
    const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = Object.entries(state.picked).filter(([, value]) => value !== "");
    left = rows.filter((row, i) => words.every((word) => searched[i].includes(word)) && wanted.every(([label, value]) => filters[label](row) === value));
    if (state.column !== null) left.sort(order);
    count.textContent = left.length === rows.length ? plural(rows.length, noun) : `${left.length} of ${plural(rows.length, noun)}`;
    body.replaceChildren();
    scroller.scrollTop = 0;
    grow();
  }

  function grow(most = CHUNK) {
    const from = body.childElementCount;
    body.append(...left.slice(from, from + most).map((row) => make("tr", {}, ...columns.map((column) => make("td", { class: column.class || "", ...(typeof column.label === "string" ? { "data-label": column.label } : {}) }, column.cell(row))))));
  }

  scroller.addEventListener("scroll", () => {
    if (scroller.scrollTop + scroller.clientHeight > scroller.scrollHeight - 400) grow();
  });
  beforePrint.push(() => grow(Infinity));
  const search = make("input", { type: "search", "aria-label": `Search ${name.toLowerCase()}`, placeholder: "search", oninput: () => { state.query = search.value; update(); } });
  const selects = Object.entries(filters).map(([label, of]) => select(label, [...new Set(rows.map(of))].sort(), (value) => { state.picked[label] = value; update(); }));
  place.append(make("div", { class: "controls" }, search, ...selects, count), scroller);
  const start = columns.findIndex((column) => column.start);
  if (start >= 0) sortBy(start);
  else update();
}

function select(label, values, change) {
  const options = [make("option", { value: "" }, "all"), ...values.map((value) => make("option", { value }, shown(value, 60)))];
  const made = make("select", { onchange: () => change(made.value) }, ...options);
  return make("label", {}, `${label} `, made);
}

// One of several values, as radio buttons.
function choice(legend, values, change) {
  const name = `choice-${legend.replaceAll(" ", "-")}`;
  const labels = Object.entries(values).map(([value, text], i) => make("label", {},
    make("input", { type: "radio", name, value, ...(i ? {} : { checked: "" }), onchange: () => change(value) }), ` ${text}`));
  return make("fieldset", {}, make("legend", { class: "skip" }, legend), ...labels);
}
