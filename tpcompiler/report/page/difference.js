// What differs from the artifact that this one is compared with: tables of it, of which each row leads to its node.
"use strict";

const changed = ([before, after], text = number) => (before === after ? text(after) : `${text(before)} → ${text(after)}`);

function showDifference({ equal, totals, placements, collectives }) {
  const tab = make("button", { "role": "tab", "id": "tab-difference", "aria-controls": "difference", "aria-selected": "false", "tabindex": "-1" }, "Differences");
  document.querySelector("[role=tablist]").prepend(tab);
  document.querySelector("aside").append(make("section", { "id": "difference", "role": "tabpanel", "aria-labelledby": tab.id, "tabindex": "0" }));
  const values = data.items.filter((item) => item.kind === "op" && item.was);
  panelOf("difference",
    make("h2", {}, `What differs: ${data.name}`),
    make("p", {}, equal ? "Nothing: the same mesh, placements, collectives and bytes. Weights are not compared." : "The graph is that of the second; collectives that are gone are drawn where they were. Weights are not compared."),
    table("In all", [["", ""], ["First", "number"], ["Second", "number"]], totals),
    placements.length ? table("Placements", [["Name", "name"], ["Kind", ""], ["First", ""], ["Second", ""]], placements.map((row) => [jump(row, goToPlacement(row)), row.what, row.first, row.second])) : null,
    collectives.length ? table("Collectives in each module", [["Module", "name"], ["Kind", ""], ["Count", "number"], ["Wire bytes", "number"]], collectives.map((row) => [jump(row, goToCollective(row)), `${row.kind}, ${row.why}`, changed([row.first[0], row.second[0]]), changed([row.first[1], row.second[1]], bytes)])) : null,
    values.length ? table("Values that ops make", [["Op", "name"], ["First", ""], ["Second", ""]], values.map((item) => [leading([item.module, item.label].filter(Boolean).join(": "), () => choose(`i${item.at}`)), item.was, item.sharding])) : null);
  showTab("difference");
}

function jump(row, go) {
  const text = `${row.pattern || "outside of modules"}${row.times > 1 ? ` x ${row.times}` : ""}`;
  return go ? leading(text, go) : text;
}

// On narrow screens the graph is above the panel.
const leading = (text, go) => link(text, () => {
  go();
  document.getElementById("graph").scrollIntoView({ block: "nearest" });
});

function goToPlacement(row) {
  const tensor = data.tensors.find((each) => each.name === row.name && each.kind === row.what);
  const end = data.ends[`${row.what} ${row.name}`];
  return tensor ? () => revealTensor(tensor) : end === undefined ? null : () => choose(`i${end}`);
}

function goToCollective(row) {
  const alike = [...data.records, ...data.gone].filter((record) => record.module === row.module && record.kind === row.kind && record.why === row.why);
  const found = alike.find((record) => data.items[record.item].differs) ?? alike[0];
  return found ? () => choose(`i${found.item}`, found) : null;
}
