"""Structured logs: JSON for machines, pretty lines on a terminal.

The field `event` is a fixed, lowercase, dotted name. All other fields are data. A line about a
request has the request's `request_id`, because one event loop serves many requests at once. A line
without a `trace_id` gets the id of the current span's trace. Tracebacks never show local variables,
because these may contain prompts.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any, Final, Literal, TextIO

import orjson
import structlog
from opentelemetry import trace

LogFormat = Literal["auto", "json", "pretty"]
_CHATTY: Final = ("nats", "httpx", "httpcore", "urllib3", "uvicorn", "asyncio")


class SteadyStream:
    """A stream for log lines that never raises. On a full disk, the line is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_torn = False  # whether the last line may be cut off

    def write(self, text: str) -> int:
        torn = "\n" if self._is_torn else ""
        try:
            self._stream.write(torn + text)
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._is_torn = True
        else:
            self._is_torn = False
        return len(text)

    def flush(self) -> None:
        """Do nothing, because each line is flushed when it is written."""


def configure(service: str, instance_id: str, log_format: LogFormat, level: str) -> None:
    """Send structlog and the standard library's loggers to stderr, in one format."""
    is_pretty = log_format == "pretty" or (log_format == "auto" and sys.stderr.isatty())
    threshold = logging.getLevelNamesMapping()[level.upper()]
    stream: Any = SteadyStream(sys.stderr)  # Any, because it lacks most methods of a TextIO
    shared = _shared_processors(service, instance_id)
    structlog.configure(
        processors=[*shared, *_renderers(is_pretty)],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(
            stream
        ),  # makes one system call per line, where print makes two
        cache_logger_on_first_use=True,
    )
    _configure_stdlib(stream, shared, is_pretty, threshold)


def take_over_stderr() -> None:
    """Log warnings and uncaught exceptions. The interpreter would print these as plain text."""
    logging.captureWarnings(True)
    log = structlog.get_logger(__name__)

    def uncaught(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            log.error("python.uncaught", exc_info=(kind, error, trace))

    sys.excepthook = uncaught
    sys.unraisablehook = lambda found: uncaught(
        found.exc_type, found.exc_value, found.exc_traceback
    )
    threading.excepthook = lambda found: uncaught(
        found.exc_type, found.exc_value, found.exc_traceback
    )


def _shared_processors(service: str, instance_id: str) -> list[structlog.types.Processor]:
    def name_the_process(
        _logger: object, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        event["service"] = service
        event["instance"] = instance_id
        return event

    return [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_the_process,
        _add_trace_id,
    ]


def _add_trace_id(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    if "trace_id" not in event:
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            event["trace_id"] = f"{span.trace_id:032x}"
    return event


def _renderers(is_pretty: bool) -> list[structlog.types.Processor]:
    if is_pretty:
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(exception_formatter=plain, pad_event_to=28)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_to_json)]


# structlog passes the renderer's keyword arguments, which are not used here.
def _to_json(event: object, **_: Any) -> str:
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def _configure_stdlib(
    stream: TextIO,
    shared: list[structlog.types.Processor],
    is_pretty: bool,
    threshold: int,
) -> None:
    """Format the log lines of libraries in the same way, and drop the less important ones."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(is_pretty),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(threshold, logging.INFO), force=True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))
