-- Keeps one response. To make room, it forgets the oldest responses: first of the same tenant, and
-- then of all tenants.
-- ARGV: the beginning of the keys, the response's name, its tenant, the response, the ttl in ms,
-- the most responses of a tenant, the most bytes of a tenant, the most bytes of all tenants.
-- KEYS: the response, the expiries of its tenant, the expiries of all tenants, the sizes.
-- Returns how many responses were forgotten to make room, and whether the response is kept. If it
-- is not kept, more room is needed, and the caller calls this script again.
local name, tenant, response = ARGV[2], ARGV[3], ARGV[4]
local ttl = tonumber(ARGV[5])
local owned, expiries, sizes = KEYS[2], KEYS[3], KEYS[4]
local MOST = 512 -- responses to forget in one call, so that Redis can answer others in between
local EACH = 512 -- bytes that Redis needs for a response in addition to its text

local function sum_of(whose)
  return tonumber(redis.call('HGET', sizes, whose) or 0) + #response
end

local function is_tenant_full()
  local count = redis.call('ZCARD', owned)
  return count > 0 and (count >= tonumber(ARGV[6]) or sum_of(tenant) > tonumber(ARGV[7]))
end

local function is_full()
  local count = redis.call('ZCARD', expiries)
  return count > 0 and sum_of('') + EACH * (count + 1) > tonumber(ARGV[8])
end

local now = forget_expired(KEYS, ARGV[1], MOST)
forget(KEYS, ARGV[1], name)
if redis.call('ZCARD', expiries) == 0 then
  redis.call('UNLINK', sizes) -- of responses whose other keys Redis itself evicted
end
local evicted = 0
while evicted < MOST and is_tenant_full() do
  forget(KEYS, ARGV[1], tenant .. ':' .. redis.call('ZRANGE', owned, 0, 0)[1])
  evicted = evicted + 1
end
while evicted < MOST and is_full() do
  forget(KEYS, ARGV[1], redis.call('ZRANGE', expiries, 0, 0)[1])
  evicted = evicted + 1
end
if is_tenant_full() or is_full() then
  return {evicted, 0}
end

redis.call('SET', KEYS[1], response, 'PX', ttl)
redis.call('ZADD', owned, now + ttl, string.match(name, '[^:]*$'))
redis.call('ZADD', expiries, now + ttl, name)
redis.call('HSET', sizes, name, #response)
redis.call('HINCRBY', sizes, tenant, #response)
redis.call('HINCRBY', sizes, '', #response)
for _, key in ipairs({owned, expiries, sizes}) do
  if redis.call('PTTL', key) < ttl then -- gateways may have different ttls; the longest is used
    redis.call('PEXPIRE', key, ttl)
  end
end
return {evicted, 1}
