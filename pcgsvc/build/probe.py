"""`partition.strategy=breakable`: a program without a trace.

In: a request. Out: a `CompiledModel` whose only piece is the module, with the memory that its
forward was run in. There is nothing to store.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from pcgsvc.build.environment import BuildEnvironment
from pcgsvc.build.load import ProgramLookup
from pcgsvc.build.stages import compile_piece
from pcgsvc.config import Compiler, captures
from pcgsvc.errors import ForwardError, PcgError
from pcgsvc.events import Phases
from pcgsvc.forward.objects import tensors_held, tensors_of
from pcgsvc.forward.plain import place_of, words_of
from pcgsvc.forward.request import Request, check_forward, make_samples, make_workspace
from pcgsvc.forward.specs import Binding
from pcgsvc.forward.state import can_be_put_back
from pcgsvc.forward.workspace import Workspace, preserved
from pcgsvc.partition.breakable import PIECE, ModulePiece, boundary_names, image_of_forward
from pcgsvc.partition.probe import Forward, ForwardProbe
from pcgsvc.partition.submodules import chosen, compile_submodules
from pcgsvc.program.image import ProgramImage
from pcgsvc.program.model import CompiledModel
from pcgsvc.program.program import Boundaries, Program


class ProbedForward(NamedTuple):
    """A forward that is not traced, after it was run."""

    probe: ForwardProbe
    image: ProgramImage
    memory: Workspace
    boundaries: Boundaries


def probe_forward(request: Request, phases: Phases) -> ProbedForward:
    """Run an untraced model's forward to learn what it returns and where it breaks."""
    check_forward(request)
    module = request.bundle.module
    boundaries = boundary_names(request.config)
    inputs = [Binding(kind="input", name=s.name, spec=None) for s in request.inputs]
    own = tensors_of(module)
    if request.planned is None:  # a plan has no memory to change
        known = {id(t) for t in own.values()}
        own |= {n: t for n, t in tensors_held(module).items() if id(t) not in known}
    memory = make_workspace(request, inputs, own)
    state = {
        n: t for n, t in own.items() if not isinstance(t, torch.nn.Parameter) and can_be_put_back(t)
    }
    samples = make_samples(request, memory)
    with phases.phase("split"), memory.on_stream(), preserved(state):
        forward = Forward(
            module, memory, samples, request.constants, boundaries, captures(request.config)
        )
        try:
            probe = forward.probe(min(request.config.capture.final_sizes))
        except PcgError:
            raise
        except Exception as error:
            if request.planned is not None:
                raise  # a plan tries again, on tensors with values
            raise ForwardError(
                f"the forward fails by itself, called plainly: {words_of(error)}{place_of(error)}. "
                "partition.strategy=breakable needs one that takes any number of rows."
            ) from error
        return ProbedForward(probe, image_of_forward(probe, memory), memory, boundaries)


def probe_program(request: Request, found: ProgramLookup, env: BuildEnvironment) -> CompiledModel:
    """Return the module as a program, its largest unbroken parts compiled where that is asked."""
    module, config = request.bundle.module, request.config
    probed = probe_forward(request, env.phases)
    inputs = [spec.name for spec in request.inputs]
    piece = ModulePiece(module, inputs, request.constants, probed.boundaries)
    piece.kernels = probed.image.ops["kernel"]
    warnings = list(probed.probe.warnings)
    if config.compiler.name is Compiler.INDUCTOR and isinstance(module, torch.nn.Module):
        one, other = probed.probe.largest.calls, probed.probe.other.calls
        with env.phases.phase("import"):
            env.ready_compilers(inductor=True)
        names = chosen(module, one, config.partition.compile_modules)
        with env.phases.phase("compile", len(names)):
            compiled = partial(compile_piece, size=None, config=config, env=env)
            piece.forwards, failed = compile_submodules(module, names, one, other, compiled)
        warnings += failed
    return CompiledModel(
        module=module,
        arguments=request.arguments,
        image=probed.image,
        program=Program(probed.image.spec, {PIECE: piece}),
        start="cold",
        counts=env.artifacts.pieces.counts,
        misses=found.misses,
        warnings=warnings,
        memory=probed.memory,
        untraced=piece.whole,
        ranks=env.ranks,
    )
