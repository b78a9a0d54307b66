// The graph: modules folded and unfolded, drawn by cytoscape and laid out by dagre.
"use strict";

// Ranks whose local shapes differ have a page of data each; the address says which rank was chosen: #rank=1.
const first = JSON.parse(document.getElementById("data").textContent);
const chosen = Number(/^#rank=(\d+)$/.exec(location.hash)?.[1] ?? first.rank);
const data = [first, ...(first.others ?? [])].find(({ ranks }) => ranks.includes(chosen)) ?? first;
if (data.ranks.includes(chosen)) data.rank = chosen;
const groups = []; // as `members` nests them, in program order, each with `outer`, the place of the one around it
const outerOf = []; // item -> the place of its group, -1 for none
const unfolded = new Set(); // places of groups
const FONT = "12px system-ui, 'Liberation Sans', sans-serif";
const LINE = 16;
const LONGEST = 56; // letters of a line in the graph; the details have all of it

(function number(members, outer) {
  for (const member of members) {
    if (typeof member === "number") outerOf[member] = outer;
    else {
      Object.assign(member, { outer, at: groups.length });
      groups.push(member);
      number(member.members, member.at);
    }
  }
})(data.members, -1);

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const within = (name, module) => (name === module ? "" : name.startsWith(`${module}.`) ? name.slice(module.length + 1) : name);
const shortened = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text);

// As `format_bytes` in terminal/printed.py.
function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = units.findIndex((unit, at) => Number((count / 1000 ** at).toPrecision(3)) < 1000 || at === units.length - 1);
  return `${Number((count / 1000 ** power).toPrecision(3))} ${units[power]}`;
}

function linesOf(item) {
  const made = item.sharding.replace("->", "→");
  const module = within(item.module, outerOf[item.at] < 0 ? "" : groups[outerOf[item.at]].path);
  if (!isSent(item)) {
    const head = item.kind === "op" ? [module, item.label] : [item.kind, item.label];
    return [head.filter(Boolean).join("  "), `${made}  ${item.value}`.trim(), written(item), item.was ? `was ${item.was}` : ""].filter(Boolean);
  }
  const record = recordsOf(item)[0];
  const fate = item.kind === "gone" ? "gone: " : isNew(item) ? "new: " : "";
  const lines = [`${fate}${record.kind}  ${made}`, carried(record)];
  if (record.why !== "inherent") lines.push(`${record.why}: ${record.reason}`);
  if (item.writes.length) lines.push(written(item));
  return item.differs && !fate ? [...lines, `was ${carried(item.before)}`] : lines;
}

const written = (item) => (item.writes.length ? `writes ${item.writes.map(([name]) => name).join(", ")}` : "");
const isSent = (item) => item.kind === "collective" || item.kind === "gone";
const isNew = (item) => item.differs && item.kind === "collective" && !item.before;
const carried = (record) => `${bytes(record.payload_bytes)} over ${record.axis}, ${bytes(record.wire_bytes)} on the wire`;

const recordsOf = (item) => (item.kind === "gone" ? data.gone : data.records).filter((record) => record.item === item.at);

const pen = document.createElement("canvas").getContext("2d");
pen.font = FONT;

function box(lines, extra) {
  const width = Math.max(...lines.map((line) => pen.measureText(line).width));
  return { label: lines.join("\n"), width: width + extra, height: lines.length * LINE + 12 };
}

data.items.forEach((item, at) => {
  item.at = at;
});
data.items.forEach((item) => {
  item.classes = `item ${item.kind} ${item.color.replace(" ", "-")}`;
  if (item.kind === "collective") item.classes += ` ${recordsOf(item)[0].why}`;
  if (item.differs) item.classes += " differs";
  item.box = box(linesOf(item).map(shortened), isSent(item) ? 56 : 24);
});

// Of a group that differs: what its collectives were, where they sent otherwise.
groups.forEach((group) => {
  group.differs = itemsIn(group.members).some((at) => data.items[at].differs);
  if (!group.differs) return;
  const records = recordsBefore(group.members);
  const kinds = [...new Set(records.map((record) => record.kind))];
  const counted = kinds.map((kind) => `${records.filter((record) => record.kind === kind).length} ${kind}`).join(", ") || "no collectives";
  const wire = records.reduce((sum, record) => sum + record.wire_bytes, 0);
  if (counted !== group.counted || wire !== group.wire) group.was = `${counted}, ${bytes(wire)} on the wire`;
});

function itemsIn(members) {
  return members.flatMap((member) => (typeof member === "number" ? member : itemsIn(member.members)));
}

function recordsBefore(members) {
  return members.flatMap((member) => (typeof member === "number" ? data.items[member].before ?? [] : Array(member.count).fill(recordsBefore(member.members)).flat()));
}

// The id of what stands in the graph for an item: itself, or the outermost folded group around it.
function standIn(item) {
  let found = `i${item}`;
  for (let at = outerOf[item]; at >= 0; at = groups[at].outer) if (!unfolded.has(at)) found = `g${at}`;
  return found;
}

function elements() {
  const found = [];
  (function walk(members, parent) {
    for (const member of members) {
      if (typeof member === "number") {
        const item = data.items[member];
        found.push({ data: { id: `i${member}`, parent, ...item.box }, classes: item.classes });
        continue;
      }
      const id = `g${member.at}`;
      const each = member.count > 1 ? "each: " : "";
      const lines = [`${unfolded.has(member.at) ? "▾" : "▸"} ${shortened(member.title)}`, `${each}${member.counted}, ${bytes(member.wire)} on the wire`];
      if (unfolded.has(member.at)) {
        found.push({ data: { id, parent, ...box([lines.join("   ")], 0) }, classes: "group unfolded" });
        walk(member.members, id);
      } else {
        if (member.was) lines.push(`was ${member.was}`);
        found.push({ data: { id, parent, ...box(lines, 32) }, classes: `group folded${member.count > 1 ? " layers" : ""}${member.differs ? " differs" : ""}` });
      }
    }
  })(data.members, undefined);
  const critical = new Set(data.chain.map(([source, target]) => `${standIn(source)} ${standIn(target)}`));
  const edges = new Set(data.items.flatMap((item) => item.sources.map((source) => `${standIn(source)} ${standIn(item.at)}`)));
  for (const id of edges) {
    const [source, target] = id.split(" ");
    if (source !== target) found.push({ data: { id, source, target }, classes: critical.has(id) ? "critical" : "" });
  }
  return found;
}

// Edges go where dagre leads them, around nodes.
const ROUTED = {
  "curve-style": "unbundled-bezier",
  "control-point-weights": (edge) => edge.scratch("controlPointWeights"),
  "control-point-distances": (edge) => edge.scratch("controlPointDistances"),
  "edge-distances": "intersection",
};

function style() {
  const colors = ["whole", "cut-0", "cut-1", "cut-2", "cut-3", "cut-4", "pending", "unknown"];
  return [
    { selector: "node", style: { "label": "data(label)", "color": css("ink"), "font-size": 12, "font-family": "system-ui, Liberation Sans, sans-serif", "text-wrap": "wrap", "line-height": LINE / 14, "text-valign": "center", "border-width": 1.5 } },
    { selector: ".item, .folded", style: { "shape": "round-rectangle", "width": "data(width)", "height": "data(height)" } },
    ...colors.map((name) => ({ selector: `.${name}`, style: { "background-color": css(`${name}-fill`), "border-color": css(name) } })),
    { selector: ".input, .output", style: { "shape": "rectangle", "background-color": css("page") } },
    { selector: ".collective, .gone", style: { "shape": "polygon", "shape-polygon-points": [-1, 0, -0.92, -1, 0.92, -1, 1, 0, 0.92, 1, -0.92, 1] } },
    { selector: ".collective", style: { "background-color": css("collective"), "border-color": css("collective"), "color": css("on-collective"), "border-width": 2 } },
    { selector: ".fallback", style: { "background-color": css("page"), "color": css("collective"), "border-style": "dashed" } },
    { selector: ".group", style: { "background-color": css("group"), "border-color": css("faint"), "border-width": 1.5 } },
    { selector: ".layers", style: { "border-style": "double", "border-width": 5, "border-color": css("ink") } },
    { selector: ".unfolded", style: { "shape": "round-rectangle", "padding": 30, "text-valign": "top", "text-margin-x": (node) => node.data("width") / 2 + 12 - node.outerWidth() / 2, "text-margin-y": 22, "background-opacity": 0.5 } },
    { selector: ".differs", style: { "border-color": css("differs"), "border-width": 4 } },
    { selector: ".gone", style: { "background-color": css("page"), "border-style": "dashed", "color": css("differs") } },
    { selector: "edge", style: { "width": 1.5, ...ROUTED, "line-color": css("faint"), "target-arrow-color": css("faint"), "target-arrow-shape": "triangle", "arrow-scale": 0.8 } },
    { selector: ".critical", style: { "width": 4, "line-color": css("ink"), "target-arrow-color": css("ink") } },
    { selector: ".current", style: { "outline-width": 4, "outline-color": css("focus"), "outline-offset": 3 } },
  ];
}

cytoscape.use(cytoscapeDagre);
const cy = cytoscape({
  container: document.getElementById("graph"),
  style: style(),
  minZoom: 0.05,
  maxZoom: 3,
  autoungrabify: true,
  boxSelectionEnabled: false,
});

function draw() {
  cy.elements().remove();
  cy.add(elements());
  cy.layout({ name: "dagre", rankDir: "TB", nodeSep: 40, rankSep: 44, fit: false, useDagreEdgeControlPoints: true }).run();
  cy.style().update(); // groups' labels and edges' bends depend on where all is now
}

// All of the graph where it can be read so, otherwise its beginning.
function fit() {
  cy.fit(undefined, 16);
  if (cy.zoom() > 1.1) cy.zoom(1.1);
  if (cy.zoom() < 0.55) cy.zoom(0.55);
  const shown = cy.elements().boundingBox();
  const { x1, w } = shown;
  const top = cy.height() / cy.zoom() >= shown.h ? (cy.height() - shown.h * cy.zoom()) / 2 : 16;
  cy.pan({ x: cy.width() / 2 - (x1 + w / 2) * cy.zoom(), y: top - shown.y1 * cy.zoom() });
}

// Move as little as it takes for a node to be in view: its top, where it is larger.
function reveal(node) {
  const { x1, x2, y1, y2 } = node.renderedBoundingBox();
  const shift = (low, high, size) => (high - low > size - 32 ? 16 - low : low < 16 ? 16 - low : high > size - 16 ? size - 16 - high : 0);
  cy.panBy({ x: x2 - x1 > cy.width() - 32 ? cy.width() / 2 - (x1 + x2) / 2 : shift(x1, x2, cy.width()), y: shift(y1, y2, cy.height()) });
}

function zoom(factor) {
  cy.zoom({ level: cy.zoom() * factor, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } });
}

function unfoldTo(item) {
  const before = unfolded.size;
  for (let at = outerOf[item]; at >= 0; at = groups[at].outer) unfolded.add(at);
  if (unfolded.size > before) draw();
}

// At first: modules around repeated layers unfolded, the layers themselves folded.
groups.filter((group) => group.count > 1).forEach((group) => {
  for (let at = group.outer; at >= 0 && groups[at].count === 1; at = groups[at].outer) unfolded.add(at);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => cy.style(style()));
