"""What the texts of a program's file may be: what torch writes is taken, what would be more than that is refused."""

from __future__ import annotations

import enum
import json
import sys
from typing import Any

import pytest

from tpcompiler.runtime.pt2_check import Unsafe, check_program

TAKEN = {
    "expr_str": """
        Symbol('s77', positive=True, integer=True)
        Mul(Integer(2), Symbol('s39', positive=True, integer=True))
        GreaterThan(Symbol('u0', integer=True), Integer(2))
        ToFloat(Float('0.5', precision=53))
        Piecewise((Integer(1), StrictLessThan(Symbol('s0'), Integer(4))), (Integer(0), true))
        2*s0 + 1
        -oo
        Eq(Mod(s0, 2), 0) & (s1 >= 2)
        Pow(Symbol('s0', positive=True, integer=True), Integer(-1))
        Pow(s0, Rational(1, 2))
        s0**2
        FloatPow(ToFloat(s0), Float('0.5', precision=53))
        PowByNatural(Integer(9), s0)
        Mul(Integer(8), Symbol('s9'), Add(FloorDiv(Symbol('s4'), Integer(4)), Integer(1)), Add(Symbol('s5'), Integer(1)))
        """,
    "guards_code": """
        L['d']['k 1'].size()[0] == L['xs'][0].size()[0]
        2*(L['xs'][0].size()[0] // 2) <= L['xs'][0].size()[0]
        abs(L['n']) <= 3
        L['x'].size(0) == L['x'].numel()
        L['x'].size()[0] ** 2 < 4096
        torch._sym_sqrt(L['n']) < round(L['x'].size()[0] / 2, 1)
        math.isnan(L['x']) or L['x'] == -math.inf
        torch.sym_max(L['n'], 2) != 3
        L['x'].stride()[0] % 2 == 0 and not L['batch'].x.size()[1] < 4
        """,
    "target": """
        torch.ops.aten.add.Tensor
        torch.ops.higher_order.cond
        torch.ops.nosuch.op.default
        torch._functorch.predispatch._vmap_increment_nesting
        torch.sym_max
        math.ceil
        _operator.getitem
        nosuch.op
        """,
    "parameter_name": """
        layers.0.weight
        my-layer.weight
        """,
    "name": """
        p_layers_0_weight
        input
        """,
}
REFUSED = {
    "expr_str": """
        open
        s0(1)
        exec(Integer(1))
        eval(chr(49))
        ().__class__
        lambda: 1
        s0[0]
        (s0 := 1)
        [s0 for s0 in s1]
        f's0'
        b'1'
        's0'
        Integer('1')
        Symbol('a b')
        Symbol('s', name='t')
        Symbol('s', real=s0)
        Symbol('s', **s0)
        Float('open()')
        Function('f')
        Integer(1) # s0
        9**9**9
        9**Rational(64, Rational(1, 10**18))
        1e9999999999
        1e9_9_9_9_9_9_9_9
        Float('0.1', 1000000000)
        Pow(9, 9999999999, 1)
        Pow(Pow(Pow(Pow(9, e=1000), e=1000), e=1000), e=1000)
        Pow(Add(s0,s1,s2,s3,s4,s5,s6,s7), 50)
        ModularIndexing(s0**Rational(1,3), Add(s1, 1e300), ModularIndexing(s2, s1, 0))
        Abs(2**Rational(1,7)+3**Rational(1,7)-(2**Rational(2,7)+3**Rational(2,7)+2*6**Rational(1,7))**Rational(1,2))
        Pow(9, Pow(9, 9))
        Pow(Pow(Pow(9, 64), 64), 64)
        Pow(Pow(Pow(Pow(9, 9), 9), 9), 0)
        Mul(Max(), Pow(Pow(9, 13), 13))
        LShift(Integer(1), Integer(9999999999))
        floor(Float('1e999999999', precision=53))
        Float('1.5', precision=999999999)
        2**Float('2', precision=eval(chr(49)))
        FloatPow(s0, Float('2', precision=eval(chr(49))))
        exp(exp(exp(9)))
        Add(
        """,
    "guards_code": """
        __import__('os')
        L['x'].tofile('y')
        L['n'] ** Float('2', precision=eval(chr(49))) == 1
        L.x == 1
        L == 1
        _INPUT == 1
        x0 == 1
        L.__class__ is None
        torch.load('x') is None
        math.__loader__
        math.factorial(L['x'].size()[0]) > 1
        torch.ctypes.cdll['./lib.so'] != 0
        torch.os.environ['HOME'] != 0
        torch.fx.experimental.symbolic_shapes.IsNonOverlappingAndDenseIndicator('eval(1)') == 1
        torch.fx.experimental.symbolic_shapes.IsNonOverlappingAndDenseIndicator(1) == 1
        IsNonOverlappingAndDenseIndicator('eval(1)') == 1
        math.size()
        math.sym_max(1, 2) == 2
        (1).size() == 1
        L.size() == 1
        L['x'].size() * 9999999999 == 1
        (1, 2) * 9999999999 == 1
        L['x'].shape * 700000000 == 0
        round(5, -9999999999) == 0
        L['x'].size(L['y'].data) == 1
        L['mode'] == 'fast'
        L['x']['a'] + 'b' == 1
        9**9**9
        ((9**64)**64)**64 == 1
        (((9**64)**64)**64)**0 == 1
        L['n'] ** L['n'] == 1
        1 << 9999999999
        1 << L['n']
        print(1)
        open
        s0(1)
        L['x'] == b'a'
        L['x'].size(dim=1)
        (lambda: 1)()
        [1 for a in L]
        {1: 2}
        True) or (True
        L["x"]
        L['x'] == 'a\\x27b'
        L['x'] # y
        """,
    "target": """
        torch.load
        torch.os.system
        torchvision.os.system
        torch.ops.load_library
        torch.ops.import_module
        torch.ops.aten.relu.overloads
        torch.ops.aten.relu.default.__call__
        torch.ops.aten.from_file.default
        torch.ops.higher_order.aoti_call_delegate
        torch._functorch.predispatch.torch
        _operator.methodcaller
        _operator.call
        _operators.add
        math.__loader__
        mathematics.sin
        #namespace:op
        """,
    "parameter_name": """
        a.__class__.b
        a"b
        a'b
        a\\b
        """,
    "name": """
        a.b
        a=1
        *a
        lambda
        1
        """,
}


def lines(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(key, line.strip()) for key, text in table.items() for line in text.strip().splitlines()]


@pytest.mark.parametrize(("key", "text"), lines(TAKEN))
def test_taken(key: str, text: str) -> None:
    check_program({key: [text]} if key == "guards_code" else {key: text})


@pytest.mark.sample(40)
@pytest.mark.parametrize(("key", "text"), [*lines(REFUSED), ("name", "a\nb"), ("guards_code", "(1,\n2)")])
def test_refused(key: str, text: str) -> None:
    with pytest.raises(Unsafe):
        check_program({key: [text]} if key == "guards_code" else {key: text})


def test_a_text_is_checked_where_it_stands() -> None:
    check_program({"inputs": [{"name": "x", "arg": {"as_string": "it's on node 'a'"}}]})
    for place in ({"inputs": [{"as_string": "it's"}]}, {"value": {"as_string": "it's"}}, {"as_int": "1"}, {"new": "1"}):
        with pytest.raises(Unsafe):
            check_program(place)
    with pytest.raises(Unsafe):  # the second time too
        check_program([{"name": "x", "arg": {"as_string": "it's"}}, {"value": {"as_string": "it's"}}])


class Kind(enum.Enum):
    A = 1


def spec(kind: str, context: Any, children: int = 0) -> str:
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf] * children}])


def keys(*names: Any) -> str:
    return spec("builtins.dict", json.dumps(names), len(names))


def factory(module: str, name: str) -> str:
    context = {"default_factory_module": module, "default_factory_name": name, "dict_context": ["a"]}
    return spec("collections.defaultdict", context, 1)


def test_trees() -> None:
    enum_key = {"__enum__": True, "fqn": f"{__name__}:Kind", "name": "A"}
    for text in (
        keys("a", 1, None),
        keys("a b", "c.d"),
        keys(enum_key),
        keys([enum_key]),
        factory("builtins", "list"),
        spec("collections.namedtuple", "some.Name", 2),
    ):
        check_program({"in_spec": text, "out_spec": text})
    for text in (
        keys("it's"),
        keys(["it's"]),
        keys({"__enum__": True, "fqn": "no_such_module:Kind", "name": "A"}),
        keys({"__enum__": True, "fqn": f"{__name__}:spec", "name": "A"}),
        keys({"__enum__": True, "fqn": "builtins:list", "name": "A"}),
        factory("no_such_module", "list"),
        factory("builtins", "eval"),
        factory("builtins", "list.append"),
        spec("collections.namedtuple", "it's"),
        "[1]",
        "{",
    ):
        with pytest.raises(Unsafe):
            check_program({"out_spec": text})
        assert "no_such_module" not in sys.modules
