// Calls to the API, with the viewer's key where one is required. The key stays in this tab.

const base = new URL("..", import.meta.url);
const KEY = "crossdock-key";
const TIMEOUT_MS = 30000; // for an answer; a busy server takes seconds

export class KeyNeeded extends Error {}

export const fetchJson = async (path) => (await answerOf(path)).json();
export const fetchText = async (path) => (await answerOf(path)).text();

async function answerOf(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(new URL(path, base), { headers, signal: AbortSignal.timeout(TIMEOUT_MS) }).catch(() => {
    throw new Error("The server does not answer.");
  });
  if (answer.status === 401) throw new KeyNeeded(key ? "This key is not accepted." : "This server requires an API key.");
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    throw new Error(body?.error?.message ?? `The server answered ${answer.status}.`);
  }
  return answer;
}

// Adds a hidden form for a key. Returns a function that shows the form if an error says that a key is missing. `retry` is
// called with a new key in place.
export function keyForm(retry) {
  const reason = element("p");
  const input = element("input", { name: "key", type: "password", autocomplete: "off", required: true });
  const form = element("form", { id: "key", className: "card", hidden: true }, reason,
    element("label", {}, "API key ", input), " ", element("button", {}, "Show"));
  document.querySelector("main").prepend(form);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, input.value.trim());
    input.value = "";
    form.hidden = true;
    retry();
  });
  return (error) => {
    form.hidden = !(error instanceof KeyNeeded);
    reason.textContent = form.hidden ? "" : error.message;
  };
}

export function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

// Returns a table row; numbers are aligned right.
export function row(...cells) {
  return element("tr", {}, ...cells.map((cell) =>
    cell instanceof Node ? element("td", {}, cell)
      : element("td", { className: typeof cell === "number" || /^([\d.,]+( ?(ms|s|%))?|–|not reached)$/.test(cell) ? "number" : "" }, `${cell}`)));
}

export const whole = (number) => Math.round(number).toLocaleString("en");

export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  return seconds < 100 ? `${seconds.toFixed(seconds < 9.95 ? 2 : 1)} s` : `${whole(seconds)} s`;
}

export function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}
