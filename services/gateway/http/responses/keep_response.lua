-- Keeps one response of a tenant; the oldest make room within the bounds.
-- KEYS: the response, its tenant's expiries (sorted set), its tenant's sizes (hash).
-- ARGV: id, response, ttl in ms, most responses, most bytes, what a response's key begins with.
-- Returns how many responses made room. The field "" of the sizes is their sum.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expiries, sizes = KEYS[2], KEYS[3]

local function drop(id)
  redis.call('UNLINK', ARGV[6] .. id)
  redis.call('ZREM', expiries, id)
  local size = redis.call('HGET', sizes, id)
  if size then
    redis.call('HDEL', sizes, id)
    redis.call('HINCRBY', sizes, '', -size)
  end
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', expiries, '-inf', now)) do
  drop(id)
end
drop(ARGV[1])
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', expiries, now + ARGV[3], ARGV[1])
redis.call('HSET', sizes, ARGV[1], #ARGV[2])
redis.call('HINCRBY', sizes, '', #ARGV[2])
local evicted = 0
while redis.call('ZCARD', expiries) > tonumber(ARGV[4])
    or tonumber(redis.call('HGET', sizes, '')) > tonumber(ARGV[5]) do
  local oldest = redis.call('ZRANGE', expiries, 0, 0)[1]
  drop(oldest)
  evicted = evicted + 1
end
redis.call('PEXPIRE', expiries, ARGV[3])
redis.call('PEXPIRE', sizes, ARGV[3])
return evicted
