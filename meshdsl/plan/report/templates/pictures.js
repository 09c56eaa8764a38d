// Charts saved as SVG, or as PNG at twice their size.
function pictureButtons(chart, name) {
  const button = (kind, save) => make("button", { type: "button", "aria-label": `Save the picture of the ${name} as ${kind}`, onclick: save }, kind);
  const svg = () => keep(new Blob([pictureOf(chart)], { type: "image/svg+xml" }), `${name}.svg`);
  return make("div", { class: "controls soft" }, "save picture: ", button("SVG", svg), button("PNG", () => keepPixels(chart, name)));
}

const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-family", "text-anchor"];

// The chart by itself, with its computed style written into it.
function pictureOf(chart) {
  const copy = chart.cloneNode(true), style = getComputedStyle(chart);
  const [from, to] = [chart, copy].map((root) => [...root.querySelectorAll("*")]);
  from.forEach((element, i) => {
    const said = getComputedStyle(element);
    to[i].setAttribute("style", DRAWN.map((property) => `${property}:${said.getPropertyValue(property)}`).join(";"));
  });
  copy.prepend(draw("rect", { width: "100%", height: "100%", style: `fill:${style.backgroundColor}` }));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", chart.clientWidth);
  return new XMLSerializer().serializeToString(copy);
}

function keepPixels(chart, name) {
  const url = URL.createObjectURL(new Blob([pictureOf(chart)], { type: "image/svg+xml" })), image = new Image();
  image.onload = () => {
    const canvas = make("canvas", {}), context = canvas.getContext("2d");
    [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
    context.scale(2, 2);
    context.drawImage(image, 0, 0);
    URL.revokeObjectURL(url);
    canvas.toBlob((blob) => keep(blob, `${name}.png`));
  };
  image.src = url;
}

function keep(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
