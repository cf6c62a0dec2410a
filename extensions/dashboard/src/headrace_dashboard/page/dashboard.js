// Polls the routes that every client asks, and shows what they say. Text from the server is only ever set as text.
import { showForm } from "/dashboard/request_form.js";

// An answer grows with the models, and a page shall cost less than 1 % of a core.
const POLL_MS = 2000, POLL_MS_PER_MODEL = 10, REMEMBERED = 60;
const at = id => document.getElementById(id);
const key = { get value() { return sessionStorage.getItem("headrace-key") || ""; } };

// What is known of the chosen model: "" nothing yet, "shown", or "refused".
let former = null, order = "", chosen = null, lastRecord = 0, chosenKind = "", timer = 0, turn = Promise.resolve();
const rates = new Map(), states = new Map(), memories = new Map();

export async function ask(path, body, method) {
  const headers = key.value ? { Authorization: `Bearer ${key.value}` } : {};
  const reply = await fetch(path, { method: method || (body === undefined ? "GET" : "POST"), body, headers, cache: "no-store" });
  if (reply.ok) return reply;
  const text = await reply.text();
  let said = text;
  try { said = JSON.parse(text).error || text; } catch { /* it is no JSON */ }
  throw Object.assign(new Error(said || `HTTP ${reply.status}`), { status: reply.status });
}
const read = async (path, body) => (await ask(path, body)).json();

// Integers that a double cannot hold stay as they are written, in browsers that can do so.
const exact = (name, value, { source } = {}) => typeof value === "number" && JSON.rawJSON && /^-?\d+$/.test(source) && !Number.isSafeInteger(value) ? JSON.rawJSON(source) : value;
export const parse = text => JSON.parse(text, exact);
const pathOf = model => `/v2/models/${encodeURIComponent(model.name)}` + (model.version ? `/versions/${model.version}` : "");
const keyOf = model => `${model.name}\n${model.version || ""}`;

export function make(tag, properties = {}, ...children) {
  const { role, aria, ...plain } = properties;
  const found = Object.assign(document.createElement(tag), plain);
  for (const [name, value] of Object.entries(aria || {})) found.setAttribute(`aria-${name}`, value);
  found.append(...children);
  return found;
}

const figure = (value, digits = 1) => value === null || Number.isNaN(value) ? "–" : value >= 100 || value === 0 ? Math.round(value).toLocaleString("en") : value.toFixed(digits);
const duration = us => us === null ? "–" : us >= 1e6 ? `${(us / 1e6).toFixed(1)} s` : us >= 1e3 ? `${(us / 1e3).toFixed(1)} ms` : `${Math.round(us)} µs`;
const bound = us => us === null ? "–" : `≤ ${duration(us)}`;
const size = bytes => bytes === null ? "unknown" : bytes >= 1 << 30 ? `${(bytes / (1 << 30)).toFixed(1)} GiB` : `${(bytes / (1 << 20)).toFixed(1)} MiB`;

// "≈" is the share that the control mode charges a model in the server.
const memoryText = each => `${each.is_estimate ? "≈ " : ""}${size(each.bytes)}`;
const memoryCell = memory => memory.map(each => `${memory.length > 1 ? `${each.device} ` : ""}${memoryText(each)}`).join(", ") || "–";

// The upper bound of the bucket in which a share of the counts ends, in µs. Buckets end at 1, 2, 4, ... µs.
function percentile(counts, share) {
  const total = counts.reduce((sum, each) => sum + each, 0);
  let seen = 0;
  for (const [place, count] of counts.entries()) if (total && (seen += count) >= share * total) return 2 ** place;
  return null;
}

function numbers(now) {
  const before = former && former.models.get(now.key), seconds = former ? (now.time - former.time) / 1000 : 0;
  if (!before || now.success < before.success || !seconds) return { requests: null, failed: null, rows: null, p50: null, p99: null };
  const counts = now.latencies.map((each, place) => each - (before.latencies[place] || 0));
  const executions = now.executions - before.executions;
  return {
    requests: (now.success - before.success) / seconds, failed: (now.failed - before.failed) / seconds,
    rows: executions ? (now.rows - before.rows) / executions : null, p50: percentile(counts, .5), p99: percentile(counts, .99),
  };
}

// One at a time: two would append the same log records.
function poll() { turn = turn.then(pollOnce); }
async function pollOnce() {
  clearTimeout(timer);
  if (document.hidden) return;  // asks again when somebody looks
  try {
    const [index, loaded] = await Promise.all([read("/v2/repository/index", ""), read("/dashboard/models.json")]);
    show(index, loaded);
    at("message").textContent = "";
    if (chosen) await showDetail();
    await showLog();
  } catch (error) {
    if (error.status === 401 || error.status === 403) at("access").hidden = false;
    at("state").textContent = error.status ? "refused" : "not reachable";
    at("message").textContent = error.message;
  }
  timer = setTimeout(poll, Math.max(POLL_MS, POLL_MS_PER_MODEL * rates.size));
}

function show(index, loaded) {
  const time = performance.now(), models = new Map(loaded.models.map(each => [keyOf(each), { ...each, key: keyOf(each), time }]));
  const rows = at("rows"), kept = new Map([...rows.children].map(row => [row.dataset.key, row])), shown = [];
  let ready = 0, total = 0, known = 0, unknown = 0;
  index.sort((one, other) => one.name < other.name ? -1 : one.name > other.name ? 1 : (one.version || 0) - (other.version || 0));
  for (const model of index) {
    const id = keyOf(model), now = models.get(id), found = now ? numbers(now) : {}, memory = now ? now.memory : [];
    ready += model.state === "READY"; total += found.requests || 0;
    for (const each of memory) { known += each.bytes || 0; unknown += each.bytes === null; }
    const series = rates.get(id) || [];
    if (found.requests !== null && found.requests !== undefined) series.push(found.requests);
    rates.set(id, series.slice(-REMEMBERED)); states.set(id, model.state || "not loaded"); memories.set(id, memory);
    const row = kept.get(id) || rowOf(model);
    kept.delete(id);
    fill(row, model, found, series.slice(-REMEMBERED), memory);
    shown.push(row);
  }
  for (const [id, row] of kept) { row.remove(); rates.delete(id); states.delete(id); memories.delete(id); }
  const newOrder = shown.map(row => row.dataset.key).join("\n");
  if (newOrder !== order) rows.append(...shown);
  order = newOrder;
  filterModels();
  write(at("state"), `${ready} of ${index.length} ready`);
  const totals = [["Requests/s", figure(total)], ["Memory of models", [known ? size(known) : "", unknown ? `${unknown} unknown` : ""].filter(each => each).join(" + ") || "–"], ["Memory of the server", size(loaded.server_bytes)]];
  at("totals").replaceChildren(...totals.map(([name, text]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: text }))));
  former = { time, models };
}

// Sets a text only if it changes: else the table of 1,000 models would be laid out again with each poll.
function write(element, text) { if (element.textContent !== text) element.textContent = text; }
function set(element, name, value) { if (element.getAttribute(name) !== value) element.setAttribute(name, value); }

function rowOf(model) {
  const row = make("tr"), name = make("button", { type: "button", className: "name", textContent: model.name, title: model.name });
  row.dataset.key = keyOf(model);
  name.addEventListener("click", () => choose(model));
  const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  line.setAttribute("class", "rate"); line.setAttribute("viewBox", "0 0 60 10"); line.setAttribute("preserveAspectRatio", "none"); line.setAttribute("aria-hidden", "true");
  line.append(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
  const load = make("button", { type: "button", textContent: "Load" }), unload = make("button", { type: "button", textContent: "Unload" });
  load.addEventListener("click", () => control(model, "load")); unload.addEventListener("click", () => control(model, "unload"));
  for (const [button, what] of [[load, "Load"], [unload, "Unload"]]) button.setAttribute("aria-label", `${what} ${model.name}`);
  const cells = ["", "", "", "number", "number", "number", "number", "number", "number", "", ""].map(className => make("td", { className }));
  cells[0].append(name); cells[2].append(make("span"), make("span", { className: "reason" })); cells[9].append(line); cells[10].append(load, " ", unload);
  row.append(...cells);
  return row;
}

function fill(row, model, found, series, memory) {
  const cells = row.children, [state, reason] = cells[2].children;
  write(cells[1], model.version || "–");
  write(state, model.state || "not loaded"); set(state, "class", model.state || ""); write(reason, model.reason || "");
  const texts = [figure(found.requests ?? null), figure(found.failed ?? null), bound(found.p50 ?? null), bound(found.p99 ?? null), figure(found.rows ?? null), memoryCell(memory)];
  texts.forEach((text, place) => write(cells[3 + place], text));
  const most = Math.max(1, ...series);
  set(cells[9].firstChild.firstChild, "points", series.map((each, place) => `${60 - series.length + place},${9.5 - 9 * each / most}`).join(" "));
  const [load, unload] = cells[10].querySelectorAll("button");
  load.disabled = model.state === "LOADING"; unload.disabled = model.state !== "READY";
  set(row, "aria-current", String(chosen !== null && keyOf(chosen) === row.dataset.key));
}

async function control(model, what) {
  at("message").textContent = "";
  try { await ask(`/v2/repository/models/${encodeURIComponent(model.name)}/${what}`, "{}"); }
  catch (error) { at("message").textContent = `${what} ${model.name}: ${error.message}`; return; }
  poll();
}

async function choose(model) {
  chosen = model; chosenKind = "";
  at("detail").hidden = false;
  at("detail-title").textContent = model.version ? `${model.name}, version ${model.version}` : model.name;
  for (const id of ["instances", "parts", "sizes", "reasons", "waits", "inputs", "answer", "config"]) at(id).replaceChildren();
  await showDetail();
  at("detail").focus();
}

function bars(id, entries) {
  const most = Math.max(1e-9, ...entries.map(([, value]) => value));
  at(id).replaceChildren(...entries.map(([name, value, text]) => {
    const fill = make("i");
    fill.style.width = `${100 * value / most}%`;
    return make("div", { className: "bar" }, make("span", { textContent: name }), make("span", { className: "fill", aria: { hidden: "true" } }, fill), make("span", { textContent: text }));
  }));
}
function pairs(id, entries) {
  at(id).replaceChildren(...entries.map(([name, text]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: text }))));
}

async function showDetail() {
  const model = chosen, state = states.get(keyOf(model)) || "not loaded", isReady = state === "READY";
  at("loaded").hidden = !isReady; at("absent").hidden = isReady;
  if (!isReady) {
    chosenKind = "";
    at("absent").textContent = `The state is ${state}. The page shows more when the model is READY.`;
    return;
  }
  if (!chosenKind) {
    try {
      const [metadata, config] = await Promise.all([read(pathOf(model)), read(`${pathOf(model)}/config`)]);
      if (model !== chosen) return;
      chosenKind = "shown";
      at("config").textContent = JSON.stringify(config, null, 2);
      model.devices = (config.instance_group || []).map(each => `${each.count} × ${each.kind.replace("KIND_", "")} ${(each.gpus || []).join(", ")}`.trim()).join("; ");
      showForm(metadata, config, pathOf(model));
      at("talk").hidden = !metadata.inputs.some(each => each.name === "text_input") || !metadata.outputs.some(each => each.name === "text_output");
      at("talk").firstChild.href = `/dashboard/chat?model=${encodeURIComponent(model.name)}`;
    } catch (error) {
      at("answer").textContent = error.message;
      if (error.status >= 400 && error.status < 500) chosenKind = "refused";  // asked again when the state changes
      return;
    }
  }
  if (chosenKind === "refused") return;
  try {
    const [told, { model_stats: [counted] }] = await Promise.all([read(`${pathOf(model)}/explain`), read(`${pathOf(model)}/stats`)]);
    if (model !== chosen) return;
    const parts = [["queue", "waiting"], ["compute_input", "batch made"], ["compute_infer", "engine"], ["compute_output", "answer split"]];
    const all = counted.inference_stats, answered = all.success.count;
    if (answered) bars("parts", parts.map(([name, text]) => { const us = all[name].ns / 1000 / answered; return [text, us, duration(us)]; }));
    const where = Object.entries(told.runs_on), memory = memories.get(keyOf(model)) || [];
    pairs("instances", [["waiting", figure(told.waiting, 0)], ["in flight", figure(told.in_flight, 0)], ...(model.devices ? [["devices", model.devices]] : []), ...memory.map(each => [`memory, ${each.device}`, memoryText(each)]), ...where]);
    bars("sizes", told.sizes.map(each => [`${each.rows}`, each.batches, figure(each.batches, 0)]));
    bars("reasons", Object.entries(told.reasons).map(([name, count]) => [name, count, figure(count, 0)]));
    pairs("waits", Object.entries(told.longest_wait_us).map(([name, us]) => [name, duration(us)]));
  } catch { /* the model has no batches to explain */ }
}

async function showLog() {
  let records;
  try { records = await read(`/dashboard/log.json?after=${lastRecord}`); } catch { return; }
  const list = at("log"), isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 30;
  for (const record of records) {
    lastRecord = record.number;
    const time = new Date(record.time * 1000).toISOString().slice(11, 23);
    list.append(make("li", { className: record.level }, make("time", { textContent: time }), ` ${record.text}`));
  }
  while (list.childElementCount > 1000) list.firstChild.remove();
  filterLog();
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}
function filterLog() {
  const levels = ["INFO", "WARNING", "ERROR", "CRITICAL"], least = levels.indexOf(at("level").value);
  for (const item of at("log").children) item.hidden = levels.indexOf(item.className) < least && least > 0;
}

function filterModels() {
  const wanted = at("filter").value.toLowerCase(), only = at("only").value, rows = [...at("rows").children];
  let count = 0;
  for (const row of rows) {
    const [name] = row.dataset.key.split("\n"), isReady = states.get(row.dataset.key) === "READY";
    const isShown = name.toLowerCase().includes(wanted) && (!only || isReady === (only === "ready"));
    if (row.hidden === isShown) row.hidden = !isShown;
    count += isShown;
  }
  at("none").hidden = count > 0;
}

at("filter").addEventListener("input", filterModels);
at("only").addEventListener("change", filterModels);
at("level").addEventListener("change", filterLog);
at("access").addEventListener("submit", event => { event.preventDefault(); sessionStorage.setItem("headrace-key", at("key").value); at("access").hidden = true; chosenKind = ""; poll(); });
document.addEventListener("visibilitychange", poll);
read("/v2").then(server => { at("server").textContent = server.name === "triton" ? "Headrace" : server.name; document.title = at("server").textContent; at("server").title = `version ${server.version}`; }).catch(() => {});
poll();
