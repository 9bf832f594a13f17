// The source batches of one pipeline that are in flight, and what happened to it: asked for while
// they are shown.

import { makeAsked } from "./ask.js";
import { element, fill, seconds, time } from "./format.js";

const MAX_BATCHES = 10;
const MAX_EVENTS = 10;

export function makeBatches(name) {
  const batches = element("ul");
  const events = element("ul");
  const parts = [element("h3", "", "First in flight"), batches, element("h3", "", "Lately"), events];

  function show({ pipelines: [{ completion, events: changes }] }) {
    fill(batches, completion.pending.first.slice(0, MAX_BATCHES).map((root) =>
      `batch ${root.batch} of ${root.stage} waits at ${root.waits_at}, ${seconds(root.age_s)} old`),
    "No source batch is in flight.");
    const all = [
      ...changes.map((each) => ({ at_s: each.at_s, text: changed(each) })), ...completion.notes,
    ].sort((a, b) => b.at_s - a.at_s);
    fill(events, all.slice(0, MAX_EVENTS).map(({ at_s: at, text }) => `${time(at * 1000)} ${text}`),
      "Nothing was held or unusual.");
  }
  return makeAsked("v1/pipelines", { pipeline: name }, parts, show);
}

function changed({ node, rate, reason }) {
  if (!node) return reason;
  const to = rate === null ? "is free" : `is held to ${Math.round(rate).toLocaleString("en")}/s`;
  return `${node} ${to}: ${reason}`;
}
