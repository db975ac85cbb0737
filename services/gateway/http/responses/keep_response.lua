-- Keeps one response; the oldest make room first, of its tenant and then of all tenants.
-- ARGV: beginning of the keys, its name, its tenant, response, ttl in ms, most responses of a
-- tenant, most bytes of a tenant, most bytes of all tenants.
-- KEYS: the response, its tenant's expiries, all expiries, the sizes.
-- Returns how many responses made room, and whether the response is kept: if not, more have to.
local name, tenant, response = ARGV[2], ARGV[3], ARGV[4]
local ttl = tonumber(ARGV[5])
local owned, expiries, sizes = KEYS[2], KEYS[3], KEYS[4]
local MOST = 512 -- make room in one call, so that Redis answers others
local EACH = 512 -- bytes that Redis takes beside a response itself

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
  redis.call('UNLINK', sizes) -- what an eviction by Redis itself has left behind
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
  if redis.call('PTTL', key) < ttl then -- of gateways with different times, the longest holds
    redis.call('PEXPIRE', key, ttl)
  end
end
return {evicted, 1}
