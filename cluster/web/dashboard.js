// Polls every second, and less often while the server does not answer: the state of each replica, and the steps it has finished since the last poll.

import { element, fetchJson, fetchText, keyForm, quantile, row, time, whole } from "./api.js";
import { showRequest } from "./request.js";
import { Timeline, describeStep } from "./timeline.js";

const KEEP_S = 60;
const PAGE_STATES = ["owned", "cached", "quarantined", "free"];
const MOST_REQUESTS = 40;
const MOST_TENANTS = 8;
const LONGEST_PAUSE_S = 30;
const MOST_CARDS = 4; // replicas whose steps are shown at once; of more only those that were chosen
const FOLDED = 16; // replicas of a pool from which on its rows are folded
const FIGURES_S = 10; // between two readings of the metrics, which are large
const get = (id) => document.getElementById(id);

class Card {
  constructor(name) {
    this.name = name;
    this.incarnation = null;
    this.steps = [];
    this.charges = []; // of tenants since the replica's start, at the last polls
    this.title = element("h3");
    this.facts = element("span", { className: "faint" });
    this.pages = element("div", { className: "bar" });
    this.pages.setAttribute("role", "img");
    this.caption = element("p", { className: "caption" });
    const canvas = element("canvas");
    const details = element("details", {}, element("summary", {}, "Newest steps as a list"), element("ol", {}));
    this.list = details.querySelector("ol");
    this.root = element("section", { className: "card" },
      element("div", { className: "head" }, this.title, this.facts), canvas, this.caption, this.pages, details);
    this.timeline = new Timeline(canvas, this.caption);
    this.timeline.fromEnd = true;
  }

  update(state) {
    if (state.incarnation !== this.incarnation) [this.incarnation, this.steps, this.charges] = [state.incarnation, [], []];
    const last = this.steps.at(-1)?.number ?? 0;
    this.steps.push(...state.steps.filter((step) => step.number > last));
    this.steps = this.steps.filter((step) => step.started > state.now - KEEP_S);
    this.charges = [...this.charges.filter((each) => each.now > state.now - KEEP_S), { now: state.now, charged: state.charged_s ?? {} }];
    this.state = state;
  }

  shares(window) {
    const { charged } = this.charges.at(-1);
    const before = this.charges.find((each) => each.now > this.state.now - window).charged;
    const used = Object.entries(charged).map(([name, seconds]) => [name, seconds - (before[name] ?? 0)]);
    const total = used.reduce((sum, [, seconds]) => sum + seconds, 0);
    return used.filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]).slice(0, MOST_TENANTS)
      .map(([name, seconds]) => `${name} ${Math.round((100 * seconds) / total)} %`);
  }

  row(window) {
    const { state } = this, { pages, requests } = state;
    const steps = this.steps.filter((step) => step.started > state.now - window);
    const prompts = steps.reduce((sum, step) => sum + step.chunks.reduce((part, chunk) => part + chunk.num_tokens, 0), 0);
    const outputs = steps.reduce((sum, step) => sum + step.num_decodes, 0);
    const total = pages ? PAGE_STATES.reduce((sum, name) => sum + pages[name], 0) : 0;
    const name = element("button", { type: "button", className: "link", title: "Show or hide its steps" }, this.name.slice(-8));
    name.setAttribute("aria-pressed", chosen.has(this.name));
    name.addEventListener("click", () => {
      chosen.has(this.name) ? chosen.delete(this.name) : chosen.add(this.name);
      wake();
    });
    return row(name, state.profile.role, requests.running, requests.waiting, (steps.length / window).toFixed(1),
      time(quantile(steps.map((step) => step.seconds), 0.99)), whole(prompts / window), whole(outputs / window),
      total ? `${Math.round((100 * pages.owned) / total)} %` : "–");
  }

  show(window) {
    this.root.hidden = cards.size > MOST_CARDS && !chosen.has(this.name);
    if (this.root.hidden) return;
    const { state } = this;
    const { profile, pages, requests } = state;
    this.title.textContent = `${state.pool} ${this.name.slice(-6)}`;
    const facts = [profile.role, `${requests.running} running`, `${requests.waiting} waiting`];
    if (requests.held) facts.push(`${requests.held} waiting for a transfer of pages`);
    if (state.cost) {
      facts.push(`a step costs ${time(state.cost.base)} + ${(state.cost.per_prefill_token * 1e6).toFixed(0)} µs per prompt token`);
      facts.push(`prediction error ${Math.round(state.step_error * 100)} %`);
    }
    const shares = this.shares(window);
    if (shares.length) facts.push(`time of tenants: ${shares.join(", ")}`);
    for (const tier of state.tiers ?? []) {
      const size = (tier.bytes / 2 ** 30).toFixed(1);
      facts.push(`${tier.name}: ${whole(tier.pages)} pages, ${size} GiB; ${whole(tier.loaded)} loaded, ${whole(tier.missed)} missed`);
    }
    this.facts.textContent = facts.join(" · ");
    this.pages.hidden = !pages; // a key that sees its own requests alone gets none
    if (pages) this.showPages(pages);
    this.timeline.show(this.steps, state.now - window, state.now);
    const newest = this.steps.slice(-15).reverse();
    this.list.replaceChildren(...newest.map((step) => element("li", { value: step.number }, describeStep(step))));
  }

  showPages(pages) {
    const total = PAGE_STATES.reduce((sum, name) => sum + pages[name], 0);
    this.pages.replaceChildren(...PAGE_STATES.map((name) => {
      const part = element("span", { className: name });
      part.style.width = `${(100 * pages[name]) / total}%`;
      return part;
    }));
    const shares = PAGE_STATES.map((name) => `${whole(pages[name])} ${name}`).join(", ");
    this.pages.title = `KV pages: ${shares}`;
    this.pages.setAttribute("aria-label", this.pages.title);
  }
}

const cards = new Map();
const chosen = new Set(); // names of replicas whose steps are shown
const isOpen = new Map(); // by pool, where the viewer has folded or opened it
let figures = { read: -FIGURES_S, tiles: [] };
let isPaused = false;
let pause = 1; // seconds to the next poll: doubled by each failure
let wake = () => {};
const showKey = keyForm(() => wake());

function totals(states, window) {
  const steps = [...cards.values()].flatMap((card) => card.steps.filter((step) => step.started > card.state.now - window));
  const mixed = steps.filter((step) => step.num_decodes && step.chunks.length);
  const count = (name) => states.reduce((sum, state) => sum + state.requests[name], 0);
  const tokens = steps.reduce((sum, step) => sum + step.chunks.reduce((part, chunk) => part + chunk.num_tokens, 0), 0);
  const decodes = steps.reduce((sum, step) => sum + step.num_decodes, 0);
  const beside = quantile(mixed.map((step) => step.seconds), 0.95);
  return [
    ["Replicas", whole(states.length)],
    ["Running", whole(count("running"))],
    ["Waiting", whole(count("waiting"))],
    ["Prompt tokens per second", whole(tokens / window)],
    ["Output tokens per second", steps.some((step) => step.num_decodes === null) ? "–" : whole(decodes / window)],
    ["Steps with chunks and streams, p95", time(beside)],
    ["Longest step", time(steps.length ? Math.max(...steps.map((step) => step.seconds)) : null)],
  ];
}

// Returns the sums of counters over all replicas and ingresses, by name and outcome.
function countersIn(text) {
  const sums = {};
  for (const [, name, labels, value] of text.matchAll(/^(crossdock_slo_\w+_total|crossdock_ingress_requests_refused_total)\{(.*)\} (\S+)$/gm)) {
    const key = `${name} ${/outcome="(\w+)"/.exec(labels)?.[1] ?? ""}`.trim();
    sums[key] = (sums[key] ?? 0) + Number(value);
  }
  return sums;
}

// Reads the model, the version, and what has been promised and kept since the start.
async function readFigures() {
  if (performance.now() / 1000 - figures.read < FIGURES_S) return;
  figures.read = performance.now() / 1000;
  const [models, version, text] = await Promise.all([fetchJson("v1/models"), fetchJson("version"), fetchText("metrics")]);
  get("model").textContent = `${models.data.map((model) => model.id).join(", ")} · version ${version.version} · ${location.host}`;
  const sums = countersIn(text);
  const share = (name) => {
    const met = sums[`${name} met`] ?? 0, every = met + (sums[`${name} missed`] ?? 0);
    return every ? `${((100 * met) / every).toFixed(met === every ? 0 : 1)} %` : "–";
  };
  figures.tiles = [
    ["First tokens in time", share("crossdock_slo_ttft_total")],
    ["Streams in time", share("crossdock_slo_tpot_total")],
    ["Refused (429)", whole(sums["crossdock_ingress_requests_refused_total"] ?? 0)],
  ];
}

function showPools(window) {
  const pools = new Map();
  for (const card of cards.values()) pools.set(card.state.pool, [...(pools.get(card.state.pool) ?? []), card]);
  const shown = [...pools].sort().map(([pool, members]) => {
    const count = (name) => members.reduce((sum, card) => sum + card.state.requests[name], 0);
    const title = element("summary", {}, `${pool}: ${members.length} replica${members.length > 1 ? "s" : ""}, ` +
      `${whole(count("running"))} running, ${whole(count("waiting"))} waiting`);
    const details = element("details", { open: isOpen.get(pool) ?? members.length <= FOLDED }, title);
    title.addEventListener("click", () => isOpen.set(pool, !details.open));
    if (details.open) {
      const head = ["Replica", "Role", "Running", "Waiting", "Steps per second", "Step p99", "Prompt tokens/s", "Output tokens/s", "Pages in use"];
      details.append(element("div", { className: "wide" }, element("table", {},
        element("thead", {}, element("tr", {}, ...head.map((text, at) => element("th", { className: at > 1 ? "number" : "" }, text)))),
        element("tbody", {}, ...members.map((card) => card.row(window))))));
    }
    return details;
  });
  get("pools").replaceChildren(...shown);
}

function showRequests(requests) {
  const rows = requests.slice(0, MOST_REQUESTS).map((request) => {
    const bar = element("div", { className: "bar", title: `${whole(request.num_computed_tokens)} tokens` }, element("span", { className: "done" }));
    const share = Math.min(request.num_computed_tokens / request.num_prompt_tokens, 1);
    bar.firstChild.style.width = `${100 * share}%`;
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `${Math.round(100 * share)} % of ${whole(request.num_prompt_tokens)} tokens`);
    const name = element("button", { type: "button", className: "link", title: `Timeline of ${request.request_id}` }, request.request_id.slice(0, 24));
    name.addEventListener("click", () => showRequest(get("request"), request.request_id));
    const kind = [request.slo_class, request.model].filter(Boolean).join(" · ");
    return row(name, kind, request.state, bar, request.num_chunks, time(request.waiting_s), time(request.first_token_s),
      request.num_output_tokens, time(request.gap_max_s));
  });
  if (requests.length > MOST_REQUESTS) rows.push(row(`and ${requests.length - MOST_REQUESTS} more`));
  if (!rows.length) rows.push(row("none"));
  get("requests").replaceChildren(...rows);
}

async function poll() {
  const query = new URLSearchParams();
  for (const card of cards.values()) if (card.incarnation) query.append("after", `${card.incarnation}:${card.steps.at(-1)?.number ?? 0}`);
  const window = Number(get("window").value);
  try {
    const [replicas, requests] = await Promise.all([fetchJson(`v1/replicas?${query}`), fetchJson("v1/requests")]);
    if (isPaused) return;
    const names = new Set(replicas.data.map((state) => state.replica));
    for (const [name, card] of cards) if (!names.has(name)) { card.root.remove(); cards.delete(name); }
    for (const name of chosen) if (!names.has(name)) chosen.delete(name);
    for (const state of replicas.data) {
      if (!cards.has(state.replica)) {
        cards.set(state.replica, new Card(state.replica));
        get("replicas").append(cards.get(state.replica).root);
      }
      cards.get(state.replica).update(state);
    }
    await readFigures();
    for (const card of cards.values()) card.show(window);
    showPools(window);
    get("none").hidden = cards.size > 0;
    get("totals").replaceChildren(...[...totals(replicas.data, window), ...figures.tiles].map(([label, value]) =>
      element("div", { className: "tile" }, element("b", {}, value), element("span", { className: "faint" }, label))));
    showRequests(requests.data);
    showKey(null);
    get("state").textContent = "live";
    get("state").className = "good";
    pause = 1;
  } catch (error) {
    pause = Math.min(2 * pause, LONGEST_PAUSE_S);
    showKey(error);
    get("state").textContent = `${error.message} Next try in ${pause} s.`;
    get("state").className = "bad";
  }
}

get("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  get("pause").setAttribute("aria-pressed", isPaused);
  get("pause").textContent = isPaused ? "Resume" : "Pause";
  get("state").textContent = isPaused ? "paused" : "loading …";
  get("state").className = "faint";
});
addEventListener("resize", () => cards.forEach((card) => card.timeline.draw()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => cards.forEach((card) => card.timeline.draw()));

document.addEventListener("visibilitychange", () => document.hidden || wake());

for (;;) {
  if (!isPaused && !document.hidden) await poll();
  await new Promise((done) => {
    const timer = setTimeout(done, 1000 * pause);
    wake = () => { clearTimeout(timer); done(); };
  });
}
