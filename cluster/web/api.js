// Asks the API, with the viewer's key where keys are asked for. The key stays in this tab.

const base = new URL("..", import.meta.url);
const KEY = "crossdock-key";

export class KeyNeeded extends Error {}

export async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(new URL(path, base), { ...options, headers });
  if (answer.status === 401) throw new KeyNeeded(key ? "This key is not accepted." : "This server asks for an API key.");
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    throw new Error(told?.error?.message ?? `The server answered ${answer.status}.`);
  }
  return answer.json();
}

// Shows the form for a key while one is missing. `again` is called when the viewer has given one.
export function keyForm(again) {
  const form = document.getElementById("key");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, form.elements.key.value.trim());
    form.elements.key.value = "";
    form.hidden = true;
    again();
  });
  return (error) => {
    form.hidden = !(error instanceof KeyNeeded);
    form.querySelector("p").textContent = form.hidden ? "" : error.message;
  };
}

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// A row of cells; numbers stand right.
export function row(...cells) {
  return element("tr", {}, ...cells.map((cell) =>
    cell instanceof Node ? element("td", {}, cell)
      : element("td", { className: typeof cell === "number" || /^([\d.,]+( ?(ms|s|%))?|–|later)$/.test(cell) ? "number" : "" }, `${cell}`)));
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
