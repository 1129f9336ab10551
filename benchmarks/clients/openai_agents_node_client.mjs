// @openai/agents for Node: runs with tools over responses and over chats.

import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run as runAgent, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { FOUND_BOTH, KEY, MODEL, STORY, TWO_CITIES, URL, WEATHER, equal, getWeather, refused, run } from "./cases.mjs";

setTracingDisabled(true);
const weather = tool({
  name: "get_weather",
  description: "The weather in a city",
  parameters: z.object({ city: z.string() }),
  execute: getWeather,
});
const cases = {};
for (const [name, Model] of [["responses", OpenAIResponsesModel], ["chats", OpenAIChatCompletionsModel]]) {
  const model = (apiKey = KEY) => new Model(new OpenAI({ baseURL: `${URL}/v1`, apiKey, maxRetries: 0 }), MODEL);
  Object.assign(cases, {
    [`${name}: chat`]: async () => {
      equal((await runAgent(new Agent({ name: "A", model: model() }), "Hi")).finalOutput, STORY);
    },
    [`${name}: two parallel calls`]: async () => {
      const agent = new Agent({ name: "A", model: model(), tools: [weather] });
      equal((await runAgent(agent, TWO_CITIES)).finalOutput, FOUND_BOTH);
    },
    [`${name}: the same, streamed`]: async () => {
      const agent = new Agent({ name: "A", model: model(), tools: [weather] });
      const result = await runAgent(agent, TWO_CITIES, { stream: true });
      await result.completed;
      equal(result.finalOutput, FOUND_BOTH);
    },
    [`${name}: structured output`]: async () => {
      const outputType = z.object({ city: z.string(), degrees: z.number().int() });
      equal((await runAgent(new Agent({ name: "A", model: model(), outputType }), "Hi")).finalOutput, WEATHER);
    },
    [`${name}: error 401`]: async () => {
      await refused(runAgent(new Agent({ name: "A", model: model("wrong") }), "Hi"), 401);
    },
  });
}
await run("openai-agents (Node)", "@openai/agents", cases);
