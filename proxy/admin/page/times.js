// The table of where requests spend their time.

import { at, count, element, say } from "./format.js";
import { makeLine, showRows } from "./rows.js";

const PARTS = [["broker", "Broker"], ["proxy", "Proxy"], ["hold", "Held by a quota"]];
const rows = new Map();

export function showTimes({ request_times: times }) {
  at("times-card").hidden = !times.length;
  showRows(at("times"), rows, new Map(times.map((each) => [each.api, each])), makeRow);
}

function makeRow({ api }) {
  const measured = element("div", "kind");
  const first = element("td", "", element("div", "name", api), measured);
  const cells = PARTS.map(([, label]) => {
    const cell = element("td", "number");
    cell.dataset.label = label;
    const [high, median] = [element("div", "", ""), element("div", "kind", "")];
    cell.append(high, median);
    return { cell, high, median };
  });

  function update(each) {
    say(measured, `${count(each.measured, "request")} measured`);
    PARTS.forEach(([part], index) => {
      say(cells[index].median, `median ${short(each[part].p50_s)}`);
      say(cells[index].high, short(each[part].p99_s));
    });
  }
  return { lines: [makeLine(first, ...cells.map(({ cell }) => cell))], update };
}

// What is below the shortest bucket is as good as nothing.
function short(value) {
  if (value < 0.00002) return "0";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 10 ? 1 : 0)} s`;
}
