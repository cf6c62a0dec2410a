// The form that asks a model: one field for each input, made from its metadata. A number, a list, text, or an image file.
import { ask, make, parse } from "/dashboard/dashboard.js";

const at = id => document.getElementById(id);
const MOST_PREFILLED = 4096;

// A shape with a size in place of each -1, and the nested zeros of it.
const sized = shape => shape.map(each => each < 0 ? 1 : each);
const zeros = ([first, ...rest]) => first === undefined ? 0 : Array.from({ length: first }, () => zeros(rest));
const shapeOf = value => Array.isArray(value) ? [value.length, ...(value.length ? shapeOf(value[0]) : [])] : [];

let submitted = 0;

export function showForm(metadata, config, path) {
  const optional = new Set((config.input || []).filter(each => each.optional).map(each => each.name));
  const fields = metadata.inputs.map(input => fieldOf(input, optional.has(input.name)));
  at("inputs").replaceChildren(...fields.map(each => each.element));
  const isStream = Boolean(config.model_transaction_policy && config.model_transaction_policy.decoupled);
  at("ask").onsubmit = event => { event.preventDefault(); send(fields, path, isStream); };
}

function fieldOf(input, isOptional) {
  const isText = input.datatype === "BYTES", shape = sized(input.shape), id = `input-${input.name}`;
  const legend = `${input.name} · ${input.datatype} [${input.shape.join(", ")}]${isOptional ? " · optional" : ""}`;
  const count = shape.reduce((product, each) => product * each, 1);
  const area = make("textarea", { id, spellcheck: false });
  area.value = isOptional ? "" : isText ? JSON.stringify(shape.length ? fill(shape, "") : "") : JSON.stringify(count <= MOST_PREFILLED ? zeros(shape) : []);
  const label = make("label", { htmlFor: id, textContent: isText ? "JSON: text, or lists of text" : "JSON: numbers in lists" });
  const element = make("fieldset", {}, make("legend", { textContent: legend }), label, area);
  if (!isText && input.datatype !== "BOOL" && shape.length >= 2) {
    const picture = make("input", { type: "file", accept: "image/*", id: `${id}-image` });
    picture.addEventListener("change", async () => { if (picture.files[0]) area.value = JSON.stringify(await pixels(picture.files[0], input.shape)); });
    element.append(make("label", { htmlFor: picture.id, textContent: "or an image file: " }), picture);
  }
  return { input, element, read: () => area.value.trim() ? valueOf(input, area.value) : null };
}

const fill = (shape, value) => shape.length ? Array.from({ length: shape[0] }, () => fill(shape.slice(1), value)) : value;

function valueOf(input, text) {
  let value;
  try { value = parse(text); } catch {
    if (input.datatype !== "BYTES") throw new Error(`input '${input.name}' is no JSON`);
    value = text;
  }
  if (!Array.isArray(value)) value = fill(sized(input.shape), input.datatype === "BYTES" && typeof value !== "string" ? text : value);
  return { name: input.name, datatype: input.datatype, shape: shapeOf(value), data: [value].flat(Infinity) };
}

// The pixels of a file as a tensor of this shape: [.., H, W], [.., H, W, 1 or 3] or [.., 1 or 3, H, W]; -1 is the size of the image.
async function pixels(file, shape) {
  const image = await createImageBitmap(file), last = shape.slice(-3);
  const isLast = last.length === 3 && [1, 3].includes(last[2]), isFirst = last.length === 3 && !isLast && [1, 3].includes(last[0]);
  const channels = isLast ? last[2] : isFirst ? last[0] : 1;
  const [height, width] = (isLast ? last.slice(0, 2) : last.slice(-2)).map((each, place) => each > 0 ? each : place ? image.width : image.height);
  const canvas = new OffscreenCanvas(width, height), drawing = canvas.getContext("2d");
  drawing.drawImage(image, 0, 0, width, height);
  const { data } = drawing.getImageData(0, 0, width, height);
  const at = (row, column, channel) => channels === 1
    ? Math.round(.299 * data[4 * (row * width + column)] + .587 * data[4 * (row * width + column) + 1] + .114 * data[4 * (row * width + column) + 2])
    : data[4 * (row * width + column) + channel];
  const grid = channel => Array.from({ length: height }, (_, row) => Array.from({ length: width }, (_, column) => at(row, column, channel)));
  let found = isLast ? Array.from({ length: height }, (_, row) => Array.from({ length: width }, (_, column) => Array.from({ length: channels }, (_, channel) => at(row, column, channel))))
    : isFirst ? Array.from({ length: channels }, (_, channel) => grid(channel)) : grid(0);
  for (let axes = shapeOf(found).length; axes < shape.length; axes++) found = [found];
  return found;
}

// NaN and Infinity are no JSON, and outputs have them: they are shown as text.
function parseReply(text) {
  try { return parse(text); } catch { return parse(text.replace(/"(?:[^"\\]|\\.)*"|-?(?:NaN|Infinity)/g, found => found[0] === '"' ? found : `"${found}"`)); }
}

async function send(fields, path, isStream) {
  const number = ++submitted, began = performance.now(), answer = at("answer");
  answer.textContent = "asking";
  try {
    const inputs = fields.map(field => field.read()).filter(each => each !== null);
    if (isStream) return await stream(inputs, path, number);
    const reply = parseReply(await (await ask(`${path}/infer`, JSON.stringify({ inputs }))).text());
    if (number !== submitted) return;
    const outputs = reply.outputs.map(each => `${each.name} ${each.datatype} [${each.shape.join(", ")}]\n${JSON.stringify(each.data)}`);
    answer.textContent = `${(performance.now() - began).toFixed(1)} ms\n\n${outputs.join("\n\n")}`;
  } catch (error) {
    if (number === submitted) answer.textContent = error.message;
  }
}

// A decoupled model answers any number of times: as server-sent events of generate_stream.
async function stream(inputs, path, number) {
  const body = Object.fromEntries(inputs.map(each => [each.name, each.data.length === 1 ? each.data[0] : each.data]));
  const reader = (await ask(`${path}/generate_stream`, JSON.stringify(body))).body.pipeThrough(new TextDecoderStream()).getReader();
  at("answer").textContent = "";
  for (let rest = "";;) {
    const { value, done } = await reader.read();
    if (done || number !== submitted) return reader.cancel();
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) at("answer").textContent += `${event.replace(/^data: ?/, "")}\n`;
  }
}
