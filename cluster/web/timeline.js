// Draws steps over time. Below: the streams that got a token in each step. Above: the chunks of prompts in that step.

import { time, whole } from "./api.js";

const COLOURS = ["#e69f00", "#56b4e9", "#2fa084", "#d55e00", "#cc79a7", "#c9b82e"]; // by Okabe and Ito, for colour-blind eyes too
const LOWER = 0.32; // share of the height for decodes

export function describeStep(step) {
  if (!step) return "";
  const isWhole = step.num_decodes !== null; // else this key sees its own chunks alone
  const parts = [`${isWhole ? `Step ${whole(step.number)}` : "A step"} took ${time(step.seconds)}`];
  if (step.predicted_s) parts[0] += ` (predicted ${time(step.predicted_s)})`;
  if (isWhole) parts.push(step.num_decodes === 1 ? "1 stream got a token" : `${whole(step.num_decodes)} streams got a token`);
  if (step.num_skipped) parts.push(`${step.num_skipped} skipped`);
  for (const chunk of step.chunks) {
    const end = chunk.start + chunk.num_tokens;
    const name = chunk.request_id ? `${chunk.request_id} ` : "";
    parts.push(`prompt #${chunk.prompt} ${name}tokens ${whole(chunk.start)}–${whole(end)} of ` +
      `${whole(chunk.num_prompt_tokens)} (${chunk.reason})`);
  }
  return parts.join(" · ") + (step.limit && step.chunks.length ? ` · chunks bounded by ${step.limit}` : "");
}

export function describeTimeline(steps) {
  const mixed = steps.filter((step) => step.chunks.length && step.num_decodes).length;
  const alone = steps.filter((step) => step.chunks.length && !step.num_decodes).length;
  return `Timeline of ${steps.length} steps: ${mixed} with chunks and streams, ${alone} with chunks alone, ` +
    `${steps.length - mixed - alone} with streams alone. Arrow keys move from step to step.`;
}

export class Timeline {
  // `caption`: the element that describes the step under the pointer, or the one chosen by arrow keys.
  constructor(canvas, caption) {
    this.canvas = canvas;
    this.caption = caption;
    this.steps = [];
    this.chosen = null;
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.addEventListener("pointermove", (event) => this.#choose(this.#under(event.offsetX)));
    canvas.addEventListener("pointerleave", () => this.#choose(null));
    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || !this.steps.length) return;
      event.preventDefault();
      const at = this.steps.findIndex((step) => step.number === this.chosen);
      const next = at < 0 ? this.steps.length - 1 : Math.min(Math.max(at + by, 0), this.steps.length - 1);
      this.#choose(this.steps[next]);
    });
  }

  // `from`, `to`: seconds, on the clock of the steps; `marks`: pairs of seconds and label, drawn as lines.
  show(steps, from, to, marks = []) {
    Object.assign(this, { from, to, marks });
    this.steps = steps.filter((step) => step.started + step.seconds > from && step.started < to);
    this.mostDecodes = Math.max(1, ...this.steps.map((step) => step.num_decodes));
    this.mostTokens = Math.max(1, ...this.steps.map((step) => step.chunks.reduce((sum, chunk) => sum + chunk.num_tokens, 0)));
    this.canvas.setAttribute("aria-label", describeTimeline(this.steps));
    this.draw();
    this.#caption(this.steps.find((step) => step.number === this.chosen));
  }

  draw() {
    const { canvas } = this;
    const scale = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    pen.fillStyle = colour("track");
    pen.fillRect(0, 0, width, height);
    const x = (seconds) => ((seconds - this.from) / (this.to - this.from)) * width;
    const ground = height - 16, middle = ground * (1 - LOWER);
    const room = middle - (this.marks.length ? 18 : 0); // pixels for chunks, below the labels of marks
    this.#axis(pen, x, width, height, colour);
    for (const step of this.steps) {
      const left = x(step.started), across = Math.max(x(step.started + step.seconds) - left, 1);
      const thick = Math.max(across - (across > 4 ? 1 : 0), 1);
      const tall = (step.num_decodes / this.mostDecodes) * ground * LOWER * 0.94;
      pen.fillStyle = colour("decode");
      pen.fillRect(left, ground - tall, thick, tall);
      let foot = middle;
      for (const chunk of step.chunks) {
        const rise = Math.max((chunk.num_tokens / this.mostTokens) * room * 0.94, 2);
        pen.fillStyle = COLOURS[chunk.prompt % COLOURS.length];
        pen.fillRect(left, foot - rise, thick, rise);
        if (thick > 26 && rise > 14) {
          pen.fillStyle = "#000";
          pen.font = "11px system-ui, sans-serif";
          pen.fillText(`#${chunk.prompt}`, left + 4, foot - rise + 12);
        }
        foot -= rise;
      }
      if (step.number === this.chosen) {
        pen.strokeStyle = colour("text");
        pen.lineWidth = 1.5;
        pen.strokeRect(left - 0.5, 1, across + 1, ground - 2);
      }
    }
    pen.fillStyle = colour("line");
    pen.fillRect(0, middle, width, 1);
    this.#marked(pen, x, height, colour);
  }

  #axis(pen, x, width, height, colour) {
    const span = this.to - this.from;
    const every = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120].find((seconds) => span / seconds <= 8) ?? 600;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "alphabetic";
    for (let seconds = 0; seconds <= span; seconds += every) {
      const at = this.fromEnd ? x(this.to - seconds) : x(this.from + seconds);
      pen.fillStyle = colour("line");
      pen.fillRect(at, 0, 1, height - 14);
      pen.fillStyle = colour("faint");
      const label = seconds === 0 ? (this.fromEnd ? "now" : "0") : (this.fromEnd ? "−" : "") + (seconds < 1 ? time(seconds) : `${seconds} s`);
      pen.textAlign = at > width - 30 ? "right" : at < 20 ? "left" : "center";
      pen.fillText(label, at, height - 3);
    }
    pen.textAlign = "left";
  }

  #marked(pen, x, height, colour) {
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = colour("text");
    for (const [seconds, label] of this.marks) {
      const at = x(seconds), isRoomBefore = at > pen.measureText(label).width + 10;
      pen.fillRect(at, 0, 1.5, height - 16);
      pen.textAlign = isRoomBefore ? "right" : "left";
      pen.fillText(label, at + (isRoomBefore ? -5 : 5), 12);
    }
    pen.textAlign = "left";
  }

  #under(at) {
    const seconds = this.from + (at / this.canvas.clientWidth) * (this.to - this.from);
    return this.steps.findLast((step) => step.started <= seconds && seconds < step.started + Math.max(step.seconds, 0.001)) ?? null;
  }

  #choose(step) {
    this.chosen = step?.number ?? null;
    this.draw();
    this.#caption(step);
  }

  #caption(step) {
    this.caption.textContent = describeStep(step) || "Point at a step, or move from step to step with the arrow keys.";
  }
}
