"""Small configs of Hugging Face architectures, by kind: the rows of docs/architectures.md."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

MARKS = {f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos"))}
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT: dict[str, Any] = {**LAYERS, **MARKS, "vocab_size": 120, "max_position_embeddings": 64}
DECODER = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
MIXTURE = {
    **{**DECODER, **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4)},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
SIDES = {
    f"{side}_{field}": size
    for side in ("encoder", "decoder")
    for field, size in (("ffn_dim", 48), ("layers", 1), ("attention_heads", 4))
}
PAIR = {
    **{**SIDES, **MARKS, "d_model": 32, "vocab_size": 120},
    **{"max_position_embeddings": 64, "decoder_start_token_id": 1},
}
T5 = {
    **{"vocab_size": 120, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_decoder_layers": 1},
    **{"num_heads": 4, "decoder_start_token_id": 0},
}
IMAGE = {**LAYERS, "image_size": 32, "patch_size": 8}
STAGES = {"image_size": 32, "depths": [1, 1], "hidden_sizes": [16, 32]}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
WAVE = {
    **{**LAYERS, "vocab_size": 32, "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2},
}
STATE = {"vocab_size": 120, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_chunk_size": 4}
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
DETR = {
    **{"backbone_config": {"model_type": "resnet", **RESNET, "out_features": ["stage2"]}, "use_timm_backbone": False},
    **{"use_pretrained_backbone": False, "backbone": None, "image_size": 64, "d_model": 32, "num_queries": 5, **SIDES},
}
TOWERS = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 24}
SEEN = {"image_token_id": 119, "image_token_index": 119, "projection_dim": 32}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32}


class Row(NamedTuple):
    """An architecture: its model type, the end of its `AutoModel...` class, and the fields of its config."""

    kind: str
    model_type: str
    head: str
    sizes: dict[str, Any]

    def config(self) -> Any:
        """Return a config of transformers, which writes into the fields that it is given."""
        from transformers import AutoConfig

        return AutoConfig.for_model(self.model_type, **copy.deepcopy(self.sizes))


def _rows(kind: str, head: str, sizes: dict[str, Any], plain: str = "", /, **own: Any) -> list[Row]:
    """Rows of one kind, each with these fields: those of plain types, and those with fields of their own."""
    fields = {**{name: {} for name in plain.split()}, **own}
    return [Row(kind, name, head, {**sizes, **each}) for name, each in fields.items()]


def _seen(text: str, vision: str, **own: Any) -> dict[str, Any]:
    """A text model that sees through a vision model."""
    parts = {"text_config": {**DECODER, "model_type": text}, "vision_config": {**IMAGE, "model_type": vision}}
    return {**SEEN, **parts, **own}


GEMMA3 = {
    **{"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    **{"sliding_window": 8, "query_pre_attn_scalar": 8},
}
DEEPSEEK = {
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0},
}
POOLFORMER = {"num_encoder_blocks": 2, "patch_sizes": [4, 2], "strides": [4, 2], "padding": [1, 1]}
SEGFORMER = {
    **{**STAGES, "num_encoder_blocks": 2, "num_attention_heads": [2, 4], "sr_ratios": [2, 1]},
    **{"patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16},
}
SPECTROGRAM = {"patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 24, "num_mel_bins": 16}
VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
QWEN2_VL = {
    "text_config": {**DECODER, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
    "vision_config": VISION,
    **{"image_token_id": 119, "video_token_id": 118, "vision_start_token_id": 117, "vision_end_token_id": 116},
}
BLIP2 = {
    **{"text_config": {**TEXT, "model_type": "opt", **OPT}, "vision_config": IMAGE},
    **{"qformer_config": {**TEXT, "encoder_hidden_size": 32}, "num_query_tokens": 4},
    **{"image_token_id": 119, "image_token_index": 119},
}
SIGLIP = "siglip_vision_model"
ROWS = [
    *_rows("decoder", "ForCausalLM", DECODER, "llama mistral qwen2 qwen3 gemma gemma2", gemma3_text=GEMMA3),
    *_rows(
        "decoder", "ForCausalLM", DECODER, "olmo2 phi phi3 starcoder2 stablelm cohere granite glm4 smollm3 gpt_neox"
    ),
    *_rows("decoder", "ForCausalLM", TEXT, "gpt2", gptj={"rotary_dim": 8}, bloom={}, falcon={}),
    *_rows("decoder", "ForCausalLM", TEXT, codegen={"rotary_dim": 8}, biogpt={}, opt=OPT),
    *_rows("decoder", "ForCausalLM", TEXT, xglm={"d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 4}),
    *_rows(
        "mixture of experts", "ForCausalLM", MIXTURE, "mixtral qwen3_moe olmoe gpt_oss granitemoe", deepseek_v3=DEEPSEEK
    ),
    *_rows("text encoder", "ForMaskedLM", TEXT, "bert roberta electra mpnet modernbert deberta-v2 convbert esm"),
    *_rows("text encoder", "ForMaskedLM", TEXT, albert={"embedding_size": 16}),
    *_rows("text encoder", "ForMaskedLM", TEXT, distilbert={"dim": 32, "hidden_dim": 48, "n_layers": 1, "n_heads": 4}),
    *_rows("text encoder", "ForMaskedLM", TEXT, "fnet"),
    *_rows("encoder-decoder", "ForSeq2SeqLM", PAIR, "bart mbart marian pegasus m2m_100 blenderbot"),
    *_rows("encoder-decoder", "ForSeq2SeqLM", T5, "t5 mt5 umt5"),
    *_rows(
        *("speech to text", "ForSpeechSeq2Seq", {**PAIR, "max_target_positions": 32}),
        whisper={"num_mel_bins": 16, "max_source_positions": 12},
        speech_to_text={"input_feat_per_channel": 16, "max_source_positions": 64, "conv_channels": 32},
    ),
    *_rows("image classifier", "ForImageClassification", IMAGE, "vit"),
    *_rows("image classifier", "", IMAGE, "deit"),
    *_rows("image classifier", "ForImageClassification", IMAGE, "beit dinov2"),
    *_rows("image classifier", "ForImageClassification", SWIN, "swin swinv2"),
    *_rows(
        *("image classifier", "ForImageClassification", STAGES),
        **{"convnext": {"num_stages": 2}, "convnextv2": {"num_stages": 2}},
        **{"poolformer": POOLFORMER, "resnet": RESNET, "regnet": {**RESNET, "layer_type": "y", "groups_width": 8}},
    ),
    *_rows("image to map", "ForSemanticSegmentation", SEGFORMER, "segformer"),
    *_rows("object detector", "ForObjectDetection", DETR, "detr conditional_detr"),
    *_rows(
        "object detector", "ForObjectDetection", {**IMAGE, "image_size": [32, 32], "num_detection_tokens": 5}, "yolos"
    ),
    *_rows("two towers", "", TOWERS, "clip siglip chinese_clip altclip"),
    *_rows("audio", "ForCTC", WAVE, "wav2vec2 hubert wavlm unispeech data2vec-audio", sew={"squeeze_factor": 2}),
    *_rows("audio", "ForCTC", {**WAVE, "feature_projection_input_dim": 16}, "wav2vec2-bert"),
    *_rows("audio", "ForAudioClassification", {**LAYERS, **SPECTROGRAM}, "audio-spectrogram-transformer"),
    *_rows(
        *("state space", "ForCausalLM", STATE, "mamba falcon_mamba"),
        mamba2={"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
        rwkv={"num_hidden_layers": 2, "attention_hidden_size": 32, "rescale_every": 0},
    ),
    *_rows(
        *("state space", "ForCausalLM", {**DECODER, "num_hidden_layers": 2}),
        recurrent_gemma={"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 8},
        bamba={**MAMBA2, "attn_layer_indices": [1]},
        lfm2={"layer_types": ["conv", "full_attention"]},
    ),
    *_rows(
        *("vision-language", "ForImageTextToText", {}),
        llava=_seen("llama", "clip_vision_model"),
        paligemma=_seen("gemma", SIGLIP),
        vipllava=_seen("llama", "clip_vision_model", vision_feature_layers=[-1]),
        gemma3=_seen("gemma3_text", SIGLIP, mm_tokens_per_image=4),
        internvl=_seen("qwen2", "internvl_vision", downsample_ratio=0.5),
        idefics3=_seen("llama", "idefics3_vision", scale_factor=2),
        aya_vision=_seen("cohere2", SIGLIP, downsample_factor=2),
        qwen2_vl=QWEN2_VL,
        **{"blip-2": BLIP2},
    ),
]
