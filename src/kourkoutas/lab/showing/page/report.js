"use strict";
// What a reader can do beside reading: see values, and come from a seed to its run. Without this script everything can
// still be read, downloaded and unfolded.

const tip = document.getElementById("tip");

function show(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 4)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18) + "px";
}

function digits(value) {
  return String(Number(value.toPrecision(4)));
}

// A picture's titles become hints that open at once and by keyboard; the browser's own would open beside them.
function takeTitles() {
  for (const title of document.querySelectorAll("svg title")) {
    const owner = title.parentNode;
    owner.dataset.tip = title.textContent;
    if (owner.localName === "a") owner.setAttribute("aria-label", title.textContent);
    title.remove();
  }
}

// Where the pointer is in the coordinates of a picture.
function within(svg, event) {
  const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
  return [(event.clientX - box.left) / box.width * view.width, (event.clientY - box.top) / box.height * view.height];
}

function overPlot(svg, event) {
  const plot = svg.plot ??= JSON.parse(svg.dataset.plot);
  const [low, high, start, stop] = plot.x, [x] = within(svg, event);
  if (x < start || x > stop) return null;
  const step = low + (x - start) / (stop - start) * (high - low);
  const rows = plot.lines.map(line => [line, line.y[line.x.findLastIndex(value => value <= step)] ?? null])
    .filter(row => row[1] !== null).sort((a, b) => a[1] - b[1]).slice(0, 12);
  const told = rows.map(([line, y]) => line.name + ": " + digits(y) + line.unit);
  return rows.length ? ["step " + Math.round(step), ...told].join("\n") : null;
}

addEventListener("pointermove", event => {
  const target = event.target instanceof Element ? event.target : null;
  const hinted = target?.closest("[data-tip]"), svg = target?.closest("svg");
  let text = hinted ? hinted.dataset.tip : null;
  if (!text && svg?.dataset.plot) text = overPlot(svg, event);
  if (text) show(text, event.clientX, event.clientY);
  else tip.hidden = true;
});
addEventListener("focusin", event => {
  const hinted = event.target.closest("[data-tip]");
  if (!hinted) { tip.hidden = true; return; }
  const box = hinted.getBoundingClientRect();
  show(hinted.dataset.tip, box.left, box.bottom - 10);
});
addEventListener("keydown", event => {
  if (event.key === "Escape") tip.hidden = true;
});
addEventListener("click", event => {
  const link = event.target.closest("a[href^='#']");
  if (link) unfold(link.getAttribute("href").slice(1));
});

// A link into a folded part unfolds it before the browser goes there.
function unfold(id) {
  for (let one = document.getElementById(id); one; one = one.parentElement) {
    if (one.localName === "details") one.open = true;
  }
}
addEventListener("hashchange", () => unfold(location.hash.slice(1)));

// Each figure can be saved as a picture of its own, which holds the page's style and the colours that the reader sees.
function asFile(svg) {
  const copy = svg.cloneNode(true), style = document.createElementNS(svg.namespaceURI, "style");
  style.textContent = document.querySelector("style").textContent +
    "svg { background: var(--paper); font: 12px system-ui, sans-serif; }";
  copy.setAttribute("xmlns", svg.namespaceURI);
  copy.removeAttribute("data-plot");
  copy.prepend(style);
  return "data:image/svg+xml;charset=utf-8," + encodeURIComponent(copy.outerHTML);
}
function addSaving() {
  for (const figure of document.querySelectorAll("figure:has(> svg)")) {
    const svg = figure.querySelector("svg"), button = document.createElement("button");
    const title = figure.querySelector("figcaption")?.textContent ?? "";
    const name = figure.classList.contains("panel") ? title : "effects";
    button.className = "save";
    button.type = "button";
    button.textContent = "SVG";
    button.setAttribute("aria-label", "Save as SVG: " + name);
    button.addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = asFile(svg);
      link.download = (name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "figure") + ".svg";
      link.click();
    });
    svg.after(button);
  }
}

takeTitles();
addSaving();
if (location.hash) unfold(location.hash.slice(1));

// A page that reloads itself keeps what the reader has unfolded, also in the last one, which no longer reloads.
const place = "open " + location.pathname;
const kept = JSON.parse(sessionStorage.getItem(place) ?? "{}");
for (const one of document.querySelectorAll("details")) if (one.id in kept) one.open = kept[one.id];
sessionStorage.removeItem(place);
if (document.querySelector("meta[http-equiv=refresh]")) {
  addEventListener("pagehide", () => {
    const now = [...document.querySelectorAll("details")].map(one => [one.id, one.open]);
    sessionStorage.setItem(place, JSON.stringify(Object.fromEntries(now)));
  });
}
