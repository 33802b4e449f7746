"""The written form of graphs: round trips, hashes that see everything but names, nothing evil."""

from __future__ import annotations

import builtins
import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, attended, partition_of, rows, trace_of

from pcgsvc.compilers.eager import EagerPiece
from pcgsvc.errors import CompileError
from pcgsvc.program.pieces import Kind
from pcgsvc.trace.rows import (
    Document,
    decode,
    digest,
    encode,
    find_target,
    function_of,
    python_of,
    refs,
    source_of,
    target_name,
)

INF, NAN = float("inf"), float("nan")
CONSTANTS: list[Any] = [
    None,
    ...,
    True,
    False,
    0,
    -7,
    1 << 70,
    "a 'quoted' \"word\"\n\\",
    0.1,
    -0.0,
    5e-324,
    INF,
    -INF,
    NAN,
    1 + 2j,
    complex(-0.0, 3.5),
    complex(INF, -INF),
    complex(NAN, 0.0),
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.strided,
    torch.sparse_coo,
    torch.channels_last,
    torch.device("cpu"),
    torch.device("cuda", 1),
    (),
    (1,),
    (1, (2.0, [3])),
    [],
    [1, "v", None],
    ["v", 0],
    slice(None),
    slice(1, None, -2),
    slice(torch.float32, [1], ()),
    {},
    {"a": 1, "b": [2, {"c": 3.0}]},
]


def ref(node: torch.fx.Node) -> int:
    raise AssertionError("there is no node here")


def same(a: Any, b: Any) -> bool:
    """Equality that knows NaN, the sign of zero, and kinds."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return repr(a) == repr(b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


# ---- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", CONSTANTS, ids=repr)
def test_a_constant_survives_json(value: Any) -> None:
    item = json.loads(json.dumps(encode(value, ref), allow_nan=False))
    assert same(decode(item, []), value)
    assert refs(item) == set()


@pytest.mark.parametrize(
    "value",
    [v for v in CONSTANTS],
    ids=repr,
)
def test_a_constant_survives_as_source_of_a_function(value: Any) -> None:
    # torch.broadcast_shapes is not called: the value passes through a call that gives it back.
    document: Document = {
        "inputs": [["int", "s"]],
        "rows": [["call_function", "builtins.max", encode([value, 0], ref), encode({}, ref)]],
        "outputs": [1],
    }
    source = python_of(document, "f").replace("builtins.max", "both")
    space = {"torch": torch, "float": float, "complex": complex, "slice": slice}
    exec(source, {**space, "both": lambda *a: a, "__builtins__": {}}, space)
    assert same(space["f"](3)[0], (value, 0))  # type: ignore[operator]


@pytest.mark.parametrize(
    "value",
    [INF, NAN, complex(INF, NAN), complex(1, -0.0)],
    ids=repr,
)
def test_a_built_function_holds_odd_numbers(value: Any) -> None:
    document: Document = {
        "inputs": [["int", 0]],
        "rows": [["call_function", "torch.full", encode([[2], value], ref), ["dict", []]]],
        "outputs": [1],
    }
    (result,) = function_of(document, "f")(0)
    assert torch.equal(result.isnan(), torch.full([2], value).isnan())
    assert same(complex(result[0].item()), complex(value))


def test_references_are_looked_up_wherever_they_stand() -> None:
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    number = {a: 0, b: 1}.__getitem__
    value = [a, (b, slice(a, None, b)), {"k": [a]}]
    item = encode(value, number)
    assert refs(item) == {0, 1}
    assert decode(item, ["x", "y"]) == ["x", ("y", slice("x", None, "y")), {"k": ["x"]}]
    assert eval(source_of(item, lambda n: f"i{n}"), {"i0": "x", "i1": "y", "slice": slice}) == [
        "x",
        ("y", slice("x", None, "y")),
        {"k": ["x"]},
    ]


@pytest.mark.parametrize(
    "value", [torch.zeros(2), object(), {1, 2}, torch.Generator(), lambda: 0], ids=type
)
def test_a_constant_of_another_kind_has_no_written_form(value: Any) -> None:
    with pytest.raises(CompileError, match="no written form"):
        encode(value, ref)


def forward(x: torch.Tensor) -> torch.Tensor:
    """Hold many kinds of calls: functions, methods, operators, in-place, kwargs, slices."""
    y = torch.nn.functional.silu(x)[:, 1:] * 2 + x[:, :-1]
    z = torch.cat([y, x], dim=-1).clamp(min=-1.5, max=float("inf")).to(torch.float64)
    z[:, 0] = 3
    a, b = z.split([3, 2 * WIDTH - 4], dim=1)
    sums = a.sum(-1, keepdim=True) + b.pow(2).mean(-1, keepdim=True) + round(x.shape[0] / 3)
    return sums.float().view(x.shape[0], 1)


def document_of(function: Callable[..., Any]) -> Document:
    (piece,) = [p for p in partition_of(function).pieces if p.kind is Kind.REGION]
    assert piece.document is not None
    return piece.document


def test_a_graph_survives_as_document_and_gives_the_same_numbers() -> None:
    document = json.loads(json.dumps(document_of(forward)))
    x = rows(5)
    given = [5 if spec[0] == "int" else x for spec in document["inputs"]]
    (result,) = function_of(document, "f")(*given)
    assert torch.equal(result, forward(x))


def test_a_piece_survives_as_bytes_and_a_piece_of_another_hash_is_refused() -> None:
    document = document_of(lambda x: x * 2 + 1)
    data = EagerPiece(document).to_bytes()
    x = rows(5)
    assert torch.equal(EagerPiece.from_bytes(data, digest(document))(x)[0], x * 2 + 1)
    with pytest.raises(CompileError, match="another"):
        EagerPiece.from_bytes(data, "0" * 64)


def test_values_that_nobody_reads_any_more_are_dropped() -> None:
    source = python_of(document_of(lambda x: ((x * 2).sin() + 1).cos()), "f")
    assert source.count("= None") >= 3


@pytest.mark.parametrize(
    "target",
    [
        torch.relu,
        torch.nn.functional.silu,
        torch.nn.functional.scaled_dot_product_attention,
        torch.ops.aten.add.Tensor,
        torch.ops.toy.attend,
        torch.ops.toy.attend.default,
        torch.Tensor.view,
        math.floor,
        getattr,
        min,
        torch.sym_max,
        torch.sym_int,
    ],
    ids=lambda target: getattr(target, "__name__", str(target)),
)
def test_a_callable_is_found_again_by_its_name(target: Any) -> None:
    assert find_target(target_name(target)) is target


def test_a_callable_of_the_user_has_no_written_form() -> None:
    with pytest.raises(CompileError, match="splitting_op"):
        target_name(forward)


# ---- hashes --------------------------------------------------------------------------------------


def base() -> Document:
    """Return a small document in which every kind of fact occurs."""
    v0, v1 = ["v", 0], ["v", 1]
    return {
        "inputs": [
            ["int", "s"],
            ["tensor", "torch.float32", ["s", 4], [4, 1], 0, "cpu", "torch.strided"],
            ["tensor", "torch.float32", ["s", 4], [4, 1], 0, "cpu", "torch.strided"],
        ],
        "rows": [
            [
                "call_function",
                "torch.sub",
                ["list", [v1, ["v", 2]]],
                ["dict", [[["str", "alpha"], ["int", 2]]]],
            ],
            ["call_method", "add", ["list", [["v", 3], ["float", (0.5).hex()]]], ["dict", []]],
            ["call_function", "torch.zeros", ["list", [["list", [v0]]]], ["dict", []]],
        ],
        "outputs": [4, 5],
        "assumes": ["s > 4"],
    }


PERTURBATIONS: dict[str, Callable[[Document], Any]] = {
    "op": lambda d: d["rows"][0].__setitem__(1, "torch.add"),
    "kind of call": lambda d: d["rows"][0].__setitem__(0, "call_method"),
    "argument": lambda d: d["rows"][0][2][1].__setitem__(1, ["v", 1]),
    "argument order": lambda d: d["rows"][0][2][1].reverse(),
    "keyword": lambda d: d["rows"][0][3][1][0].__setitem__(0, ["str", "other"]),
    "keyword's value": lambda d: d["rows"][0][3][1][0].__setitem__(1, ["int", 3]),
    "kind of a number": lambda d: d["rows"][0][3][1][0].__setitem__(1, ["float", (2.0).hex()]),
    "bool for int": lambda d: d["rows"][0][3][1][0].__setitem__(1, ["bool", True]),
    "constant": lambda d: d["rows"][1][2][1].__setitem__(1, ["float", (0.5 + 2**-53).hex()]),
    "dtype": lambda d: d["inputs"][1].__setitem__(1, "torch.float16"),
    "shape": lambda d: d["inputs"][1].__setitem__(2, ["s", 5]),
    "symbol": lambda d: d["inputs"][1].__setitem__(2, [7, 4]),
    "stride": lambda d: d["inputs"][1].__setitem__(3, [1, 4]),
    "offset": lambda d: d["inputs"][1].__setitem__(4, 1),
    "device": lambda d: d["inputs"][1].__setitem__(5, "cuda:0"),
    "layout": lambda d: d["inputs"][1].__setitem__(6, "torch.sparse_coo"),
    "order of rows": lambda d: d["rows"].reverse(),
    "a row less": lambda d: d["rows"].pop(),
    "outputs": lambda d: d["outputs"].reverse(),
    "an output less": lambda d: d["outputs"].pop(),
    "range": lambda d: d["assumes"].append("s > 5"),
}


@pytest.mark.parametrize("name", list(PERTURBATIONS))
def test_any_single_change_changes_the_hash(name: str) -> None:
    document = base()
    PERTURBATIONS[name](document)
    assert document != base()
    assert digest(document) != digest(base())


def test_the_hash_does_not_depend_on_identity_or_key_order() -> None:
    turned = dict(reversed(copy.deepcopy(base()).items()))
    assert digest(turned) == digest(base())


def graph_hash(function: Callable[..., Any], example: Any = None, **kw: Any) -> str:
    (piece,) = [p for p in partition_of(function, example=example, **kw).pieces]
    assert piece.hash is not None
    return piece.hash


CHANGES: dict[str, tuple[Callable[..., Any], torch.Tensor | None]] = {
    "op": (lambda x: torch.sub(x, 2) * 0.5, None),
    "constant": (lambda x: torch.add(x, 2) * 0.25, None),
    "kind of constant": (lambda x: torch.add(x, 2.0) * 0.5, None),
    "keyword": (lambda x: torch.add(x, 2, alpha=2) * 0.5, None),
    "order": (lambda x: torch.add(x * 0.5, 2), None),
    "operand order": (lambda x: 0.5 * torch.add(x, 2), None),
    "dtype": (lambda x: torch.add(x, 2) * 0.5, torch.zeros(3, WIDTH, dtype=torch.float64)),
    "shape": (lambda x: torch.add(x, 2) * 0.5, torch.zeros(3, WIDTH + 1)),
    "assumption": (lambda x: torch.add(x, 2) * 0.5 if x.shape[0] > 3 else x, None),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_of_the_model_changes_the_hash_of_its_piece(name: str) -> None:
    function, example = CHANGES[name]
    assert graph_hash(function, example) != graph_hash(lambda x: torch.add(x, 2) * 0.5)


def test_names_do_not_change_the_hash() -> None:
    def renamed(x: torch.Tensor) -> torch.Tensor:
        first_of_two = torch.add(x, 2)
        return first_of_two * 0.5

    assert graph_hash(renamed) == graph_hash(lambda x: torch.add(x, 2) * 0.5)


# ---- malicious documents -------------------------------------------------------------------------


def row(target: str, args: Any = (), op: str = "call_function") -> list[Any]:
    return [op, target, ["list", list(args)], ["dict", []]]


def evil(*rows_: list[Any]) -> Document:
    return {"inputs": [["int", 0]], "rows": list(rows_), "outputs": [len(rows_)]}


@pytest.fixture
def touched(tmp_path: Path) -> Path:
    return tmp_path / "touched"


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system",
        "torch.sys.exit",
        "torch.no_such_thing",
        "builtins.eval",
        "builtins.exec",
        "builtins.__import__",
        "builtins.getattr.__self__.eval",
        "operator.__builtins__",
        "math.__loader__.load_module",
        "torch.load",
        "torch.hub.load",
        "torch.ops.load_library",
        "os.system",
        "__import__",
        "torch.ops.no.such",
        "torch",
        "",
        "torch.relu(torch.os.system('false'))",
        "torch.relu; import os",
    ],
)
def test_a_callable_outside_torch_operator_and_math_is_refused(target: str) -> None:
    with pytest.raises(CompileError):
        function_of(evil(row(target, [["v", 0]])), "f")


@pytest.mark.parametrize(
    "target",
    [
        *["", "a.b", "a()", "a; b", "a b"],
        *["lambda", "__class__", "__reduce_ex__", "_secret"],
    ],
)
def test_a_bad_method_name_is_refused(target: str) -> None:
    with pytest.raises(CompileError):
        function_of(evil(row(target, [["v", 0]], op="call_method")), "f")


@pytest.mark.parametrize("op", ["call_module", "get_attr", "exec", 3, None])
def test_a_row_of_another_kind_is_refused(op: Any) -> None:
    with pytest.raises(CompileError):
        function_of(evil(row("torch.relu", [["v", 0]], op=op)), "f")


def test_code_in_a_keyword_s_name_is_refused(touched: Path) -> None:
    name = f"input=torch.os.system('touch {touched}'), out"
    document = evil(row("torch.relu"))
    document["rows"][0][3] = ["dict", [[["str", name], ["none"]]]]
    with pytest.raises(CompileError):
        function_of(document, "f")(0)
    assert not touched.exists()


@pytest.mark.parametrize(
    "kind",
    ["torch", "device", "float", "complex", "int", "bool", "str"],
)
def test_code_in_a_constant_is_refused_or_stays_text(kind: str, touched: Path) -> None:
    code = f"torch.os.system('touch {touched}')"
    document = evil(row("torch.relu", [[kind, code, code]]))
    with pytest.raises((CompileError, ValueError, TypeError, RuntimeError)):
        function_of(document, "f")(0)
    assert not touched.exists()


def test_a_module_reached_as_a_constant_is_refused(touched: Path) -> None:
    document = evil(row("system", [["torch", "os"], ["str", f"touch {touched}"]], op="call_method"))
    with pytest.raises(CompileError):
        function_of(document, "f")(0)
    assert not touched.exists()


def test_a_module_reached_through_getattr_is_refused(touched: Path) -> None:
    document = evil(
        row("builtins.getattr", [["torch", "torch.os"], ["str", "system"]]),
        row("__call__", [["v", 1], ["str", f"touch {touched}"]], op="call_method"),
    )
    with pytest.raises(CompileError):
        function_of(document, "f")(0)
    assert not touched.exists()


@pytest.mark.parametrize("where", ["argument", "output"])
def test_a_reference_to_nothing_is_refused(where: str) -> None:
    document = evil(row("torch.relu", [["v", 7 if where == "argument" else 0]]))
    if where == "output":
        document["outputs"] = [9]
    with pytest.raises(CompileError):
        function_of(document, "f")


@pytest.mark.parametrize("kind", ["pickle", "code", "set"])
def test_a_constant_of_an_unknown_kind_is_refused(kind: str) -> None:
    with pytest.raises(CompileError, match="unknown"):
        function_of(evil(row("torch.relu", [[kind, "x"]])), "f")


def test_a_built_function_has_no_builtins_but_the_import_of_torch_s_own_parts() -> None:
    function = function_of(evil(row("torch.relu", [["v", 0]])), "f")
    space = function.__globals__
    (name,) = space["__builtins__"]
    assert name == "__import__"
    with pytest.raises(ImportError, match="no part of torch"):
        space["__builtins__"][name]("os")
    assert not {"eval", "exec", "open", "__import__"} & set(space)
    assert builtins not in space.values()


def test_trace_of_a_graph_keeps_one_row_per_call() -> None:
    document = document_of(lambda x: (x * 2).sin())
    assert [r[1] for r in document["rows"]] == ["operator.mul", "sin"]
    assert trace_of(attended).ops["toy::attend"] == 1
