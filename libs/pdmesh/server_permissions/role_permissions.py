"""The table of permissions at NATS and Redis, by role. Everything that is not listed is forbidden.

A role is the name of a service, as in its certificate (`core.access.process_identity`). The roles
of people (viewer, operator, admin) may only read here, because people change the mesh through the
master. Each process writes its own record in the registry and no other record. It sends events
about itself. Some roles also send events about others. The reports of a node agent are such events,
because their subject names the machine.
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

Subject = Callable[[str], str]  # makes a subject from an id or "*"
ANY: Final = "*"


def whole(bucket: str) -> str:
    """All entries of a bucket, in the form that `KvBucket.watch` uses."""
    return f"{bucket}.>"


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """The events that a role may send and receive, and its access to the entries of buckets.

    An entry is `<bucket>.<key>`. NATS can limit a watch to certain entries. It can limit reads of
    single entries only to a bucket.
    """

    tells_of_itself: tuple[Subject, ...] = ()  # subjects of events that it sends about itself
    tells: tuple[str, ...] = ()  # subjects of events that it sends about others
    hears: tuple[str, ...] = ()  # subjects of events that it receives
    writes: tuple[str, ...] = ()  # buckets in which it writes any entry
    follows: tuple[str, ...] = ()  # entries that it watches
    follows_own: tuple[str, ...] = ()  # buckets in which it watches the entry with its own id
    reads: tuple[str, ...] = ()  # buckets in which it reads single entries
    makes: tuple[str, ...] = ()  # buckets that it makes and updates
    inspects: tuple[str, ...] = ()  # buckets whose servers and replicas it may see
    has_record: bool = True  # whether it writes its own record in the registry


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """The patterns of keys and the commands that a role may use, by their names in Redis' ACLs.

    The commands include those that its scripts call.
    """

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
            # The operators' page shows these events of the last hour, also those of other masters.
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

# The commands that redis-py sends for each connection (`net.redis_pool`). CLIENT SETINFO is not
# among them: Redis 7.0 lacks this command, and does not load a file with unknown commands.
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
    # The keys of kept responses are left out, because operators' tools must not see answers' texts.
    str(AdminRole.OPERATOR): RedisAccess(
        _INDEX, (*_CONNECTION, "get", "smembers", "scard", "hgetall"), only_reads=True
    ),
}
