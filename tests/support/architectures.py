"""Tiny causal language models of all types that transformers has."""

from __future__ import annotations

from typing import Any

# By the names that configs have for them; a config gets those that it has.
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 32, "max_position_embeddings": 64, "sliding_window": 4, "rotary_dim": 4,
    "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_inner": 64,
    "d_model": 32, "n_layers": 2, "n_heads": 4, "num_layers": 2, "ffn_dim": 32, "word_embed_proj_dim": 32,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "n_shared_experts": 1, "num_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip


def tiny(kind: str, **options: Any) -> Any:
    """Build the causal language model of a type, with two layers of different kinds if it has several."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    usual = CONFIG_MAPPING[kind]()
    known = {name: value for name, value in SIZES.items() if getattr(usual, name, None) is not None}
    if "kv_lora_rank" in known:  # every head has keys of its own, whose width is a sum
        known["num_key_value_heads"] = 4
        known.pop("head_dim", None)
    still = {
        name: 0.0
        for name, value in vars(usual).items()
        if isinstance(value, float) and ("drop" in name or "jitter" in name)
    }
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(usual, name, None):
            known[name] = [kinds[0], next((each for each in kinds if each != kinds[0]), kinds[0])]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "experts_implementation": "eager"}
    config = CONFIG_MAPPING[kind](**known, **still, **{**special, **options})
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])(config)
