// The page: what is chosen, tabs, keys and search.
"use strict";

const MOST_FOUND = 40;
const byId = (id) => document.getElementById(id);
let current = null; // the id of a node of the graph

function choose(id, record) {
  if (id.startsWith("i")) unfoldTo(Number(id.slice(1)));
  cy.nodes().removeClass("current");
  const node = cy.getElementById(id);
  node.addClass("current");
  reveal(node);
  current = id;
  const at = Number(id.slice(1));
  if (id.startsWith("g")) describeGroup(groups[at]);
  else describeItem(data.items[at], record);
  showTab("details");
  byId("said").textContent = node.data("label").replaceAll("\n", ", ").replace("▸", "folded").replace("▾", "unfolded");
}

function toggled(at) {
  if (!unfolded.delete(at)) unfolded.add(at);
  draw();
  choose(`g${at}`);
}

function release() {
  cy.nodes().removeClass("current");
  current = null;
  overview();
}

function overview() {
  const share = Math.round((100 * data.held[data.rank]) / Math.max(data.whole, 1));
  panelOf("details",
    make("h2", {}, "Summary"),
    make("p", {}, `Rank ${data.rank} holds ${bytes(data.held[data.rank])} of ${bytes(data.whole)} of weights and buffers (${share}%). In a call it sends ${bytes(data.wire)} in ${data.counted}.`),
    make("p", {}, "Choose a node of the graph for its details; click a group to unfold it."),
    ...fallbackList(),
    data.records.length ? layerTable("Collectives by layer") : null,
    data.tensors.length ? tensorTable(data.alike) : null);
}

function showTab(name) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const shown = tab.getAttribute("aria-controls") === name;
    tab.setAttribute("aria-selected", shown);
    tab.tabIndex = shown ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !shown;
  }
}

document.querySelector("[role=tablist]").addEventListener("click", (event) => event.target.role === "tab" && showTab(event.target.getAttribute("aria-controls")));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const next = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
  showTab(next.getAttribute("aria-controls"));
  next.focus();
});

cy.on("tap", "node", (event) => {
  const id = event.target.id();
  if (event.target.hasClass("folded")) toggled(Number(id.slice(1)));
  else choose(id);
});
cy.on("dbltap", ".unfolded", (event) => event.target.hasClass("current") && toggled(Number(event.target.id().slice(1))));

byId("graph").addEventListener("keydown", (event) => {
  const ids = cy.nodes().map((node) => node.id());
  const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
  if (step) choose(ids[Math.min(Math.max(current === null ? 0 : ids.indexOf(current) + step, 0), ids.length - 1)]);
  else if (event.key === "Home") choose(ids[0]);
  else if (event.key === "End") choose(ids.at(-1));
  else if (event.key === "Enter" && current?.startsWith("g")) toggled(Number(current.slice(1)));
  else if (event.key === "Enter" && current) byId("details").focus();
  else if (event.key === "Escape") release();
  else if (event.key === "+" || event.key === "=") zoom(1.25);
  else if (event.key === "-") zoom(0.8);
  else return;
  event.preventDefault();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target !== byId("search")) {
    event.preventDefault();
    byId("search").select();
  } else if (event.key === "Escape" && event.target.closest("aside")) byId("graph").focus();
});

const entries = [
  ...groups.map((group) => ({ kind: "module", text: group.title === group.path ? group.path : `${group.path} (${group.title})`, go: () => revealGroup(group.at) })),
  ...data.items.filter((item) => !isSent(item)).map((item) => ({ kind: item.kind, text: [item.module, item.label, item.name].filter(Boolean).join(" "), go: () => choose(`i${item.at}`) })),
  ...data.tensors.map((tensor) => ({ kind: tensor.kind, text: tensor.name, go: () => revealTensor(tensor) })),
  ...[...data.records, ...(data.gone ?? [])].map((record) => ({ kind: "collective", text: [record.kind, record.module, record.node, record.why].filter(Boolean).join(" "), go: () => choose(`i${record.item}`, record) })),
];

function revealGroup(at) {
  for (let outer = groups[at].outer; outer >= 0; outer = groups[outer].outer) unfolded.add(outer);
  draw();
  choose(`g${at}`);
}

function revealTensor(tensor) {
  if (tensor.item !== null) choose(`i${tensor.item}`);
  describeTensor(tensor);
  showTab("details");
}

const [search, found] = [byId("search"), byId("found")];
let hits = [];
let marked = 0;

function look() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const all = words.length ? entries.filter(({ kind, text }) => words.every((word) => `${kind} ${text}`.toLowerCase().includes(word))) : [];
  hits = all.slice(0, MOST_FOUND);
  const rows = hits.map(({ kind, text }, at) => make("li", { role: "option", id: `hit-${at}`, onclick: () => pick(at) }, make("span", { class: "kind" }, kind), ` ${text}`));
  if (all.length > hits.length) rows.push(make("li", { class: "more" }, `and ${all.length - hits.length} more`));
  if (words.length && !all.length) rows.push(make("li", { class: "more" }, "nothing found"));
  found.replaceChildren(...rows);
  found.hidden = !words.length;
  search.setAttribute("aria-expanded", !found.hidden);
  mark(0);
}

function mark(at) {
  marked = Math.min(Math.max(at, 0), hits.length - 1);
  [...found.querySelectorAll("[role=option]")].forEach((row, i) => row.setAttribute("aria-selected", i === marked));
  if (marked < 0) return search.removeAttribute("aria-activedescendant");
  search.setAttribute("aria-activedescendant", `hit-${marked}`);
  byId(`hit-${marked}`).scrollIntoView({ block: "nearest" });
}

function pick(at) {
  const { go } = hits[at];
  search.value = "";
  look();
  byId("graph").focus();
  go();
}

search.addEventListener("input", look);
search.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown") mark(marked + 1);
  else if (event.key === "ArrowUp") mark(marked - 1);
  else if (event.key === "Enter" && hits.length) pick(marked);
  else if (event.key === "Escape") {
    search.value = "";
    look();
    byId("graph").focus();
  } else return;
  event.preventDefault();
});

function redraw(change) {
  change();
  draw();
  release();
  fit();
}

byId("in").addEventListener("click", () => zoom(1.25));
byId("out").addEventListener("click", () => zoom(0.8));
byId("fit").addEventListener("click", fit);
byId("unfold").addEventListener("click", () => redraw(() => groups.forEach((_, at) => unfolded.add(at))));
byId("fold").addEventListener("click", () => redraw(() => unfolded.clear()));

byId("name").textContent = data.name;

function summarise() {
  byId("summary").textContent = `mesh ${data.mesh}, ${data.device}. Rank ${data.rank} holds ${bytes(data.held[data.rank])} of ${bytes(data.whole)}. Per call: ${data.counted}, ${bytes(data.wire)} on the wire.`;
}

// Ranks with equal local shapes share the graph; for others the page starts again with theirs.
const rankChoice = byId("rank");
const choices = data.difference ? data.ranks : [...Array(data.world).keys()];
rankChoice.append(...choices.map((rank) => make("option", { value: rank }, `rank ${rank}`)));
rankChoice.value = data.rank;
rankChoice.addEventListener("change", () => {
  const rank = Number(rankChoice.value);
  history.replaceState(null, "", `#rank=${rank}`);
  if (!data.ranks.includes(rank)) return location.reload();
  data.rank = rank;
  document.title = titled();
  summarise();
  if (current?.startsWith("i")) describeItem(data.items[Number(current.slice(1))]);
  else if (!current) overview();
});
const titled = () => document.title.replace(/rank \d+$/, `rank ${data.rank}`);
document.title = titled();
summarise();

const key = (name, text) => make("li", {}, make("span", { class: `swatch ${name}` }), text);
// One colour may stand for several shardings: the first is spelled out, the others are in the tooltip.
function placementKey(name, shardings) {
  const [[text, words]] = shardings;
  const row = key(name, `${text}: ${words || "sharded"}${shardings.length > 1 ? `, and ${shardings.length - 1} more` : ""}`);
  row.title = shardings.map((each) => each.filter(Boolean).join(": ")).join("\n");
  return row;
}
byId("legend").append(
  ...Object.entries(data.legend).sort().map(([color, shardings]) => placementKey(color.replace(" ", "-"), shardings)),
  ...(data.records.some((record) => record.why !== "fallback") ? [key("collective", "collective: ranks exchange data")] : []),
  ...(data.records.some((record) => record.why === "fallback") ? [key("fallback", "fallback: a collective that no plan entry asked for")] : []),
  ...(data.items.some((item) => item.differs) ? [key("differs", "differs from the first")] : []),
  ...(data.gone?.length ? [key("gone", "collective that is gone")] : []),
  ...(data.chain.length ? [key("critical", "critical path: the slowest chain of steps")] : []));
showCost();
showTimeline();
overview();
if (data.difference) showDifference(data.difference);
addEventListener("resize", () => {
  cy.resize();
  if (current === null) fit();
});
cy.resize(); // the legend has taken its place
draw();
fit();
