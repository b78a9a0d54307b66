"""`tpcompiler export DIR --prefill-decode` for every kind of model that generates, and two ranks that generate with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.launch import fork_ranks
from tests.long import in_long_runs
from tests.runtime.commands import refused
from tests.zoo.case import randomise
from tools import hf_table
from tools.hf_models import ROWS, Row
from tools.hf_table import PAGE, build, measure_ranks, table_rows
from tpcompiler import InputsError, cli
from tpcompiler.frontend.example_inputs import Example
from tpcompiler.frontend.exporting import _export_dynamic, export_without_weights
from tpcompiler.frontend.prefill_decode import StepModule, build_steps
from tpcompiler.runtime.run import generate
from tpcompiler.runtime.weightless import weightless_names

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

MAIN = Path(cli.__file__).with_name("__main__.py")
KINDS = {
    "gpt2": ("decode, prefill", "auto"),
    "qwen3": ("decode, prefill", "config.json"),
    "deepseek_v3": ("decode, prefill", "config.json"),
    "mamba": ("decode, prefill", "auto"),
    "t5": ("decode, encoder, prefill", "auto"),
    "whisper": ("decode, encoder, prefill", "auto"),
}
# The whole way is the same for all; what differs, the programs and the order of their calls, is tested below.
SHORT = "mamba"
# Of each kind of state, cache and positions one; `ALSO` have the same ones, in long runs.
DECODERS = ("gpt2", "bloom", "gemma2", "deepseek_v3", "mamba", "bamba", "lfm2")
ALSO_DECODERS = ("opt", "olmoe", "falcon_mamba", "mamba2")
PAIRS = ("t5", "bart", "marian", "whisper")
ALSO_PAIRS = ("umt5", "m2m_100", "speech_to_text")


def row(model_type: str) -> Row:
    return next(row for row in ROWS if row.model_type == model_type)


def launched(out: Path, *words: object) -> str:
    """`torchrun` of tools/hf_table.py, by processes that have imported torch."""
    ended = fork_ranks(2, MAIN, *map(str, words))
    return "" if ended.codes == (0, 0) else "\n".join(ended.printed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", [kind if kind == SHORT else pytest.param(kind, marks=in_long_runs) for kind in KINDS]
)
def test_two_ranks_generate_as_transformers(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From `save_pretrained` by the command line: 18 tokens of two rows, of which one pads its source."""
    monkeypatch.setattr(hf_table, "torchrun", launched)
    programs, plan, ran = measure_ranks(row(model_type), tmp_path)
    assert (programs, plan) == KINDS[model_type], ran
    said, _, kinds = ran.partition(": ")
    assert said == "18 tokens a row as transformers"
    assert int(kinds.split()[0]) > 3
    if model_type != "mamba":
        return
    other = {"input_ids": torch.full((2, 9), 7)}  # negative control: of another prompt there are other tokens
    made = hf_table._written("run", tmp_path / "out", other, "--tokens", 18)
    asked = {"input_ids": torch.full((2, 9), 8)}
    monkeypatch.setattr(hf_table, "_written", lambda *_: made)
    assert hf_table.check_tokens(row("mamba"), tmp_path, tmp_path / "out", asked) == "NOT the tokens of transformers"


def steps_of(model_type: str) -> tuple[Any, dict[str, StepModule]]:
    """A small model with weights, and its programs' modules."""
    torch.manual_seed(0)
    auto: Any = getattr(transformers, f"AutoModel{row(model_type).head}")
    config = row(model_type).config()
    model = randomise(auto.from_config(config, experts_implementation="batched_mm"))
    return model, build_steps(model, 2, 4, 16)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 100, (2, count), generator=torch.Generator().manual_seed(seed))


def places(first: int, last: int) -> torch.Tensor:
    return torch.arange(first, last)


def continued(model: Any, ids: torch.Tensor, first: int) -> torch.Tensor:
    """The logits that transformers computes with a cache of its own: so many tokens at once, then one by one."""
    logits, cache = [], {}
    for at in [0, *range(first, ids.shape[1])]:
        made = model(ids[:, at : at + 1] if at else ids[:, :first], use_cache=True, **cache)
        name = next(name for name in ("past_key_values", "cache_params") if made.get(name) is not None)
        logits, cache = [*logits, made.logits], {name: made[name]}
    return torch.cat(logits, 1)


@pytest.mark.sample(6)
@pytest.mark.parametrize("model_type", [*DECODERS, *(pytest.param(kind, marks=in_long_runs) for kind in ALSO_DECODERS)])
def test_a_state_is_kept_and_begun_again(model_type: str) -> None:
    """Prompt and tokens after it give the logits of the whole text; so does a text that decode begins, over an old state."""
    model, steps = steps_of(model_type)
    with torch.no_grad():
        ids, other = tokens(7), tokens(3, seed=1)
        wanted, begun = continued(model, ids, 4), continued(model, other, 1)
        made = [steps["prefill"](input_ids=ids[:, :4], cache_position=places(0, 4))]
        changed = steps["prefill"](input_ids=other.repeat(1, 2)[:, :4], cache_position=places(0, 4))
        after = steps["decode"](input_ids=ids[:, 4:5], cache_position=places(4, 5))
        steps["prefill"](input_ids=ids[:, :4], cache_position=places(0, 4))
        for at in range(4, 7):
            made.append(steps["decode"](input_ids=ids[:, at : at + 1], cache_position=places(at, at + 1)))
        again = [steps["decode"](input_ids=other[:, at : at + 1], cache_position=places(at, at + 1)) for at in range(3)]
        if hasattr(steps["prefill"], "conv_state_0"):
            with pytest.raises(IndexError):  # such a prompt has no past
                steps["prefill"](input_ids=ids[:, :4], cache_position=places(1, 5))
    torch.testing.assert_close(torch.cat(made, 1), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(again, 1), begun, rtol=1e-4, atol=1e-4)
    assert changed.shape == made[0].shape
    assert not torch.allclose(after, made[1], atol=1e-2)  # negative control: decode goes on with what prefill wrote


@pytest.mark.parametrize("model_type", [*PAIRS, *(pytest.param(kind, marks=in_long_runs) for kind in ALSO_PAIRS)])
def test_a_source_is_read_once(model_type: str) -> None:
    """The keys and values of the encoder's vectors are kept; of a shorter source nothing of a longer one is read."""
    model, steps = steps_of(model_type)
    takes = steps["encoder"].example.inputs
    target = tokens(5, seed=2)
    with torch.no_grad():
        for length in (9, 6):
            if "input_ids" in takes:
                mask = torch.ones(2, length, dtype=torch.int64)
                mask[1, 4:] = 0
                source = {"input_ids": tokens(length, seed=length), "attention_mask": mask}
            else:
                source = {name: value * length for name, value in takes.items()}
            wanted = model(**source, decoder_input_ids=target).logits
            more = {name: value for name, value in source.items() if name == "attention_mask"}
            vectors = steps["encoder"](**source)
            made = [
                steps["prefill"](
                    input_ids=target[:, :2], cache_position=places(0, 2), encoder_hidden_states=vectors, **more
                )
            ]
            for at in range(2, 5):
                made.append(steps["decode"](input_ids=target[:, at : at + 1], cache_position=places(at, at + 1)))
            torch.testing.assert_close(torch.cat(made, 1), wanted, rtol=1e-4, atol=1e-4)
        steps["prefill"](input_ids=target[:, :2], cache_position=places(0, 2), encoder_hidden_states=-vectors, **more)
        other = steps["decode"](input_ids=target[:, 2:3], cache_position=places(2, 3))
    assert not torch.allclose(other, made[1], atol=1e-2)  # negative control: what decode reads is what prefill wrote


class Chunks(torch.nn.Module):
    """Pads to whole chunks, as Mamba2 does: a program is right for the lengths that need as much padding as its example."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        short = -x.shape[1] % 4
        return (torch.nn.functional.pad(x, (0, short)) if short else x) + y.sum()


def test_sizes_of_which_a_program_takes_some() -> None:
    """Such a size is not dynamic, whatever torch calls it; the others are."""
    example = Example()
    example.add("x", torch.ones(2, 8), "batch", "length")
    example.add("y", torch.ones(3), "rest")
    made = _export_dynamic("it", Chunks(), example, {"length": (2, 64)})
    assert made.sizes == "dynamic: batch, rest; fixed: length 8 (the model's code depends on it)"
    assert made.program.example_inputs is not None
    shapes = [list(value.shape) for value in made.program.example_inputs[1].values()]
    assert shapes == [[2, 8], [3]]


@pytest.mark.slow
def test_positions_that_no_checkpoint_has(tmp_path: Path) -> None:
    """Marian's sinusoids are computed by transformers and left out of what it saves; the program has them."""
    build(row("marian"), tmp_path)
    auto: Any = transformers.AutoModelForSeq2SeqLM
    wanted = auto.from_pretrained(tmp_path).state_dict()["model.encoder.embed_positions.weight"]
    program = export_without_weights(tmp_path, length=4).program
    name = next(name for name in program.constants if name.endswith("encoder.embed_positions.weight"))
    assert name not in weightless_names(program)
    torch.testing.assert_close(program.constants[name], wanted)


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        (
            "rwkv",
            "RwkvForCausalLM keeps its state in no cache: its forward takes neither past_key_values nor cache_params",
        ),
        ("llava", "LlavaForConditionalGeneration generates from pixel_values too, and prefill takes text only"),
    ],
)
def test_what_has_no_steps(model_type: str, said: str, tmp_path: Path) -> None:
    """Refused by name, with nothing written."""
    build(row(model_type), tmp_path)
    assert refused("export", tmp_path, "--prefill-decode", "-o", tmp_path / "models").splitlines()[0] == said
    assert not (tmp_path / "models").exists()


def test_generate_is_for_sets(tmp_path: Path) -> None:
    said = refused("run", tmp_path, "--inputs", "prompt.safetensors", "--tokens", 3).splitlines()
    assert said == [
        f"{tmp_path} has no programs called prefill and decode",
        "  help: export with --prefill-decode, and convert its files together",
    ]


class Next(torch.nn.Module):
    """After each token the next number is the most likely."""

    def forward(self, input_ids: torch.Tensor, cache_position: torch.Tensor) -> torch.Tensor:
        likely = torch.nn.functional.one_hot(input_ids + 1, 40).float()
        return likely + 0 * cache_position[:, None]


def loaded(count: int, calls: list[list[int]]) -> Any:
    """A program for so many tokens, as `load` gives it, that notes the positions of its calls."""
    given = {"input_ids": torch.ones(2, count, dtype=torch.int64), "cache_position": torch.arange(count)}
    exported = torch.export.export(Next(), (), given)
    module: Any = exported.module()

    def call(**inputs: torch.Tensor) -> torch.Tensor:
        calls.append(inputs["cache_position"].tolist())
        return module(**inputs)

    call.exported_program = exported  # type: ignore[attr-defined]
    return call


@pytest.mark.parametrize(
    ("length", "positions"),
    [(4, [[0, 1, 2, 3], [4], [5]]), (6, [[0, 1, 2, 3], [4], [5], [6], [7]]), (2, [[0], [1], [2], [3]])],
)
def test_a_prompt_of_another_length_than_prefill_takes(length: int, positions: list[list[int]]) -> None:
    """Decode takes the rest of a longer one, and all of a shorter one."""
    calls: list[list[int]] = []
    programs = {"prefill": loaded(4, calls), "decode": loaded(1, calls)}
    prompt = torch.arange(3, 3 + length).repeat(2, 1)
    made = torch.stack(list(generate(programs, {"input_ids": prompt}, 3)), 1)
    assert made.tolist() == [[length + 3, length + 4, length + 5]] * 2
    assert calls == positions
    with pytest.raises(InputsError, match="has no 'input_ids' to begin with"):
        next(generate(programs, {"ids": prompt}, 3))


class Encode(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return (input_ids * attention_mask)[..., None].float()


class First(torch.nn.Module):
    """After a token comes the one that is larger by the sum of the source's tokens."""

    def forward(
        self,
        input_ids: torch.Tensor,
        cache_position: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
    ) -> torch.Tensor:
        total = (encoder_hidden_states[..., 0] * attention_mask).sum(1, keepdim=True).long()
        return torch.nn.functional.one_hot(input_ids + total, 40).float() + 0 * cache_position[:, None]


def test_a_source_is_encoded_for_the_first_program() -> None:
    source = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    step = {"input_ids": torch.tensor([[3], [3]]), "cache_position": torch.arange(1)}
    first = {**step, "encoder_hidden_states": torch.ones(2, 3, 1), "attention_mask": source["attention_mask"]}
    programs: dict[str, Any] = {}
    for name, model, given in (("encoder", Encode(), source), ("prefill", First(), first), ("decode", Next(), step)):
        exported = torch.export.export(model, (), given)
        programs[name] = exported.module()
        programs[name].exported_program = exported
    made = generate(programs, {**source, "decoder_input_ids": step["input_ids"]}, 3)
    assert torch.stack(list(made), 1).tolist() == [[9, 10, 11], [12, 13, 14]]
    with pytest.raises(InputsError, match="has no 'decoder_input_ids' to begin with"):
        next(generate(programs, source, 3))


@pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests")
def test_the_page_shows_ranks_that_ran() -> None:
    """16 architectures of eight kinds at least; `python -m tools.hf_table --ranks --write` measures them again."""
    lines = table_rows(PAGE.read_text(encoding="utf-8"), ranks=True)
    ran = [line.split("|") for line in lines.values() if "as transformers" in line]
    assert len(ran) >= 16
    assert len({cells[2] for cells in ran}) >= 8
