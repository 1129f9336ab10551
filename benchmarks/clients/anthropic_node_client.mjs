// @anthropic-ai/sdk for Node: messages, tools, and their errors.

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import {
  FOUND_BOTH, HI, KEY, MODEL, NO_PICTURE, PICTURES, PICTURE_LIMITS, STORY, TWO_CITIES, URL, WEATHER, equal, getWeather,
  refused, run,
} from "./cases.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const seeing = new Anthropic({ baseURL: PICTURES.url, apiKey: KEY, maxRetries: 0 });
const wrong = new Anthropic({ baseURL: URL, apiKey: "wrong", maxRetries: 0 });
const fields = { model: MODEL, max_tokens: 900, messages: HI };
const tool = betaZodTool({
  name: "get_weather", description: "The weather in a city", inputSchema: z.object({ city: z.string() }), run: getWeather,
});
const asked = { ...fields, messages: [{ role: "user", content: TWO_CITIES }], tools: [tool] };
const image = (url) => ({ type: "image", source: { type: "base64", media_type: "image/png", data: url.split(",")[1] } });

await run("anthropic (Node)", "@anthropic-ai/sdk", {
  "chat": async () => {
    const answer = await client.messages.create(fields);
    equal(answer.content.map((block) => block.type), ["thinking", "text"]);
    equal(answer.content[1].text, STORY);
  },
  "chat, streamed": async () => {
    const final = await client.messages.stream(fields).finalMessage();
    equal([final.content[1].text, final.stop_reason], [STORY, "end_turn"]);
  },
  "tool runner, two parallel calls": async () => {
    const final = await client.beta.messages.toolRunner(asked);
    equal(final.content.at(-1).text, FOUND_BOTH);
  },
  "the same, streamed": async () => {
    const runner = client.beta.messages.toolRunner({ ...asked, stream: true });
    equal((await runner.runUntilDone()).content.at(-1).text, FOUND_BOTH);
  },
  "structured output": async () => {
    const schema = z.object({ city: z.string(), degrees: z.number().int() });
    const answer = await client.messages.parse({ ...fields, output_config: { format: zodOutputFormat(schema) } });
    equal(answer.parsed_output, WEATHER);
  },
  "two pictures": async () => {
    const [first, second] = PICTURES.images.map(image);
    const messages = [{ role: "user", content: [first, { type: "text", text: PICTURES.between }, second] }];
    const final = await seeing.messages.stream({ model: MODEL, messages, ...PICTURE_LIMITS }).finalMessage();
    equal(final.content.at(-1).text, PICTURES.text);
    equal(final.usage.input_tokens, PICTURES.prompt_tokens);
  },
  "picture that is none": async () => {
    const messages = [{ role: "user", content: [{ type: "text", text: "Look:" }, image(NO_PICTURE)] }];
    await refused(seeing.messages.create({ model: MODEL, messages, ...PICTURE_LIMITS }), 400, "messages[0].content[1]");
  },
  "errors 401, 400, 404": async () => {
    await refused(wrong.messages.create(fields), 401);
    await refused(client.messages.create({ ...fields, max_tokens: 0 }), 400, "max_tokens");
    await refused(client.messages.create({ ...fields, model: "other" }), 404, "other");
  },
});
