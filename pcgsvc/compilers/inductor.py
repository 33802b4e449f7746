"""`compiler=inductor`: a piece as one artifact of Inductor.

In: a piece. Out: a callable artifact, and bytes that give it back (they hold a pickle of torch's:
load only what is trusted). Knows nothing of capture or the disk.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.compilers.direct import DirectArtifact, extract
from pcgsvc.compilers.passes import pass_options
from pcgsvc.compilers.specialize import baked_inputs, graph_for
from pcgsvc.config import CompilerConfig
from pcgsvc.errors import CompileError
from pcgsvc.program.pieces import Piece, graph_module
from pcgsvc.program.program import Boundaries, CompiledPiece, boundaries_of


class InductorPiece(CompiledPiece):
    """A compiled piece. On the CPU its kernels are C++ that no dispatch mode sees.

    Args:
        artifact: Inductor's, compiled or deserialised, or a `DirectArtifact`; trusted.
        num_outputs: how many results it has.
        boundaries: the splitting ops that it calls by itself; None: it is a region.
        baked: places of the arguments that are compiled in.
        assumes: see `CompiledPiece.assumes`.
    """

    opaque = True

    def __init__(
        self,
        artifact: Any,
        num_outputs: int,
        boundaries: Boundaries | None = None,
        baked: Sequence[int] = (),
        assumes: Sequence[str] = (),
    ) -> None:
        self._artifact = artifact
        self._num_outputs = num_outputs
        self._baked = frozenset(baked)
        self.boundaries = boundaries
        self.assumes = list(assumes)
        self.problems: list[str] = []
        """What the passes were to do and did not, as warnings; not stored."""

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the piece."""
        if self._baked:
            args = tuple(a for at, a in enumerate(args) if at not in self._baked)
        results: Sequence[Any] = self._artifact(*args)
        return results[: self._num_outputs]

    def generated(self) -> str:
        """Return the source that Inductor generated; of a direct form, what of it is run."""
        if isinstance(self._artifact, DirectArtifact):
            return self._artifact.source
        return torch_private.inductor_source(self._artifact)

    def to_bytes(self) -> bytes:
        """Return a line of what is assumed, then the artifact's serialised form."""
        artifact = torch_private.inductor_serialize(self._artifact)
        if not artifact:
            raise ValueError("torch gave no bytes")
        return json.dumps(self.assumes).encode() + b"\n" + artifact

    @classmethod
    def from_bytes(
        cls,
        data: bytes,
        num_outputs: int,
        boundaries: Boundaries | None = None,
        baked: Sequence[int] = (),
    ) -> InductorPiece:
        """Load what `to_bytes` gave, which must be trusted; raises whatever torch's loader does."""
        assumes, _, artifact = data.partition(b"\n")
        loaded = torch_private.inductor_deserialize(artifact)
        return cls(loaded, num_outputs, boundaries, baked, json.loads(assumes))

    def num_kernels(self) -> int:
        """See `CompiledPiece.num_kernels`: launches in the generated code."""
        if isinstance(self._artifact, DirectArtifact):
            return self._artifact.num_kernels
        return torch_private.count_kernels(self.generated())

    @property
    def is_direct(self) -> bool:
        """Whether it runs without Inductor."""
        return isinstance(self._artifact, DirectArtifact)

    def to_direct(self, folder: Path) -> tuple[bytes, set[str]]:
        """Return the form that runs without Inductor, and the files under `folder` that it needs.

        Raises:
            NotDirectError: the artifact has no such form.
        """
        form, files = extract(self._artifact, folder, self.num_kernels())
        return json.dumps(form, sort_keys=True).encode(), files


def compile_piece(
    piece: Piece,
    config: CompilerConfig,
    dump_path: Path | None = None,
    *,
    size: int | None = None,
) -> InductorPiece:
    """Compile one region.

    Args:
        piece: a region; its nodes carry Dynamo's fake values.
        config: what Inductor is asked for.
        dump_path: file that gets the source that Inductor generated.
        size: the only row count that it will run with; None: any.

    Raises:
        CompileError: Inductor refused the piece, or would get it wrong; its message names the
            piece.
    """
    boundaries = boundaries_of(piece.document or {})
    cut = () if boundaries is None else sorted(boundaries.names)
    module = graph_module(piece) if size is None else graph_for(piece, size)
    if not piece.outputs:
        _add_output(module)
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [torch_private.settled(node.meta["example_value"]) for node in given]
    for node, value in zip(given, inputs, strict=True):
        if isinstance(value, torch.Tensor) and value.is_neg():
            raise CompileError(
                f"{piece.name}: {node.name} is a view that negates on reading (.imag of a "
                "conjugate), and generated code reads memory as it lies. Keep its .resolve_neg(), "
                "or set compiler=eager."
            )
    options = _options(config, cut)
    symbol = torch_private.size_symbol(inputs)
    try:
        with torch.no_grad():
            artifact = torch_private.inductor_compile(module, inputs, options)
    except Exception as error:
        rows = "" if size is None else f" for {size} rows"
        raise CompileError(
            f"{piece.name}: inductor cannot compile it{rows} ({type(error).__name__}: {error}). "
            "compiler=eager runs it as it is."
        ) from error
    baked = () if size is None else baked_inputs(piece.document or {})
    assumes = () if symbol is None else _assumed(piece, *symbol)
    compiled = InductorPiece(artifact, len(piece.outputs), boundaries, baked, assumes)
    for option in options["config_patches"].values():
        compiled.problems += getattr(option, "problems", [])  # of a pass
    if dump_path is not None:
        dump_path.write_text(compiled.generated())
    return compiled


def _assumed(piece: Piece, shape_env: Any, symbol: Any) -> list[str]:
    """Return what compiled code assumes of the row count, which nothing compares when it is called.

    torch notes it as guards of the trace, each once: what earlier pieces assume is among them.

    Raises:
        CompileError: that it is the one of the trace.
    """
    known = torch_private.size_known(shape_env, symbol)
    if known is not None:
        raise CompileError(
            f"{piece.name}: torch gives up the row count as a variable on the way to Inductor, and "
            f"the code would be for {known} rows only. A write in place through .unbind() does "
            "that: write to x[:, 0] instead. compiler=eager runs it as it is."
        )
    traced = (piece.document or {}).get("assumes", ())
    return [c for c in torch_private.size_conditions(shape_env, symbol) if c not in traced]


def _add_output(module: torch.fx.GraphModule) -> None:
    """Give a piece that only writes a result: Inductor wants at least one."""
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        output.args = ((module.graph.call_function(torch.empty, (0,)),),)
    module.recompile()


def _options(config: CompilerConfig, cut: Sequence[str]) -> dict[str, Any]:
    """Return what Inductor is told; `cut`: the splitting ops that an artifact calls by itself."""
    # Graphs are captured by our own session; Inductor's trees under it would only cost time.
    # A precompiled header makes the first C++ compile take twice as long, and needs the compiler
    # even to load an artifact. Freezing would fold weights into the code, where new ones would not
    # be seen; an environment variable switches it on.
    ours = {
        "triton.cudagraphs": False,
        "cpp_cache_precompile_headers": False,
        "freezing": False,
    }
    tuning = torch_private.tuning_options(
        max_autotune=config.max_autotune,
        combo_kernels=config.combo_kernels,
        threads=config.threads,
    )
    borders = torch_private.partition_options(cut) if cut else {}
    passes = pass_options(config.passes or ())
    return {"config_patches": {**ours, **tuning, **borders, **passes, **config.options}}


def compile_probe(device: torch.device) -> None:
    """Compile what is smallest, so that Inductor has tried what its compilers can do."""
    if device.type == "cpu":
        torch_private.probe_cpp_compiler()
        return
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(8, device=device)
    y = graph.call_function(torch.add, (x, 1))
    graph.output((y,))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with torch.no_grad():
        artifact = torch_private.inductor_compile(module, [torch.ones(8, device=device)], {})
        artifact(torch.ones(8, device=device))
