-- No two requests alike: a new request id, a new x-request-id and other numbers each time. A server that remembers what it
-- has parsed is flattered by a load that repeats itself.
local count, run = 0, math.random(1, 1000000000)
local headers = { ["Content-Type"] = "application/json" }
local tensor = '{"name":"%s","datatype":"FP32","shape":[1,16],"data":[%g,2.25,3,4,5,6,7,8,9,10,11,12,13,14,15,16]}'

request = function()
  count = count + 1
  headers["x-request-id"] = string.format("%d-%032d", run, count)
  local first = count % 1000 + 0.5
  local inputs = string.format(tensor, "INPUT0", first)
  if wrk.path:find("tiny_add", 1, true) then
    inputs = inputs .. "," .. string.format(tensor, "INPUT1", first)
  end
  return wrk.format("POST", nil, headers, string.format('{"id":"%d","inputs":[%s]}', count, inputs))
end
