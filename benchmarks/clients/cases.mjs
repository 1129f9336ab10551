// Runs the cases of one client and prints their outcomes.

import assert from "node:assert";
import { readFileSync } from "node:fs";

export const { URL, KEY } = process.env;
export const MODEL = "tiny";
export const HI = [{ role: "user", content: "Hi" }];
export const STORY = "The quick brown fox 🙂 jumps over the lazy dog";
export const FOUND = "The tools say: 21 degrees in Paris";
export const FOUND_BOTH = `${FOUND}; 21 degrees in Rome`;
export const TWO_CITIES = "What is the weather in Paris and in Rome?";
export const WEATHER = { city: "Paris", degrees: 21 };
export const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const getWeather = ({ city }) => `21 degrees in ${city}`;
export const PICTURES = JSON.parse(process.env.PICTURES);  // a second server, what to send it, and transformers' answer
export const PICTURE_LIMITS = { max_tokens: PICTURES.num_tokens, temperature: 0 };
export const NO_PICTURE = "data:image/png;base64,aGVsbG8=";
export const equal = assert.deepEqual;

/** Run every case, which throws where it fails, and print the outcomes. */
export async function run(client, name, cases) {
  const file = new globalThis.URL(`node_modules/${name}/package.json`, import.meta.url);
  const { version } = JSON.parse(readFileSync(file));
  for (const [title, body] of Object.entries(cases)) {
    let failure = "";
    try {
      await body();
    } catch (error) {
      failure = `${error.name}: ${error.message}`;
    }
    console.log(JSON.stringify({ client, version, case: title, failure }));
  }
}

/** Check that a promise is rejected with this HTTP status, and that the message has this text. */
export async function refused(promise, status, text = "") {
  const error = await promise.then(() => assert.fail("nothing was thrown"), (thrown) => thrown);
  assert.equal(error.status ?? error.statusCode, status, `${error}`);
  assert.ok(error.message.includes(text), error.message);
}
