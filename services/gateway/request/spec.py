"""A client's validated request, in one form for HTTP and gRPC.

A scenario is a kind of requests with its own instances.

Each call creates several of these structs. They are msgspec structs, which are created and replaced
in a tenth of the time that frozen dataclasses need.
"""

from __future__ import annotations

from array import array
from typing import Final

import msgspec

from pdmesh.core.images.prompt_image import PromptImage
from pdmesh.core.kv.tiers.session_holds import SessionState
from pdmesh.core.sampling.constraint import Constraint
from pdmesh.core.sampling.logit_shaping import UNSHAPED, LogitShaping
from pdmesh.core.sampling.repetition import RepeatedEnd, RepetitionRule
from pdmesh.core.tenancy.limits import ANYONE, Tenant
from pdmesh.services.gateway.images.loading import Held
from pdmesh.services.gateway.parsing.answer_parsing import Parsing
from pdmesh.services.gateway.routing.adapter_names import AdaptedModel
from pdmesh.services.gateway.text.prompt import Prompt
from pdmesh.services.gateway.text.text_stream import TextRules
from pdmesh.services.gateway.text.tokenizer import Tokenizer

UNBOUNDED: Final = 1 << 31


class SamplingSpec(msgspec.Struct, frozen=True):
    """How an answer's tokens are drawn, and when it ends.

    If `max_tokens` is None, `default_max_tokens` applies. If both are None, the gateway's default
    applies. In all cases the model's context also limits the answer.
    """

    max_tokens: int | None = None
    default_max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int | None = None
    shaping: LogitShaping = UNSHAPED
    constraint: Constraint | None = None
    stop_token_ids: frozenset[int] = frozenset()  # in addition to the model's end tokens
    is_stop_shown: bool = False  # the answer's text includes the stop string
    are_special_shown: bool = False  # the answer's text includes special tokens
    repetition: RepetitionRule | None = None

    @property
    def ends_by_text(self) -> bool:
        """Whether the gateway may end an answer before its instance does."""
        return bool(self.stop) or self.repetition is not None

    def end_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end an answer. `eos_token_ids` are the model's end tokens."""
        own = frozenset[int]() if self.ignore_eos else eos_token_ids
        return own | self.stop_token_ids if self.stop_token_ids else own

    def text_rules(self, end_ids: frozenset[int]) -> TextRules:
        min_tokens = self.shaping.min_tokens
        return TextRules(self.stop, min_tokens, self.is_stop_shown, self.are_special_shown, end_ids)

    def repeated_end(self, end_ids: frozenset[int], max_tokens: int) -> RepeatedEnd | None:
        if self.repetition is None:
            return None
        return RepeatedEnd(self.repetition, end_ids, self.shaping.min_tokens, max_tokens)


class ServedModel(msgspec.Struct, frozen=True):
    """A model as one call uses it, even if the model gets another tokenizer during the call."""

    name: str
    tokenizer: Tokenizer
    context_length: int  # the most tokens that prompt and answer may have together
    adapter: AdaptedModel | None = None  # the adapter that `name` stands for


class ToldSession(msgspec.Struct, frozen=True):
    """The chat session that a client names, and its state."""

    id: str
    state: SessionState


class CallSpec(msgspec.Struct, frozen=True):
    """One call of a client, who wants `n` answers (choices) for each prompt.

    `prompts` holds token ids of `tokenizer`, which also turns the answers into text.
    """

    operation: str  # chat or text_completion
    model: str
    prompts: tuple[array[int], ...]
    sampling: SamplingSpec
    tokenizer: Tokenizer
    context_length: int = UNBOUNDED  # the most tokens that prompt and answer may have together
    n: int = 1
    scenario: str = ""
    chat_id: str = ""
    session: ToldSession | None = None
    cache_salt: str = ""
    # The names of two fields in the client's API, for error messages about lengths.
    field_of_prompt: str = "prompt"
    field_of_max_tokens: str = "max_tokens"
    echoed: tuple[str, ...] = ()  # the text of each prompt, if answers begin with the prompt
    # The client asked for 0 tokens. The engine draws one token all the same, which is not shown.
    is_echo_alone: bool = False
    spells_ids: bool = False  # log probabilities name tokens by token id
    has_token_ids: bool = False  # the answer holds token ids beside the text
    parsing: Parsing | None = None  # set if answers are parsed for reasoning or tool calls
    tenant: Tenant = ANYONE
    adapter: AdaptedModel | None = None  # the adapter that `model` names
    images: tuple[PromptImage, ...] = ()  # a call with images has only one prompt
    held_images: Held | None = None

    @property
    def text_rules(self) -> TextRules:
        return self.sampling.text_rules(self.sampling.end_ids(self.tokenizer.eos_token_ids))

    @property
    def base_model(self) -> str:
        """The model that instances serve, even if `model` names an adapter of it."""
        return self.model if self.adapter is None else self.adapter.model


class PreparedCall(msgspec.Struct, frozen=True):
    """A call for which the instances can now be chosen.

    `prompts` and `max_tokens` have the same order.
    """

    spec: CallSpec  # its scenario is chosen, and its adapter is the one that is served now
    prompts: tuple[Prompt, ...]
    max_tokens: tuple[int, ...]  # the limit for each prompt's answers
    scenario_by: str  # "label", "rule" or "model", depending on how the scenario was chosen
