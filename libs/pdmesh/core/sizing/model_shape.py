"""Computes the shape of a model, which decides its time and memory, from the fields of its Hugging
Face `config.json`.

The shape has the numbers of parameters, the bytes of weights and of KV, and the operations per
token. Supported models are decoders with gated MLPs, grouped attention, multi-head latent attention
(MLA) and mixtures of experts. Other kinds are refused with the name of the field that shows the
difference. A guess would be wrong without a warning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pdmesh.core.sizing.problem import SizingProblem

Config = Mapping[str, Any]

_BYTES: Final[Mapping[str, float]] = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_NO_KV_PER_TOKEN: Final = (
    "ssm_state_size", "mamba_d_state", "ssm_cfg", "rwkv_version",
    "full_attention_interval", "linear_attn_config", "linear_num_value_heads", "conv_L_cache",
)  # fmt: skip
_KNOWN_LAYERS: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_UNGATED: Final = frozenset(
    {
        "bloom",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gptj",
        "mpt",
        "opt",
        "phi",
        "starcoder2",
    }
)  # fmt: skip
_MAX_COUNT: Final = 10**7  # a larger value of a field is a mistake


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Counts of one model. `expert_params` counts all routed experts together.

    `attention_width` counts, per layer, the multiplications of one token with one token that it
    attends to (scores and values, over all heads). `kv_elements` is per token and layer.
    `weight_bits` and `compute` are those of the matrices. `compute` names the unit that multiplies
    them: bf16, fp8 or fp4.
    """

    num_layers: int
    hidden: int
    num_kv_heads: int  # 1 if the KV of a token cannot be divided between ranks (MLA)
    dense_params: int  # every token is multiplied with these
    head_params: int  # each drawn token costs a multiplication with these
    embedding_params: int  # these are only looked up; 0 if the head shares them
    expert_params: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    attention_width: int = 0
    kv_elements: int = 0
    weight_bits: float = 16.0
    compute: str = "bf16"
    is_block_scaled: bool = False  # fp8 with a scale per block: its kernels are slower
    kv_bytes_per_element: float = 2.0
    max_len: int = 0  # the most tokens of prompt and answer together; 0: unknown
    measured_weight_bytes: int = 0  # the size of the weight files; 0: unknown
    notes: tuple[str, ...] = ()

    @property
    def num_params(self) -> int:
        rest = self.head_params + self.embedding_params
        return self.dense_params + self.expert_params + rest

    @property
    def expert_share(self) -> float:
        """The share of the experts that one token uses."""
        return self.experts_per_token / self.num_experts if self.num_experts else 0.0

    @property
    def active_params(self) -> float:
        """The parameters that one token of a prompt is multiplied with."""
        return self.dense_params + self.expert_params * self.expert_share

    @property
    def weight_bytes(self) -> float:
        """The bytes of all weights."""
        if self.measured_weight_bytes:
            return float(self.measured_weight_bytes)
        embeddings = self.embedding_params * self._head_bits / 8
        return self.dense_bytes + self.expert_bytes + embeddings

    @property
    def dense_bytes(self) -> float:
        """The bytes of the weights that every step reads.

        A step reads only a few rows of the embeddings.
        """
        return (self.dense_params * self.weight_bits + self.head_params * self._head_bits) / 8

    @property
    def _head_bits(self) -> float:
        """The bits per parameter of the head and the embeddings. Neither is ever quantised."""
        return max(self.weight_bits, 16.0)

    @property
    def expert_bytes(self) -> float:
        return self.expert_params * self.weight_bits / 8

    @property
    def kv_token_bytes(self) -> float:
        """The bytes that one token's KV, of all layers, has in a transfer from a prefill to a
        decode.
        """
        return self.num_layers * self.kv_elements * self.kv_bytes_per_element

    def rank_kv_bytes(self, tp: int) -> float:
        """The bytes of one token's KV on one of `tp` ranks.

        If there are fewer KV heads than ranks, heads are copied.
        """
        heads = math.ceil(self.num_kv_heads / tp)
        return self.kv_token_bytes * heads / self.num_kv_heads

    def with_fp8_kv(self) -> ModelShape:
        return replace(self, kv_bytes_per_element=1.0)


def model_shape(config: Config, *, weight_bytes: int = 0) -> ModelShape:
    """The shape that a `config.json` describes. Raises SizingProblem, which names the field.

    `weight_bytes` is the size of the model's weight files; 0 means that it is unknown.
    """
    notes: list[str] = []
    if isinstance(text := config.get("text_config"), Mapping):
        notes.append("text_config: only the language model is counted, not what reads images")
        config = {**{k: v for k, v in config.items() if k in _OUTER}, **text}
    _refuse_other_kinds(config)
    layers = _layer_kinds(config, notes)
    hidden, vocab = _count(config, "hidden_size"), _count(config, "vocab_size")
    attention = _attention(config, hidden)
    mlp = _mlp(config, hidden, layers)
    tied = bool(config.get("tie_word_embeddings", False))
    bits, compute = _precision(config)
    shape = ModelShape(
        num_layers=layers,
        hidden=hidden,
        num_kv_heads=attention.num_kv_heads,
        dense_params=layers * attention.params + mlp.dense,
        head_params=hidden * vocab,
        embedding_params=0 if tied else hidden * vocab,
        expert_params=mlp.experts,
        num_experts=mlp.num_experts,
        experts_per_token=mlp.per_token,
        attention_width=attention.width,
        kv_elements=attention.kv_elements,
        weight_bits=bits,
        compute=compute,
        is_block_scaled=_is_block_scaled(config),
        max_len=_count(config, "max_position_embeddings", 0),
        notes=tuple(notes),
    )
    return _with_files(shape, weight_bytes)


_OUTER: Final = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")


@dataclass(frozen=True, slots=True)
class _Attention:
    params: int  # per layer
    width: int
    kv_elements: int
    num_kv_heads: int


@dataclass(frozen=True, slots=True)
class _Mlp:
    """Counts over all layers."""

    dense: int
    experts: int = 0
    num_experts: int = 0
    per_token: int = 0


def _attention(config: Config, hidden: int) -> _Attention:
    heads = _count(config, "num_attention_heads")
    if config.get("kv_lora_rank"):
        return _latent_attention(config, hidden, heads)
    kv_heads = _count(config, "num_key_value_heads", heads)
    if not kv_heads:
        raise SizingProblem("model", "num_key_value_heads: must be more than 0")
    dim = _count(config, "head_dim", 0) or hidden // heads
    if not dim:
        raise SizingProblem("model", f"hidden_size: {hidden} is less than {heads} heads")
    if heads % kv_heads:
        raise SizingProblem("model", f"num_key_value_heads: {kv_heads} does not divide {heads}")
    return _Attention(
        params=2 * hidden * dim * (heads + kv_heads),
        width=2 * heads * dim,
        kv_elements=2 * kv_heads * dim,
        num_kv_heads=kv_heads,
    )


def _latent_attention(config: Config, hidden: int, heads: int) -> _Attention:
    """Multi-head latent attention: all heads share one latent vector per token, which is the KV."""
    latent, rope = _count(config, "kv_lora_rank"), _count(config, "qk_rope_head_dim")
    nope, value = _count(config, "qk_nope_head_dim"), _count(config, "v_head_dim")
    query_rank = _count(config, "q_lora_rank", 0)
    query = heads * (nope + rope)
    params = query_rank * (hidden + query) if query_rank else hidden * query
    params += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    return _Attention(
        params=params,
        width=heads * (nope + rope + value),
        kv_elements=latent + rope,
        num_kv_heads=1,
    )


def _mlp(config: Config, hidden: int, layers: int) -> _Mlp:
    num_experts = next((_count(config, name) for name in _EXPERTS if config.get(name)), 0)
    inner = config.get("intermediate_size")
    if num_experts < 2:
        return _Mlp(3 * hidden * _count(config, "intermediate_size") * layers)
    per_token = _count(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise SizingProblem("model", f"num_experts_per_tok: {per_token} of {num_experts} experts")
    width = _count(config, "moe_intermediate_size", _count(config, "intermediate_size"))
    num_dense = _num_dense_layers(config, layers)
    sparse = layers - num_dense
    shared = _count(config, "shared_expert_intermediate_size", 0)
    shared = shared or _count(config, "n_shared_experts", 0) * width
    dense = num_dense * 3 * hidden * (_count(config, "intermediate_size") if inner else width)
    dense += sparse * (3 * hidden * shared + hidden * num_experts)
    return _Mlp(dense, sparse * num_experts * 3 * hidden * width, num_experts, per_token)


def _num_dense_layers(config: Config, layers: int) -> int:
    if first := _count(config, "first_k_dense_replace", 0):
        return min(first, layers)
    only = _list(config, "mlp_only_layers")
    if not (step := _count(config, "decoder_sparse_step", 1)):
        raise SizingProblem("model", "decoder_sparse_step: must be more than 0")
    return sum(i in only or (i + 1) % step != 0 for i in range(layers))


def _layer_kinds(config: Config, notes: list[str]) -> int:
    layers = _count(config, "num_hidden_layers")
    kinds = _list(config, "layer_types")
    for kind in sorted({str(kind) for kind in kinds} - _KNOWN_LAYERS):
        raise SizingProblem("model", f"layer_types: layers of {kind} are not planned for")
    if "sliding_attention" in kinds or "chunked_attention" in kinds:
        notes.append("layer_types: layers with a window count as full, so KV is overstated")
    return layers


def _refuse_other_kinds(config: Config) -> None:
    for field in _NO_KV_PER_TOKEN:
        if config.get(field):
            raise SizingProblem("model", f"{field}: layers with a state are not planned for")
    if config.get("is_encoder_decoder"):
        raise SizingProblem("model", "is_encoder_decoder: only decoders are planned for")
    if (kind := str(config.get("model_type"))) in _UNGATED:
        raise SizingProblem("model", f"model_type: {kind} has no gated MLP, and is not planned for")


def _precision(config: Config) -> tuple[float, str]:
    """The bits per weight, and the unit that multiplies."""
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping):
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        dtype = dtype.removeprefix("torch.")
        if dtype not in _BYTES:
            raise SizingProblem("model", f"torch_dtype: {dtype} is not one of {', '.join(_BYTES)}")
        return 8 * _BYTES[dtype], "bf16"
    method = str(quantised.get("quant_method", ""))
    match method:
        case "fp8" | "fbgemm_fp8":
            return 8.0, "fp8"
        case "awq" | "gptq" | "auto-round":
            bits = _count(quantised, "bits")
            return bits + _per_group(quantised, 20), "bf16"  # a group has a scale and a zero point
        case "mxfp4":
            return 4.25, "bf16"
        case "compressed-tensors":
            return _compressed(quantised)
        case "modelopt":
            fp4 = "FP4" in str(quantised.get("quant_algo", ""))
            return (4.5, "fp4") if fp4 else (8.0, "fp8")
    raise SizingProblem("model", f"quantization_config.quant_method: {method!r} is not known")


def _is_block_scaled(config: Config) -> bool:
    quantised = config.get("quantization_config")
    return isinstance(quantised, Mapping) and bool(quantised.get("weight_block_size"))


def _compressed(quantised: Config) -> tuple[float, str]:
    groups = quantised.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        raise SizingProblem("model", "quantization_config.config_groups: no group says its weights")
    bits = float(_count(weights, "num_bits"))
    has_inputs = bool(first.get("input_activations")) if isinstance(first, Mapping) else False
    if bits == 8 and has_inputs and weights.get("type") == "float":
        return bits, "fp8"
    return bits + _per_group(weights, 16) if bits < 8 else bits, "bf16"


def _per_group(quantised: Config, num_bits: int) -> float:
    """The bits per weight that `num_bits` for each group add. Group size -1 is a whole channel."""
    if quantised.get("group_size") == -1:
        return 0.0
    size = _count(quantised, "group_size", 128)
    if size == 0:
        raise SizingProblem("model", "group_size: must be more than 0, or -1")
    return num_bits / size


def _with_files(shape: ModelShape, weight_bytes: int) -> ModelShape:
    """Use the measured size of the files, and add a note if the shape's size differs much."""
    if not weight_bytes:
        return shape
    off = shape.weight_bytes / weight_bytes - 1
    notes = shape.notes
    if abs(off) > _MAX_OFF:
        notes += (f"weights: config.json describes {off:+.0%} of the bytes in the files",)
    return replace(shape, measured_weight_bytes=weight_bytes, notes=notes)


_MAX_OFF: Final = 0.1


def _count(config: Config, field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise SizingProblem("model", f"{field}: must be a whole number, not {value!r}")
    if value == 0 and default is None:
        raise SizingProblem("model", f"{field}: must be more than 0")
    return value


def _list(config: Config, field: str) -> Sequence[Any]:
    value = config.get(field)
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise SizingProblem("model", f"{field}: must be a list, not {value!r}")
    return value
