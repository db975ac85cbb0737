"""Compiles constraints for vLLM's scheduler, on threads beside its steps.

A constraint is a grammar that the answer must follow. vLLM compiles grammars only with a tokenizer,
and the mesh's engines run without one. So the first constraint gives vLLM's manager of structured
output a backend of the mesh, with the model's vocabulary. If other engines drew the answer's first
tokens, these are the last tokens of the prompt. The constraint is advanced past these tokens before
vLLM receives it. If the request still waits for token 1, the constraint is advanced past token 1 in
the request's first step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from pdmesh.core.sampling.constraint import Constraint
from pdmesh.engine.grammars.compiler import GrammarCompiler, GrammarRefused
from pdmesh.engine.grammars.guide import Guide
from pdmesh.engine.grammars.vocabulary import load_vocabulary
from pdmesh.engine.vllm.host.sampling import BEGINS_AFTER
from pdmesh.engine.vllm.sampling_extras import num_drawn_before

_THREADS: Final = 2  # threads that compile


def compile_with_drawn() -> None:
    """Patch vLLM's manager of structured output in this process. Idempotent."""
    from vllm.v1.structured_output import StructuredOutputManager as Manager

    if getattr(Manager.grammar_init, "knows_drawn", False):
        return
    fill = Manager.grammar_bitmask
    beginning = threading.Lock()

    def grammar_init(manager: Any, request: Any) -> None:
        if request.structured_output_request is None:
            return
        with beginning:
            if manager.backend is None:
                _prepare(manager)
        grammar = manager.executor.submit(drawing_of, manager.backend, request)
        request.structured_output_request.grammar = grammar

    @functools.wraps(fill)
    def grammar_bitmask(manager: Any, requests: Any, constrained: list[str], drafts: Any) -> Any:
        for request_id in constrained:
            request = requests[request_id]
            grammar = request.structured_output_request.grammar
            if grammar.awaits_first_token:
                grammar.awaits_first_token = False
                grammar.accept_tokens(request_id, request.prompt_token_ids[-1:])
        return fill(manager, requests, constrained, drafts)

    grammar_init.knows_drawn = True  # type: ignore[attr-defined]
    Manager.grammar_init = grammar_init
    Manager.grammar_bitmask = grammar_bitmask


def _prepare(manager: Any) -> None:
    """Give vLLM's manager threads and a backend. vLLM makes neither without a tokenizer."""
    if not hasattr(manager, "executor"):
        manager.executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammars")
    config = manager.vllm_config.model_config
    manager.backend = Grammars(Path(config.model), config.get_vocab_size())


class Grammars:
    """The backend that vLLM's manager of structured output calls."""

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        self._compiler = GrammarCompiler(lambda: load_vocabulary(model_dir, vocab_size))

    def drawing(self, constraint: Constraint, drawn: Sequence[int]) -> Drawing | RefusedGrammar:
        """Compile the constraint, and advance it past the tokens drawn so far.

        Called on a thread, beside the steps.
        """
        import xgrammar  # noqa: F401 - takes 2 s, which a step would wait for later

        try:
            return Drawing(Guide.after(constraint, self._compiler, drawn))
        except GrammarRefused:
            return RefusedGrammar()

    def allocate_token_bitmask(self, num_rows: int) -> Any:
        """A bitmask for `num_rows` answers.

        Made without llguidance.torch, whose import takes 3 s and 120 MB.
        """
        import torch

        num_words = -(-self._compiler.vocabulary.vocab_size // 32)
        is_pinned = torch.cuda.is_available()
        return torch.full((num_rows, num_words), -1, dtype=torch.int32, pin_memory=is_pinned)

    def destroy(self) -> None:
        """There is nothing to free."""


class Drawing:
    """A guide, which applies a constraint to one answer, with the methods that vLLM calls."""

    def __init__(self, guide: Guide) -> None:
        self.awaits_first_token = self.has_failed = False
        self._guide = guide

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Returns whether the constraint allows the tokens. If not, vLLM fails the request."""
        self.has_failed = not self._guide.accept(tokens)
        return not self.has_failed

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[: self._guide.num_valid(tokens)]

    def rollback(self, num_tokens: int) -> None:
        self._guide.give_back(num_tokens)

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        row = bitmask[index]
        if self._guide.is_free:
            row.fill_(-1)
        else:
            num_bytes = row.numel() * row.element_size()
            self._guide.matcher.unsafe_compute_mask_ptr(row.data_ptr(), num_bytes)

    def is_terminated(self) -> bool:
        """Always False.

        True would matter only for tokens that speculation proposes after the answer's end. There
        are none.
        """
        return False

    def reset(self) -> None:
        raise NotImplementedError("vLLM never calls this")


class RefusedGrammar:
    """Stands in for a grammar that does not compile, and fails its request with the next token.

    vLLM itself would end the request without a reason. The instance would then report that the KV
    did not arrive, and the mesh would try the request on another engine.
    """

    has_failed = True

    def __init__(self) -> None:
        self.awaits_first_token = False

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return False

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return []

    def rollback(self, num_tokens: int) -> None:
        """There is nothing to take back, because no token was accepted."""

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        bitmask[index].fill_(-1)

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        raise NotImplementedError("vLLM never calls this")


def has_failed(request: Any) -> bool:
    """Whether a vLLM request ended because of its constraint.

    Either the constraint did not compile, or it did not allow the last token.
    """
    asked = request.structured_output_request
    return asked is not None and getattr(asked.grammar, "has_failed", False)


def drawing_of(backend: Grammars, request: Any) -> Drawing | RefusedGrammar:
    """Compile the constraint of a vLLM request.

    While the request waits for token 1, its prompt ends with a stand-in. The constraint is not
    advanced past the stand-in.
    """
    params = request.sampling_params
    num_drawn = num_drawn_before(params)
    drawn = request.prompt_token_ids[-num_drawn:] if num_drawn else []
    is_early = bool((request.kv_transfer_params or {}).get("is_early"))
    begins_after = (params.extra_args or {}).get(BEGINS_AFTER, ())
    constraint = Constraint(params.structured_outputs.grammar, tuple(begins_after))
    drawing = backend.drawing(constraint, drawn[:-1] if is_early else drawn)
    drawing.awaits_first_token = is_early
    return drawing
