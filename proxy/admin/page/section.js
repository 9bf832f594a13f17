// Shows a section of the page and its tile: only when there is something to show in it.

import { at, say } from "./format.js";

// `trouble` says what needs a look; without any `calm` is said. Gives the section's body.
export function showSection(name, { shown, total }, trouble, calm) {
  at(`${name}-card`).hidden = at(`${name}-tile`).hidden = total === 0;
  say(at(`${name}-count`), total.toLocaleString("en"));
  say(at(`${name}-note`), trouble ? `■ ${trouble}` : `✓ ${calm}`);
  at(`${name}-note`).className = trouble ? "note warn" : "note";
  say(at(`${name}-shown`), shown < total ? `${shown} of ${total}` : "");
  return at(name);
}
