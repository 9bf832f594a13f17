// The list of connected clients that no rule bounds.

import { element, fill, rate, visible, whole } from "./format.js";
import { showSection } from "./section.js";

export function showUnbounded({ unbounded, unbounded_clients: clients }) {
  const list = showSection(
    "unbounded", { shown: clients.length, total: unbounded }, "no rule bounds them", "");
  fill(list, clients, "No client without a bound fits the filter.", makeItem);
}

function makeItem({ client_id: id, user, listener, rate: moved }) {
  const name = element("b", "", whole(id ? visible(id) : "(no client id)"));
  const now = moved === null ? "" : `, ${rate(moved, "bytes_per_second")}`;
  const where = `${user === null ? "anonymous" : visible(user)}, listener ${listener}${now}`;
  return element("li", "", name, " ", element("span", "note", where));
}
