// The table of what was changed lately, by whom, and from what to what.

import { at, element, fill, say, time, visible } from "./format.js";
import { makeLine } from "./rows.js";

const MAX_LINES = 6;

export function showChanges({ changes, changes_total: total }) {
  at("changes-card").hidden = total === 0;
  say(at("changes-shown"), changes.length < total ? `${changes.length} of ${total}` : "");
  fill(at("changes"), changes, "", makeRow);
}

function makeRow({ at: when, who, address, what, before, after }) {
  const author = element("td", "", element("span", "name", visible(who)));
  if (address) author.append(element("div", "note", address));
  const cells = [
    element("td", "", time(when)), author, element("td", "what", visible(what)),
    element("td", "", shown(before)), element("td", "", shown(after)),
  ];
  ["When", "Who", "What", "From", "To"].forEach((label, index) => {
    cells[index].dataset.label = label;
  });
  return makeLine(...cells);
}

// A line for each key of what was set; what is not set is left out.
function shown(value) {
  if (value === null) return "nothing";
  if (typeof value !== "object") return visible(`${value}`);
  const set = Object.entries(value).filter(([, each]) => each !== null);
  if (set.length === 0) return "nothing";
  const lines = set.slice(0, MAX_LINES).map(([key, each]) => {
    const text = typeof each === "string" ? each : JSON.stringify(each);
    return element("li", "", visible(`${key} ${text}`));
  });
  const left = set.length - lines.length;
  if (left) lines.push(element("li", "note", `and ${left} more, see v1/audit`));
  return element("ul", "", ...lines);
}
