// Draws rate against bound over ten minutes as a small SVG.

import { rate as rateText } from "./format.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 56;
const SPAN_S = 600;
const HEADROOM = 1.12;

export function makeChart() {
  const svg = document.createElementNS(NAMESPACE, "svg");
  svg.setAttribute("class", "chart");
  svg.setAttribute("role", "img");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const floor = add(svg, "floor");
  floor.setAttribute("d", `M0 ${HEIGHT}H${WIDTH}`);
  const parts = { area: add(svg, "area"), rate: add(svg, "rate"), bound: add(svg, "bound") };
  return { svg, draw: (client) => draw(svg, parts, client) };
}

function add(svg, className) {
  const path = document.createElementNS(NAMESPACE, "path");
  path.setAttribute("class", className);
  svg.append(path);
  return path;
}

function draw(svg, parts, client) {
  const history = client.history ?? { interval_s: SPAN_S, rates: [], bounds: [] };
  // What is measured now ends the line, so that it moves between two samples as well.
  const rates = [...history.rates, client.rate];
  const bounds = [...history.bounds, [rates.length - 1, client.bound]];
  const top = Math.max(...rates, ...bounds.map(([, bound]) => bound)) * HEADROOM;
  const x = (index) => WIDTH - ((rates.length - 1 - index) * history.interval_s * WIDTH) / SPAN_S;
  const y = (value) => HEIGHT - (value / top) * HEIGHT;
  const point = (index, value) => `${x(index).toFixed(1)} ${y(value).toFixed(1)}`;

  const line = rates.map((value, index) => point(index, value)).join("L");
  parts.rate.setAttribute("d", `M${line}`);
  parts.area.setAttribute("d", `M${x(0).toFixed(1)} ${HEIGHT}L${line}V${HEIGHT}Z`);
  const steps = bounds.map(([index, bound], step) =>
    step === 0 ? `M0 ${y(bound).toFixed(1)}` : `H${x(index).toFixed(1)}V${y(bound).toFixed(1)}`);
  parts.bound.setAttribute("d", `${steps.join("")}H${WIDTH}`);

  const text = (value) => rateText(value, client.unit);
  svg.setAttribute("aria-label",
    `Last 10 minutes: from ${text(Math.min(...rates))} to ${text(Math.max(...rates))}, `
    + `now ${text(client.rate)}; bound ${text(client.bound)}`);
}
