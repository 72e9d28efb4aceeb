"""config.json to ModelSection and back, in the spellings of transformers 4 and 5.

Values are read, never guessed from shapes: a key may be left out only where the family declares what
transformers then assumes.
"""

from typing import Any

import torch
from pydantic import ValidationError

from spes_mega.errors import CheckpointError
from spes_mega.layout.families.catalog import FAMILIES, REQUIRED, family_of
from spes_mega.layout.families.family import Family
from spes_mega.layout.families.rope import read_rope
from spes_mega.recipe import ModelSection, is_local
from spes_mega.recipe.model import MAX_LAYERS
from spes_mega.validation import explain

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_PLAIN_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
# Kept when a checkpoint changes its family; within a family everything of the base is kept.
_NEUTRAL_KEYS = ("attention_dropout", "use_cache", "output_router_logits", "router_aux_loss_coef")
_STALE_KEYS = ("_name_or_path", "transformers_version", "auto_map", "num_local_experts", "num_experts")


def parse_config(raw: dict[str, Any]) -> ModelSection:
    """Read a config.json. Raises CheckpointError naming the key that is missing or not supported."""
    _check_types(raw)
    _check_numbers(raw)
    family = family_of(raw)
    _check_fixed(family, raw)
    fields: dict[str, Any] = {ours: _value(family, raw, theirs) for ours, theirs in _PLAIN_KEYS.items()}
    num_kv_heads, head_dim = _value(family, raw, "num_key_value_heads"), _value(family, raw, "head_dim")
    if head_dim is None:
        head_dim = _even_share(fields["hidden_size"], fields["num_heads"])
    if not isinstance(head_dim, int):
        raise CheckpointError(f"config.json: head_dim is {head_dim!r}; a whole number was expected")
    theta, scaling = read_rope(raw, family.defaults.get("rope_theta"), head_dim)
    fields |= {
        "family": family.name,
        "num_kv_heads": fields["num_heads"] if num_kv_heads is None else num_kv_heads,
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": raw.get("tie_word_embeddings", False),
        "init_std": raw.get("initializer_range", 0.02),
        "sliding_window": _sliding_window(family, raw),
    }
    fields |= _moe_fields(family, raw, fields["num_layers"])
    try:
        return ModelSection.model_validate(fields, strict=True)
    except ValidationError as e:
        raise CheckpointError("\n".join(explain("config.json", e, ModelSection))) from e


def make_config(model: ModelSection, base: dict[str, Any] | None, dtype: torch.dtype) -> dict[str, Any]:
    """A config.json that stock transformers opens.

    Args:
        base: the config.json this model comes from. Within a family all its other keys are kept; from another
            family the token ids and neutral keys are. None: no beginning- or end-of-text ids are claimed.
        dtype: of most of the weights.
    """
    family = FAMILIES[model.family]
    config = _kept(family, base)
    config |= {theirs: getattr(model, ours) for ours, theirs in _PLAIN_KEYS.items()}
    config |= {
        "model_type": family.name,
        "architectures": [family.architecture],
        "hidden_act": "silu",
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "dtype": DTYPE_NAMES[dtype],
        "torch_dtype": DTYPE_NAMES[dtype],
        "rope_theta": model.rope_theta,
        "rope_scaling": model.rope_scaling,
        "rope_parameters": {"rope_type": "default", **(model.rope_scaling or {}), "rope_theta": model.rope_theta},
    }
    return dict(sorted((config | _family_keys(family, model)).items()))


def differences(expected: ModelSection, found: ModelSection) -> list[str]:
    """One line for each field in which two models differ so that one's weights don't fit the other's code.

    Not compared: local fields, init, init_std and max_seq_len, which change no weight, and the dense width of a model
    that has no dense layer.
    """
    lines = []
    for name, field in ModelSection.model_fields.items():
        a, b = getattr(expected, name), getattr(found, name)
        unused = name == "ffn_hidden_size" and expected.is_moe and not expected.dense_layers
        if a != b and name not in ("init", "init_std", "max_seq_len") and not is_local(field) and not unused:
            lines.append(f"{name}: {a} expected, {b} found")
    return lines


def _value(family: Family, raw: dict[str, Any], *keys: str) -> Any:
    for key in keys:
        if raw.get(key) is not None:
            return raw[key]
    default = family.defaults.get(keys[0], REQUIRED)
    if default is REQUIRED:
        raise CheckpointError(f"config.json: the key {keys[0]!r} is missing (a {family.name} model needs it)")
    return default


def _even_share(hidden_size: Any, num_heads: Any) -> int:
    """What transformers takes as head_dim where a family lets config.json leave it out."""
    if not (isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0):
        raise CheckpointError("config.json: hidden_size and num_attention_heads must be positive whole numbers")
    if hidden_size % num_heads:
        raise CheckpointError(f"config.json: head_dim is missing, and {hidden_size} / {num_heads} is no whole number")
    return hidden_size // num_heads


_TYPES: dict[str, tuple[type, str]] = {
    "model_type": (str, "a name"),
    "rope_parameters": (dict, "a mapping"),
    "rope_scaling": (dict, "a mapping"),
    "layer_types": (list, "a list"),
    "mlp_only_layers": (list, "a list"),
    "decoder_sparse_step": (int, "a whole number"),
}


def _check_types(raw: dict[str, Any]) -> None:
    for key, (kind, expected) in _TYPES.items():
        if raw.get(key) is not None and not isinstance(raw[key], kind):
            raise CheckpointError(f"config.json: {key} is {raw[key]!r}; {expected} was expected")


def _check_numbers(raw: dict[str, Any]) -> None:
    """JSON has numbers of any size; no key of a model means one that neither int64 nor a float holds."""
    values = list(raw.items())
    while values:
        key, value = values.pop()
        if isinstance(value, int) and value.bit_length() > 63:
            raise CheckpointError(f"config.json: {key} is a number of more than 63 bits")
        if isinstance(value, dict):
            values += [(f"{key}.{inner}", part) for inner, part in value.items()]
        elif isinstance(value, list):
            values += [(key, part) for part in value]


def _check_fixed(family: Family, raw: dict[str, Any]) -> None:
    rope = raw.get("rope_parameters") or {}
    for key, wanted in family.fixed.items():
        found = raw.get(key, rope.get(key))
        if found is not None and found != wanted:
            shown = "null" if wanted is None else wanted
            raise CheckpointError(
                f"config.json: {key} is {found!r}; of {family.name} models only those with {key} {shown} are supported"
            )
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise CheckpointError("config.json: layer_types has layers other than full_attention, which are not supported")
    if raw.get("quantization_config"):
        raise CheckpointError("config.json: quantization_config is set; dequantize the checkpoint first")


def _sliding_window(family: Family, raw: dict[str, Any]) -> Any:
    """null means none, which is not what a key that is left out means. Other families ignore the key."""
    return raw.get("sliding_window", family.defaults["sliding_window"]) if family.sliding_window else None


def _moe_fields(family: Family, raw: dict[str, Any], num_layers: int) -> dict[str, Any]:
    if not family.is_moe:
        assert family.ffn_key is not None, "a dense family has dense layers"
        return {"ffn_hidden_size": _value(family, raw, family.ffn_key)}
    fields = {ours: _value(family, raw, *theirs) for ours, theirs in family.expert_keys.items()}
    fields["norm_topk_prob"] = family.always_renormalizes or _value(family, raw, "norm_topk_prob")
    if family.can_mix_dense and isinstance(num_layers, int) and num_layers <= MAX_LAYERS:
        step = raw.get("decoder_sparse_step") or 1
        listed = raw.get("mlp_only_layers") or ()
        dense = [layer for layer in range(num_layers) if layer in listed or (layer + 1) % step]
        if dense:
            assert family.ffn_key is not None, "can_mix_dense goes with a ffn_key"
            fields |= {"dense_layers": tuple(dense), "ffn_hidden_size": _value(family, raw, family.ffn_key)}
    return fields


def _family_keys(family: Family, model: ModelSection) -> dict[str, Any]:
    keys: dict[str, Any] = {key: value for key, value in family.fixed.items() if key != "partial_rotary_factor"}
    if family.ffn_key is not None:
        # An MoE model without dense layers has no such width; transformers wants a number all the same.
        keys[family.ffn_key] = model.ffn_hidden_size or model.expert_hidden_size
    for ours, theirs in family.expert_keys.items():
        keys[theirs[0]] = getattr(model, ours)
    if family.is_moe and not family.always_renormalizes:
        keys["norm_topk_prob"] = model.norm_topk_prob
    if family.sliding_window:
        keys["sliding_window"] = model.sliding_window
    if family.can_mix_dense:
        keys |= {"decoder_sparse_step": 1, "mlp_only_layers": list(model.dense_layers)}
    return keys


def _kept(family: Family, base: dict[str, Any] | None) -> dict[str, Any]:
    if base is None:
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    same = base.get("model_type") == family.name
    return {
        key: value
        for key, value in base.items()
        if key not in _STALE_KEYS and (same or key in _NEUTRAL_KEYS or key.endswith(("_token_id", "_token_ids")))
    }
