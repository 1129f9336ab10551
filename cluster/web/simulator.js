// Shows what each policy does in one scenario: as timelines on one scale, and as latencies.

import { element, fetchJson, keyForm, row, time, whole } from "./api.js";
import { Timeline } from "./timeline.js";

const POLICIES = {
  adaptive: "chunks fit the slack of the streams: Crossdock's default",
  fixed: "chunks fill the token budget, beside decodes, as in vLLM",
  alternating: "chunks fill the token budget, in steps without decodes",
  whole: "a prompt is computed in one step, without chunks",
};
const CHOICES = {
  prompt_tokens: ["Prompt, tokens", [512, 2048, 4096, 8192, 16384, 32768, 65536], 16384],
  num_prompts: ["Prompts that arrive together", [1, 2, 4, 8], 1],
  num_streams: ["Streams that decode", [0, 1, 4, 8, 16, 32, 64], 16],
  max_num_batched_tokens: ["Token budget of a step", [128, 256, 512, 1024, 2048, 4096, 8192, 16384], 2048],
  tpot_s: ["Target per token", [0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1], 0.05],
  profile: ["Step costs", ["h100-8b", "h100-70b", "h200-8b", "b200-8b", "a100-8b", "l4-8b", "here"], "h100-8b"],
};
// A page without a server brings its runs along: what may be chosen, and the answer for each choice.
const stored = JSON.parse(document.getElementById("runs")?.textContent ?? "null");
const [form, state] = ["scenario", "state"].map((id) => document.getElementById(id));
const shown = (name, value) => (name === "tpot_s" ? time(value) : typeof value === "number" ? whole(value) : value === "here" ? "this server's" : value);

for (const [name, [label, values, start]] of Object.entries(CHOICES)) {
  const asked = new URLSearchParams(location.hash.slice(1)).get(name) ?? `${start}`;
  const options = (stored?.choices[name] ?? values).map((value) =>
    element("option", { value, selected: `${value}` === asked }, shown(name, value)));
  form.append(element("label", { className: "tile" }, `${label} `, element("select", { name }, ...options)));
}
const lanes = Object.entries(POLICIES).map(([policy, text]) => {
  const canvas = element("canvas"), caption = element("p", { className: "caption" });
  document.getElementById("lanes").append(element("section", { className: "card" },
    element("div", { className: "head" }, element("h3", {}, policy), element("span", { className: "faint" }, text)), canvas, caption));
  return { policy, timeline: new Timeline(canvas, caption) };
});

let newest = 0;

async function play() {
  const turn = ++newest; // an older answer that comes later is not shown
  const fields = Object.fromEntries(new FormData(form));
  history.replaceState(null, "", `#${new URLSearchParams(fields)}`);
  state.textContent = "computing …";
  try {
    const runs = [];
    for (const { policy } of lanes) {
      const query = new URLSearchParams({ ...fields, policy });
      runs.push(stored ? stored.runs[query] : await fetchJson(`v1/simulator?${query}`));
      if (turn !== newest) return;
    }
    const end = Math.max(...runs.map(({ steps }) => steps.at(-1).started + steps.at(-1).seconds));
    runs.forEach((run, place) => lanes[place].timeline.show(run.steps, 0, end, [[run.arrived, "prompts arrive"]]));
    document.getElementById("summary").replaceChildren(...runs.map((run, place) => row(lanes[place].policy,
      run.is_cut ? "not reached" : time(Math.max(...run.ttft_s)), time(run.tpot_s.p50), time(run.tpot_s.p99), time(run.tpot_s.p100),
      run.steps.length)));
    say(stored ? "computed by the real scheduler, before" : "computed by this server's scheduler", "good", null);
  } catch (error) {
    if (turn === newest) say(error.message, "bad", error);
  }
}

function say(textContent, className, error) {
  Object.assign(state, { textContent, className });
  showKey(error);
}

const redraw = () => lanes.forEach(({ timeline }) => timeline.steps.length && timeline.draw());
const showKey = keyForm(play);
form.addEventListener("change", play);
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
await play();
