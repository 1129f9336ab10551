// Vercel's AI SDK: its providers for OpenAI's responses and chats, for compatible servers, and for Anthropic.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { FOUND_BOTH, KEY, MODEL, STORY, TWO_CITIES, URL, WEATHER, equal, getWeather, refused, run } from "./cases.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const tools = {
  get_weather: tool({ inputSchema: z.object({ city: z.string() }), execute: getWeather }),
};
const schema = z.object({ city: z.string(), degrees: z.number().int() });
const providers = {
  "responses": (apiKey) => createOpenAI({ baseURL: `${URL}/v1`, apiKey }).responses(MODEL),
  "chats": (apiKey) => createOpenAI({ baseURL: `${URL}/v1`, apiKey }).chat(MODEL),
  "compatible": (apiKey) =>
    createOpenAICompatible({ name: "c", baseURL: `${URL}/v1`, apiKey, supportsStructuredOutputs: true })(MODEL),
  "messages": (apiKey) => createAnthropic({ baseURL: `${URL}/v1`, apiKey })(MODEL),
};

const cases = {};
for (const [name, provider] of Object.entries(providers)) {
  const base = { model: provider(KEY), maxRetries: 0 };
  Object.assign(cases, {
    [`${name}: chat`]: async () => {
      const { text, reasoningText } = await generateText({ ...base, prompt: "Hi" });
      equal(text, STORY);
      // For OpenAI's own, the SDK reads no reasoning in chats, and summaries alone in responses.
      if (name === "compatible" || name === "messages") equal(reasoningText.trim(), "The user wants an answer.");
    },
    [`${name}: streamed`]: async () => {
      let found = "";
      for await (const part of streamText({ ...base, prompt: "Hi" }).textStream) found += part;
      equal(found, STORY);
    },
    [`${name}: two parallel calls`]: async () => {
      const { text } = await generateText({ ...base, prompt: TWO_CITIES, tools, stopWhen: stepCountIs(3) });
      equal(text, FOUND_BOTH);
    },
    [`${name}: the same, streamed`]: async () => {
      const { steps } = streamText({ ...base, prompt: TWO_CITIES, tools, stopWhen: stepCountIs(3) });
      equal((await steps).at(-1).text, FOUND_BOTH);
    },
    [`${name}: forced call`]: async () => {
      const { toolCalls } = await generateText({ ...base, prompt: TWO_CITIES, tools, toolChoice: "required" });
      equal(toolCalls[0].input, { city: "Paris" });
    },
    [`${name}: structured output`]: async () => {
      const { output } = await generateText({ ...base, prompt: "Hi", output: Output.object({ schema }) });
      equal(output, WEATHER);
    },
    [`${name}: errors 401, 400`]: async () => {
      await refused(generateText({ ...base, model: provider("wrong"), prompt: "Hi" }), 401);
      await refused(generateText({ ...base, prompt: "Hi", topP: 7 }), 400, "top_p");
    },
  });
}
await run("Vercel AI SDK", "ai", cases);
