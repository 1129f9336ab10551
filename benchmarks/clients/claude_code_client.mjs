// Claude Code, without a terminal: an answer, and a task for which it runs a command.

import assert from "node:assert";
import { spawnSync } from "node:child_process";
import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { FOUND, KEY, MODEL, STORY, URL, run } from "./cases.mjs";

const program = join(import.meta.dirname, "node_modules/@anthropic-ai/claude-code-linux-x64/claude");

/** Run Claude Code in an empty folder with a home of its own. Returns what it prints. */
function claude(prompt, key, ...options) {
  const home = mkdtempSync(join(tmpdir(), "claude-"));
  const env = {
    PATH: process.env.PATH,
    HOME: home,
    CLAUDE_CODE_TMPDIR: home,
    ANTHROPIC_BASE_URL: URL,
    ANTHROPIC_API_KEY: key,
    ANTHROPIC_MODEL: MODEL,
    ANTHROPIC_SMALL_FAST_MODEL: MODEL,
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    CLAUDE_CODE_MAX_RETRIES: "0",
    DISABLE_AUTOUPDATER: "1",
  };
  const args = ["-p", prompt, "--output-format", "text", ...options];
  const found = spawnSync(program, args, { cwd: home, env, input: "", encoding: "utf8", timeout: 60_000 });
  return found.stdout + found.stderr;
}

await run("Claude Code", "@anthropic-ai/claude-code", {
  "answer": () => assert.equal(claude("Hi", KEY).trim(), STORY),
  "runs a command": () => assert.ok(claude("Weather in Paris?", KEY, "--allowedTools", "Bash").includes(FOUND)),
  "error 401": () => assert.match(claude("Hi", "wrong"), /401|API key|authenticat/i),
});
