// Writes figures for people, and finds and makes elements. Text only ever enters the page as text.

const UNITS = ["B/s", "KiB/s", "MiB/s", "GiB/s"];

export function rate(value, unit) {
  if (unit === "percent") return `${value.toFixed(value < 10 ? 1 : 0)} %`;
  let step = 0;
  while (value >= 1000 && step < UNITS.length - 1) { value /= 1024; step += 1; }
  return `${value.toFixed(step === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2)} ${UNITS[step]}`;
}

export function seconds(value) {
  if (value < 1) return `${Math.max(1, Math.round(value * 1000))} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 90) return `${value.toFixed(0)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  if (value < 129600) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} days`;
}

export const NONE = "–";

export function figure(value) {
  return value === null ? NONE : Math.round(value).toLocaleString("en");
}

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

export function time(iso) {
  const at = new Date(iso);
  const clock = at.toLocaleTimeString([], { hourCycle: "h23" });
  // Sweden writes dates as 2026-09-21, which nobody takes for another day.
  return at.toDateString() === new Date().toDateString()
    ? clock : `${at.toLocaleDateString("sv-SE")} ${clock}`;
}

// The parts of a text: a word that is long, a client id or a path, is shown without its middle.
const LONG = 44;
const HEAD = 24;
const TAIL = 15;
const LONG_WORDS = new RegExp(`(\\S{${LONG + 1},})`, "u");

function parts(text) {
  return text.split(LONG_WORDS).map((part, index) => (index % 2 ? whole(part) : part));
}

// A name, of several words or one, without its middle if it is long: who copies it, searches for it
// or listens gets all of it.
export function whole(text) {
  const chars = [...text];
  if (chars.length <= LONG) return document.createTextNode(text);
  const made = document.createElement("span");
  made.className = "long";
  made.title = text;
  for (const [className, from, to] of [["", 0, HEAD], ["middle", HEAD, -TAIL], ["tail", -TAIL]]) {
    const part = document.createElement("span");
    part.className = className;
    part.append(chars.slice(from, to).join(""));
    made.append(part);
  }
  return made;
}

export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.flatMap((child) => (typeof child === "string" ? parts(child) : child)));
  return made;
}

// What is not seen, or is taken for nothing at an end, would make another client id look the same.
const UNSEEN = /^ | $|(?! )[\p{C}\p{Z}\p{Default_Ignorable_Code_Point}]/gu;

export function visible(text) {
  return text.replace(UNSEEN, (char) => {
    const code = char.codePointAt(0).toString(16);
    return code.length > 4 ? `\\u{${code}}` : `\\u${code.padStart(4, "0")}`;
  });
}

export const at = (id) => document.getElementById(id);

// Makes the items of a list anew when they have changed; `none` is shown when there are none.
export function fill(list, items, none, makeItem = (item) => element("li", "", item)) {
  const state = JSON.stringify(items);
  if (list.dataset.state === state) return;
  list.dataset.state = state;
  const made = items.map(makeItem);
  list.replaceChildren(...(made.length || !none ? made : [element("li", "", none)]));
}

// Screen readers and selections lose their place when text that is the same is set again.
export function say(target, text) {
  if (target.textContent !== text) target.replaceChildren(...parts(text));
}

// The same for a name, such as a client id, which may be of several words.
export function sayName(target, text) {
  if (target.textContent !== text) target.replaceChildren(whole(text));
}
