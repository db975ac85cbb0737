-- The functions that both scripts for kept responses use. A response has the name `<tenant>:<id>`.
-- Sorted sets have the expiry times: one set of ids for each tenant, and one set of names for all
-- tenants. One hash has the sizes in bytes: of each response under its name, of each tenant under
-- the tenant, and of all responses together under the empty name.

local function subtract(sizes, whose, size)
  if redis.call('HINCRBY', sizes, whose, -size) <= 0 then
    redis.call('HDEL', sizes, whose)
  end
end

-- Returns whether the response was kept.
local function forget(keys, beginning, name)
  local expiries, sizes = keys[3], keys[4]
  local tenant, id = string.match(name, '^(.*):(.*)$')
  redis.call('ZREM', expiries, name)
  redis.call('ZREM', expiries .. ':' .. tenant, id)
  local size = redis.call('HGET', sizes, name)
  if size then
    redis.call('HDEL', sizes, name)
    subtract(sizes, tenant, size)
    subtract(sizes, '', size)
  end
  return redis.call('UNLINK', beginning .. name)
end

-- Forgets up to `most` expired responses. Returns the time in ms.
local function forget_expired(keys, beginning, most)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local found = redis.call('ZRANGE', keys[3], '-inf', now, 'BYSCORE', 'LIMIT', 0, most)
  for _, name in ipairs(found) do
    forget(keys, beginning, name)
  end
  return now
end
