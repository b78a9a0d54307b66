// The panel: details of what is chosen, slices drawn, the costs and the timeline. Texts go in as text, never as HTML.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const MOST_DRAWN = 12; // slabs of the dims before the last two
const number = (count) => count.toLocaleString("en");
const shaped = (shape) => `[${shape.join(", ")}]`;

function make(tag, attributes, ...children) {
  const svg = ["svg", "rect", "text", "title", "g"].includes(tag);
  const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

// Notation, with words next to it.
const withWords = ({ sharding, words }) => (sharding && words ? `${sharding}: ${words}` : sharding).replaceAll("->", "→");

const facts = (rows) =>
  make("dl", {}, ...rows.filter(([, value]) => value !== "" && value !== null).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));

const table = (caption, heads, rows) =>
  make("div", { class: "wide" }, make("table", {},
    make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...heads.map(([name, kind]) => make("th", { scope: "col", class: kind }, name)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell, at) => make("td", { class: heads[at][1] }, cell)))))));

const panelOf = (name, ...children) => document.getElementById(name).replaceChildren(...children.filter(Boolean));

function describeItem(item, record) {
  if (isSent(item)) return describeCollective(item, record);
  panelOf("details",
    make("h2", {}, [item.module, item.label].filter(Boolean).join(": ")),
    facts([
      ["Kind", item.kind],
      ["Ops", item.ops.join(", ")],
      ["Placement", withWords(item)],
      ["It was", item.was ?? ""],
      ["Writes", item.writes.length ? make("ul", {}, ...item.writes.map(([name, at]) => make("li", {}, at === null ? name : link(name, () => describeTensor(data.tensors[at]))))) : ""],
      [`Value on rank ${data.rank}`, item.value],
      ["Global shape", item.unknown && `not known: ${item.unknown}`],
      ["Why", item.note[0]],
      ["Source line", item.note[1] ?? ""],
    ]),
    item.slices === null ? null : slicesOf(data.slices[item.slices]),
    leavesOf(item.tensors));
}

function describeCollective(item, chosen) {
  const records = recordsOf(item);
  const record = chosen ?? records[0];
  const gone = item.kind === "gone";
  const placed = item.sources.map((source) => data.items[source]).filter((source) => !isSent(source));
  panelOf("details",
    make("h2", {}, `${record.kind} over ${record.axis}${gone ? ", which is gone" : isNew(item) ? ", which is new" : ""}`),
    facts([
      ["Change", withWords(item)],
      ["Why", `${record.why}: ${WHY[record.why]}`],
      ["Reason", record.reason],
      ["To avoid it", record.advice],
      [gone ? "It followed" : "Placed by", make("ul", {}, ...placed.map((source) => make("li", {}, link(`${source.module || source.kind} ${source.label}`, () => choose(`i${source.at}`)), gone ? "" : `: ${source.note[0] || source.sharding}`)))],
      ["Payload", `${bytes(record.payload_bytes)} (${number(record.payload_bytes)} bytes)`],
      ["On the wire", `${bytes(record.wire_bytes)} that each rank sends (${number(record.wire_bytes)} bytes)`],
      ["It was", item.differs && item.before && !gone ? `${item.was ? `${item.was.replace("->", "→")}, ` : ""}${carried(item.before)}, ${item.before.why}` : ""],
      ["Ranks in a group", number(record.group_size)],
      ["Module", record.module],
      ["Source line", record.source],
      ["Node", record.node],
    ]),
    item.slices === null ? null : slicesOf(data.slices[item.slices], "What it makes"),
    records.length > 1 ? make("details", {}, make("summary", {}, `Stands for ${records.length} calls`), make("ul", {}, ...records.map((each) => make("li", {}, link(`${each.module || each.layer}: ${each.node}`, () => describeItem(item, each)))))) : null);
}

const WHY = {
  "inherent": "it adds up the partial results that the plan's own cuts leave on the ranks",
  "plan-demanded": "a style of the plan, or the boundary, asks for it",
  "fallback": "an op needs the value whole, and no plan entry asked for that",
};

// A line may break behind the dots of a name.
const link = (text, onclick) => make("button", { class: "link", onclick }, ...text.split(/(?<=\.)/).flatMap((part) => [part, make("wbr", {})]));

function describeGroup(group) {
  const toggle = make("button", { onclick: () => toggled(group.at) }, unfolded.has(group.at) ? "Fold" : "Unfold");
  panelOf("details",
    make("h2", {}, group.title),
    facts([
      ["Module", group.path],
      ["Stands for", group.count > 1 ? `${group.count} that are alike` : ""],
      [group.count > 1 ? "Each sends" : "Sends", `${group.counted}; ${bytes(group.wire)} on the wire`],
      ["It was", group.was ?? ""],
      ["All send", group.count > 1 ? `${bytes(group.wire * group.count)} on the wire` : ""],
    ]),
    toggle,
    leavesOf([...new Set(itemsIn(group.members).flatMap((at) => data.items[at].tensors))]));
}

function leavesOf(tensors) {
  if (!tensors.length) return null;
  const rows = tensors.map((at) => data.tensors[at]).map((row, i) => [link(row.name, () => describeTensor(data.tensors[tensors[i]])), `${row.dtype}${shaped(row.shape)}`, row.sharding]);
  return table("Parameters, buffers and constants", [["Name", ""], ["Global", ""], ["Placement", ""]], rows);
}

function describeTensor(tensor) {
  const slices = data.slices[tensor.slices];
  panelOf("details",
    make("h2", {}, tensor.name),
    facts([
      ["Kind", tensor.kind],
      ["Placement", withWords(tensor)],
      ["It was", tensor.was ?? ""],
      ["Tied to", tensor.tied_to ?? ""],
      ["Global", `${tensor.dtype}${shaped(tensor.shape)}`],
      [`On rank ${data.rank}`, `${tensor.dtype}${shaped(slices.holders.find((holder) => holder.ranks.includes(data.rank)).local)}`],
    ]),
    slicesOf(slices),
    tensor.item === null ? null : link("Show where it is used", () => choose(`i${tensor.item}`)));
}

const ranksOf = (ranks) => (ranks.length > 8 ? `ranks ${ranks.slice(0, 7).join(", ")} and ${ranks.length - 7} more` : `rank${ranks.length > 1 ? "s" : ""} ${ranks.join(", ")}`);

function slicesOf(slices, title = "Which rank holds what") {
  const words = (runs, dim) => runs.map(([start, stop]) => (slices.of[dim] === slices.shape[dim] ? `${start}:${stop}` : `${start}/${slices.of[dim]}:${stop}/${slices.of[dim]}`)).join(" + ") || "nothing";
  const rows = slices.holders.map((holder) => [ranksOf(holder.ranks), shaped(holder.local), `[${holder.runs.map((runs, dim) => (runs.length === 1 && runs[0][1] - runs[0][0] === slices.of[dim] ? ":" : words(runs, dim))).join(", ")}]`]);
  const pending = slices.pending.map(([axis, op]) => `Each rank of ${axis} holds a partial ${op}: the value is the ${op} of them.`).join(" ");
  return make("section", { class: "slices" },
    make("h3", {}, `${title}: ${slices.sharding} of ${shaped(slices.shape)}`),
    pending ? make("p", {}, pending) : null,
    ...(slices.shape.length && !slices.of.includes(0) ? drawnSlices(slices) : []),
    table("Slices", [["Ranks", ""], ["Local", ""], ["Slice", ""]], rows));
}

// The last two dims as a rectangle, rows from the top; of those before, a rectangle for each slab that ranks hold.
function drawnSlices(slices) {
  const lead = slices.of.length - 2;
  const slabs = new Map();
  slices.holders.forEach((holder, at) => {
    let found = [[]];
    for (const runs of holder.runs.slice(0, Math.max(lead, 0))) found = found.flatMap((slab) => runs.slice(0, MOST_DRAWN).map((run) => [...slab, run.join(":")]));
    for (const slab of found) slabs.set(slab.join(", "), [...(slabs.get(slab.join(", ")) ?? []), at]);
  });
  const drawn = [...slabs].slice(0, MOST_DRAWN).map(([slab, holders]) => make("figure", {}, rectangle(slices, holders, slab), make("figcaption", {}, slab ? `[${slab}, :, :]` : "")));
  const more = slabs.size > MOST_DRAWN ? make("p", {}, `and ${slabs.size - MOST_DRAWN} more such slabs`) : null;
  const [last, size] = [slices.shape.length - 1, slices.shape.at(-1)];
  const axes = `${last ? `Down: dim ${last - 1} of ${slices.shape[last - 1]}. ` : ""}Across: dim ${last} of ${size}.`;
  return [make("div", { class: "slabs" }, ...drawn), more, make("p", { class: "axes" }, axes)];
}

function rectangle(slices, holders, slab) {
  const dims = slices.of.length;
  const [down, across] = dims > 1 ? [slices.of[dims - 2], slices.of[dims - 1]] : [1, slices.of[0]];
  const width = dims > 2 ? 150 : 260;
  const height = dims > 1 ? Math.min(Math.max((width * down) / across, 40), dims > 2 ? 110 : 200) : 44;
  const cells = holders.flatMap((at) => {
    const { ranks, runs } = slices.holders[at];
    const rows = dims > 1 ? runs[dims - 2] : [[0, 1]];
    return rows.flatMap(([top, bottom]) => runs[dims - 1].map(([left, right]) => {
      const [x, y, w, h] = [(left / across) * width, (top / down) * height, ((right - left) / across) * width, ((bottom - top) / down) * height];
      const name = ranks.length > 4 ? `${ranks[0]}…${ranks.at(-1)}` : ranks.join(",");
      const label = w > 8 * name.length && h > 12 ? make("text", { "x": x + w / 2, "y": y + h / 2, "text-anchor": "middle", "dominant-baseline": "central" }, name) : "";
      return make("g", { class: `rank-${at % 8}` }, make("rect", { x, y, width: w, height: h }, make("title", {}, `${ranksOf(ranks)}: rows ${top}:${bottom}, columns ${left}:${right}`)), label);
    }));
  });
  const text = holders.map((at) => `${ranksOf(slices.holders[at].ranks)} ${JSON.stringify(slices.holders[at].runs)}`).join("; ");
  return make("svg", { "viewBox": `-1 -1 ${width + 2} ${height + 2}`, "width": width + 2, "height": height + 2, "role": "img", "aria-label": `${slab} ${text}`.slice(0, 400) }, ...cells);
}

// Tensors of repeated layers are one row.
function tensorTable(rows) {
  const cells = rows.map(({ name, first: at, times: count }) => {
    const row = data.tensors[at];
    const tied = row.tied_to ? ` (tied to ${row.tied_to})` : "";
    const words = row.sharding.includes(",") ? make("p", { class: "words" }, row.words) : "";
    return [make("span", {}, link(name, () => revealTensor(row)), tied), count > 1 ? `${count} ×` : "", `${row.dtype}${shaped(row.shape)}`, make("span", {}, row.sharding, words)];
  });
  return table("Parameters, buffers and constants", [["Name", "name"], ["", "number"], ["Global", "shape"], ["Placement", ""]], cells);
}

function fallbackList() {
  const rows = data.records.filter((record) => record.why === "fallback");
  if (!rows.length) return [make("p", {}, "No fallbacks: the plan asked for every gather.")];
  const items = rows.map((record) => make("li", {}, link(`${record.kind} in ${record.module || "the model"}`, () => choose(`i${record.item}`, record)), `: ${bytes(record.payload_bytes)}. ${record.reason}.`, record.advice ? make("p", { class: "advice" }, `To avoid it: ${record.advice}.`) : ""));
  return [make("h3", {}, `${rows.length} fallback${rows.length > 1 ? "s" : ""}: gathers that no plan entry asked for`), make("ul", { class: "fallbacks" }, ...items)];
}

const opsOf = (ops) => Object.entries(ops).map(([op, count]) => `${count} ${op}`).join(", ");
const times = (row) => (row.layers > 1 ? `${row.layers} ×` : "");

const costHeads = [["Kind", ""], ["Why", ""], ["Count", "number"], ["Payload", "number"], ["On the wire", "number"]];
const costCells = (row) => [row.kind, row.why, number(row.count * row.layers), bytes(row.payload_bytes * row.layers), bytes(row.wire_bytes * row.layers)];
const layerTable = (title = "By layer") => table(title, [["Layer", ""], ["", "number"], ...costHeads], data.cost.layers.map((row) => [row.layer, times(row), ...costCells(row)]));

function showCost() {
  panelOf("cost",
    make("h2", {}, "What one call sends"),
    make("p", {}, `${data.counted}. Each rank sends ${bytes(data.wire)} (${number(data.wire)} bytes).`),
    table("By kind", costHeads, data.cost.kinds.map(costCells)),
    layerTable(),
    data.unknown.length ? table("What this page does not know", [["What", ""], ["Of", ""], ["Why", ""]], data.unknown.map((row) => [row.what, opsOf(row.ops), row.why])) : null);
}

const rounded = (value) => Number(value.toPrecision(3));

function seconds(value) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) if (value >= size) return `${rounded(value / size)} ${unit}`;
  return `${rounded(value / 1e-9)} ns`;
}

function showTimeline() {
  const rows = data.timeline.map((row) => ({ ...row, total: row.layers * (row.compute + row.sent) }));
  const all = rows.reduce((sum, row) => sum + row.total, 0);
  const critical = rows.reduce((sum, row) => sum + row.layers * row.critical, 0);
  const uncounted = data.unknown.find((row) => row.what === "FLOPs");
  const { name, flops, memory_bandwidth } = data.machine;
  const { total, host, ...parts } = data.step;
  const shares = Object.entries(parts).filter(([, value]) => value).map(([part, value]) => `${part} ${seconds(value)}`).join(", ");
  let start = 0;
  const bars = rows.map((row) => {
    const [x, compute, sent] = [start, row.layers * row.compute, row.layers * row.sent].map((value) => (all ? (100 * value) / all : 0));
    start += row.total;
    const bar = make("svg", { class: "bar", width: "100%", height: 18, role: "img", "aria-label": `${row.layer}: from ${seconds(start - row.total)} to ${seconds(start)}` },
      make("rect", { class: "compute", x: `${x}%`, width: `${compute}%`, y: 2, height: 14 }), make("rect", { class: "sent", x: `${x + compute}%`, width: `${sent}%`, y: 2, height: 14 }));
    return [row.layer, times(row), bar, seconds(row.compute), seconds(row.sent), seconds(row.critical)];
  });
  panelOf("timeline",
    make("h2", {}, "Predicted time of one call"),
    make("p", {}, `${seconds(total)}: one step after the other ${seconds(all)} (${shares})${host ? `, and the host takes ${seconds(host)} to launch them meanwhile` : ""}. The critical path, which is the longest chain of steps that need each other, takes ${seconds(critical)}; the graph draws it with thick lines.`),
    make("p", {}, `A prediction, not a measurement. Machine ${name}, by its file: ${rounded(flops / 1e12)} TFLOP/s, memory ${rounded(memory_bandwidth / 1e12)} TB/s. A kernel takes its floor and the roofline's time with the rank's own shapes, at the sizes of the example; a collective takes the fastest of its links.`),
    uncounted ? make("p", {}, `Left out: ${opsOf(uncounted.ops)}, which may multiply matrices and have no FLOPs here (${uncounted.why}).`) : null,
    make("p", { class: "key" }, make("span", { class: "compute" }), "compute ", make("span", { class: "sent" }), "communication"),
    table("By layer; times are those of each", [["Layer", ""], ["", "number"], ["Time", "time"], ["Compute", "number"], ["Communication", "number"], ["Critical", "number"]], bars));
}
