// The chat page. State is one list of messages; everything shown is made from it. It survives a reload (in the tab's
// storage), and so does the API key, which is kept nowhere else.
import { render } from "./markdown.js";

const $ = (id) => document.getElementById(id);

// What the sliders set. A slider that was not moved is not sent: the model's own value holds.
const SLIDERS = [
  { field: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05 },
  { field: "top_p", label: "Top p", min: 0.05, max: 1, step: 0.05 },
  { field: "top_k", label: "Top k", min: 1, max: 100, step: 1 },
  { field: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { field: "repetition_penalty", label: "Repetition penalty", min: 0.8, max: 2, step: 0.05 },
  { field: "max_tokens", label: "Most tokens of an answer", min: 1, max: 4096, step: 1 },
];

let messages = load(sessionStorage, "messages", []);
let settings = load(localStorage, "settings", { system: "", seed: "", sliders: {} });
let running = null; // the AbortController of the answer that is being made

// ---- what is kept

function load(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function keep() {
  try {
    sessionStorage.setItem("messages", JSON.stringify(messages));
    localStorage.setItem("settings", JSON.stringify(settings));
  } catch {
    // full or forbidden: the page works without
  }
}

// ---- asking

/** A call of the API. Throws `Refusal` with the server's own words. */
async function call(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server cannot be reached.");
  }
  if (answer.ok) return answer;
  let said = `The server answered ${answer.status}.`;
  try {
    said = (await answer.json()).error.message;
  } catch {
    // no JSON: not from the application itself
  }
  throw new Refusal(said, answer.status, Number(answer.headers.get("Retry-After")) || 0);
}

class Refusal extends Error {
  constructor(message, status = 0, retryAfter = 0) {
    super(message);
    Object.assign(this, { status, retryAfter });
  }
}

/** The events of a stream, as parsed JSON. Throws `Refusal` when it ends without its ending, or with an error. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refusal("The connection was lost before the answer's end.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const data = part.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(event.error.message);
      yield event;
    }
  }
}

function body() {
  const system = settings.system.trim();
  return {
    model: $("model").value,
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...messages.filter((message) => message.text).map((message) => ({ role: message.role, content: message.text })),
    ],
    stream: true,
    stream_options: { include_usage: true },
    ...settings.sliders,
    ...(settings.seed === "" ? {} : { seed: Number(settings.seed) }),
  };
}

/** Asks for the next answer to the conversation, and shows it while it comes. */
async function answer() {
  const asked = JSON.stringify(body());
  const message = { role: "assistant", text: "", thoughts: "", figures: "" };
  messages.push(message);
  running = new AbortController();
  showProblem(null);
  showAll();
  $("status").textContent = "Waiting for the first token …";
  const begun = performance.now();
  let first = null;
  try {
    const { body: stream } = await call("v1/chat/completions", { method: "POST", body: asked, signal: running.signal });
    for await (const event of events(stream)) {
      const delta = event.choices[0]?.delta ?? {};
      message.text += delta.content ?? "";
      message.thoughts += delta.reasoning_content ?? "";
      if (first === null && (delta.content || delta.reasoning_content)) {
        first = performance.now();
        $("status").textContent = "Answering …";
      }
      if (event.choices[0]?.finish_reason === "length") message.ending = "cut at the limit of tokens";
      if (event.usage) message.figures = figures(event.usage.completion_tokens, begun, first ?? performance.now());
      showSoon(message);
    }
    $("status").textContent = "Answer complete.";
  } catch (error) {
    if (error.name === "AbortError") {
      message.ending = "stopped";
      $("status").textContent = "Stopped.";
    } else {
      $("status").textContent = "";
      message.ending = message.text ? "broken off" : "";
      showProblem(error);
    }
  } finally {
    if (!message.text && !message.thoughts) messages = messages.filter((other) => other !== message);
    running = null;
    keep();
    showAll();
  }
}

function figures(tokens, begun, first) {
  const seconds = (performance.now() - first) / 1000;
  const rate = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  return `first token after ${Math.round(first - begun)} ms, ${tokens} tokens${rate}`;
}

function send() {
  const text = $("prompt").value.trim();
  if (running || !text || $("model").disabled) return;
  messages.push({ role: "user", text });
  $("prompt").value = "";
  keep();
  answer();
}

function again() {
  if (running) return;
  if (messages.at(-1)?.role === "assistant") messages.pop();
  if (messages.length) answer();
  else start();
}

// ---- showing

const shown = new Map(); // message -> its parts on the page
let due = null;

function showAll() {
  const log = $("log");
  log.replaceChildren(...messages.map((message) => (shown.get(message) ?? make(message)).article));
  messages.forEach(show);
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("new").disabled = !messages.length && !running;
  log.scrollTop = log.scrollHeight;
}

/** Shows a growing message at the next frame: once per frame, however many tokens came. */
function showSoon(message) {
  due ??= requestAnimationFrame(() => {
    due = null;
    const log = $("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60; // who has scrolled up is reading
    show(message);
    if (follows) log.scrollTop = log.scrollHeight;
  });
}

function make(message) {
  const article = document.createElement("article");
  article.className = message.role;
  const heading = document.createElement("h2");
  heading.textContent = message.role === "user" ? "You" : "Model";
  const inside = document.createElement("div");
  inside.className = "body";
  const below = document.createElement("p");
  below.className = "figures";
  article.append(heading, inside, below);
  const parts = { article, inside, below };
  shown.set(message, parts);
  return parts;
}

function show(message) {
  const parts = shown.get(message);
  if (!parts) return;
  const { article, inside, below } = parts;
  if (message.role === "user") {
    inside.textContent = message.text;
    return;
  }
  render(inside, message.text);
  if (message.thoughts) inside.prepend(thoughts(message));
  const making = running !== null && message === messages.at(-1);
  article.classList.toggle("waiting", making && !message.text);
  article.setAttribute("aria-busy", String(making));
  below.textContent = [message.figures, message.ending].filter(Boolean).join(" · ");
  if (!making && message.text) below.append(copier(message));
}

function thoughts(message) {
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = "Thoughts";
  const text = document.createElement("div");
  render(text, message.thoughts);
  details.append(summary, text);
  details.open = !message.text;
  return details;
}

function copier(message) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(message.text);
      $("status").textContent = "Copied.";
    } catch {
      $("status").textContent = "The browser does not let this page copy.";
    }
  });
  return button;
}

function showProblem(error) {
  $("problem").hidden = error === null;
  if (error === null) return;
  const wait = error.retryAfter ? ` There should be room in ${error.retryAfter} s.` : "";
  $("problem-text").textContent = error.message + wait;
  $("key-form").hidden = error.status !== 401;
  $("retry").hidden = error.status === 401;
  if (error.status === 401) $("key").focus();
}

function showSettings() {
  $("system").value = settings.system;
  $("seed").value = settings.seed;
  for (const { field, min, max } of SLIDERS) {
    const value = settings.sliders[field];
    $(field).value = value ?? (min + max) / 2;
    $(`${field}-value`).textContent = value ?? "the model's own";
    $(field).setAttribute("aria-valuetext", value ?? "the model's own");
  }
}

function makeSliders() {
  for (const { field, label, min, max, step } of SLIDERS) {
    const row = document.createElement("div");
    row.className = "slider";
    const name = document.createElement("label");
    name.htmlFor = field;
    name.textContent = label;
    const value = document.createElement("span");
    value.id = `${field}-value`;
    const input = document.createElement("input");
    Object.assign(input, { type: "range", id: field, min, max, step });
    input.addEventListener("input", () => {
      settings.sliders[field] = Number(input.value);
      keep();
      showSettings();
    });
    row.append(name, value, input);
    $("sliders").append(row);
  }
}

function toggleSettings(hidden) {
  $("settings").hidden = hidden;
  $("settings-toggle").setAttribute("aria-expanded", String(!hidden));
}

const THEMES = { "": "as the system has them", light: "light", dark: "dark" };

function showTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[theme]}`);
  $("theme").title = `Colours: ${THEMES[theme]}`;
}

// ---- beginning

/** Asks which models there are; again with a key, where one is needed. */
async function start() {
  showProblem(null);
  try {
    const { data } = await (await call("v1/models")).json();
    const chosen = settings.model;
    $("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
    $("model").disabled = false;
    $("links").hidden = Boolean(sessionStorage.getItem("key")); // a link takes no key along
    const longest = Math.max(...data.map((model) => model.max_model_len ?? 4096));
    $("max_tokens").max = longest;
  } catch (error) {
    showProblem(error);
  }
}

// Leaving breaks off what is being made; what came so far is there again after a reload.
addEventListener("pagehide", () => {
  if (running) messages.at(-1).ending = "broken off";
  keep();
});

makeSliders();
toggleSettings(matchMedia("(max-width: 50rem)").matches);
showSettings();
showTheme(settings.theme in THEMES ? settings.theme : "");
showAll();

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("prompt").focus();
});
$("retry").addEventListener("click", again);
$("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  shown.clear();
  keep();
  showProblem(null);
  showAll();
  $("status").textContent = "";
  $("prompt").focus();
});
$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value.trim());
  $("key").value = "";
  await start();
  if ($("problem").hidden && messages.at(-1)?.role === "user") answer();
  else if ($("problem").hidden) $("prompt").focus();
});
$("model").addEventListener("change", () => {
  settings.model = $("model").value;
  keep();
});
for (const field of ["system", "seed"]) {
  $(field).addEventListener("input", () => {
    settings[field] = $(field).value;
    keep();
  });
}
$("defaults").addEventListener("click", () => {
  settings = { ...settings, system: "", seed: "", sliders: {} };
  keep();
  showSettings();
});
$("settings-toggle").addEventListener("click", () => {
  toggleSettings(!$("settings").hidden);
});
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  settings.theme = names[(names.indexOf(settings.theme ?? "") + 1) % names.length];
  showTheme(settings.theme);
  keep();
});

await start();
