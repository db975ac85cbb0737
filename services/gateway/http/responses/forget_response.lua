-- Forgets one response, and the responses that have expired. Returns whether the response was kept.
-- KEYS are the same as in keep_response.lua. ARGV: the beginning of the keys, the response's name.
local found = forget(KEYS, ARGV[1], ARGV[2])
forget_expired(KEYS, ARGV[1], 512)
return found
