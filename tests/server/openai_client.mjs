// The openai npm package against a server: node openai_client.mjs FOLDER_OF_NODE_MODULES URL
import { createRequire } from "node:module";
import assert from "node:assert/strict";

const [folder, url] = process.argv.slice(2);
const { OpenAI, BadRequestError, NotFoundError } = createRequire(`${folder}/x.js`)("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const greedy = { model: "tiny", temperature: 0, max_tokens: 8 };
const messages = [{ role: "user", content: "What is said twice is the same, ".repeat(5) }];

const models = await client.models.list();
assert.equal(models.data[0].id, "tiny");

const whole = await client.chat.completions.create({ ...greedy, messages });
const text = whole.choices[0].message.content;
assert.equal(whole.usage.completion_tokens, 8);

let streamed = "";
let usage;
let cache;
const stream = await client.chat.completions.create({
  ...greedy, messages, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
  cache = chunk.cache ?? cache;
}
assert.equal(streamed, text);
assert.equal(usage.completion_tokens, 8);
assert.ok(usage.prompt_tokens_details.cached_tokens >= 64);
assert.equal(cache.num_tokens, usage.prompt_tokens_details.cached_tokens);

const runner = client.chat.completions.stream({ ...greedy, messages });
assert.equal((await runner.finalMessage()).content, text);

const completions = await client.completions.create({ ...greedy, prompt: ["one", "two"], logprobs: 1 });
assert.deepEqual(completions.choices.map((choice) => choice.index), [0, 1]);
assert.equal(completions.choices[1].logprobs.tokens.length, 8);
let second = "";
for await (const chunk of await client.completions.create({ ...greedy, prompt: "two", stream: true })) {
  second += chunk.choices[0]?.text ?? "";
}
assert.equal(second, completions.choices[1].text);

await assert.rejects(client.chat.completions.create({ ...greedy, messages, top_p: 7 }), BadRequestError);
await assert.rejects(client.chat.completions.create({ ...greedy, messages, model: "none" }), NotFoundError);

const left = new AbortController();
const leaving = await client.chat.completions.create(
  { ...greedy, messages, max_tokens: 300, stream: true }, { signal: left.signal },
);
for await (const chunk of leaving) {
  left.abort();
  if (chunk.usage) throw new Error("the stream went on to its end");
}
console.log("all good");
