"""`pdmesh ratio`: shows the leader's decisions on P:D ratios, or changes groups by hand (S27)."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable

from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.leader import leader_of
from pdmesh.cli.view.output import as_data, show
from pdmesh.v1 import admin_service_pb2 as pb


def run(options: argparse.Namespace) -> int:
    return asyncio.run(_ratio(options))


async def _ratio(options: argparse.Namespace) -> int:
    asked = [options.more, options.add, options.remove, options.profile]
    if any(asked):
        decisions = await _plan(options)
    elif options.group or options.force or options.reason:
        raise CommandFailed("choose a change: --more, --add, --remove or --profile", code=2)
    else:
        decisions = await _decisions(options)
    show(options, [as_data(each) for each in decisions], lambda: decisions_text(decisions))
    return 0


async def _decisions(options: argparse.Namespace) -> list[pb.RatioDecision]:
    states = await leader_of(options).groups()
    return [d for d in states.decisions if options.scenario in ("", d.scenario)]


async def _plan(options: argparse.Namespace) -> list[pb.RatioDecision]:
    request = pb.PlanMovesRequest(
        scenario=options.scenario, reason=options.reason, is_forced=options.force
    )
    if options.profile:
        t_p_s, b_p, t_d_s, b_d = options.profile
        request.profile.CopyFrom(
            pb.ScenarioProfile(
                t_p_s=t_p_s, num_prefill_slots=b_p, t_d_s=t_d_s, num_decode_slots=b_d
            )
        )
    else:
        kinds = {"change_role": options.more, "add": options.add, "remove": options.remove}
        (move,) = ((kind, role) for kind, role in kinds.items() if role)
        if not options.group:
            raise CommandFailed("choose a group: --group NAME (pdmesh groups lists them)", code=2)
        request.moves.add(group_id=options.group, kind=move[0], role=move[1])
    return list((await leader_of(options).plan_moves(request)).decisions)


def decisions_text(decisions: Iterable[pb.RatioDecision]) -> str:
    """For each decision, a line with the reason, a line with the numbers, and a line per move."""
    lines: list[str] = []
    for each in decisions:
        at = each.decided_at.ToDatetime().strftime("%H:%M:%S")
        lines.append(f"{at} {each.scenario}: {each.action}: {each.reason}")
        if inputs := _inputs(each):
            lines.append(f"         {inputs}")
        for move in each.moves:
            to_group = f" to {move.to_group}" if move.to_group else ""
            lines.append(f"         {move.group_id}: {move.kind} {move.role}{to_group}")
    return "\n".join(lines) if lines else "this leader has made no decision yet"


def _inputs(decision: pb.RatioDecision) -> str:
    parts: list[str] = []
    if decision.HasField("e2e_s"):
        parts.append(f"E2E {decision.e2e_s:.3g} s, T_p/E2E {decision.prefill_share:.1%}")
    for group in decision.groups:
        prefill = _busy(group.prefill_busy if group.HasField("prefill_busy") else None)
        decode = _busy(group.decode_busy if group.HasField("decode_busy") else None)
        shape = f"{group.num_prefill}P:{group.num_decode}D"
        parts.append(f"{group.group_id} {shape}, prefills {prefill}, decodes {decode}")
    return "; ".join(parts)


def _busy(share: float | None) -> str:
    return "of unknown load" if share is None else f"{share:.0%} busy"
