-- Binary requests of 16 floats, of one sequence of 20 requests after the other: wrk -t64 -c64 ... URL -- sequences. A thread
-- has one connection, and its sequences one id, since only so does one request wait for the answer to the one before.
-- Without the argument they are of no sequence. They differ in nothing else: a server may recognize both.
local length, count, threads, made = 20, -1, 0, {}

function setup(thread)
  threads = threads + 1
  thread:set("id", threads)
end

local function body(step)
  local parameters = '"binary_data_output":true'
  if step >= 0 then
    parameters = string.format('"sequence_id":%d,"sequence_start":%s,"sequence_end":%s,', id,
      tostring(step == 0), tostring(step == length - 1)) .. parameters
  end
  local input = '{"name":"INPUT0","datatype":"FP32","shape":[1,16],"parameters":{"binary_data_size":64}}'
  local json = string.format('{"inputs":[%s],"parameters":{%s}}', input, parameters)
  local headers = {
    ["Content-Type"] = "application/octet-stream",
    ["Inference-Header-Content-Length"] = tostring(#json),
  }
  return wrk.format("POST", nil, headers, json .. string.rep("\0", 64))
end

function init(arguments)
  for step = 0, length - 1 do
    made[step] = body(arguments[1] == "sequences" and step or -1)
  end
end

function request()
  count = count + 1
  if id == 1 then
    return made[math.max(0, count - 1) % length] -- wrk looks at one of the first thread's that it does not send
  end
  return made[count % length]
end
