"""Making a program: the stages from the trace to compiled pieces, in order.

In: a request, and what the store has for it. Out: a `MadeProgram`, neither checked nor stored.
"""

from __future__ import annotations

from pcgsvc.build.environment import BuildEnvironment
from pcgsvc.build.load import ProgramLookup
from pcgsvc.build.probe import probe_program
from pcgsvc.build.stages import (
    MadeProgram,
    assemble,
    compile_pieces,
    split,
    trace_forward,
    write_down,
)
from pcgsvc.config import Compiler, Strategy
from pcgsvc.forward.request import Request
from pcgsvc.program.image import collectives_of, members_of


def make_program(request: Request, found: ProgramLookup, env: BuildEnvironment) -> MadeProgram:
    """Trace, split and compile, if nothing was found; or run a forward that is not traced.

    Raises:
        PeerError: another process that is to run the same program has another one, or failed.
    """
    made = _make(request, found, env)
    config, image = request.config, made.model.image
    facts = {
        "mode": config.mode.value,
        "capture.sizes": config.capture.final_sizes,
        "capture.self_check": config.capture.self_check,
        "the program": collectives_of(image),
    }
    env.ranks.join(members_of(image), facts)
    return made


def _make(request: Request, found: ProgramLookup, env: BuildEnvironment) -> MadeProgram:
    config, phases = request.config, env.phases
    if found.model is not None:
        return MadeProgram(found.model)
    if config.partition.strategy is Strategy.BREAKABLE:
        return MadeProgram(probe_program(request, found, env))
    with phases.phase("import"):
        env.ready_compilers(inductor=config.compiler.name is Compiler.INDUCTOR)
    traced = trace_forward(request, phases)
    parts = split(traced, config, phases)
    image, problems = write_down(request, traced, parts)
    image, pieces = compile_pieces(parts.compiled, image, config, env)
    model = assemble(request, traced, image, pieces, env)
    return MadeProgram(model, parts.compiled, problems)
