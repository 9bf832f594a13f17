// The table of open connections, those with most traffic first: asked for while it is shown.

import { ask } from "./ask.js";
import { NONE, at, element, rate, say, sayName, seconds, time, visible } from "./format.js";
import { makeColumns, showRows } from "./rows.js";

const LIMIT = 100;
const HELD = {
  delay_queue: "response held",
  muted: "muted",
  gate: "waits at the gate",
  connection_rate: "too many new connections",
  one_at_a_time: "one request at a time",
  login: "login under way",
  in_flight: "too many requests in flight",
  client_not_reading: "client does not read",
  broker_not_reading: "broker does not read",
};
const COLUMNS = [
  ["Broker", "", ({ node_id: node, listener }) => `${node ?? "bootstrap"} · ${listener}`],
  ["Since", "", ({ since, age_s: age }) => `${time(since)} (${seconds(age)})`],
  ["In", "number", ({ received_rate: moved }) => figureOf(moved)],
  ["Out", "number", ({ sent_rate: moved }) => figureOf(moved)],
  ["In flight", "number", ({ in_flight: requests }) => `${requests}`],
  ["Held", "", ({ held, state }) => (held ? why(held) : state === "open" ? "" : state)],
];
const rows = new Map();
let loading = false;

at("connections-more").addEventListener("click", () => {
  const isOpen = at("connections-open").hidden;
  at("connections-open").hidden = !isOpen;
  at("connections-more").setAttribute("aria-expanded", `${isOpen}`);
  showConnections();
});

// Asks anew if the table is open; the filter is that of the page.
export async function showConnections() {
  if (loading || at("connections-open").hidden) return;
  loading = true;
  try {
    const query = new URLSearchParams({ limit: LIMIT, filter: at("filter").value.trim() });
    const { connections, matching } = await ask(`v1/connections?${query}`);
    showRows(at("connections-rows"), rows, new Map(connections.map((each) => [each.id, each])), makeRow);
    say(at("connections-shown"), `${connections.length} of ${matching}, most traffic first`);
    say(at("connections-lost"), "");
  } catch (error) {
    say(at("connections-lost"), `✕ ${error.message}`);
  } finally {
    loading = false;
  }
}

function makeRow({ id, address, port, member }) {
  const home = member === undefined ? "" : ` · at ${visible(member)}`;
  const name = element("div", "name");
  const where = element("div", "kind", `${address.includes(":") ? `[${address}]` : address}:${port} · id ${id}${home}`);
  const row = makeColumns(element("td", "", name, where), COLUMNS);

  function update(each) {
    const user = each.user === null ? "" : `, ${visible(each.user)}`;
    row.line.className = each.held ? "throttled" : "";
    sayName(name, `${each.client_id ? visible(each.client_id) : "(no client id)"}${user}`);
    row.update(each);
  }
  return { lines: [row.line], update };
}

const figureOf = (value) => (value === null ? NONE : rate(value, "bytes_per_second"));

function why({ where, quota, entity, rule, ends_in_s: left }) {
  return [
    HELD[where] ?? where,
    ...(quota ? [`${quota} of ${visible(entity)}`] : []),
    ...(rule ? [rule.title] : []),
    ...(left === null ? [] : [`${seconds(left)} to go`]),
  ].join(" · ");
}
