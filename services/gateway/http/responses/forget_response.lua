-- Forgets one response, and those that have expired. Returns whether it was there.
-- KEYS as in keep_response. ARGV: beginning of the keys, its name.
local found = forget(KEYS, ARGV[1], ARGV[2])
forget_expired(KEYS, ARGV[1], 512)
return found
