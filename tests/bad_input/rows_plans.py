"""Rows of the table: plans, meshes, and placements at the boundary."""

from __future__ import annotations

from torch.distributed.tensor import Shard

from tests.bad_input.row import Row, content, text
from tests.runtime.models import PLAN
from tpcompiler import parallelize
from tpcompiler.errors import InputsError, MeshError, PlanError

CONVERT = "tpcompiler convert model.pt2 --plan plan.yaml -o new"
CONVERT_HELP = "tpcompiler convert --help lists the options"


def planned(what: str, plan: str, *said: str) -> Row:
    return Row(what, f"{CONVERT} --tp 2", *said, spoil=text("plan.yaml", plan))


PLANS = [
    Row(
        "none",
        "tpcompiler convert model.pt2 --tp 2 --dry-run",
        "no --plan is given: the search finds one, as with --plan auto",
        code=0,
    ),
    Row(
        "a slip in auto",
        "tpcompiler convert model.pt2 --tp 2 --plan autoo -o new",
        "plan file autoo does not exist",
        "did you mean auto? or give the path of a YAML or JSON file",
    ),
    planned(
        "a plan of another model",
        '"model.layers.*.q_proj": colwise\n"model.layers.*.o_proj": rowwise\n"**.lm_head": colwise\n',
        "none of the plan's 3 entries matches: this program has 'layers.*.up', 'layers.*.down', 'head'",
        "give a plan of this model, or --plan auto, which finds one",
        'asked by: plan.yaml line 1 ("model.layers.*.q_proj": "colwise")',
    ),
    Row(
        "a degree that leaves a rank nothing",
        "tpcompiler convert other.pt2 --tp 4 --plan plan.yaml -o new",
        "cannot shard 'conv.weight' on dim 1 of 3 by mesh axis 'tp' of 4 for aten.conv2d.default: it needs shards that "
        "are not empty, and 3 over 4 leaves 1 empty",
        "use a degree that divides 3, or change 'conv' from rowwise to replicate (0 B sent per rank and call)",
        'asked by: plan.yaml line 1 ("conv": "rowwise")      used at: models.py:51, in forward',
        spoil=text("plan.yaml", "conv: rowwise\n"),
    ),
    Row(
        "no such file",
        "tpcompiler convert model.pt2 --tp 2 --plan none.yaml -o new",
        "plan file none.yaml does not exist",
        "give the path of a YAML or JSON file",
    ),
    Row(
        "a directory",
        "tpcompiler convert model.pt2 --tp 2 --plan out -o new",
        "plan file out is a directory",
        "give the path of a YAML or JSON file",
    ),
    Row(
        "the model as the plan",
        "tpcompiler convert model.pt2 --tp 2 --plan model.pt2 -o new",
        "plan file model.pt2 line 1: not UTF-8 text",
        "save the file as UTF-8",
    ),
    Row(
        "Latin-1",
        f"{CONVERT} --tp 2",
        "plan file plan.yaml line 1: not UTF-8 text",
        "save the file as UTF-8",
        spoil=content("plan.yaml", b"# caf\xe9\nhead: colwise\n"),
    ),
    planned("nothing in it", "", "plan file plan.yaml is empty", 'write at least one entry, such as "*.up": colwise'),
    planned(
        "a list",
        "- head\n- colwise\n",
        "plan file plan.yaml line 1: the plan is not a mapping",
        'write one "name": style on each line, such as "*.up": colwise',
    ),
    planned(
        "no YAML: a bracket that is not closed",
        "head: [colwise\n",
        "plan file plan.yaml line 2: not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'",
        "correct the quotes, brackets and indentation",
    ),
    planned(
        "a name that begins with `*`, without quotes",
        "*.up: colwise\n",
        "plan file plan.yaml line 1: YAML anchors and aliases (& and *) are not allowed",
        'quote a name that begins with *, such as "*.up": colwise',
    ),
    planned(
        "a key that is a number",
        "0: colwise\n",
        "plan file plan.yaml line 1: a key is not text",
        'quote the key, such as "0" or "on"',
    ),
    planned(
        "one name twice",
        "head: colwise\nhead: rowwise\n",
        "plan file plan.yaml line 2: 'head' is written already in line 1",
        "remove one of the two",
    ),
    planned(
        "a name that nothing has",
        '"layer.*.up": colwise\n',
        "plan entry 'layer.*.up' matches nothing",
        "use a name of the program, such as 'layers.*.up', 'layers.*', 'layers.*.up.bias'",
        'asked by: plan.yaml line 1 ("layer.*.up": "colwise")',
    ),
    planned(
        "a parameter that no layer has",
        '"layers.*.up.kernel": colwise\n',
        "plan entry 'layers.*.up.kernel' matches nothing",
        "use a name of the program, such as 'layers.*.up', 'layers.*.up.weight', 'layers.*.up.bias'",
        'asked by: plan.yaml line 1 ("layers.*.up.kernel": "colwise")',
    ),
    planned(
        "an unknown style",
        "head: columnwise\n",
        "unknown style 'columnwise'",
        "did you mean 'colwise'? use one of colwise, colwise_gather_output, rowwise, rowwise_split_input, embedding_rowwise, packed_colwise, packed_rowwise, replicate, sequence_parallel, gather, moe_tp_experts, grouped_gemm, dispatch_experts, attend_in_turns, shard_at_rest, or a placement such as S(0) or R",
        'asked by: plan.yaml line 1 ("head": "columnwise")',
    ),
    planned(
        "a style that is not supported yet",
        "head: megamoe_experts\n",
        "style 'megamoe_experts' is recognised but not supported yet",
        "use 'replicate' meanwhile: every rank then holds and runs the whole layer",
        'asked by: plan.yaml line 1 ("head": "megamoe_experts")',
    ),
    planned(
        "a style that is a number",
        "head: 7\n",
        "unknown style '7'",
        "use one of colwise, colwise_gather_output, rowwise, rowwise_split_input, embedding_rowwise, packed_colwise, packed_rowwise, replicate, sequence_parallel, gather, moe_tp_experts, grouped_gemm, dispatch_experts, attend_in_turns, shard_at_rest, or a placement such as S(0) or R",
        'asked by: plan.yaml line 1 ("head": "7")',
    ),
    planned(
        "turns of a module that does not attend",
        "head: attend_in_turns\n",
        "style 'attend_in_turns' does not fit 'head': it calls no scaled_dot_product_attention",
        "name the module that attends, of a program as torch.export gives it",
        'asked by: plan.yaml line 1 ("head": "attend_in_turns")',
    ),
    planned(
        "two patterns that disagree",
        '"hea*": rowwise\n"*ead": colwise\n',
        "plan entries 'hea*' and '*ead' ask different styles of 'head'",
        "add an entry for 'head', or make one of the two more specific",
        'asked by: plan.yaml line 1 ("hea*": "rowwise") and plan.yaml line 2 ("*ead": "colwise")',
    ),
    planned(
        "a dim that the tensor does not have",
        "head.weight: S(2)\n",
        "cannot shard 'head.weight' on dim 2: it has 2 dims",
        "use a dim from -2 to 1",
        'asked by: plan.yaml line 1 ("head.weight": "S(2)")',
    ),
    planned(
        "an axis that the mesh does not have",
        'head.weight: {dp: "S(0)"}\n',
        "'head.weight' names mesh axis 'dp', which the mesh (tp=2) does not have",
        "use one of tp",
        "asked by: plan.yaml line 1 (\"head.weight\": {'dp': 'S(0)'})",
    ),
]

MESHES = [
    Row(
        "no mesh at all", CONVERT, "Invalid value for --tp / --mesh: give exactly one of --tp and --mesh", CONVERT_HELP
    ),
    Row(
        "two words for the mesh",
        f"{CONVERT} --tp 2 --mesh tp=2",
        "Invalid value for --tp / --mesh: give exactly one of --tp and --mesh",
        CONVERT_HELP,
    ),
    Row("no degree", f"{CONVERT} --mesh tp", "--mesh 'tp' is not a mesh", "write axis=degree, such as dp=2"),
    Row(
        "no degree for one axis",
        f"{CONVERT} --mesh dp=2,tp",
        "--mesh 'dp=2,tp' is not a mesh",
        "write axis=degree, such as dp=2",
    ),
    Row(
        "a degree that is no number",
        f"{CONVERT} --mesh tp=two",
        "--mesh 'tp=two' is not a mesh",
        "write axis=degree, such as dp=2",
    ),
    Row("nothing", f"{CONVERT} --mesh ''", "--mesh '' is not a mesh", "write axis=degree, such as dp=2"),
    Row(
        "one axis twice",
        f"{CONVERT} --mesh tp=2,tp=2",
        "a mesh needs one or more differently named axes, got ['tp', 'tp']",
        "write --tp 4, or --mesh dp=2,tp=4",
    ),
    Row(
        "an axis that is no name",
        f"{CONVERT} --mesh 'a b=2'",
        "mesh axis 'a b' is not a name",
        'use a name such as "tp"',
    ),
    Row("no ranks", f"{CONVERT} --tp 0", "mesh axis 'tp' has degree 0", "a degree is an integer of at least 1"),
    Row(
        "fewer than none", f"{CONVERT} --tp -2", "mesh axis 'tp' has degree -2", "a degree is an integer of at least 1"
    ),
    Row(
        "more ranks than anybody has",
        f"{CONVERT} --tp 16777216",
        "mesh tp=16777216 has 16777216 ranks",
        "one program is made per rank: use at most 65536 ranks",
    ),
    Row(
        "more axes than anybody has",
        f"{CONVERT} --mesh {','.join(f'a{i}=1' for i in range(65))}",
        "a mesh has 65 axes",
        "use at most 64",
    ),
    Row(
        "a digit of another script",
        f"{CONVERT} --tp 2 --input x=S(\uff11)",
        "'S(\uff11)' is not a placement",
        "write R, S(dim) such as S(0) or S(-1), or P(op) with op one of sum, avg, product, max, min",
        "asked by: --input",
    ),
    *(
        Row(
            f"`parallelize(program, {mesh!r}, plan)`",
            lambda program, mesh=mesh: parallelize(program, mesh, PLAN),
            f"mesh axis 'tp' has degree {mesh!r}",
            "a degree is an integer of at least 1",
            code=MeshError,
        )
        for mesh in (True, 2.0, None, "2")
    ),
]

BOUNDARIES = [
    Row(
        "an input without a placement",
        f"{CONVERT} --tp 2 --input x",
        "--input x names no placement",
        "write --input x=S(0), or x=dp:S(0),tp:R",
    ),
    Row(
        "no placement",
        f"{CONVERT} --tp 2 --input x=Z",
        "'Z' is not a placement",
        "write R, S(dim) such as S(0) or S(-1), or P(op) with op one of sum, avg, product, max, min",
        "asked by: --input",
    ),
    Row(
        "an input that the program does not have",
        f"{CONVERT} --tp 2 --input y=R",
        "the program has no tensor input 'y'",
        "it has x, shift",
    ),
    Row(
        "an output that it does not have",
        f"{CONVERT} --tp 2 --output x=R",
        "the program has no tensor output 'x'",
        "it has logits, hidden",
    ),
    Row(
        "a dim that the input does not have",
        f"{CONVERT} --tp 2 --input 'x=S(7)'",
        "cannot shard input 'x' on dim 7: it has 2 dims",
        "use a dim from -2 to 1",
        "asked by: --input",
    ),
    Row(
        "an axis that the mesh does not have",
        f"{CONVERT} --tp 2 --input 'x=dp:S(0)'",
        "input 'x' names mesh axis 'dp', which the mesh (tp=2) does not have",
        "use one of tp",
        "asked by: --input",
    ),
    *(
        Row(
            f"`inputs={given!r}`",
            lambda program, given=given: parallelize(program, 2, PLAN, inputs=given),
            f"inputs={given!r} is neither a mapping of names nor a list",
            'write {name: placement} or [placement, ...], such as ["S(0)"]',
            code=PlanError,
        )
        for given in ("S(0)", Shard(0), 3, {0: "R"})
    ),
    *(
        Row(
            f"`{name}={given!r}`",
            lambda program, name=name, given=given: parallelize(program, 2, PLAN, **{name: given}),
            f"{name}{what}",
            help,
            code=InputsError,
        )
        for name, given, what, help in (
            ("collectives", "mpi", " is 'mpi'", "name one of auto, nccl, symm_mem"),
            ("optimize", "speed", " is 'speed'", "name one of latency, memory"),
            ("optimizer", "lion", " is 'lion'", "name one of adamw, sgd, none"),
            ("check_indices", "no", ": Expected `bool`, got `str`", "see the arguments of parallelize"),
        )
    ),
    Row(
        '`outputs=[{"tp": 3}]`',
        lambda program: parallelize(program, 2, PLAN, outputs=[{"tp": 3}]),
        "'3' is not a placement",
        "write R, S(dim) such as S(0) or S(-1), or P(op) with op one of sum, avg, product, max, min",
        "asked by: outputs=",
        code=PlanError,
    ),
]
