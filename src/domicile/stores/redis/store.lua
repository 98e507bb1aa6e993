-- The coordination store as one script: every read and write of a store is one run of it (S11).
--
-- Redis runs a script alone and keeps all or nothing of it, so a run is a transaction. Each run
-- compares the caller's history, advances store time, ends expired leases and then does its work.
-- Reads write nothing unless a lease has expired. All keys carry one hash tag: they lie in one
-- slot. Times are whole microseconds, which a number of Lua holds exactly.
--
--   meta  hash    history, rev, time, wall, trimmed, bytes, format
--   item  hash    key -> "created revision lease-length lease value"; length "-": no lease
--   index zset    the keys, sorted as bytes
--   ttl   hash    lease -> its ttl
--   due   zset    lease -> its deadline in store time
--   held  zset    "length:lease:key" for each key under a lease, sorted as bytes
--   log   stream  one entry for each revision, whose id is "revision-0": the tag of the revision
--                 before and its own, store time, bytes so far, the server's clock, whether leases
--                 ended, who committed, and the changes
--   tag   hash    revision -> the random tag of the call that wrote it (S5)

local META, ITEM, INDEX, TTL, DUE, HELD, LOG, TAG =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]

local op, known, floor, floor_tag = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local fresh, tag_now, by = ARGV[5], ARGV[6], ARGV[7]
local kept, kept_bytes, kept_us = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local FIRST = 11 -- the arguments of the operation begin here

local MAX_TICK_US, KEPT_TAGS, TRIMMED_AT_ONCE, MANY = 250000, 100000, 8, 1000

local function whole(number) return string.format('%.0f', number) end

-- A command that this user may not run would end the script in its middle, and what it wrote before
-- would stay. So everything is asked for before the first write.
if not READS_ONLY then
  for _, command in ipairs({
    {'HSET', META, 'f', 'v'}, {'HSET', ITEM, 'f', 'v'}, {'HDEL', ITEM, 'f'}, {'HMGET', ITEM, 'f'},
    {'HGET', ITEM, 'f'}, {'HEXISTS', TTL, 'f'}, {'HSET', TTL, 'f', 'v'}, {'HSET', TAG, 'f', 'v'},
    {'ZADD', INDEX, '0', 'm'}, {'ZADD', DUE, '0', 'm'}, {'ZADD', HELD, '0', 'm'},
    {'ZREM', INDEX, 'm'}, {'ZREMRANGEBYLEX', HELD, '-', '+'}, {'ZRANGEBYLEX', HELD, '-', '+'},
    {'ZRANGEBYSCORE', DUE, '-inf', '0'}, {'XADD', LOG, '1-0', 'f', 'v'},
    {'XRANGE', LOG, '-', '+'}, {'XTRIM', LOG, 'MINID', '1-0'}, {'XREAD', 'STREAMS', LOG, '0-0'},
    {'HLEN', ITEM}, {'XLEN', LOG}, {'ZCOUNT', DUE, '-inf', '0'},
  }) do
    if not redis.acl_check_cmd(unpack(command)) then
      return redis.error_reply('NOPERM this user may not run ' .. command[1] .. ' on ' ..
        (command[1] == 'XREAD' and LOG or command[2]))
    end
  end
end

local at = redis.call('TIME')
local wall = tonumber(at[1]) * 1000000 + tonumber(at[2])
local meta = redis.call('HMGET', META,
  'history', 'rev', 'time', 'wall', 'trimmed', 'bytes', 'format')

local history = meta[1]
if not history then
  if known ~= '' then return {'rewound', 'it is empty'} end
  if fresh == '' then return {'absent'} end
  history = fresh
  redis.call('HSET', META, 'history', history, 'rev', '0', 'time', whole(wall), 'wall', whole(wall),
    'trimmed', '0', 'bytes', '0', 'format', '1')
  meta = {history, '0', whole(wall), whole(wall), '0', '0', '1'}
end
if meta[7] ~= '1' then return {'format', tostring(meta[7])} end

local rev, trimmed, logged = tonumber(meta[2]), tonumber(meta[5]), tonumber(meta[6])
local tag = redis.call('HGET', TAG, whole(rev)) or ''

-- S5: also a rewind that newer commits have overtaken must be seen: the caller's newest revision
-- must still have the tag that the caller knows.
if known ~= '' then
  if known ~= history then return {'rewound', 'it has another history'} end
  if rev < floor then
    return {'rewound', 'it is at revision ' .. whole(rev) .. ' after ' .. whole(floor)}
  end
  if floor > 0 then
    local stored = redis.call('HGET', TAG, whole(floor))
    if not stored then
      return {'rewound', 'it keeps nothing to compare with revision ' .. whole(floor)}
    end
    if stored ~= floor_tag then
      return {'rewound', 'its revision ' .. whole(floor) .. ' is another one'}
    end
  end
end

-- S4: a step of the wall clock, or an outage, counts as one tick at most.
local passed = wall - tonumber(meta[4])
local now = tonumber(meta[3]) + math.min(math.max(passed, 0), MAX_TICK_US)

local kept_time = false
local function keep_time()
  if not kept_time then
    kept_time = true
    redis.call('HSET', META, 'time', whole(now), 'wall', whole(wall))
  end
end

local function trim()
  for _ = 1, TRIMMED_AT_ONCE do
    local first = redis.call('XRANGE', LOG, '-', '+', 'COUNT', 1)[1]
    if not first then return end
    local revision = tonumber(string.match(first[1], '^(%d+)'))
    local at_us, bytes = tonumber(first[2][6]), tonumber(first[2][8])
    local fits = rev - revision < kept and logged - bytes <= kept_bytes
    if fits and now - at_us <= kept_us then return end
    redis.call('XTRIM', LOG, 'MINID', whole(revision + 1) .. '-0')
    trimmed = revision
  end
end

-- Make changes the next revision. `pieces` has keys and items, each behind its length.
local function publish(pieces, expiry)
  local blob = table.concat(pieces)
  rev, logged = rev + 1, logged + #blob
  redis.call('XADD', LOG, whole(rev) .. '-0', 'p', tag, 't', tag_now, 'a', whole(now),
    'b', whole(logged), 'w', whole(wall), 'e', expiry, 'o', by, 'c', blob)
  tag = tag_now
  redis.call('HSET', TAG, whole(rev), tag)
  redis.call('HDEL', TAG, whole(rev - KEPT_TAGS))
  trim()
  redis.call('HSET', META, 'rev', whole(rev), 'trimmed', whole(trimmed), 'bytes', whole(logged))
  keep_time()
end

local function piece(pieces, key, item)
  pieces[#pieces + 1] = #key .. ':' .. key .. #item .. ':' .. item
end

local function lease_of(item)
  local length, start = string.match(item, '^%d+ %d+ ([%d-]+) ()')
  if length == '-' then return nil end
  return string.sub(item, start, start + tonumber(length) - 1)
end

local function held_under(lease) return #lease .. ':' .. lease .. ':' end

-- What is attached to a lease disappears with it, in one commit (S3).
local function end_lease(lease, expiry)
  local under = held_under(lease)
  local upto = '(' .. string.sub(under, 1, -2) .. ';'
  local held = redis.call('ZRANGEBYLEX', HELD, '[' .. under, upto)
  local pieces = {}
  for _, member in ipairs(held) do
    local key = string.sub(member, #under + 1)
    redis.call('HDEL', ITEM, key)
    redis.call('ZREM', INDEX, key)
    piece(pieces, key, '')
  end
  redis.call('ZREMRANGEBYLEX', HELD, '[' .. under, upto)
  redis.call('ZREM', DUE, lease)
  redis.call('HDEL', TTL, lease)
  keep_time()
  if #pieces > 0 then publish(pieces, expiry) end
end

if not READS_ONLY then
  for _, lease in ipairs(redis.call('ZRANGEBYSCORE', DUE, '-inf', whole(now))) do
    end_lease(lease, '1')
  end
end

local function answer(status, ...)
  return {status, history, rev, tag, whole(passed), whole(now), ...}
end

-- The number of the first operation that fails, from 0; nil if all hold.
local function conflict()
  local n = 0
  for i = FIRST, #ARGV, 4 do
    local kind, key = ARGV[i], ARGV[i + 1]
    if kind == 'put' then
      local lease = ARGV[i + 3]
      if lease ~= '' and redis.call('HEXISTS', TTL, lease) == 0 then return n end
    elseif kind ~= 'delete' then
      local item = redis.call('HGET', ITEM, key)
      local there = item and string.match(item, '^%d+ (%d+) ')
      if kind == 'absent' then
        if there then return n end
      elseif not there or (kind == 'at' and there ~= ARGV[i + 2]) then
        return n
      end
    end
    n = n + 1
  end
  return nil
end

local function write(pieces, kind, key, value, lease)
  local old = redis.call('HGET', ITEM, key)
  if kind == 'delete' and not old then return end
  local before = old and lease_of(old)
  if before then redis.call('ZREM', HELD, held_under(before) .. key) end
  if kind == 'delete' then
    redis.call('HDEL', ITEM, key)
    redis.call('ZREM', INDEX, key)
    piece(pieces, key, '')
    return
  end
  local created = old and string.match(old, '^(%d+) ') or whole(rev + 1)
  local length = lease == '' and '-' or #lease
  local item = created .. ' ' .. whole(rev + 1) .. ' ' .. length .. ' ' .. lease .. value
  redis.call('HSET', ITEM, key, item)
  if not old then redis.call('ZADD', INDEX, 0, key) end
  if lease ~= '' then redis.call('ZADD', HELD, 0, held_under(lease) .. key) end
  piece(pieces, key, item)
end

local function renew(lease)
  local ttl = redis.call('HGET', TTL, lease)
  if ttl then
    redis.call('ZADD', DUE, whole(now + tonumber(ttl)), lease)
    keep_time()
  end
  return ttl
end

if op == 'commit' then
  local failed = conflict()
  if failed then return answer('conflict', failed) end
  local pieces = {}
  for i = FIRST, #ARGV, 4 do
    if ARGV[i] == 'put' or ARGV[i] == 'delete' then
      write(pieces, ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
    end
  end
  if #pieces > 0 then publish(pieces, '0') end
  return answer('ok')
end

local subject = ARGV[FIRST]
if op == 'keep' then
  local ttl = renew(subject)
  if not ttl then return answer('gone') end
  return answer('ok', ttl, redis.call('HGET', ITEM, ARGV[FIRST + 1]))
end
if op == 'renew' then
  local ttl = renew(subject)
  if not ttl then return answer('gone') end
  return answer('ok', ttl)
end
if op == 'grant' then
  redis.call('HSET', TTL, subject, ARGV[FIRST + 1])
  return answer('ok', renew(subject))
end
if op == 'revoke' then
  if redis.call('HEXISTS', TTL, subject) == 1 then end_lease(subject, '0') end
  return answer('ok')
end
if op == 'tick' then
  keep_time()
  return answer('ok')
end
if op == 'get' then
  return answer('ok', redis.call('HGET', ITEM, subject))
end
if op == 'list' then
  local keys = redis.call('ZRANGEBYLEX', INDEX, subject, ARGV[FIRST + 1])
  local found = {}
  for i = 1, #keys, MANY do
    local last = math.min(i + MANY - 1, #keys)
    local items = redis.call('HMGET', ITEM, unpack(keys, i, last))
    for n = i, last do found[n] = items[n - i + 1] end
  end
  return answer('ok', keys, found)
end
if op == 'log' then
  local from = tonumber(subject)
  if from > rev then return answer('future') end
  if from < trimmed then return answer('compacted', trimmed) end
  local after = whole(from + 1) .. '-0'
  return answer('ok', redis.call('XRANGE', LOG, after, '+', 'COUNT', ARGV[FIRST + 1]))
end
if op == 'compact' then
  local upto = math.min(tonumber(subject), rev)
  if upto > trimmed then
    redis.call('XTRIM', LOG, 'MINID', whole(upto + 1) .. '-0')
    redis.call('HSET', META, 'trimmed', whole(upto))
  end
  return answer('ok')
end
if op == 'state' then
  return answer('ok', redis.call('HLEN', ITEM), redis.call('HLEN', TTL), redis.call('XLEN', LOG),
    trimmed, whole(wall), redis.call('ZCOUNT', DUE, '-inf', whole(now)))
end
return redis.error_reply('ERR domicile does not know the operation ' .. op)
