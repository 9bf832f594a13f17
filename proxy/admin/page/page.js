// Asks for the status every two seconds and shows it; pauses while nobody looks.

import { showChanges } from "./changes.js";
import { showClients } from "./clients.js";
import { showConnections } from "./connections.js";
import { at, count, element, figure, fill, say, seconds, time, visible } from "./format.js";
import { showMembers } from "./members.js";
import { showPipelines } from "./pipelines.js";
import { showQueries } from "./queries.js";
import { showTimes } from "./times.js";
import { showUnbounded } from "./unbounded.js";

const INTERVAL_MS = 2000;
const PATIENCE_MS = 6000;
const FILTER_PAUSE_MS = 200;
const LIMIT = 60;

let timer = null;
let request = null;
let seen = null;

async function poll() {
  clearTimeout(timer);
  request?.abort();
  request = null;
  if (document.hidden) return;
  const own = (request = new AbortController());
  const patience = setTimeout(() => own.abort(), PATIENCE_MS);
  try {
    const query = new URLSearchParams({ by: "client", limit: LIMIT, filter: at("filter").value.trim() });
    const answer = await fetch(`v1/status?${query}`, { signal: own.signal, cache: "no-store" });
    if (!answer.ok) throw new Error(`the proxy answered ${answer.status}`);
    const status = await answer.json();
    if (own !== request) return;
    seen = new Date();
    show(status);
  } catch (error) {
    if (own !== request) return;
    showLost(error);
  } finally {
    clearTimeout(patience);
  }
  timer = setTimeout(poll, INTERVAL_MS);
}

function showLost(error) {
  const since = seen ? `These figures are of ${time(seen)}.` : "";
  const reason = error instanceof TypeError || error.name === "AbortError" ? "" : ` (${error.message})`;
  say(at("lost"), `✕ No contact with the proxy${reason}. ${since} Trying again.`);
  at("lost").hidden = false;
  mark("bad", "✕ No contact");
}

function mark(className, text) {
  at("state").className = `state ${className}`;
  say(at("state"), text);
}

function show(status) {
  at("lost").hidden = true;
  if (status.ready && status.warning) mark("warn", `■ Ready, but ${status.warning}`);
  else if (status.ready) mark("good", "✓ Ready");
  else mark("bad", `✕ Not ready: ${status.not_ready_reason}`);
  say(at("facts"), `version ${status.version} · up ${seconds(status.uptime_s)} · `
    + `throttle mode ${status.throttle_mode} · ${time(status.at)}`);
  showPaused(status.throttling);
  showTiles(status);
  showClients(at("clients"), status);
  at("none").hidden = status.clients.length > 0;
  say(at("none"), status.client_counts.bounded
    ? "No client fits the filter."
    : "No client under a quota has sent anything yet.");
  showUnbounded(status);
  showConnections();
  showQueries(status);
  showPipelines(status);
  showMembers(status);
  showTimes(status);
  showChanges(status);
  showPanels(status);
}

function showPaused({ enforced, paused, scheduled }) {
  const pauses = paused.map((each) => {
    const who = Object.keys(each.keys).length ? visible(each.selector) : "all clients";
    const by = each.by ? `, by ${visible(each.by)}` : "";
    return `${who} for ${seconds(each.left_s)}, until ${time(each.until)}${by}`;
  });
  const text = pauses.length ? `■ Quotas are paused: ${pauses.join("; ")}` : "";
  say(at("paused"), enforced ? text : "■ Quotas are not enforced: throttle.enforce is false");
  at("paused").hidden = enforced && !pauses.length;
  const times = scheduled.map((each) => `${visible(each.selector)} ${visible(each.schedule)}`);
  say(at("scheduled"), times.length ? `Schedules: ${times.join("; ")}` : "");
  at("scheduled").hidden = !times.length;
}

function showTiles(status) {
  const queues = Object.entries(status.delay_queues);
  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
  const clients = status.client_counts;
  say(at("throttled"), figure(clients.throttled));
  say(at("throttled-note"), `of ${count(clients.bounded, "client")}, ${figure(clients.held)} holding now`);
  say(at("waiting"), `${sum(queues.map(([, size]) => size))}`);
  say(at("waiting-note"), queues.map(([api, size]) => `${api} ${size}`).join(" · "));
  say(at("connections"), sum(status.listeners.map((each) => each.connections)).toLocaleString("en"));
  say(at("connections-note"), `on ${count(status.listeners.length, "listener")}`);
  at("cluster").className = status.cluster_answers ? "good" : "bad";
  say(at("cluster"), status.cluster_answers ? "✓ Answers" : "✕ Silent");
  say(at("cluster-note"), `${count(status.brokers.length, "broker")} known`);
}

function showPanels(status) {
  fill(at("listeners"), status.listeners.map((each) => [
    each.name, count(each.connections, "connection"),
    `${address(each)}${each.tls ? " · TLS" : ""}`,
  ]), "No listener is open.", makeItem);
  fill(at("brokers"), status.brokers.map((each) => [`Broker ${each.node_id}`, "", address(each)]),
    "No broker is known yet.", makeItem);
  fill(at("loads"), status.config_loads.map((each) => [
    each.result === "ok" ? "✓ Loaded" : `✕ ${each.result}`, time(each.at), each.message,
  ]), "Nothing was loaded yet.", makeItem);
}

const address = ({ host, port }) => `${host.includes(":") ? `[${host}]` : host}:${port}`;

function makeItem([title, side, note]) {
  const parts = [element("b", "", title), element("span", "", side)];
  return element("li", "", ...parts, element("span", "note", note));
}

let typing = null;
at("filter").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(poll, FILTER_PAUSE_MS);
});
document.addEventListener("visibilitychange", poll);
poll();
