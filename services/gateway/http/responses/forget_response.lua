-- Forgets one response of a tenant. Returns whether there was one.
-- KEYS: the response, its tenant's expiries (sorted set), its tenant's sizes (hash).
-- ARGV: id.
redis.call('ZREM', KEYS[2], ARGV[1])
local size = redis.call('HGET', KEYS[3], ARGV[1])
if size then
  redis.call('HDEL', KEYS[3], ARGV[1])
  redis.call('HINCRBY', KEYS[3], '', -size)
end
return redis.call('UNLINK', KEYS[1])
