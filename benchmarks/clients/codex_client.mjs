// Codex, without a terminal: an answer, and a task for which it runs a command.

import assert from "node:assert";
import { spawnSync } from "node:child_process";
import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { FOUND, KEY, MODEL, STORY, URL, run } from "./cases.mjs";

const program = join(import.meta.dirname, "node_modules/.bin/codex");
const SETTINGS = [
  `model="${MODEL}"`,
  'model_provider="crossdock"',
  'model_providers.crossdock.name="Crossdock"',
  `model_providers.crossdock.base_url="${URL}/v1"`,
  'model_providers.crossdock.env_key="CODEX_KEY"',
  'model_providers.crossdock.wire_api="responses"',
  "model_providers.crossdock.request_max_retries=0",
  "model_providers.crossdock.stream_max_retries=0",
  'web_search="disabled"', // a tool that OpenAI's servers would run
];

/** Run Codex in an empty folder with a home of its own. Returns what it prints. */
function codex(prompt, key) {
  const home = mkdtempSync(join(tmpdir(), "codex-"));
  const env = { PATH: process.env.PATH, HOME: home, CODEX_HOME: home, CODEX_KEY: key };
  const settings = SETTINGS.flatMap((setting) => ["-c", setting]);
  // Its own sandbox needs rights that containers do not have.
  const args = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ...settings, prompt];
  const found = spawnSync(program, args, { cwd: home, env, input: "", encoding: "utf8", timeout: 60_000 });
  return found.stdout + found.stderr;
}

await run("Codex", "@openai/codex", {
  "answer": () => {
    const printed = codex("Hi", KEY);
    assert.ok(printed.includes(STORY), printed.slice(-600));
  },
  "runs a command": () => {
    const printed = codex("Weather in Paris?", KEY);
    assert.ok(printed.includes(FOUND.slice(0, 14)) && printed.includes("21 degrees in Paris"), printed.slice(-600));
  },
  "error 401": () => {
    const printed = codex("Hi", "wrong");
    assert.match(printed, /401/, printed.slice(-600));
  },
});
