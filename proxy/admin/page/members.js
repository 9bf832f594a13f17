// The table of the processes that relay: where there are several, each with what it does now.

import { NONE, at, element, figure, say, sayName, seconds, visible } from "./format.js";
import { makeLine, showRows } from "./rows.js";

const COLUMNS = ["State", "Connections", "Clients", "Throttled", "Waiting", "Up"];
const rows = new Map();

// One process alone has no members.
export function showMembers({ members = [], tier }) {
  at("members-card").hidden = members.length < 2;
  const silent = members.filter((each) => !each.answers).length;
  const lines = tier ? [`tier ${visible(tier.name)}, generation ${tier.generation}`] : [];
  const wrong = silent ? [`■ ${silent} of ${members.length} silent: what they know is missing`] : [];
  wrong.push(...members.flatMap(overloads));
  at("members-shown").className = wrong.length ? "note warn" : "note";
  say(at("members-shown"), [...lines, ...wrong].join(" · "));
  showRows(at("members"), rows, new Map(members.map((each) => [each.name, each])), makeRow);
}

// More members do not help clients of a slot that fills one alone.
const overloads = ({ name, slots = { overloaded: [] } }) =>
  slots.overloaded.map(({ slot, clients }) => {
    const whose = clients.length ? `: ${clients.map(visible).join(", ")}` : "";
    return `■ slot ${slot} fills member ${visible(name)} alone${whose}`;
  });

function makeRow({ name, machine }) {
  const title = element("div", "name");
  sayName(title, visible(name));
  const home = machine === undefined ? [] : [element("div", "kind", `machine ${visible(machine)}`)];
  const cells = COLUMNS.map((label, index) => {
    const cell = element("td", index ? "number" : "");
    cell.dataset.label = label;
    return cell;
  });
  const [state, connections, clients, throttled, waiting, up] = cells;
  const line = makeLine(element("td", "", title, ...home), ...cells);

  function update(each) {
    const isGood = each.answers && each.ready !== false;
    line.className = isGood ? "" : "throttled";
    const trouble = each.answers ? "Not ready" : each.alive === false ? "Down" : "Silent";
    say(state, isGood ? "✓ Ready" : `✕ ${trouble}: ${each.problem}`);
    say(connections, known(each.connections));
    say(clients, known(each.clients));
    say(throttled, known(each.throttled));
    say(waiting, known(each.waiting));
    say(up, each.uptime_s === undefined ? NONE : seconds(each.uptime_s));
  }
  return { lines: [line], update };
}

const known = (value) => figure(value ?? null);
