// The pipelines: for each its nodes as a row of boxes, and what its ledger says.

import { makeBatches } from "./batches.js";
import { NONE, count, element, figure, say, seconds, time, whole } from "./format.js";
import { showRows } from "./rows.js";
import { showSection } from "./section.js";

const rows = new Map();

export function showPipelines({ pipelines, pipelines_total: total }) {
  const held = pipelines.flatMap(nodesOf).filter(isHeld).length;
  const trouble = held ? `${count(held, "node")} held` : "";
  const list = showSection("pipelines", { shown: pipelines.length, total }, trouble, "nothing held");
  const order = [...pipelines].sort((a, b) => a.name.localeCompare(b.name));
  showRows(list, rows, new Map(order.map((each) => [each.name, each])), makePipeline);
}

const isHeld = ({ state, waits }) => state === "reduced" || Boolean(waits);
const nodesOf = ({ sources, stages }) => [...sources, ...stages];

function makePipeline({ name }) {
  const full = element("p", "what warn");
  const flow = element("ol", "flow");
  flow.setAttribute("role", "list");
  flow.setAttribute("aria-label", `Sources and stages of ${name}, in order`);
  const left = element("p", "note");
  const facts = ["In flight", "Completed", "Failed", "Timed out", "Oldest in flight"].map(makeFact);
  const [pending, completed, failed, late, oldest] = facts;
  const batches = makeBatches(name);
  const more = element("details", "", element("summary", "", "Batches and events"), batches.box);
  more.addEventListener("toggle", () => more.open && batches.load());
  const list = element("dl", "facts-row", ...facts.map(({ box }) => box));
  const item = element("li", "", element("h3", "name", whole(name)), full, flow, left, list, more);
  const nodes = new Map();

  function update(pipeline) {
    const shown = nodesOf(pipeline);
    // A source and a stage never have the same name.
    showRows(flow, nodes, new Map(shown.map((node) => [node.name, node])), makeNode);
    const { stages, stages_total: total } = pipeline;
    say(left, stages.length < total
      ? `${stages.length} of ${count(total, "stage")}: those held, and the first` : "");
    item.className = pipeline.pending.full ? "alarm" : "";
    say(full, pipeline.pending.full ? "■ Full: the first stages wait until batches are done" : "");
    pending.show(...aboutPending(pipeline.pending));
    completed.show(figure(pipeline.completed));
    failed.show(figure(pipeline.failed), "", pipeline.failed > 0);
    late.show(figure(pipeline.timed_out), "", pipeline.timed_out > 0);
    oldest.show(...aboutOldest(pipeline.oldest));
    if (more.open) batches.load();
  }
  return { lines: [item], update };
}

function makeFact(label) {
  const big = element("dd");
  const note = element("dd", "note");
  function show(text, more = "", isBad = false) {
    big.className = isBad ? "bad" : "";
    say(big, isBad ? `✕ ${text}` : text);
    say(note, more);
  }
  return { box: element("div", "", element("dt", "", label), big, note), show };
}

function aboutPending({ batches, size_bytes: bytes, max_batches: most, max_bytes: mostBytes }) {
  const size = mostBytes === null ? figure(bytes) : `${figure(bytes)} of ${figure(mostBytes)}`;
  return [
    most === null ? figure(batches) : `${figure(batches)} of ${figure(most)}`,
    bytes || mostBytes !== null ? `${size} bytes` : "",
  ];
}

function aboutOldest(oldest) {
  if (!oldest) return [NONE];
  return [
    seconds(oldest.age_s),
    `batch ${oldest.batch} of ${oldest.stage} waits at ${oldest.waits_at}, `
    + `since ${time(oldest.started_s * 1000)}`,
  ];
}

function makeNode({ name }) {
  const parts = ["kind", "what", "note", "note", "note", "reason"].map((part) => element("div", part));
  const [kind, state, received, processed, lag, reason] = parts;
  const item = element("li", "", element("div", "name", whole(name)), ...parts);

  function update(node) {
    const held = isHeld(node);
    const isStage = "alive" in node;
    item.className = held ? "held" : "";
    const stage = isStage && `stage after ${node.upstream.join(" and ")}`;
    say(kind, !isStage ? "source" : node.alive ? stage : `${stage} · silent`);
    state.className = held ? "what warn" : "what good";
    say(state, node.waits
      ? `■ Waits for ${node.waits.for}, may read ${figure(node.waits.records)}`
      : held ? `■ Held to ${figure(node.rate)} of ${figure(node.normal_rate)}/s`
      : `✓ Free, normal ${figure(node.normal_rate)}/s`);
    say(received, isStage
      ? `receives ${figure(node.received_rate)}/s` : `sends ${figure(node.measured_rate)}/s`);
    say(processed, isStage ? `processes ${figure(node.processing_rate)}/s` : "");
    say(lag, isStage && node.lag !== null ? `lag ${figure(node.lag)}` : "");
    say(reason, node.waits ? node.waits.reason : held ? `since ${time(node.since_s * 1000)}: ${node.reason}` : "");
  }
  return { lines: [item], update };
}
