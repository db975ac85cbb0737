"""Describes a started pooling vLLM to the mesh."""

from __future__ import annotations

from typing import Any, Final

from pdmesh.core.pooling.facts import PoolingFacts, PoolingTask
from pdmesh.errors import EngineMisconfigured

_TASKS: Final = {task.value: task for task in PoolingTask}


def takes_token_types(model_config: Any) -> bool:
    """Whether the model tells the two texts of a pair apart, as BERT does."""
    return int(getattr(model_config.hf_config, "type_vocab_size", 0) or 0) > 1


def facts_of(model_config: Any, supported_tasks: tuple[str, ...]) -> PoolingFacts:
    """The facts about a started pooling model. Raises EngineMisconfigured if it cannot be served.

    A model has only one task: the one for which vLLM itself would serve the model. `model_config`
    is vLLM's own, of no stable type.
    """
    chosen = str(model_config.get_pooling_task(supported_tasks) or "").partition("&")[0]
    task = _TASKS.get(chosen)
    if task is None:
        raise EngineMisconfigured(
            f"this model's pooling task is {chosen or 'none'}; embed and classify are served",
        )
    num_classes = 0
    if task is PoolingTask.CLASSIFY:
        _refuse_template(model_config)
        num_classes = int(getattr(model_config.hf_config, "num_labels", 0) or 1)
    dimensions = model_config.matryoshka_dimensions or ()
    encoder = model_config.encoder_config or {}
    return PoolingFacts(
        tasks=frozenset({task}),
        num_dimensions=model_config.embedding_size if task is PoolingTask.EMBED else 0,
        is_matryoshka=task is PoolingTask.EMBED and bool(model_config.is_matryoshka),
        matryoshka_dimensions=tuple(int(each) for each in dimensions),
        is_cross_encoder=task is PoolingTask.CLASSIFY and num_classes == 1,
        joins_pairs=not model_config.use_sep_token,
        num_classes=num_classes,
        is_lower_case=bool(encoder.get("do_lower_case", False)),
    )


def _refuse_template(model_config: Any) -> None:
    """Raises EngineMisconfigured for a model with its own template for pairs of texts.

    The mesh's gateways cannot apply such a template.
    """
    from vllm.model_executor.model_loader import get_model_cls
    from vllm.model_executor.models.interfaces import supports_score_template

    if supports_score_template(get_model_cls(model_config)):
        message = "this model has a template of its own for pairs of texts, which is not supported"
        raise EngineMisconfigured(message)
