// Talks to a model that generates text: by /v1/chat/completions if the server has it, else by generate_stream.
// Text from the server is only ever set as text.
const at = id => document.getElementById(id);
const key = () => sessionStorage.getItem("headrace-key") || "";
// The models by name. A model of generate_stream has the names of its inputs.
const models = new Map();
// What was said, as messages of OpenAI; and what stops the answer that is being written.
let said = [], stopper = null;

async function ask(path, body, signal) {
  const headers = { ...(key() ? { Authorization: `Bearer ${key()}` } : {}), ...(body ? { "Content-Type": "application/json" } : {}) };
  const reply = await fetch(path, { method: body === undefined ? "GET" : "POST", body, headers, signal, cache: "no-store" });
  if (reply.ok) return reply;
  const text = await reply.text();
  throw Object.assign(new Error(errorIn(text) || `HTTP ${reply.status}`), { status: reply.status });
}
// The text of an error, in OpenAI's form or in Triton's.
function errorIn(text) {
  try {
    const { error } = JSON.parse(text);
    return typeof error === "string" ? error : error && error.message;
  } catch { return text; }
}

async function findModels() {
  models.clear();
  try {
    for (const model of (await (await ask("/v1/models")).json()).data) if ((model.task || "generation") === "generation") models.set(model.id, null);
  } catch (error) {
    if (error.status !== 404) throw error;
    await findByMetadata();
  }
  const chosen = at("model").value || new URLSearchParams(location.search).get("model");
  at("model").replaceChildren(...[...models.keys()].map(name => new Option(name, name, false, name === chosen)));
  at("send").disabled = !models.size;
  tell(models.size ? "" : "No model of this server generates text: it would have the input text_input and the output text_output.");
}
async function findByMetadata() {
  const names = new Set((await (await ask("/v2/repository/index", '{"ready":true}')).json()).map(each => each.name));
  for (const name of names) {
    const { inputs, outputs } = await (await ask(`/v2/models/${encodeURIComponent(name)}`)).json();
    const has = (list, wanted) => list.some(each => each.name === wanted);
    if (has(inputs, "text_input") && has(outputs, "text_output")) models.set(name, new Set(inputs.map(each => each.name)));
  }
}

function tell(text, isError) {
  at("state").textContent = text;
  at("state").classList.toggle("error", Boolean(isError));
}

// Keeps the last words in sight, unless the reader has scrolled up.
function keepAtEnd(change) {
  const talk = at("talk"), isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
  change();
  if (isAtEnd) talk.scrollTop = talk.scrollHeight;
}
function show(role, text) {
  const article = document.createElement("article"), head = document.createElement("h2"), body = document.createTextNode(text);
  article.className = role;
  head.textContent = role === "user" ? "You" : at("model").value;
  article.append(head, body);
  keepAtEnd(() => at("talk").append(article));
  return { article, body };
}

// The members of sampling that are filled in.
function sampling() {
  const found = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) if (at(name).value !== "") found[name] = Number(at(name).value);
  return found;
}
function request(model, messages) {
  const inputs = models.get(model);
  if (!inputs) return ["/v1/chat/completions", { model, messages, stream: true, stream_options: { include_usage: true }, ...sampling() }];
  const body = inputs.has("messages") ? { messages: JSON.stringify(messages) } : { text_input: messages.map(each => each.role === "system" ? each.content : `${each.role}: ${each.content}`).join("\n\n") + "\n\nassistant:" };
  if (inputs.has("stream")) body.stream = true;
  if (inputs.has("sampling_parameters")) body.sampling_parameters = JSON.stringify(sampling());
  return [`/v2/models/${encodeURIComponent(model)}/generate_stream`, body];
}
// The new parts in an event: text, reasoning, and the number of tokens if the event has it.
function read(event) {
  if (event.error) throw new Error(typeof event.error === "string" ? event.error : event.error.message);
  if (!event.choices) return { text: String(event.text_output ?? "") };
  const delta = event.choices.length ? event.choices[0].delta : {};
  return { text: delta.content || "", thought: delta.reasoning_content || delta.reasoning || "", tokens: event.usage ? event.usage.completion_tokens : 0 };
}
// The events of a stream, as JSON.
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function answer() {
  const model = at("model").value, system = at("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...said];
  const { article, body } = show("assistant", "");
  const began = performance.now();
  let text = "", thought = null, first = 0, count = 0, tokens = 0;
  stopper = new AbortController();
  running(true);
  try {
    const reply = await ask(...request(model, messages).map((part, place) => place ? JSON.stringify(part) : part), stopper.signal);
    for await (const event of events(reply)) {
      const part = read(event);
      tokens = part.tokens || tokens;
      if (part.thought) {
        if (!thought) article.insertBefore(thought = Object.assign(document.createElement("div"), { className: "thought" }), body);
        keepAtEnd(() => thought.append(part.thought));
      }
      if (!part.text) continue;
      first = first || performance.now();
      count++;
      text += part.text;
      keepAtEnd(() => body.appendData(part.text));
    }
    tell(figures(began, first, tokens || count, tokens ? "tokens" : "parts"));
  } catch (error) {
    if (error.name === "AbortError") tell(`Stopped. ${figures(began, first, count, "parts")}`);
    else {
      if (error.status === 401 || error.status === 403) at("access").hidden = false;
      article.classList.add("error");
      if (!text) body.appendData(error.message);
      tell(error.message, true);
    }
  }
  // A question without an answer is not a part of the conversation: it is asked again.
  if (text) said.push({ role: "assistant", content: text });
  else at("text").value = at("text").value || said.pop().content;
  stopper = null;
  running(false);
}
function figures(began, first, count, unit) {
  if (!first) return "";
  const seconds = (performance.now() - first) / 1000;
  return `${count} ${unit}, first after ${Math.round(first - began)} ms${count > 1 && seconds > 0 ? `, then ${((count - 1) / seconds).toFixed(1)} per second` : ""}`;
}
function running(isRunning) {
  at("send").hidden = at("new").disabled = at("model").disabled = isRunning;
  at("stop").hidden = !isRunning;
  if (isRunning) tell("Writing …");
  at("text").focus();
}

function say() {
  const text = at("text").value.trim();
  if (!text || stopper || !models.size) return;
  at("text").value = "";
  said.push({ role: "user", content: text });
  show("user", text);
  at("talk").scrollTop = at("talk").scrollHeight;
  answer();
}

at("say").addEventListener("submit", event => { event.preventDefault(); say(); });
at("text").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  say();
});
addEventListener("keydown", event => { if (event.key === "Escape" && stopper) stopper.abort(); });
at("stop").addEventListener("click", () => stopper && stopper.abort());
at("new").addEventListener("click", () => { said = []; at("talk").replaceChildren(); tell(""); at("text").focus(); });
at("access").addEventListener("submit", event => { event.preventDefault(); sessionStorage.setItem("headrace-key", at("key").value); at("access").hidden = true; start(); });

async function start() {
  try { await findModels(); } catch (error) {
    if (error.status === 401 || error.status === 403) at("access").hidden = false;
    tell(error.message, true);
  }
}
start();
at("text").focus();
