// The table of clients: one row for each sensor.

import { ask } from "./ask.js";
import { makeChart } from "./chart.js";
import { count, element, rate, say, seconds, time, visible } from "./format.js";
import { makeLine, showRows } from "./rows.js";

const KINDS = {
  consumer_byte_rate: "consumer bytes",
  producer_byte_rate: "producer bytes",
  request_percentage: "request time",
};
const rows = new Map();

export function showClients(body, clients) {
  const wanted = clients.map((client) => [`${client.quota}\n${client.entity}`, client]);
  // Throttled clients first, then by name: rates change all the time, and rows must not jump.
  const order = wanted.sort(([keyA, a], [keyB, b]) =>
    b.throttled - a.throttled || a.entity.localeCompare(b.entity) || keyA.localeCompare(keyB));
  showRows(body, rows, new Map(order), makeRow);
}

function makeRow(first) {
  const name = element("div", "name", visible(first.entity));
  const kind = element("div", "kind", KINDS[first.quota] ?? first.quota);
  const summary = element("summary");
  const why = element("div", "why");
  const details = element("details", "", summary, why);
  details.addEventListener("toggle", () => details.open && explain(why, first));
  const chart = makeChart();
  const now = element("div", "big");
  const bound = element("div", "note");
  const most = element("div", "note");
  const share = element("div", "share");
  const what = element("div", "what");
  const until = element("div");
  const holds = element("div", "note");
  const observed = element("div", "note");
  const line = makeLine(
    element("td", "", name, kind, details), element("td", "", chart.svg),
    element("td", "number", now, bound, most, share), element("td", "", what, until, holds, observed));

  function update(client) {
    const held = client.hold_ends_in_s !== null;
    chart.draw(client);
    say(now, rate(client.rate, client.unit));
    say(bound, `of ${rate(client.bound, client.unit)}`);
    say(most, client.adaptive ? `adaptive, at most ${rate(client.static_bound, client.unit)}` : "");
    say(share, `${Math.round((100 * client.rate) / client.bound)} %`);
    const isAbove = !client.enforced && client.above_s > 0;
    line.className = client.throttled ? "throttled" : "";
    what.className = client.throttled || isAbove ? "what warn" : "what good";
    say(what, client.throttled ? "■ Throttled" : isAbove ? "■ Above its bound" : "✓ Within its bound");
    say(until, held ? `holding, ${seconds(client.hold_ends_in_s)} to go` : "");
    say(observed, client.enforced ? ""
      : `not enforced, above for ${Math.min(client.above_s, 60)} s of the last minute`);
    say(holds, client.throttled
      ? `${count(client.holds, "hold")}, ${seconds(client.held_s)} in the last minute` : "");
    const source = client.rule.source ? `${client.rule.source}, ` : "";
    say(summary, `${client.rule.title} · ${source}${count(client.client_count, "client")}`);
  }
  return { lines: [line], update };
}

async function explain(why, { entity, quota }) {
  try {
    const { quotas } = await ask(`v1/clients/${encodeURIComponent(entity)}`);
    const found = quotas.find((each) => each.quota === quota);
    const by = found.rule.by ? [element("p", "", `set by ${found.rule.by}, ${time(found.rule.at)}`)] : [];
    if (found.rule.until) by.push(element("p", "", `ends by itself, ${time(found.rule.until)}`));
    const reason = found.adaptive?.reason
      ? [element("p", "", `bound of ${rate(found.bound, found.unit)}: ${found.adaptive.reason}`)] : [];
    const connected = found.connected.map((client) => explained(client, found));
    const none = element("p", "", "No client of this quota is connected now.");
    why.replaceChildren(...by, ...reason, ...(connected.length ? connected : [none]));
  } catch (error) {
    why.replaceChildren(element("p", "bad", `✕ ${error.message}`));
  }
}

function explained(client, { quota, unit }) {
  const who = `${visible(client.client_id ?? "(no client id)")}, ${visible(client.user ?? "anonymous")}, `
    + `listener ${client.listener}`;
  const { rules } = client.quotas.find((each) => each.quota === quota);
  const list = rules.map((rule) => {
    const text = `${rule.title}, ${rate(rule.bound, unit)}: ${rule.reason}`;
    return element("li", rule.chosen ? "chosen" : "", `${rule.chosen ? "→" : "–"} ${text}`);
  });
  return element("div", "", element("h3", "", who), element("ul", "", ...list));
}
