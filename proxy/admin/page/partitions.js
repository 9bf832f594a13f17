// The partitions of one query, and what was noted of it: asked for while they are shown.

import { makeAsked } from "./ask.js";
import { count, element, fill, say, time } from "./format.js";
import { columnsOf, makeColumns, makeHead, showRows } from "./rows.js";

const LIMIT = 100;
const MAX_NOTES = 5;
const COLUMNS = [
  ...columnsOf("partition"),
  ["State", "", (each) =>
    stateOf(each).join("; ") || (each.lag_records ? "✓ goes on" : "✓ up to date")],
];

export function makePartitions(name) {
  const left = element("p", "note");
  const notes = element("ul", "notes");
  const head = makeHead("Partition", COLUMNS);
  const body = element("tbody");
  const table = element("table", "partitions", element("thead", "", head), body);
  table.setAttribute("role", "table");
  table.setAttribute("aria-label", `Partitions of ${name}`);
  for (const group of table.children) group.setAttribute("role", "rowgroup");
  const rows = new Map();

  function show({ queries: [query] }) {
    const wanted = query.partitions.map((each) => [`${each.topic}-${each.partition}`, each]);
    showRows(body, rows, new Map(wanted), makePartition);
    const total = query.totals.partitions;
    say(left, wanted.length < total
      ? `${wanted.length} of ${total}: the stuck, then those with most lag` : "");
    fill(notes, query.notes.slice(0, MAX_NOTES).map((note) => {
      const where = note.topic === null ? "" : `${note.topic}-${note.partition}: `;
      return `${time(note.at * 1000)} ${where}${note.text}`;
    }));
  }
  return makeAsked("v1/progress", { query: name, limit: LIMIT }, [table, left, notes], show);
}

function makePartition({ topic, partition }) {
  const row = makeColumns(element("td", "name", `${topic}-${partition}`), COLUMNS);

  function update(each) {
    row.line.className = each.stuck_since === null ? "" : "alarm";
    row.cells.at(-1).className = stateOf(each).length ? "warn" : "";
    row.update(each);
  }
  return { lines: [row.line], update };
}

function stateOf(each) {
  const skip = each.skipped.at(-1);
  return [
    ...(each.stuck_since === null ? [] : [`■ stuck since ${time(each.stuck_since * 1000)}`]),
    ...(each.failed.records ? [`${count(each.failed.records, "record")} to be read again`] : []),
    ...(skip === undefined ? [] : [
      `▲ ${count(each.skipped_records, "record")} skipped, last offsets ${skip.from} to before `
      + `${skip.to}: ${skip.reason}`,
    ]),
  ];
}
