// The playground: talks to the server that it came from, and to nothing else.
"use strict";

const $ = (id) => document.getElementById(id);
const COLOURS = ["--p0", "--p1", "--p2", "--p3"];
const lanes = { main: $("lane-main"), plain: $("lane-plain") };
let model = null;
let messages = []; // the conversation so far, as the API takes it
let drafters = []; // names in the order in which they were first seen; their places are their colours
let running = null; // aborts what runs

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function number(id) {
  return $(id).value === "" ? null : Number($(id).value);
}

function body(turns, plain) {
  const drafts = number("num_speculative_tokens");
  return {
    model,
    messages: turns,
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    speculation: { enabled: !plain, trace: true, num_speculative_tokens: plain ? null : drafts },
  };
}

// Server-sent events of a response, one object at a time.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice("data: ".length));
    }
  }
}

async function problem(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function say(lane, text, kind) {
  const turn = document.createElement("div");
  turn.className = `turn ${kind}`;
  turn.textContent = text;
  const log = lane.querySelector(".log");
  log.append(turn);
  log.scrollTop = log.scrollHeight;
  return turn;
}

function colour(proposer) {
  if (!drafters.includes(proposer)) {
    drafters.push(proposer);
    legend();
  }
  return `var(${COLOURS[drafters.indexOf(proposer) % COLOURS.length]})`;
}

function legend() {
  const items = ["target", ...drafters].map((name, place) => {
    const item = document.createElement("li");
    const sample = document.createElement("span");
    sample.className = place ? "token drafted" : "token";
    if (place) sample.style.setProperty("--who", colour(name));
    sample.textContent = place ? name : "the model itself";
    item.append(sample);
    return item;
  });
  $("legend").replaceChildren(...items);
}

function token(entry) {
  const span = document.createElement("span");
  const drafted = entry.proposer !== "target";
  span.className = drafted ? "token drafted" : "token";
  span.textContent = entry.text;
  span.title = `${entry.proposer}, token ${entry.token_id}`;
  if (drafted) span.style.setProperty("--who", colour(entry.proposer));
  return span;
}

function show(lane, { tokens, forwards, seconds }) {
  lane.querySelector(".tau").textContent = forwards ? (tokens / forwards).toFixed(2) : "–";
  lane.querySelector(".speed").textContent = seconds > 0 ? (tokens / seconds).toFixed(1) : "–";
  lane.querySelector(".count").textContent = tokens;
}

function showDepths(rates) {
  const rows = rates.map((rate, index) => {
    const row = document.createElement("li");
    const bar = document.createElement("span");
    const fill = document.createElement("i");
    bar.className = "bar";
    fill.style.width = `${Math.round(100 * rate)}%`;
    bar.append(fill);
    row.append(String(index + 1), bar, `${Math.round(100 * rate)}%`);
    return row;
  });
  $("depths").replaceChildren(...rows);
}

// Runs one answer in a lane and returns its text.
async function answer(lane, turns, plain, signal) {
  const start = performance.now();
  const turn = say(lane, "", "assistant");
  const seen = { tokens: 0, forwards: 0, seconds: 0 };
  let first = null;
  let text = "";
  const request = { method: "POST", headers: headers(), body: JSON.stringify(body(turns, plain)), signal };
  const response = await fetch("v1/chat/completions", request);
  if (!response.ok) throw new Error(await problem(response));
  const log = lane.querySelector(".log");
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) {
      seen.forwards = event.usage.speculation.num_forwards;
      if (!plain) showDepths(event.usage.speculation.acceptance_by_depth);
    }
    for (const choice of event.choices) {
      const trace = choice.trace || [];
      text += choice.delta.content || "";
      turn.append(...trace.map(token));
      seen.tokens += trace.length;
      // A forward gives the model's own token last; an answer may end among the drafted ones.
      seen.forwards += trace.filter((entry) => entry.proposer === "target").length;
      if (trace.length && first === null) first = performance.now();
    }
    seen.seconds = (performance.now() - (first ?? start)) / 1000;
    if (event.choices.length) log.scrollTop = log.scrollHeight;
    show(lane, seen);
  }
  return text;
}

function conversation() {
  const system = $("system").value.trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...messages];
}

async function ask(race) {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  running = new AbortController();
  busy(true);
  lanes.plain.hidden = !race;
  messages.push({ role: "user", content: text });
  $("prompt").value = "";
  const turns = conversation();
  const shown = race ? [lanes.main, lanes.plain] : [lanes.main];
  for (const lane of shown) say(lane, text, "user");
  try {
    const runs = [];
    for (const lane of shown) {
      const started = performance.now(); // one after the other: in one batch each would pay for the other
      const said = await answer(lane, turns, lane === lanes.plain, running.signal);
      runs.push({ said, seconds: (performance.now() - started) / 1000 });
    }
    messages.push({ role: "assistant", content: runs[0].said });
    $("status").textContent = race ? verdict(...runs) : "";
  } catch (error) {
    running.abort();
    messages.pop();
    const stopped = error.name === "AbortError";
    $("status").textContent = stopped ? "Stopped." : "";
    if (!stopped) say(lanes.main, error.message, "error");
  } finally {
    running = null;
    busy(false);
    $("prompt").focus();
    gauges();
  }
}

function verdict(speculative, plain) {
  const ratio = (plain.seconds / speculative.seconds).toFixed(2);
  const times = `Speculative ${speculative.seconds.toFixed(2)} s, plain ${plain.seconds.toFixed(2)} s`;
  const same = speculative.said === plain.said;
  return `${times}: ${ratio} times as fast. The two texts ${same ? "are the same" : "differ"}.`;
}

function busy(is) {
  $("send").disabled = $("race").disabled = is;
  if (is) $("status").textContent = "Running. Esc stops.";
}

function clear() {
  running?.abort();
  messages = [];
  for (const lane of Object.values(lanes)) lane.querySelector(".log").replaceChildren();
  lanes.plain.hidden = true;
  showDepths([]);
  $("status").textContent = "";
}

// The gauges come from the metrics that Prometheus reads.
async function gauges() {
  try {
    const response = await fetch("metrics");
    if (!response.ok) throw new Error(String(response.status));
    const lines = (await response.text()).split("\n");
    const read = (name) => Number(lines.find((line) => line.startsWith(`specdec_${name} `))?.split(" ")[1] ?? NaN);
    const used = read("kv_cache_usage_ratio");
    $("cache").value = used;
    $("cache-text").textContent = `${(100 * used).toFixed(0)}%`;
    $("running").textContent = read("num_requests_running");
    $("waiting").textContent = read("num_requests_waiting");
  } catch {
    $("cache-text").textContent = $("running").textContent = $("waiting").textContent = "–";
  }
}

async function describe() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) {
    $("model").textContent = response.status === 401 ? "Enter the API key under Parameters." : await problem(response);
    return;
  }
  const { id, drafter, max_model_len: longest } = (await response.json()).data[0];
  model = id;
  $("model").textContent = `${id}, drafter ${drafter}, context ${longest.toLocaleString("en")}`;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(false);
});
$("race").addEventListener("click", () => ask(true));
$("clear").addEventListener("click", clear);
$("key").addEventListener("change", describe);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask(event.ctrlKey || event.metaKey);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
legend();
describe();
gauges();
setInterval(gauges, 1000);
