-- No two requests alike: a new request id, a new x-request-id and other numbers each time. A server that remembers what it
-- has parsed is flattered by a load that repeats itself. JSON, or with the argument "binary" binary tensors.
local ffi = require("ffi")
local count, run, is_binary = 0, math.random(1, 1000000000), false
local headers = { ["Content-Type"] = "application/json" }
local json = '{"name":"%s","datatype":"FP32","shape":[1,16],"data":[%g,2.25,3,4,5,6,7,8,9,10,11,12,13,14,15,16]}'
local binary = '{"name":"%s","datatype":"FP32","shape":[1,16],"parameters":{"binary_data_size":64}}'
local floats = ffi.new("float[16]")

function init(arguments)
  is_binary = arguments[1] == "binary"
  if is_binary then
    headers["Content-Type"] = "application/octet-stream"
  end
end

request = function()
  count = count + 1
  headers["x-request-id"] = string.format("%d-%032d", run, count)
  local first = count % 1000 + 0.5
  local tensor = is_binary and binary or json
  local inputs = string.format(tensor, "INPUT0", first)
  local both = wrk.path:find("tiny_add", 1, true)
  if both then
    inputs = inputs .. "," .. string.format(tensor, "INPUT1", first)
  end
  if not is_binary then
    return wrk.format("POST", nil, headers, string.format('{"id":"%d","inputs":[%s]}', count, inputs))
  end
  floats[0] = first
  local data = ffi.string(floats, 64)
  local head = string.format('{"id":"%d","inputs":[%s],"parameters":{"binary_data_output":true}}', count, inputs)
  headers["Inference-Header-Content-Length"] = tostring(#head)
  return wrk.format("POST", nil, headers, head .. data .. (both and data or ""))
end
