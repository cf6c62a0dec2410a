-- No two requests alike: a new request id, a new x-request-id and other numbers each time. A server that remembers what it
-- has parsed is flattered by a load that repeats itself. JSON, or with the argument "binary" binary tensors. Further
-- arguments are the FP32 inputs, such as INPUT0:1,16; unless there are any, those of an identity or of tiny_add.
local ffi = require("ffi")
local count, run, is_binary = 0, math.random(1, 1000000000), false
local headers = { ["Content-Type"] = "application/json" }
local inputs = {}

local function add(name, dims)
  local size = 1
  for dim in dims:gmatch("%d+") do
    size = size * tonumber(dim)
  end
  local described = string.format('{"name":"%s","datatype":"FP32","shape":[%s],', name, dims)
  local rest = string.format('"parameters":{"binary_data_size":%d}}', 4 * size)
  table.insert(inputs, { json = described .. '"data":[%g' .. string.rep(",2.25", size - 1) .. "]}",
    binary = described .. rest, floats = ffi.new("float[?]", size), bytes = 4 * size })
end

function init(arguments)
  is_binary = arguments[1] == "binary"
  if is_binary then
    headers["Content-Type"] = "application/octet-stream"
  end
  for at = 2, #arguments do
    add(arguments[at]:match("(.+):(.+)"))
  end
  if #inputs == 0 then
    add("INPUT0", "1,16")
    if wrk.path:find("tiny_add", 1, true) then
      add("INPUT1", "1,16")
    end
  end
end

request = function()
  count = count + 1
  headers["x-request-id"] = string.format("%d-%032d", run, count)
  local first = count % 1000 + 0.5
  local described, data = {}, {}
  for at, input in ipairs(inputs) do
    described[at] = is_binary and input.binary or string.format(input.json, first)
    input.floats[0] = first
    data[at] = ffi.string(input.floats, input.bytes)
  end
  local list = table.concat(described, ",")
  if not is_binary then
    return wrk.format("POST", nil, headers, string.format('{"id":"%d","inputs":[%s]}', count, list))
  end
  local head = string.format('{"id":"%d","inputs":[%s],"parameters":{"binary_data_output":true}}', count, list)
  headers["Inference-Header-Content-Length"] = tostring(#head)
  return wrk.format("POST", nil, headers, head .. table.concat(data))
end
