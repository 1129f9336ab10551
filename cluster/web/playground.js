// Turns the sliders into queries, and the answers of the server's scheduler into three timelines on one scale.

import { element, fetchJson, keyForm, row, time, whole } from "./api.js";
import { Timeline } from "./timeline.js";

const LANES = [
  ["adaptive", "Adaptive", "chunks as large as the tightest stream's slack allows: this server's default"],
  ["fixed", "Fixed budget", "chunks fill the token budget of a step, as in vLLM"],
  ["whole", "No chunks", "a prompt is computed in one step"],
];
// The values that the sliders offer.
const VALUES = {
  prompt_tokens: [256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536],
  num_prompts: [1, 2, 3, 4, 6, 8],
  num_decodes: [0, 1, 2, 4, 8, 16, 32, 64, 128],
  decode_context: [64, 256, 1024, 4096, 16384, 32768],
  max_num_batched_tokens: [160, 256, 512, 1024, 2048, 4096, 8192, 16384],
  tpot_s: [0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2],
};
const START = { prompt_tokens: 16384, num_prompts: 1, num_decodes: 16, decode_context: 1024, max_num_batched_tokens: 2048, tpot_s: 0.05 };
const LARGE_GPU = { base: 0.004, per_prefill_token: 2e-5, per_attended: 2e-9, per_decode: 5e-5, per_context: 2e-8 };

const form = document.getElementById("scenario");
const state = document.getElementById("state");
const costs = new Map([["a large GPU, 8B model", LARGE_GPU]]);
const lanes = LANES.map(([policy, title, text]) => {
  const canvas = element("canvas"), caption = element("p", { className: "caption" });
  const root = element("section", { className: "card" },
    element("div", { className: "head" }, element("h3", {}, title), element("span", { className: "faint" }, text)), canvas, caption);
  document.getElementById("lanes").append(root);
  return { policy, title, timeline: new Timeline(canvas, caption) };
});

const shown = (name, value) => (name === "tpot_s" ? time(value) : whole(value));
const chosen = (name) => VALUES[name][Number(form.elements[name].value)];

function options() {
  const select = form.elements.hardware, before = select.value;
  select.replaceChildren(...[...costs.keys()].map((name) => element("option", { value: name }, name)));
  if (costs.has(before)) select.value = before;
}

async function hardware() {
  const replicas = await fetchJson("v1/replicas");
  for (const { pool, replica, cost } of replicas.data) if (cost) costs.set(`${pool} ${replica.slice(-6)}, as measured here`, cost);
  options();
}

let running = null;

async function play() {
  running?.abort();
  const { signal } = (running = new AbortController());
  for (const label of form.querySelectorAll("label")) {
    const input = label.querySelector("input");
    if (input) label.querySelector("b").textContent = shown(input.name, chosen(input.name));
    if (input) input.setAttribute("aria-valuetext", shown(input.name, chosen(input.name)));
  }
  const fields = Object.fromEntries(Object.keys(VALUES).map((name) => [name, chosen(name)]));
  history.replaceState(null, "", `#${new URLSearchParams(fields)}`);
  try {
    const answers = await Promise.all(lanes.map(({ policy }) =>
      fetchJson(`v1/playground/scheduler?${new URLSearchParams({ ...fields, ...costs.get(form.elements.hardware.value), policy })}`, { signal })));
    const end = Math.max(...answers.map(({ steps }) => steps.at(-1).started + steps.at(-1).seconds));
    answers.forEach((answer, place) => lanes[place].timeline.show(answer.steps, 0, end, [[answer.arrived, "prompts arrive"]]));
    document.getElementById("summary").replaceChildren(...answers.map((answer, place) => row(
      lanes[place].title,
      answer.is_cut ? "not reached" : time(Math.max(...answer.first_tokens_s)),
      time(answer.gap_p50_s),
      time(answer.gap_max_s),
      answer.late_share === null ? "–" : `${(100 * answer.late_share).toFixed(1)} %`,
      answer.steps.length,
    )));
    state.textContent = "computed by this server's scheduler";
    state.className = "good";
    showKey(null);
  } catch (error) {
    if (error.name === "AbortError") return;
    showKey(error);
    state.textContent = error.message;
    state.className = "bad";
  }
}

const showKey = keyForm(() => hardware().then(play, play));
const given = new URLSearchParams(location.hash.slice(1));
for (const [name, values] of Object.entries(VALUES)) {
  const at = values.indexOf(Number(given.get(name)));
  Object.assign(form.elements[name], { min: 0, max: values.length - 1, step: 1 });
  form.elements[name].value = given.has(name) && at >= 0 ? at : values.indexOf(START[name]);
}
options();
let waiting = null;
form.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(play, 120);
});
form.addEventListener("submit", (event) => event.preventDefault());
addEventListener("resize", () => lanes.forEach(({ timeline }) => timeline.steps.length && timeline.draw()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => lanes.forEach(({ timeline }) => timeline.steps.length && timeline.draw()));
await hardware().catch(() => null); // without replicas or a key, only the example is offered
await play();
