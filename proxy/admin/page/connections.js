// The table of open connections, those with most traffic first: asked for while it is shown.

import { ask } from "./ask.js";
import { at, element, say, sayName, visible } from "./format.js";
import { columnsOf, makeColumns, makeHead, showRows } from "./rows.js";

const LIMIT = 100;
const COLUMNS = columnsOf("connection");
const rows = new Map();
let loading = false;
at("connections-head").append(makeHead("Client", COLUMNS));

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
  const host = address.includes(":") ? `[${address}]` : address;
  const where = element("div", "kind", `${host}:${port} · id ${id}${home}`);
  const state = element("div", "kind");
  const row = makeColumns(element("td", "", name, where, state), COLUMNS);

  function update(each) {
    const user = each.user === null ? "" : `, ${visible(each.user)}`;
    row.line.className = each.held ? "throttled" : "";
    sayName(name, `${each.client_id ? visible(each.client_id) : "(no client id)"}${user}`);
    say(state, each.state === "open" ? "" : each.state);
    row.update(each);
  }
  return { lines: [row.line], update };
}
