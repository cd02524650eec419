// A chat, a stream and a bad request through the npm `openai` client. Usage: node chat.mjs <base URL> <model>
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];

const whole = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 16 });
const stream = await client.chat.completions.create({
  model,
  messages,
  temperature: 0,
  max_tokens: 16,
  stream: true,
  stream_options: { include_usage: true },
});
let streamed = "";
let usage = null;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
let refused = null;
try {
  await client.chat.completions.create({ model, messages, temperature: 9 });
} catch (error) {
  refused = { name: error.constructor.name, status: error.status, param: error.param };
}
const response = await client.responses.create({ model, input: messages[0].content, temperature: 0, max_output_tokens: 16 });
console.log(JSON.stringify({ whole: whole.choices[0].message.content, streamed, usage, refused, response: response.output_text }));
