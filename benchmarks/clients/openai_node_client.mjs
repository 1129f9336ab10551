// openai for Node: chats, responses, and their errors.

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  FOUND_BOTH, HI, KEY, MODEL, NO_PICTURE, PARAMETERS, PICTURES, PICTURE_LIMITS, STORY, TWO_CITIES, URL, WEATHER, equal,
  getWeather, refused, run,
} from "./cases.mjs";

const at = { baseURL: `${URL}/v1`, maxRetries: 0 };
const client = new OpenAI({ ...at, apiKey: KEY });
const wrong = new OpenAI({ ...at, apiKey: "wrong" });
const seeing = new OpenAI({ ...at, baseURL: `${PICTURES.url}/v1`, apiKey: KEY });
const weather = z.object({ city: z.string(), degrees: z.number().int() });
const tool = { type: "function", name: "get_weather", parameters: PARAMETERS, strict: true };

await run("openai (Node)", "openai", {
  "chat": async () => {
    const answer = await client.chat.completions.create({ model: MODEL, messages: HI });
    equal(answer.choices[0].message.content, STORY);
  },
  "chat, streamed": async () => {
    const final = await client.chat.completions.stream({ model: MODEL, messages: HI }).finalContent();
    equal(final, STORY);
  },
  "chat, tool runner, two parallel calls": async () => {
    const running = client.chat.completions.runTools({
      model: MODEL,
      messages: [{ role: "user", content: TWO_CITIES }],
      tools: [{
        type: "function",
        function: { name: "get_weather", parameters: PARAMETERS, function: getWeather, parse: JSON.parse },
      }],
    });
    equal(await running.finalContent(), FOUND_BOTH);
  },
  "chat, the same, streamed": async () => {
    const running = client.chat.completions.runTools({
      model: MODEL,
      stream: true,
      messages: [{ role: "user", content: TWO_CITIES }],
      tools: [{
        type: "function",
        function: { name: "get_weather", parameters: PARAMETERS, function: getWeather, parse: JSON.parse },
      }],
    });
    equal(await running.finalContent(), FOUND_BOTH);
  },
  "chat, structured output": async () => {
    const answer = await client.chat.completions.parse({
      model: MODEL, messages: HI, response_format: zodResponseFormat(weather, "weather"),
    });
    equal(answer.choices[0].message.parsed, WEATHER);
  },
  "response, streamed": async () => {
    const final = await client.responses.stream({ model: MODEL, input: "Hi" }).finalResponse();
    equal(final.output_text, STORY);
  },
  "response, two parallel calls": async () => {
    const input = [{ role: "user", content: TWO_CITIES }];
    let answer;
    for (let turn = 0; turn < 3; turn++) {
      answer = await client.responses.create({ model: MODEL, input, tools: [tool], store: false });
      input.push(...answer.output);
      const calls = answer.output.filter((item) => item.type === "function_call");
      if (!calls.length) break;
      for (const call of calls) {
        const output = getWeather(JSON.parse(call.arguments));
        input.push({ type: "function_call_output", call_id: call.call_id, output });
      }
    }
    equal(answer.output_text, FOUND_BOTH);
  },
  "response, structured output": async () => {
    const answer = await client.responses.parse({
      model: MODEL, input: "Hi", text: { format: zodTextFormat(weather, "weather") },
    });
    equal(answer.output_parsed, WEATHER);
  },
  "embeddings": async () => {
    const input = ["a text", "another text", "a text"];
    const answer = await client.embeddings.create({ model: MODEL, input });  // asks for base64, and decodes it
    const [first, second, third] = answer.data.map((one) => one.embedding);
    equal(first, third);
    equal(first.length, 4);
    equal(first.every((number, i) => number === second[i]), false);
    equal(Math.abs(first.reduce((sum, number) => sum + number * number, 0) - 1) < 1e-5, true);
    await refused(client.embeddings.create({ model: MODEL, input: [] }), 400, "input");
  },
  "chat, two pictures": async () => {
    const [first, second] = PICTURES.images.map((url) => ({ type: "image_url", image_url: { url } }));
    const messages = [{ role: "user", content: [first, { type: "text", text: PICTURES.between }, second] }];
    const answer = await seeing.chat.completions.create({ model: MODEL, messages, ...PICTURE_LIMITS });
    equal(answer.choices[0].message.content, PICTURES.text);
    equal(answer.usage.prompt_tokens, PICTURES.prompt_tokens);
    const streamed = await seeing.chat.completions.stream({ model: MODEL, messages, ...PICTURE_LIMITS }).finalContent();
    equal(streamed, PICTURES.text);
  },
  "response, two pictures": async () => {
    const [first, second] = PICTURES.images.map((url) => ({ type: "input_image", image_url: url, detail: "auto" }));
    const input = [{ role: "user", content: [first, { type: "input_text", text: PICTURES.between }, second] }];
    const limits = { max_output_tokens: PICTURES.num_tokens, temperature: 0 };
    const final = await seeing.responses.stream({ model: MODEL, input, ...limits }).finalResponse();
    equal(final.output_text, PICTURES.text);
    equal(final.usage.input_tokens, PICTURES.prompt_tokens);
  },
  "picture that is none": async () => {
    const content = [{ type: "text", text: "Look:" }, { type: "image_url", image_url: { url: NO_PICTURE } }];
    const messages = [{ role: "user", content }];
    await refused(seeing.chat.completions.create({ model: MODEL, messages }), 400, "messages[0].content[1]");
    const input = [{ role: "user", content: [{ type: "input_image", image_url: NO_PICTURE, detail: "auto" }] }];
    await refused(seeing.responses.create({ model: MODEL, input }), 400, "input[0].content[0]");
  },
  "errors 401, 400, 404": async () => {
    await refused(wrong.responses.create({ model: MODEL, input: "Hi" }), 401);
    await refused(client.chat.completions.create({ model: MODEL, messages: HI, top_p: 7 }), 400, "top_p");
    await refused(client.responses.create({ model: "other", input: "Hi" }), 404, "other");
  },
});
