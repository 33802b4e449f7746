"""The program image: JSON and back, and what malformed JSON does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import attended, rows, toy, trace_of
from torch import nn

from pcgsvc.compilers.eager import EagerPiece
from pcgsvc.errors import CompileError
from pcgsvc.partition.fx import partition_fx
from pcgsvc.program.guards import StoredGuard
from pcgsvc.program.image import ProgramImage, custom_ops, from_json, image_of, to_json


class Many(nn.Module):
    """Returns a nest with constants, writes to a buffer, and branches on the size."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        if x.shape[0] > 100:
            x = x + 1
        y = attended(x * 1e-5)
        return {"y": (y, x.sum(1)), "flag": True, "nothing": [None, "word"], "x": x}


def image(module: Callable[..., Any] | None = None) -> ProgramImage:
    traced = trace_of(module or toy(2))
    partition = partition_fx(traced, None, ())
    guards = [StoredGuard("module.eps", "CONSTANT_MATCH", ["float", "1e-05"])]
    return image_of(traced, partition, partition, guards=guards, files={"a.b": "0" * 64})


@pytest.fixture(scope="module")
def data() -> bytes:
    return to_json(image())


@pytest.mark.parametrize("module", [toy(2), Many().eval(), lambda x: attended(x).view(-1)[::4]])
def test_an_image_survives_json(module: Callable[..., Any]) -> None:
    made = image(module)
    again = from_json(to_json(made))
    assert again == made
    assert again.tree() == made.tree()
    assert to_json(again) == to_json(made)


def test_the_predicate_and_constants_survive_json() -> None:
    again = from_json(to_json(image(Many().eval())))
    assert again.predicate.broken_by(50) is None
    assert again.predicate.broken_by(101) is not None
    assert again.mutated == ("count",)
    assert sorted(map(str, again.constants.values())) == ["None", "True", "word"]


def test_json_holds_no_pickle_and_no_address(data: bytes) -> None:
    assert json.loads(data)
    assert b" at 0x" not in data


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "3", "null", '"x"', '{"spec": 3}', '{"spec": {}}', "\x00"]
)
def test_what_is_no_image_is_an_error_of_ours(text: str) -> None:
    with pytest.raises(CompileError, match="stored program"):
        from_json(text.encode())


def test_an_image_without_pieces_is_refused(data: bytes) -> None:
    tree = json.loads(data)
    tree["pieces"] = []
    with pytest.raises(CompileError, match="no pieces"):
        from_json(json.dumps(tree).encode())


def test_a_document_under_another_hash_is_refused(data: bytes) -> None:
    tree = json.loads(data)
    (document, *_) = tree["documents"].values()
    document["rows"][0][1] = "torch.sub"
    with pytest.raises(CompileError, match="not theirs"):
        from_json(json.dumps(tree).encode())


@pytest.mark.parametrize("name", ["spec", "outputs", "documents", "guards", "predicate", "schemas"])
def test_a_missing_part_is_refused(data: bytes, name: str) -> None:
    tree = json.loads(data)
    del tree[name]
    with pytest.raises(CompileError):
        from_json(json.dumps(tree).encode())


def test_any_part_of_a_wrong_kind_is_refused_or_read_but_raises_nothing_else(data: bytes) -> None:
    rng = random.Random(0)
    refused = 0
    for _ in range(400):
        tree = json.loads(data)
        damage(tree, rng)
        try:
            from_json(json.dumps(tree).encode())
        except CompileError:
            refused += 1
    assert refused > 100


def damage(tree: Any, rng: random.Random) -> None:
    """Replace or remove one node of a JSON tree, at a random depth."""
    junk: list[Any] = [None, 3, "x", [], {}, [1, 2], {"a": 1}, -1.5]
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = rng.choice(keys)
        below = tree[key]
        if not isinstance(below, (dict, list)) or not below or rng.random() < 0.4:
            if rng.random() < 0.3:
                del tree[key]
            else:
                tree[key] = rng.choice(junk)
            return
        tree = below


def test_a_tensor_that_the_module_lacks_is_named() -> None:
    made = image()
    with pytest.raises(CompileError, match=r"blocks\.0\.norm\.weight"):
        made.bind({}, torch.device("cpu"))
    tensors = dict(toy(2).named_parameters())
    assert set(made.bind(tensors, torch.device("cpu"))) <= set(tensors)


def test_custom_ops_of_a_document_are_found_by_their_names() -> None:
    rows_ = [
        ["call_function", "torch.ops.toy.attend", [], []],
        ["call_function", "torch.ops.ns.op.default", [], []],
        ["call_function", "torch.ops.aten.add.Tensor", [], []],
        ["call_function", "torch.add", [], []],
        ["call_method", "view", [], []],
    ]
    assert custom_ops({"rows": rows_}) == ["ns::op", "toy::attend"]


# ---- eager pieces --------------------------------------------------------------------------------


def test_an_eager_piece_survives_its_bytes_and_refuses_another_name() -> None:
    made = image(lambda x: attended(x * 2 + 1))
    ((name, document),) = made.documents.items()
    data = EagerPiece(document).to_bytes()
    piece = EagerPiece.from_bytes(data, name)
    x = rows(3)
    assert torch.equal(piece(3, x)[0] if len(document["inputs"]) == 2 else piece(x)[0], x * 2 + 1)
    with pytest.raises(CompileError, match="another piece"):
        EagerPiece.from_bytes(data, "0" * 64)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"3", b"[]", b"{}"])
def test_bytes_that_are_no_eager_piece_are_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(CompileError, match="stored piece"):
        EagerPiece.from_bytes(data, "0" * 64)
