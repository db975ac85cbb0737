"""Starts vLLM from the instance's process: imports vLLM, builds the engine, and logs progress."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import structlog
from pydantic import ValidationError

from pdmesh.engine.vllm.child import child_main
from pdmesh.engine.vllm.child.expert_parallel import check_experts
from pdmesh.engine.vllm.child.pipeline import check_stages
from pdmesh.engine.vllm.host.stats import SchedulerView
from pdmesh.engine.vllm.model.cache_kinds import check_cache_kinds, may_reuse_prefixes
from pdmesh.engine.vllm.model.rotation import rotate_rightly
from pdmesh.engine.vllm.model.state_steps import check_state_steps
from pdmesh.errors import EngineFailed, EngineMisconfigured

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger(__name__)

PROGRESS_EVERY_S = 5.0


async def with_progress(event: str, work: Any, timeout_s: float = 600.0) -> Any:
    """Await `work` and return its result, with a log line every few seconds.

    Raises EngineFailed if `work` takes longer than `timeout_s`.
    """
    task, started = asyncio.ensure_future(work), time.monotonic()
    while not (await asyncio.wait([task], timeout=PROGRESS_EVERY_S))[0]:
        waited = time.monotonic() - started
        log.info(event, seconds=round(waited, 1))
        if waited > timeout_s:
            raise EngineFailed(f"vLLM did not start within {timeout_s:.0f} s")
    return await task


def vllm_version() -> str:
    """Import vLLM and return its version. Raises EngineFailed with the remedy if that fails."""
    try:
        import vllm.v1.engine.async_llm  # the slow part; later imports find it done
    except ImportError as error:
        raise EngineFailed(
            f"vLLM cannot be imported ({error}); install it with `make setup`, "
            "or run without it: --engine sim",
            reason="ENGINE_MISSING",
        ) from error
    import vllm

    return str(vllm.__version__)


def build(
    arguments: dict[str, Any], view: SchedulerView, is_wanted: Callable[[], bool]
) -> AsyncLLM:
    """Start vLLM's processes and load the model. Blocks. Raises EngineFailed with vLLM's own cause.

    The thread that runs this function cannot be cancelled, so the function asks `is_wanted` before
    it starts a process.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        config = engine_config(AsyncEngineArgs, arguments)
        if config.kv_transfer_config is not None:  # pooling and encoding move no KV
            told = config.kv_transfer_config.kv_connector_extra_config
            check_cache_kinds(
                config.model_config,
                reuses_prefixes=may_reuse_prefixes(config),
                has_tiers=bool(told.get("tiers")),
            )
            check_state_steps(config)
            check_stages(config)
        check_experts(config)
        rotate_rightly(config)
        # vLLM checks the argument `async_scheduling`, but its platform for CPUs then ignores it.
        config.scheduler_config.async_scheduling = bool(arguments.get("async_scheduling"))
        if not is_wanted():
            raise EngineFailed("the engine is no longer wanted", reason="ENGINE_START")
        with guarded_children():
            llm = AsyncLLM.from_vllm_config(
                config, stat_loggers=[view.logger_factory()], disable_log_stats=True
            )
            # The gateway has compiled each request's grammar. vLLM would compile it again on this
            # event loop.
            llm.input_processor.structured_outputs_config = None
            return llm
    except ImportError as error:
        raise EngineFailed(missing_library(error), reason="ENGINE_MISSING") from error
    except (RuntimeError, ValueError, OSError, MemoryError, TypeError) as error:
        message = f"vLLM did not start ({_cause(error)}); its own lines above name the cause"
        raise EngineFailed(message, reason="ENGINE_START") from error


def model_config(arguments: Mapping[str, Any]) -> Any:
    """vLLM's configuration of the model, of no stable type.

    Imports vLLM. Raises EngineMisconfigured.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        return AsyncEngineArgs(**arguments).create_model_config()
    except (ValueError, TypeError) as error:
        raise EngineMisconfigured(f"vLLM refuses its arguments ({_cause(error)})") from error


def engine_config(make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """vLLM's configuration, of no stable type. Raises EngineMisconfigured with vLLM's objection.

    vLLM has started nothing yet, so an error can only concern the arguments or the model.
    """
    try:
        return make(**arguments).create_engine_config()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise EngineMisconfigured(f"vLLM refuses its arguments ({_cause(error)})") from error


@contextlib.contextmanager
def guarded_children() -> Iterator[None]:
    """Children spawned in this context import `child_main` as main module, not the service's."""
    os.environ[child_main.HOST_PID] = str(os.getpid())
    main = sys.modules["__main__"]
    spec, file = main.__spec__, main.__dict__.pop("__file__", None)
    main.__spec__, main.__file__ = None, child_main.__file__
    try:
        yield
    finally:
        main.__spec__ = spec
        del main.__file__
        if file is not None:
            main.__file__ = file


def missing_library(error: ImportError) -> str:
    """A message in one line about a library that the model needs and that is not installed.

    The processors of Qwen2-VL and its successors need torchvision, if only for videos.
    """
    if "torchvision" in str(error).lower():
        return (
            "the model's processor needs torchvision, built for the torch that is installed "
            "(docs/images.md, Models)"
        )
    return f"the model needs a library that is not installed ({_cause(error)})"


def _cause(error: BaseException) -> str:
    """The cause in one line.

    The first line of a pydantic error has only the number of problems, so all problems are listed
    here.
    """
    if isinstance(error, ValidationError):
        found = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return f"{error.title}: {'; '.join(line.removeprefix(': ') for line in found)}"
    text = str(error).strip().splitlines()
    return f"{error.__class__.__name__}: {text[0] if text else ''}"
