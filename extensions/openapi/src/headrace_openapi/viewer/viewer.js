// Shows openapi.json, and sends requests to the same server. Everything that comes from the server, such as the name of
// a model, is shown as text and never as HTML.
"use strict";

const SHOWN = 200000;
const METHODS = ["get", "post", "put", "patch", "delete", "head", "options"];

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function pretty(text) {
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // It is no JSON, and is shown as it is.
  }
  return text.length > SHOWN ? text.slice(0, SHOWN) + "\n... " + (text.length - SHOWN) + " more characters" : text;
}

async function exampleOf(content) {
  if (!content) return "";
  if (content.example !== undefined) return JSON.stringify(content.example, null, 2);
  const [first] = Object.values(content.examples || {});
  if (!first || !first.externalValue) return "{}";
  const answer = await fetch("." + first.externalValue);
  return answer.text();
}

function form(path, method, operation, parameters) {
  const body = element("div", undefined, "body");
  if (operation.description) body.append(element("p", operation.description, "notes"));
  const fields = new Map();
  for (const parameter of parameters) {
    const label = element("label", parameter.name);
    const input = element("input");
    label.append(input);
    fields.set(parameter.name, input);
    body.append(label);
  }
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  const text = element("textarea");
  if (content) {
    text.setAttribute("aria-label", "Body");
    exampleOf(content).then((example) => { text.value = example; }, (error) => { text.value = String(error); });
    body.append(text);
  }
  const send = element("button", "Send");
  const answer = element("pre");
  answer.hidden = true;
  send.addEventListener("click", async () => {
    let target = path;
    for (const [name, input] of fields) target = target.replace("{" + name + "}", encodeURIComponent(input.value));
    answer.hidden = false;
    answer.textContent = "...";
    try {
      const options = { method: method.toUpperCase() };
      if (content && text.value) Object.assign(options, { body: text.value, headers: { "Content-Type": "application/json" } });
      const received = await fetch("." + target, options);
      answer.textContent = received.status + " " + received.statusText + "\n" + pretty(await received.text());
    } catch (error) {
      answer.textContent = String(error);
    }
  });
  body.append(send, answer);
  return body;
}

function row(path, method, item) {
  const operation = item[method];
  const details = element("details");
  details.dataset.text = (path + " " + (operation.summary || "")).toLowerCase();
  const summary = element("summary");
  summary.append(element("span", method.toUpperCase(), "method " + method), element("span", path, "path"),
    element("span", operation.summary || "", "what"));
  details.append(summary);
  details.addEventListener("toggle", () => {
    if (details.open && !details.querySelector(".body")) details.append(form(path, method, operation, item.parameters || []));
  });
  return details;
}

function show(description) {
  document.title = description.info.title;
  document.getElementById("title").textContent = description.info.title + " " + description.info.version;
  document.getElementById("about").textContent = description.info.description;
  const groups = new Map();
  for (const [path, item] of Object.entries(description.paths)) {
    for (const method of METHODS.filter((each) => each in item)) {
      const tag = item[method].tags[0];
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(row(path, method, item));
    }
  }
  const sections = [...groups].map(([tag, rows]) => {
    const section = element("section");
    section.append(element("h2", tag.replaceAll("_", " ")), ...rows);
    return section;
  });
  document.getElementById("routes").append(...sections);
  document.getElementById("filter").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    for (const section of sections) {
      const rows = [...section.querySelectorAll("details")];
      for (const each of rows) each.hidden = !each.dataset.text.includes(wanted);
      section.hidden = rows.every((each) => each.hidden);
    }
  });
}

fetch("openapi.json").then(async (answer) => {
  const text = await answer.text();
  if (!answer.ok) throw new Error(answer.status + " " + text);
  show(JSON.parse(text));
}).catch((error) => { document.getElementById("about").textContent = String(error); });
