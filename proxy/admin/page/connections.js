// The table of open connections, those with most traffic first: asked for while it is shown.

import { ask } from "./ask.js";
import { NONE, at, element, rate, say, sayName, seconds, time, visible } from "./format.js";
import { makeLine, showRows } from "./rows.js";

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
const COLUMNS = ["Broker", "Since", "In", "Out", "In flight", "Held"];
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
  const cells = COLUMNS.map((label, index) => {
    const cell = element("td", index > 1 && index < COLUMNS.length - 1 ? "number" : "");
    cell.dataset.label = label;
    return cell;
  });
  const [broker, since, received, sent, flight, held] = cells;
  const line = makeLine(element("td", "", name, where), ...cells);

  function update(each) {
    const user = each.user === null ? "" : `, ${visible(each.user)}`;
    line.className = each.held ? "throttled" : "";
    sayName(name, `${each.client_id ? visible(each.client_id) : "(no client id)"}${user}`);
    say(broker, `${each.node_id ?? "bootstrap"} · ${each.listener}`);
    say(since, `${time(each.since)} (${seconds(each.age_s)})`);
    say(received, figureOf(each.received_rate));
    say(sent, figureOf(each.sent_rate));
    say(flight, `${each.in_flight}`);
    say(held, each.held ? why(each.held) : each.state === "open" ? "" : each.state);
  }
  return { lines: [line], update };
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
