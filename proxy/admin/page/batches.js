// The source batches of one pipeline that are in flight, and what happened to it: asked for while
// they are shown.

import { element, say, seconds, time } from "./format.js";

const PATIENCE_MS = 6000;
const MAX_BATCHES = 10;
const MAX_EVENTS = 10;

export function makeBatches(name) {
  const trouble = element("p", "bad");
  const batches = element("ul");
  const events = element("ul");
  const parts = [element("h3", "", "First in flight"), batches, element("h3", "", "Lately"), events];
  let loading = false;

  async function load() {
    if (loading) return;
    loading = true;
    try {
      const asked = new URLSearchParams({ pipeline: name });
      const signal = AbortSignal.timeout(PATIENCE_MS);
      const answer = await fetch(`v1/pipelines?${asked}`, { signal, cache: "no-store" });
      const found = await answer.json();
      if (!answer.ok) throw new Error(found.error);
      show(found.pipelines[0]);
      say(trouble, "");
    } catch (error) {
      const lost = error instanceof TypeError || error.name === "TimeoutError";
      say(trouble, `✕ ${lost ? "No contact with the proxy." : error.message}`);
    } finally {
      loading = false;
    }
  }

  function show({ completion, events: changes }) {
    fill(batches, completion.pending.first.slice(0, MAX_BATCHES).map((root) =>
      `batch ${root.batch} of ${root.stage} waits at ${root.waits_at}, ${seconds(root.age_s)} old`),
    "No source batch is in flight.");
    const all = [
      ...changes.map((each) => ({ at_s: each.at_s, text: changed(each) })), ...completion.notes,
    ].sort((a, b) => b.at_s - a.at_s);
    fill(events, all.slice(0, MAX_EVENTS).map(({ at_s: at, text }) => `${time(at * 1000)} ${text}`),
      "Nothing was held or unusual.");
  }
  return { box: element("div", "why", trouble, ...parts), load };
}

function changed({ node, rate, reason }) {
  if (!node) return reason;
  const to = rate === null ? "is free" : `is held to ${Math.round(rate).toLocaleString("en")}/s`;
  return `${node} ${to}: ${reason}`;
}

function fill(list, lines, none) {
  const state = JSON.stringify(lines);
  if (list.dataset.state === state) return;
  list.dataset.state = state;
  list.replaceChildren(...(lines.length ? lines : [none]).map((line) => element("li", "", line)));
}
