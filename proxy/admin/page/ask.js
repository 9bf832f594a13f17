// Asks the proxy for what is shown of one thing, in words that people understand when it fails.

import { element, say } from "./format.js";

const PATIENCE_MS = 6000;

// Gives the JSON of a path, or throws an Error that says why not.
export async function ask(path) {
  try {
    const signal = AbortSignal.timeout(PATIENCE_MS);
    const answer = await fetch(path, { signal, cache: "no-store" });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    return found;
  } catch (error) {
    const lost = error instanceof TypeError || error.name === "TimeoutError";
    throw lost ? new Error("No contact with the proxy.") : error;
  }
}

// For what is asked for while it is open: show(found) fills `parts`, and trouble is said above them.
// Gives { box, load }: an element with all of it, and a function that asks anew.
export function makeAsked(path, parameters, parts, show) {
  const trouble = element("p", "bad");
  let loading = false;

  async function load() {
    if (loading) return;
    loading = true;
    try {
      show(await ask(`${path}?${new URLSearchParams(parameters)}`));
      say(trouble, "");
    } catch (error) {
      say(trouble, `✕ ${error.message}`);
    } finally {
      loading = false;
    }
  }
  return { box: element("div", "why", trouble, ...parts), load };
}
