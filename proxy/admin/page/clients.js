// The table of clients: for each client a row for each of its quotas.

import { ask } from "./ask.js";
import { makeChart } from "./chart.js";
import { at, count, element, figure, fill, rate, say, sayName, seconds, time, visible, whole } from "./format.js";
import { makeLine, showRows } from "./rows.js";

const KINDS = {
  consumer_byte_rate: "consumer bytes",
  producer_byte_rate: "producer bytes",
  request_percentage: "request time",
};
const rows = new Map();

export function showClients(body, { clients: quotas, client_counts: counts, budgets = [] }) {
  const groups = new Map();
  for (const quota of quotas) groups.set(quota.group, [...(groups.get(quota.group) ?? []), quota]);
  const wanted = [...groups].map(([key, all]) => [key, { quotas: all, ...named(all) }]);
  // Throttled clients first, then by name: rates change all the time, and rows must not jump.
  const order = wanted.sort(([keyA, a], [keyB, b]) =>
    isThrottled(b) - isThrottled(a) || a.name.localeCompare(b.name) || keyA.localeCompare(keyB));
  showRows(body, rows, new Map(byBudget(order, budgets)), (item) =>
    (item.rates ? makeBudget() : makeClient()));
  const left = counts.left ? `, ${counts.left.toLocaleString("en")} of them left` : "";
  say(at("shown"), `${figure(counts.shown)} of ${count(counts.bounded, "client")}${left}`);
}

// Each budget with its clients below it, then those without one.
function byBudget(clients, budgets) {
  const within = new Map(budgets.map(({ name }) => [name, []]));
  const others = [];
  for (const client of clients) {
    const { budget } = client[1].quotas.find((quota) => within.has(quota.budget)) ?? {};
    (within.get(budget) ?? others).push(client);
  }
  const shown = [...within].flatMap(([name, inside]) =>
    [[`budget\n${name}`, { rates: budgets.filter((each) => each.name === name) }], ...inside]);
  return [...shown, ...others];
}

const isThrottled = ({ quotas }) => quotas.some((quota) => quota.throttled);

// What a client is called: as its rules call it if they agree, else as it calls itself.
function named(quotas) {
  const [{ entity }] = quotas;
  if (quotas.every((quota) => quota.entity === entity)) return { name: visible(entity), who: "" };
  const [client] = quotas.find((quota) => quota.clients.length).clients;
  return { name: nameOf(client), who: `${userOf(client)}, listener ${client.listener}` };
}

const nameOf = ({ client_id: id }) => (id ? visible(id) : "(no client id)");
const userOf = ({ user }) => (user === null ? "anonymous" : visible(user));

function makeClient() {
  const inside = new Map();
  let lines = [];

  function update({ quotas, name, who }) {
    const wanted = new Map(quotas.map((quota) => [`${quota.quota}\n${quota.entity}`, quota]));
    for (const [key, row] of inside) {
      if (!wanted.has(key)) { row.line.remove(); inside.delete(key); }
    }
    for (const [key, quota] of wanted) {
      if (!inside.has(key)) inside.set(key, makeRow(quota));
      const isFirst = quota === quotas[0];
      inside.get(key).update(quota, { name, who, isFirst, isThrottled: isThrottled({ quotas }) });
    }
    lines = [...wanted.keys()].map((key) => inside.get(key).line);
  }
  return { get lines() { return lines; }, update };
}

function makeRow(first) {
  const title = element("div", "name");
  const user = element("div", "note");
  const shares = element("div", "shares");
  const kind = element("div", "kind");
  const summary = element("summary");
  const why = element("div", "why");
  const details = element("details", "", summary, why);
  details.addEventListener("toggle", () => details.open && explain(why, first));
  const chart = makeChart();
  const now = element("div", "big");
  const bound = element("div", "note");
  const most = element("div", "note");
  const part = element("div", "note");
  const share = element("div", "share");
  const what = element("div", "what");
  const until = element("div");
  const waits = element("div", "note");
  const holds = element("div", "note");
  const observed = element("div", "note");
  const line = makeLine(
    element("td", "", title, user, shares, kind, details), element("td", "", chart.svg),
    element("td", "number", now, bound, most, part, share),
    element("td", "", what, until, waits, holds, observed));

  function update(client, { name, who, isFirst, isThrottled }) {
    const held = client.hold_ends_in_s !== null;
    // The further rows say the name to those who hear the table.
    title.className = isFirst ? "name" : "name unseen";
    sayName(title, name);
    say(user, isFirst ? who : "");
    fill(shares, isFirst ? client.shares : [], "", makeShare);
    const entity = who ? ` · ${visible(client.entity)}` : "";
    const where = client.member === undefined ? "" : ` · at ${(client.members ?? [client.member]).map(visible).join(", ")}`;
    say(kind, `${KINDS[client.quota] ?? client.quota}${entity}${where}`);
    chart.draw(client);
    say(now, rate(client.rate, client.unit));
    say(bound, `of ${rate(client.bound, client.unit)}`);
    say(most, client.adaptive ? `adaptive, at most ${rate(client.static_bound, client.unit)}` : "");
    say(part, partOf(client));
    say(waits, client.waits_for ? visible(client.waits_for) : "");
    say(share, `${Math.round((100 * client.rate) / client.bound)} %`);
    const isAbove = !client.enforced && client.above_s > 0;
    line.classList.toggle("throttled", client.throttled);
    line.classList.toggle("beside", isThrottled);
    line.classList.toggle("further", !isFirst);
    what.className = client.throttled || isAbove ? "what warn" : "what good";
    say(what, client.throttled ? "■ Throttled" : isAbove ? "■ Above its bound" : "✓ Within its bound");
    say(until, held ? `holding, ${seconds(client.hold_ends_in_s)} to go` : "");
    say(observed, client.enforced ? ""
      : `not enforced, above for ${Math.min(client.above_s, 60)} s of the last minute`);
    say(holds, client.throttled
      ? `${count(client.holds, "hold")}, ${seconds(client.held_s)} in the last minute` : "");
    const { schedule } = client.rule;
    const source = [client.rule.source, schedule].filter(Boolean).map((each) => `${each}, `).join("");
    say(summary, `${client.rule.title} · ${source}${count(client.client_count, "client")}`);
  }
  return { line, update };
}

// What a client has of its budget. What is borrowed or lent below a twentieth of its share is no
// more than what measured rates waver by.
function partOf({ fair_share: share = null, borrowed, lent, unit }) {
  if (share === null) return "";
  const loans = [["borrows", borrowed], ["lends", lent]].filter(([, of]) => of >= share / 20);
  return [["share", share], ...loans].map(([word, of]) => `${word} ${rate(of, unit)}`).join(" · ");
}

// The rows of a budget: one for each of its rates.
function makeBudget() {
  const inside = new Map();
  let lines = [];

  function update({ rates }) {
    for (const [kind, row] of inside) {
      if (!rates.some((each) => each.quota === kind)) { row.line.remove(); inside.delete(kind); }
    }
    lines = rates.map((each, index) => {
      if (!inside.has(each.quota)) inside.set(each.quota, makeBudgetRow());
      inside.get(each.quota).update(each, index === 0);
      return inside.get(each.quota).line;
    });
  }
  return { get lines() { return lines; }, update };
}

function makeBudgetRow() {
  const title = element("div", "name");
  const kind = element("div", "kind");
  const active = element("div", "note");
  const now = element("div", "big");
  const bound = element("div", "note");
  const share = element("div", "share");
  const what = element("div", "what");
  const observed = element("div", "note");
  const line = makeLine(element("td", "", title, kind), element("td", "", active),
    element("td", "number", now, bound, share), element("td", "", what, observed));

  function update(budget, isFirst) {
    line.className = isFirst ? "budget" : "budget further";
    title.className = isFirst ? "name" : "name unseen";
    sayName(title, `budget ${visible(budget.name)}`);
    const parent = budget.parent === null ? "" : ` · in ${visible(budget.parent)}`;
    say(kind, `${KINDS[budget.quota] ?? budget.quota}${parent}`);
    const guaranteed = budget.guaranteed ? ` · ${rate(budget.guaranteed, budget.unit)} guaranteed` : "";
    say(active, `${count(budget.active_clients, "active client")}${guaranteed}`);
    say(now, rate(budget.rate, budget.unit));
    say(bound, `of ${rate(budget.bound, budget.unit)}`);
    say(share, `${Math.round((100 * budget.rate) / budget.bound)} %`);
    say(what, budget.waiting ? `${count(budget.waiting, "connection")} waiting` : "");
    say(observed, !budget.enforced ? "not enforced" : budget.throttled
      ? `${count(budget.holds, "hold")}, ${seconds(budget.held_s)} in the last minute` : "");
  }
  return { line, update };
}

function makeShare({ quota, entity, throttled }) {
  const text = `shares ${KINDS[quota] ?? quota} of ${visible(entity)}`;
  return element("div", throttled ? "note warn" : "note", throttled ? `■ ${text}, throttled` : text);
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
  const who = [whole(nameOf(client)), `, ${userOf(client)}, listener ${client.listener}`];
  const { rules } = client.quotas.find((each) => each.quota === quota);
  const list = rules.map((rule) => {
    const text = `${rule.title}, ${rate(rule.bound, unit)}: ${rule.reason}`;
    return element("li", rule.chosen ? "chosen" : "", `${rule.chosen ? "→" : "–"} ${text}`);
  });
  return element("div", "", element("h3", "", ...who), element("ul", "", ...list));
}
