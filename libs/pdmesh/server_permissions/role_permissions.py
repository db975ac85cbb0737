"""What each role may do at NATS and Redis, as data. What is not here, nobody may do.

A role is a service's name as certificates have it (`core.access.process_identity`). People's roles
(viewer, operator, admin) only read here: people change the mesh through the master. Each process
writes its own record, and no other. It sends events about itself, and some roles also send events
about others. A node agent's reports count among these: their subject names the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pdmesh.core.access.operator_roles import ROLES, AdminRole
from pdmesh.kv.index import redis_keys
from pdmesh.net import subjects
from pdmesh.net.nats import buckets
from pdmesh.net.nats.desired_store import CURRENT, UPGRADES

Subject = Callable[[str], str]  # from an id, or "*"
ANY: Final = "*"


def whole(bucket: str) -> str:
    """All entries of a bucket, as `KvBucket.watch` asks for them."""
    return f"{bucket}.>"


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """Events that a role sends and gets, and what it does with the entries of buckets.

    An entry is `<bucket>.<key>`. NATS can limit a watch to certain entries, but reads of single
    entries only to a bucket.
    """

    tells_of_itself: tuple[Subject, ...] = ()
    tells: tuple[str, ...] = ()  # about others
    hears: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()  # buckets, whole; everyone but operators writes its record
    follows: tuple[str, ...] = ()  # entries
    follows_own: tuple[str, ...] = ()  # buckets, of which only the entry with its id
    reads: tuple[str, ...] = ()  # buckets
    makes: tuple[str, ...] = ()  # buckets
    inspects: tuple[str, ...] = ()  # buckets: which servers hold them, and how current each is
    has_record: bool = True


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """Patterns of keys, and commands as Redis' ACLs name them, with those that scripts call."""

    keys: tuple[str, ...]
    commands: tuple[str, ...]
    only_reads: bool = False


_RECORDS: Final = whole(buckets.INSTANCES)

_INSTANCE: Final = NatsAccess(
    tells_of_itself=(
        subjects.health_instance,
        subjects.kv_blocks,
        subjects.instance_load,
        subjects.error_reported,
    ),
    follows=(_RECORDS, *map(whole, (buckets.FAULTS, buckets.PINS, buckets.ADAPTERS))),
    follows_own=(buckets.ASSIGNMENTS,),
    reads=(buckets.INSTANCES,),
)

NATS_ROLES: Final[Mapping[str, NatsAccess]] = {
    "gateway": NatsAccess(
        tells_of_itself=(subjects.health_instance, subjects.request_finished),
        writes=(buckets.TENANTS,),
        follows=(
            _RECORDS,
            *map(whole, (buckets.OUT_OF_SERVICE, buckets.FAULTS, buckets.ADAPTERS)),
            whole(buckets.TENANTS),
            f"{buckets.DESIRED}.{CURRENT}",
            f"{buckets.DESIRED}.{UPGRADES}",
        ),
        reads=(buckets.INSTANCES, buckets.TENANTS),
    ),
    "master-scheduler": NatsAccess(
        tells_of_itself=(subjects.health_instance, subjects.leader_changed, subjects.admin_changed),
        tells=(
            subjects.kv_pin(),
            subjects.group_changed(),
            subjects.group_step(),
            subjects.upgrade_step(),
        ),
        hears=(
            subjects.kv_blocks(),
            subjects.instance_load(),
            subjects.request_finished(),
            subjects.error_reported(),
            # What the operators' page shows of the last hour, of other masters too:
            subjects.health_changed(),
            subjects.fault_report(),
            subjects.group_step(),
            subjects.upgrade_step(),
            subjects.leader_changed(),
            subjects.admin_changed(),
        ),
        writes=(
            buckets.ASSIGNMENTS,
            buckets.PINS,
            buckets.ADAPTERS,
            buckets.OUT_OF_SERVICE,
            buckets.DESIRED,
            buckets.LEADER,
            buckets.USAGE,
        ),
        follows=tuple(map(whole, buckets.ALL_BUCKETS)),
        reads=buckets.ALL_BUCKETS,
        makes=buckets.ALL_BUCKETS,
    ),
    "kv-cache-index": NatsAccess(
        tells_of_itself=(subjects.health_instance,),
        hears=(subjects.kv_blocks(),),
        follows=(_RECORDS, whole(buckets.PINS)),
        reads=(buckets.INSTANCES,),
    ),
    "health-monitor": NatsAccess(
        tells_of_itself=(subjects.health_instance,),
        tells=(subjects.health_changed(), subjects.fault_report()),
        hears=(subjects.health_instance(), subjects.node_reported()),
        writes=(buckets.HEALTH, buckets.FAULTS),
        follows=(
            _RECORDS,
            *map(whole, (buckets.HEALTH, buckets.FAULTS, buckets.OUT_OF_SERVICE)),
        ),
        reads=(buckets.INSTANCES,),
    ),
    "node-agent": NatsAccess(
        tells_of_itself=(subjects.health_instance,),
        tells=(subjects.node_reported(),),
        follows=(_RECORDS,),
        reads=(buckets.INSTANCES,),
    ),
    "prefill": _INSTANCE,
    "decode": _INSTANCE,
    "instance": _INSTANCE,
    **dict.fromkeys(
        ROLES,
        NatsAccess(
            hears=(subjects.ALL,),
            follows=tuple(map(whole, buckets.ALL_BUCKETS)),
            reads=(buckets.INSTANCES,),
            inspects=buckets.ALL_BUCKETS,
            has_record=False,
        ),
    ),
}

# What clients with redis-py send (`net.redis_pool`). Redis 7.0 does not load a file that names a
# command which it does not have, such as CLIENT SETINFO.
_CONNECTION: Final = ("hello", "ping", "select", "client|setname")
_RESPONSES: Final = (
    f"{redis_keys.KEPT_RESPONSES}*",
    redis_keys.KEPT_EXPIRIES,
    f"{redis_keys.KEPT_EXPIRIES}:*",
    redis_keys.KEPT_SIZES,
)
_INDEX: Final = (redis_keys.INSTANCES, redis_keys.EPOCH, f"{redis_keys.INSTANCE_KEYS}*")

REDIS_ROLES: Final[Mapping[str, RedisAccess]] = {
    "gateway": RedisAccess(
        _RESPONSES,
        (
            *_CONNECTION,
            *("evalsha", "script|load", "get", "set", "unlink", "exists", "time"),
            *("hget", "hset", "hdel", "hincrby", "zadd", "zrem", "zcard", "zrange"),
            *("pttl", "pexpire"),
        ),
    ),
    "kv-cache-index": RedisAccess(
        _INDEX,
        (
            *_CONNECTION,
            *("multi", "exec", "get", "set", "del", "unlink"),
            *("smembers", "sadd", "srem", "hgetall", "hset"),
        ),
    ),
    # Kept responses hold text, so tools do not see them.
    str(AdminRole.OPERATOR): RedisAccess(
        _INDEX, (*_CONNECTION, "get", "smembers", "scard", "hgetall"), only_reads=True
    ),
}
