"""Models of tests/zoo at sizes at which kernels and links take longer than what it takes to call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram

from tests.zoo.build import transformer
from tests.zoo.case import Case, randomise
from tests.zoo.decoders import ATTENTION, EVERYTHING, SIZES, VOCABULARY_CUT, decoder
from tests.zoo.experts import EXPERTS
from tests.zoo.handwritten import GRU
from tests.zoo.index import CASES
from tpcompiler.frontend.prefill_decode import build_steps
from tpcompiler.runtime.artifact import SINGLE

WIDE = {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 4096}
TEXT = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8}
SEQUENCES = {"d_model": 512, "vocab_size": 4096, "use_cache": False, "tie_word_embeddings": True}
TOKENS = 16  # that decode makes for each prompt

Inputs = dict[str, torch.Tensor]


class Subject(NamedTuple):
    """A model of the benchmark.

    Attributes:
        kind: what it stands for.
        plan: by hand, as the zoo has it.
        export: its programs by name, each with its inputs; one alone has no name.
        calls: how often each program is called in a step.
    """

    kind: str
    plan: Callable[[], Mapping[str, object]]
    export: Callable[[], dict[str, tuple[ExportedProgram, Inputs]]]
    calls: Mapping[str, int]


def scaled(kind: str, name: str, build: Callable[[], torch.nn.Module] | None = None, **different: Any) -> Subject:
    """A case of the zoo, built with other sizes and called with another example."""
    case: Case = replace(CASES[name], **({"build": build} if build else {}), **different)

    def export() -> dict[str, tuple[ExportedProgram, Inputs]]:
        return {SINGLE: (case.export(False), case.inputs(*case.example))}

    return Subject(kind, case.asked, export, {SINGLE: 1})


def llama(kind: str = "attention", **different: Any) -> Subject:
    return scaled(kind, "llama", decoder("", "Llama", EVERYTHING, **WIDE, **different).build, example=(2, 128))


def generating(batch: int, prompt: int, room: int) -> Subject:
    """A prompt and tokens after it, over one cache."""

    def model() -> Any:
        return transformer("Llama", "ForCausalLM", {**SIZES, **WIDE, "use_cache": True})()

    def plan() -> Mapping[str, object]:
        return {f"model.{name}": style for name, style in EVERYTHING.items()}

    def export() -> dict[str, tuple[ExportedProgram, Inputs]]:
        steps = build_steps(model(), batch, prompt, room)
        found = {}
        for name, step in steps.items():
            inputs = {**step.example.inputs}
            if name == "decode":
                inputs["cache_position"] = torch.tensor([prompt])
            found[name] = torch.export.export(step, (), step.example.inputs), inputs
        return found

    return Subject("prefill and decode", plan, export, {"prefill": 1, "decode": TOKENS})


class Tagger(torch.nn.Module):
    """The zoo's, wider."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gru, self.out = torch.nn.Embedding(120, 256), GRU(256, 1024), torch.nn.Linear(1024, 11)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(self.table(input_ids)))


SUBJECTS: dict[str, Subject] = {
    "llama": llama(),
    "gpt2": scaled(
        "attention",
        "gpt2",
        transformer(
            "GPT2",
            "LMHeadModel",
            {
                "n_embd": 512,
                "n_inner": 2048,
                "n_layer": 2,
                "n_head": 8,
                "n_positions": 128,
                "vocab_size": 4096,
                "use_cache": False,
            },
        ),
        example=(2, 128),
    ),
    "gpt_neox": scaled(
        "attention",
        "gpt_neox",
        transformer(
            "GPTNeoX", "ForCausalLM", {**TEXT, "vocab_size": 4096, "use_parallel_residual": True, "use_cache": False}
        ),
        example=(2, 128),
    ),
    "bert": scaled(
        "attention",
        "bert",
        transformer(
            "Bert", "ForMaskedLM", {**TEXT, "vocab_size": 4096, "max_position_embeddings": 128, "pad_token_id": 0}
        ),
        example=(2, 128),
    ),
    "vit": scaled(
        "attention",
        "vit",
        transformer("ViT", "ForImageClassification", {**TEXT, "image_size": 128, "patch_size": 16, "num_labels": 20}),
        example=(4, 128),
    ),
    "conv_u": scaled("convolutions", "conv_u", example=(2, 128)),
    "resnet": scaled("convolutions", "resnet", example=(8, 160)),
    "regnet": scaled(
        "convolutions",
        "regnet",
        transformer(
            "RegNet",
            "ForImageClassification",
            {
                "embedding_size": 32,
                "hidden_sizes": [128, 256],
                "depths": [1, 2],
                "groups_width": 16,
                "num_labels": 20,
                "layer_type": "y",
            },
        ),
        example=(4, 96),
    ),
    "convnext": scaled(
        "convolutions",
        "convnext",
        transformer(
            "ConvNext",
            "ForImageClassification",
            {"hidden_sizes": [128, 256], "depths": [1, 2], "num_stages": 2, "num_labels": 20},
        ),
        example=(4, 96),
    ),
    "qwen3_moe": scaled(
        "mixture",
        "qwen3_moe",
        decoder(
            "", "Qwen3Moe", {}, **WIDE, head_dim=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=512
        ).build,
        example=(2, 64),
    ),
    "mixtral": scaled(
        "mixture",
        "mixtral_cut",
        decoder(
            "",
            "Mixtral",
            {},
            **{**WIDE, "intermediate_size": 96 * 4},
            num_local_experts=4,
            experts_implementation="batched_mm",
        ).build,
        plan={**VOCABULARY_CUT, **ATTENTION, **EXPERTS},
        example=(4, 2),
    ),
    "gru": scaled("recurrent", "gru", lambda: randomise(Tagger()), example=(8, 8)),
    "t5": scaled(
        "encoder-decoder",
        "t5",
        transformer(
            "T5",
            "ForConditionalGeneration",
            {**SEQUENCES, "d_kv": 64, "d_ff": 2048, "num_layers": 2, "num_heads": 8, "decoder_start_token_id": 0},
        ),
        example=(2, 96),
    ),
    "bart": scaled(
        "encoder-decoder",
        "bart",
        transformer(
            "Bart",
            "ForConditionalGeneration",
            {
                **SEQUENCES,
                "encoder_ffn_dim": 2048,
                "decoder_ffn_dim": 2048,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 8,
                "decoder_attention_heads": 8,
                "max_position_embeddings": 128,
            },
        ),
        example=(2, 96),
    ),
    "chat": generating(2, 64, 128),
}
