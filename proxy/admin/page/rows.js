// Keeps the rows of a table while they are shown, so that focus, opened details and selections
// survive an update.

import { COLUMNS } from "./columns.js";
import { element, figure, rate, say, seconds, visible } from "./format.js";

// `wanted` maps keys to items in the order to show; `rows` is what is kept between the calls.
// makeRow(item) gives { lines, update }: one or more <tr>, and a function that shows an item.
export function showRows(body, rows, wanted, makeRow) {
  for (const [key, row] of rows) {
    if (!wanted.has(key)) { row.lines.forEach((line) => line.remove()); rows.delete(key); }
  }
  for (const [key, item] of wanted) {
    if (!rows.has(key)) rows.set(key, makeRow(item));
    rows.get(key).update(item);
  }
  const focused = document.activeElement;
  [...wanted.keys()].flatMap((key) => rows.get(key).lines).forEach((line, index) => {
    if (body.children[index] !== line) body.insertBefore(line, body.children[index] ?? null);
  });
  if (focused !== document.activeElement && body.contains(focused)) focused.focus();
}

const FORMS = {
  text: visible,
  number: String,
  count: figure,
  rate: (value) => rate(value, "bytes_per_second"),
  seconds,
  age: seconds,
};

// The columns of a table as the proxy declares them (proxy/admin/document_models.py), for makeColumns.
export function columnsOf(name) {
  return COLUMNS[name].map(([title, path, form, none]) => {
    const text = (item) => {
      const value = path.split(".").reduce((part, key) => part?.[key], item) ?? null;
      return value === null ? none : FORMS[form](value);
    };
    return [title, form === "text" ? "" : "number", text];
  });
}

// The head of a table: the title of its first cells, and those of its columns.
export function makeHead(first, columns) {
  const cells = [[first, ""], ...columns].map(([title, className]) => {
    const cell = element("th", className, title);
    cell.scope = "col";
    return cell;
  });
  const line = makeLine(...cells);
  for (const cell of cells) cell.setAttribute("role", "columnheader");
  return line;
}

// The row of a table of columns, each [label, class, text(item)], behind a first cell: gives
// { line, update }.
export function makeColumns(first, columns) {
  const cells = columns.map(([label, className]) => {
    const cell = element("td", className);
    cell.dataset.label = label;
    return cell;
  });
  const update = (item) => columns.forEach(([, , text], index) => say(cells[index], text(item)));
  return { line: makeLine(first, ...cells), cells, update };
}

// Roles, because a table that is laid out as cards on a phone is none to a screen reader.
export function makeLine(...cells) {
  const line = document.createElement("tr");
  line.setAttribute("role", "row");
  for (const cell of cells) cell.setAttribute("role", "cell");
  line.append(...cells);
  return line;
}
