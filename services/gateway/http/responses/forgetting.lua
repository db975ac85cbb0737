-- What the scripts of kept responses share. A response is named `<tenant>:<id>`.
-- Expiries are sorted sets: ids of a tenant, and the names of all. The sizes are one hash: bytes of
-- each response by its name, of each tenant under the tenant, of all of them under the empty name.

local function subtract(sizes, whose, size)
  if redis.call('HINCRBY', sizes, whose, -size) <= 0 then
    redis.call('HDEL', sizes, whose)
  end
end

-- Returns whether there was one.
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

-- Returns the time, in ms.
local function forget_expired(keys, beginning, most)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local found = redis.call('ZRANGE', keys[3], '-inf', now, 'BYSCORE', 'LIMIT', 0, most)
  for _, name in ipairs(found) do
    forget(keys, beginning, name)
  end
  return now
end
