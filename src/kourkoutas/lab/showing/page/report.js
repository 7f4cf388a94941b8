"use strict";
// What a reader can do beside reading: see values, follow one optimizer, and come from a seed to its run. Without this
// script everything can still be read, downloaded and unfolded.

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

function makePicks() {
  for (const name of document.querySelectorAll("span.pick")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "pick";
    button.textContent = name.textContent;
    button.setAttribute("aria-pressed", "false");
    name.replaceWith(button);
  }
}

let picked = null;
function pick(arm) {
  picked = arm;
  document.body.classList.toggle("picking", arm !== null);
  for (const one of document.querySelectorAll("[data-arm]")) one.classList.toggle("picked", one.dataset.arm === arm);
  for (const button of document.querySelectorAll("button.pick")) {
    button.setAttribute("aria-pressed", String(button.closest("[data-arm]").dataset.arm === arm));
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
  const lines = plot.lines.filter(line => picked === null || String(line.arm) === picked);
  const rows = lines.map(line => [line, line.y[line.x.findLastIndex(value => value <= step)] ?? null])
    .filter(row => row[1] !== null).sort((a, b) => a[1] - b[1]).slice(0, 12);
  const told = rows.map(([line, y]) => line.name + ": " + digits(y) + line.unit);
  return rows.length ? ["step " + Math.round(step), ...told].join("\n") : null;
}

function overMap(svg, event) {
  const map = svg.map ??= JSON.parse(svg.dataset.map);
  const [low, high, start, stop] = map.x, [top, bottom] = map.y, [x, y] = within(svg, event);
  if (x < start || x > stop || y < top || y > bottom) return null;
  const row = Math.min(map.rows.length - 1, Math.floor((y - top) / (bottom - top) * map.rows.length));
  const count = map.cells[row].length, column = Math.min(count - 1, Math.floor((x - start) / (stop - start) * count));
  const value = map.cells[row][column], width = (high - low) / count;
  const from = Math.ceil(low + column * width), to = Math.floor(low + (column + 1) * width);
  const steps = to > from ? "steps " + from + " to " + to : "step " + from;
  return map.rows[row] + "\n" + steps + "\n" + (value === null ? "no gradient" : map.what + " " + value);
}

addEventListener("pointermove", event => {
  const target = event.target instanceof Element ? event.target : null;
  const hinted = target?.closest("[data-tip]"), svg = target?.closest("svg");
  let text = hinted ? hinted.dataset.tip : null;
  if (!text && svg?.dataset.plot) text = overPlot(svg, event);
  if (!text && svg?.dataset.map) text = overMap(svg, event);
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
  if (event.key === "Escape") { tip.hidden = true; pick(null); }
});
addEventListener("click", event => {
  const button = event.target.closest("button");
  if (button?.classList.contains("pick")) {
    const arm = button.closest("[data-arm]").dataset.arm;
    return pick(arm === picked ? null : arm);
  }
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

let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const one of folded) one.open = true;
});
addEventListener("afterprint", () => { for (const one of folded) one.open = false; });

takeTitles();
makePicks();
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
