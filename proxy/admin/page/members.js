// The table of the processes that relay: where there are several, each with what it does now.

import { at, element, say, sayName, visible } from "./format.js";
import { columnsOf, makeColumns, makeHead, showRows } from "./rows.js";

const isGood = ({ answers, ready }) => answers && ready !== false;
const COLUMNS = [
  ["State", "", (each) => (isGood(each) ? "✓ Ready" : `✕ ${trouble(each)}: ${each.problem}`)],
  ...columnsOf("member"),
];
at("members-head").append(makeHead("Member", COLUMNS));
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
  const row = makeColumns(element("td", "", title, ...home), COLUMNS);

  function update(each) {
    row.line.className = isGood(each) ? "" : "throttled";
    row.update(each);
  }
  return { lines: [row.line], update };
}

const trouble = ({ answers, alive }) => (answers ? "Not ready" : alive === false ? "Down" : "Silent");
