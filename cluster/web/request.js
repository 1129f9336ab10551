// One request as a picture: waits, chunks, transfers and tokens of all replicas that worked on it, on one axis.

import { element, fetchJson, time, whole } from "./api.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000, LEFT = 170, LINE = 26, TOP = 22; // units of the picture

function svg(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Returns the rows of the picture: a title, and parts of { kind, from, to, text }, in seconds after the first arrival.
export function rowsOf(legs) {
  const origin = Math.min(...legs.map((leg) => leg.arrived));
  return legs.flatMap((leg) => {
    const at = leg.arrived - origin, parts = [];
    const add = (kind, from, to, text) => parts.push({ kind, from: at + from, to: at + Math.max(to, from), text });
    const tokens = (leg.first_token_s ?? 0) + (leg.tpot_s ?? 0) * Math.max(leg.num_output_tokens - 1, 0); // so far
    const last = leg.ended_s ?? Math.max(tokens, ...leg.chunks.map((chunk) => chunk.started_s + chunk.step_s));
    if (leg.model_start_s) add("wait", -leg.model_start_s, 0, `waited ${time(leg.model_start_s)} for its model to start`);
    if (leg.queued_s) add("wait", 0, leg.queued_s, `waited ${time(leg.queued_s)} for its first chunk`);
    for (const chunk of leg.chunks) {
      if (chunk.waited_s && chunk.started_s > leg.queued_s)
        add("wait", chunk.started_s - chunk.waited_s, chunk.started_s, `waited ${time(chunk.waited_s)} between chunks`);
      const span = `tokens ${whole(chunk.start)}–${whole(chunk.start + chunk.num_tokens)}`;
      add("part", chunk.started_s, chunk.started_s + chunk.step_s, `${span} in ${time(chunk.step_s)} (${chunk.reason})`);
    }
    const ends = leg.chunks.map((chunk) => chunk.started_s + chunk.step_s);
    const begun = leg.first_token_s ?? Math.max(0, ...ends);
    if (leg.num_output_tokens > 1 || !leg.chunks.length) {
      const gap = leg.gap_max_s === null ? "" : `, longest gap ${time(leg.gap_max_s)}`;
      add("stream", begun, last, `${whole(leg.num_output_tokens)} tokens${gap}`);
    }
    const found = [{ title: `${leg.replica} ${leg.leg === "local" ? "" : leg.leg}`.trim(), parts }];
    for (const sent of leg.transfers) {
      const seconds = sent.total_s ?? 0;
      const end = sent.ended_s ?? last;
      const text = `${sent.direction}: ${whole((sent.num_bytes ?? 0) / 1024)} KiB, ${sent.outcome}`;
      found.push({ title: "transfer", parts: [{ kind: "transfer", from: at + Math.max(end - seconds, 0), to: at + end, text }] });
    }
    return found;
  });
}

export function picture(legs) {
  const rows = rowsOf(legs), parts = rows.flatMap((row) => row.parts);
  const from = Math.min(0, ...parts.map((part) => part.from)), to = Math.max(from + 0.001, ...parts.map((part) => part.to));
  const x = (seconds) => LEFT + ((seconds - from) / (to - from)) * (WIDTH - LEFT - 30);
  const height = TOP + rows.length * LINE + 6;
  const root = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", class: "request" });
  const first = legs.map((leg) => leg.first_token_s).find((seconds) => seconds !== null);
  root.setAttribute("aria-label", `${parts.filter((part) => part.kind === "part").length} chunks over ${time(to - from)}` +
    (first === undefined ? "" : `, first token after ${time(first)}`));
  const span = to - from;
  const every = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 600].find((step) => span / step <= 8) ?? 3600;
  for (let seconds = Math.ceil(from / every) * every; seconds <= to; seconds += every) {
    root.append(svg("line", { x1: x(seconds), x2: x(seconds), y1: TOP - 4, y2: height, class: "axis" }));
    root.append(svg("text", { x: x(seconds), y: 12, class: "label" }, seconds ? time(Math.abs(seconds)) : "0"));
  }
  rows.forEach((row, number) => {
    const y = TOP + number * LINE;
    root.append(svg("text", { x: 0, y: y + 15, class: "title" }, row.title));
    for (const part of row.parts) {
      const width = Math.max(x(part.to) - x(part.from), 1.5);
      root.append(svg("rect", { x: x(part.from), y, width, height: LINE - 8, class: part.kind }, svg("title", {}, part.text)));
    }
  });
  return root;
}

// Shows the request of an id below `place`, until it is closed.
export async function showRequest(place, id) {
  const close = element("button", { type: "button" }, "Close");
  close.addEventListener("click", () => place.replaceChildren());
  const card = element("section", { className: "card" }, element("div", { className: "head" }, element("h3", {}, `Request ${id}`), close));
  place.replaceChildren(card);
  try {
    const { requests } = await fetchJson(`v1/requests/${encodeURIComponent(id)}`);
    const legend = [["wait", "waits"], ["part", "chunks of its prompt"], ["transfer", "transfers of KV pages"], ["stream", "tokens"]];
    card.append(picture(requests), element("ul", { className: "legend" },
      ...legend.map(([kind, text]) => element("li", {}, element("i", { className: `of-${kind}` }), text))));
    const texts = rowsOf(requests).flatMap((row) => row.parts.map((part) => `${row.title}: ${time(part.from)}: ${part.text}`));
    card.append(element("details", {}, element("summary", {}, "As a list"), element("ol", {}, ...texts.map((text) => element("li", {}, text)))));
  } catch (error) {
    card.append(element("p", { className: "bad" }, error.message));
  }
}
