"""The table of `pdmesh groups --usage`: instance-hours by service, scenario, group and pool."""

from __future__ import annotations

from pdmesh.cli.view.table import table
from pdmesh.v1.admin_service_pb2 import UsageBook

_NOBODY = "-"


def usage_text(book: UsageBook) -> str:
    rows = [
        (
            account.service or _NOBODY,
            account.scenario or _NOBODY,
            account.group_id or _NOBODY,
            account.pool or _NOBODY,
            str(account.num_instances),
            f"{account.instance_s:.1f}",
            f"{account.instance_s / 3600:.3f}",
        )
        for account in book.accounts
    ]
    header = ("SERVICE", "SCENARIO", "GROUP", "POOL", "INSTANCES NOW", "SECONDS", "INSTANCE-HOURS")
    since, as_of = (
        stamp.ToDatetime().isoformat(timespec="seconds") for stamp in (book.since, book.as_of)
    )
    return f"used from {since}Z to {as_of}Z\n{table(header, rows)}"
