-- Forgets one response, and up to 512 expired ones. Returns whether the one response was kept.
-- KEYS are the same as in keep_response.lua. ARGV: the beginning of the keys, the response's name.
local found = forget(KEYS, ARGV[1], ARGV[2])
forget_expired(KEYS, ARGV[1], 512)
return found
