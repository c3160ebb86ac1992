/* The server: OpenAI's API, and what forkpoint adds to it. */

const LOADING = "loading"; // the code of the error 503 while the model loads
const RETRY_MS = 1000;

export class ServerError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export async function request(path, apiKey, options = {}) {
  const headers = { ...options.headers };
  if (apiKey) headers.Authorization = "Bearer " + apiKey;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const text = await response.text();
  let message = text.slice(0, 300),
    code = null;
  try {
    const body = JSON.parse(text);
    message = body.error?.message ?? body.detail ?? message;
    code = body.error?.code;
  } catch {
    /* not JSON: show it as it is */
  }
  if (response.status === 401)
    message = "The server wants an API key, and " + (apiKey ? "refused this one." : "none is set.");
  throw new ServerError(message || `The server answered ${response.status}.`, response.status, code);
}

/* The response of a server whose model is ready. `waits` is called while it loads. */
async function requestWhenLoaded(path, apiKey, options, waits) {
  for (;;)
    try {
      return await request(path, apiKey, options);
    } catch (error) {
      if (error.status !== 503 || error.code !== LOADING) throw error;
      waits();
      await pause(RETRY_MS, options.signal);
    }
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let buffer = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer = (buffer + value).replaceAll("\r\n", "\n");
    let start = 0;
    for (let end; (end = buffer.indexOf("\n\n", start)) >= 0; start = end + 2) {
      const lines = buffer
        .slice(start, end)
        .split("\n")
        .filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
    }
    buffer = buffer.slice(start);
  }
}

/* The fields of a request beside its messages. */
export function requestFields(model, settings) {
  const fields = { model, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const names = { temperature: "temperature", top_p: "topP", top_k: "topK", seed: "seed", max_tokens: "maxTokens" };
  for (const [name, setting] of Object.entries(names))
    if (settings[setting] !== null) fields[name] = settings[setting];
  if (settings.stop.length) fields.stop = settings.stop;
  return fields;
}

/* Writes the answer into `node` as it comes; `changed` is called after each piece. */
export async function streamAnswer(node, messages, apiKey, signal, changed) {
  const started = performance.now();
  let first = null,
    last = null,
    ended = false;
  try {
    const options = {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...node.sent, messages }),
      signal,
    };
    const response = await requestWhenLoaded("v1/chat/completions", apiKey, options, () => {
      node.isLoading = true;
      changed();
    });
    delete node.isLoading;
    for await (const data of events(response)) {
      if (data === "[DONE]") {
        ended = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message ?? String(chunk.error));
      node.usage = chunk.usage ?? node.usage;
      node.cache = chunk.cache ?? node.cache;
      node.speculation = chunk.speculation ?? node.speculation;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const text = choice.delta?.content ?? "",
        thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
      node.finish = choice.finish_reason ?? node.finish;
      for (const call of choice.delta?.tool_calls ?? []) addCall(node, call);
      if (!text && !thought && !choice.delta?.tool_calls) continue;
      last = performance.now();
      first ??= last;
      if (text && node.reasoning && !node.thoughtSeconds) node.thoughtSeconds = (last - first) / 1000;
      node.content += text;
      node.reasoning += thought;
      changed();
    }
    if (!ended) throw new ServerError("The answer broke off. The server may have stopped.");
  } finally {
    delete node.isLoading;
    if (first !== null)
      node.figures = { firstTokenSeconds: (first - started) / 1000, decodeSeconds: (last - first) / 1000 };
  }
}

/* Tool calls come in pieces; each piece names the call that it belongs to. */
function addCall(node, { index, function: part }) {
  node.toolCalls ??= [];
  const call = (node.toolCalls[index ?? 0] ??= { name: "", arguments: "" });
  call.name += part?.name ?? "";
  call.arguments += part?.arguments ?? "";
}
