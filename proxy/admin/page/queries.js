// The table of Spark queries; a row opens to its partitions.

import { NONE, count, element, figure, rate, say, seconds, whole } from "./format.js";
import { makePartitions } from "./partitions.js";
import { makeLine, showRows } from "./rows.js";
import { showSection } from "./section.js";

const COLUMNS = 6;
const rows = new Map();

export function showQueries({ queries, followed }) {
  const troubled = queries.filter((query) => alarms(query).length).length;
  const trouble = troubled ? `${count(troubled, "needs", "need")} a look` : "";
  const body = showSection("queries", { shown: queries.length, total: followed }, trouble, "all go on");
  // Those in trouble first, then by name: figures change all the time, and rows must not jump.
  const order = [...queries].sort((a, b) =>
    (alarms(b).length > 0) - (alarms(a).length > 0) || a.name.localeCompare(b.name));
  showRows(body, rows, new Map(order.map((query) => [query.name, query])), makeRow);
}

function alarms({ state, error, stuck_partitions: stuck, commit }) {
  return [
    ...(state === "failed" ? [`✕ Failed${error ? `: ${error}` : ""}`] : []),
    ...(stuck ? [`■ ${count(stuck, "partition")} stuck`] : []),
    ...(commit && !commit.ok ? ["✕ Not committed"] : []),
  ];
}

function makeRow({ name }) {
  const state = element("div", "kind");
  const alarm = element("div", "what warn");
  const skipped = element("div", "warn");
  const advice = element("div", "warn");
  const more = element("button", "more");
  const first = element("td", "", element("div", "name", whole(name)), state, alarm, skipped, advice, more);
  const cells = ["Lag", "In flight", "Last batch", "Bound", "Commits"].map(makeCell);
  const [lag, flight, batch, bound, commit] = cells;
  const line = makeLine(first, ...cells.map(({ cell }) => cell));
  const partitions = makePartitions(name);
  const inside = element("td", "", partitions.box);
  inside.colSpan = COLUMNS;
  const below = makeLine(inside);
  below.className = "below";
  below.hidden = true;
  more.type = "button";
  more.setAttribute("aria-expanded", "false");
  more.addEventListener("click", () => {
    below.hidden = !below.hidden;
    more.setAttribute("aria-expanded", `${!below.hidden}`);
    if (!below.hidden) partitions.load();
  });

  function update(query) {
    const wrong = alarms(query);
    line.className = wrong.length ? "alarm" : "";
    say(state, query.client_id === name ? query.state : `${query.state} · client ${query.client_id}`);
    say(alarm, wrong.join(" · "));
    say(skipped, query.skipped_records ? `▲ ${count(query.skipped_records, "record")} skipped` : "");
    say(advice, query.advice.map((text) => `▲ ${text}`).join(" "));
    say(more, count(query.partitions, "partition"));
    lag.show(figure(query.lag_records), query.lag_s ? `oldest ${seconds(query.lag_s)}` : "");
    flight.show(figure(query.in_flight_records),
      query.failed_records ? `${figure(query.failed_records)} to be read again` : "");
    batch.show(...aboutBatch(query.batch));
    bound.show(...aboutBound(query.adaptive));
    commit.show(...aboutCommit(query.commit));
    if (!below.hidden) partitions.load();
  }
  return { lines: [line, below], update };
}

function makeCell(label) {
  const big = element("div", "big");
  const note = element("div", "note");
  const why = element("div", "note");
  const cell = element("td", "", big, note, why);
  cell.dataset.label = label;
  const show = (text, ...notes) => [big, note, why].forEach((part, index) =>
    say(part, [text, ...notes][index] ?? ""));
  return { cell, show };
}

function aboutBatch(batch) {
  if (!batch) return [NONE, "none reported yet"];
  const ago = batch.ended_ago_s === null ? [] : [`${seconds(batch.ended_ago_s)} ago`];
  return [
    batch.duration_s === null ? NONE : seconds(batch.duration_s),
    count(batch.rows, "row"),
    [`batch ${batch.id}`, ...ago].join(" · "),
  ];
}

function aboutBound(adaptive) {
  if (!adaptive) return [NONE, "not adaptive"];
  const unit = "bytes_per_second";
  const [now, most] = [rate(adaptive.bound, unit), rate(adaptive.static_bound, unit)];
  return [
    adaptive.rate === null ? now : `${figure(adaptive.rate)} records/s`,
    adaptive.bound < adaptive.static_bound ? `${now} of ${most}` : `${most}, the rule's own`,
    adaptive.reason ?? "",
  ];
}

function aboutCommit(commit) {
  if (!commit) return [NONE, "to no group"];
  if (!commit.ok) return ["✕ Fails", `group ${commit.group}`, commit.error];
  if (commit.ago_s === null) return ["None yet", `group ${commit.group}`];
  return ["✓ Done", `group ${commit.group}`, `${seconds(commit.ago_s)} ago`];
}
