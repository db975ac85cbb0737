"""`pdmesh plan`: computes how many instances a workload needs.

The command needs no running mesh. It compares two deployments and recommends one of them: P/D, with
prefill and decode on different instances, and fusion, with both phases on each instance.
"""

from __future__ import annotations

import argparse

import yaml

from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.planning.law_file import read_law
from pdmesh.cli.planning.model_folder import read_model
from pdmesh.cli.planning.plan_text import PlanPage, as_data, as_text
from pdmesh.cli.planning.scenario import read_scenario
from pdmesh.cli.view.output import show
from pdmesh.core.sizing.accelerators import Accelerator, accelerator
from pdmesh.core.sizing.advice import Advice, advise
from pdmesh.core.sizing.deployment import Deployment
from pdmesh.core.sizing.desired_state import desired_state
from pdmesh.core.sizing.instance_kind import InstanceKind, kinds_of
from pdmesh.core.sizing.model_shape import ModelShape
from pdmesh.core.sizing.problem import SizingProblem
from pdmesh.core.sizing.roofline import law_notes
from pdmesh.core.sizing.search import NotPossible, Workload


def run(options: argparse.Namespace) -> int:
    try:
        _plan(options)
    except SizingProblem as exc:
        raise CommandFailed(str(exc), code=2) from exc
    except (ArithmeticError, ValueError, RecursionError) as exc:
        raise CommandFailed(f"no plan can be made from these values: {exc}", code=2) from exc
    return 0


def _plan(options: argparse.Namespace) -> None:
    shape, folder = read_model(options.model)
    if options.kv_dtype == "fp8":
        shape = shape.with_fp8_kv()
    device = accelerator(options.gpu)
    scenario = read_scenario(options)
    traffic, goals = scenario.traffic, scenario.goals
    if shape.max_len and traffic.longest > shape.max_len:
        raise SizingProblem(
            "prompt",
            f"prompt and answer have up to {traffic.longest} tokens; the model takes"
            f" {shape.max_len} (max_position_embeddings)",
        )
    if not any(request.num_steps for request in traffic.requests):
        raise SizingProblem(
            "answer", "has only one token: a prefill draws it, and nothing is decoded"
        )
    kinds = _kinds(options, shape, device)
    advice = advise(Workload(traffic, goals, tuple(kinds), options.least))
    notes = (*shape.notes, *_law_notes(options, shape, device, kinds))
    page = PlanPage(traffic, goals, advice, options.price or 0.0, notes)
    chosen = _chosen(options, advice)
    desired = desired_state(chosen, traffic, goals, folder, shape.max_len) if chosen else None
    if options.desired:
        if desired is None:
            raise CommandFailed(f"{advice.answer.value}: {'; '.join(advice.reasons)}")
        print(yaml.safe_dump(desired, sort_keys=False), end="")
        return
    show(options, as_data(page, desired), lambda: as_text(page))


def _kinds(
    options: argparse.Namespace, shape: ModelShape, device: Accelerator
) -> list[InstanceKind]:
    if not options.law:
        return kinds_of(shape, device, options.tp)
    if len(options.tp) > 1:
        raise SizingProblem("tp", "a law holds for one number of ranks: name it, such as --tp 1")
    return kinds_of(shape, device, options.tp, read_law(options.law))


def _law_notes(
    options: argparse.Namespace,
    shape: ModelShape,
    device: Accelerator,
    kinds: list[InstanceKind],
) -> tuple[str, ...]:
    if options.law:
        return (f"step times are those of the law {options.law}",)
    return law_notes(shape, device, max(kind.tp for kind in kinds))


def _chosen(options: argparse.Namespace, advice: Advice) -> Deployment | None:
    if options.mode == "auto":
        return advice.chosen
    side = advice.pair if options.mode == "pd" else advice.fusion
    if isinstance(side, NotPossible):
        raise SizingProblem("mode", f"{options.mode} cannot meet the goals: {side.reason}")
    return side
