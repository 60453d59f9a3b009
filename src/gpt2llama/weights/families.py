"""What transformers calls things: one table a model family, read in both directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """How one model_type spells a model, read in both directions.

    keys: theirs -> (our field or fields, the value transformers takes when the key is absent).
    fixed: our fields that have one value in this family. names: our modules -> theirs.
    """

    architecture: str
    prefix: str
    names: dict[str, str]
    keys: dict[str, tuple[str, Any]]
    fixed: dict[str, Any]


_COMMON = {"norm_placement": "pre", "embed_scale": False, "logit_softcap": None}

_GPT2_NAMES = {
    "embed_tokens": "wte",
    "embed_positions": "wpe",
    "layers": "h",
    "attn_norm": "ln_1",
    "mlp_norm": "ln_2",
    "norm": "ln_f",
    "self_attn.q_proj": "attn.c_attn",  # q, k and v in one
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_GPT2_KEYS = {
    "vocab_size": ("vocab_size", ...),
    "n_positions": ("max_seq_len", ...),
    "n_layer": ("n_layers", ...),
    "n_head": ("n_heads", ...),
    "n_embd": ("d_model", ...),
    "n_inner": ("d_ff", None),  # None: 4 · n_embd
    "activation_function": ("activation", "gelu_new"),
    "layer_norm_epsilon": ("norm_eps", 1e-5),
    "embd_pdrop": ("dropout", 0.1),
    "attn_pdrop": ("dropout", 0.1),
    "resid_pdrop": ("dropout", 0.1),
    "tie_word_embeddings": ("tie_embeddings", True),
}
_GPT2_FIXED = {
    **_COMMON,
    "norm": "layernorm",
    "norm_bias": True,
    "position": "learned",
    "gated_mlp": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "n_kv_heads": None,
    "head_dim": None,
    "qk_norm": False,
    "sliding_window": None,
}

_LLAMA_NAMES = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_LLAMA_KEYS = {
    "vocab_size": ("vocab_size", ...),
    "max_position_embeddings": ("max_seq_len", ...),
    "num_hidden_layers": ("n_layers", ...),
    "num_attention_heads": ("n_heads", ...),
    "num_key_value_heads": ("n_kv_heads", None),
    "head_dim": ("head_dim", None),
    "hidden_size": ("d_model", ...),
    "intermediate_size": ("d_ff", ...),
    "hidden_act": ("activation", "silu"),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "tie_word_embeddings": ("tie_embeddings", False),
}
_ATTENTION_BIAS = {"attention_bias": ("qkv_bias out_bias", False)}
_LLAMA_FIXED = {**_COMMON, "norm": "rmsnorm", "position": "rope", "gated_mlp": True}
_NO_BIAS = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}

FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", "transformer.", _GPT2_NAMES, _GPT2_KEYS, _GPT2_FIXED),
    "llama": Family(
        "LlamaForCausalLM",
        "model.",
        _LLAMA_NAMES,
        {**_LLAMA_KEYS, **_ATTENTION_BIAS, "mlp_bias": ("mlp_bias", False)},
        {**_LLAMA_FIXED, "qk_norm": False, "sliding_window": None},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "model.",
        _LLAMA_NAMES,
        {
            **_LLAMA_KEYS,
            "num_key_value_heads": ("n_kv_heads", 8),
            "sliding_window": ("sliding_window", 4096),
        },
        {**_LLAMA_FIXED, **_NO_BIAS, "qk_norm": False},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "model.",
        _LLAMA_NAMES,
        {**_LLAMA_KEYS, "num_key_value_heads": ("n_kv_heads", 32)},
        {**_LLAMA_FIXED, **_NO_BIAS, "qkv_bias": True, "qk_norm": False},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "model.",
        _LLAMA_NAMES,
        {
            **_LLAMA_KEYS,
            **_ATTENTION_BIAS,
            "num_key_value_heads": ("n_kv_heads", 32),
            "head_dim": ("head_dim", 128),
        },
        {**_LLAMA_FIXED, "mlp_bias": False, "qk_norm": True},
    ),
}

ACTIVATIONS = {  # the first spelling of each is the one written
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
SCALINGS = ("linear", "dynamic", "yarn", "llama3")

# Where a family does not read the key itself: what we cannot do, and the value that is harmless.
MUST_BE = {
    "add_cross_attention": False,
    "attention_bias": False,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "quantization_config": None,
    "rope_interleaved": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "sliding_window": None,
    "use_mrope": False,
    "use_sliding_window": False,
}
_INERT = {  # why it does not change what the model computes
    "where it comes from": "architectures model_type transformers_version _name_or_path "
    "is_llama_config tokenizer_class unsloth_version unsloth_fixed unsloth_optimized "
    "transformers.js_config",
    "the tensors have their own": "dtype torch_dtype",
    "precision or speed of the same sum": "pretraining_tp reorder_and_upcast_attn use_cache "
    "attn_implementation _attn_implementation _attn_implementation_autoset chunk_size_feed_forward "
    "use_bfloat16",
    "another spelling of the context": "n_ctx max_sequence_length model_max_length",
    "training": "attention_dropout hidden_dropout initializer_range gradient_checkpointing",
    "the tokenizer's": "bos_token_id eos_token_id pad_token_id sep_token_id prefix "
    "n_special predict_special_tokens",
    "of encoders": "cross_attention_hidden_size decoder_start_token_id is_decoder "
    "tie_encoder_decoder",
    "other heads": "id2label label2id num_labels _num_labels problem_type finetuning_task "
    "summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj",
    "what transformers returns": "output_attentions output_hidden_states output_past "
    "return_dict return_dict_in_generate torchscript",
    "generation": "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id "
    "forced_eos_token_id length_penalty max_length max_new_tokens min_length "
    "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores "
    "remove_invalid_values repetition_penalty suppress_tokens task_specific_params temperature "
    "top_k top_p typical_p",
}
INERT_KEYS = frozenset(" ".join(_INERT.values()).split())
