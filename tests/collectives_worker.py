"""One of two processes: modules with collectives, built in every way, or a process that ends badly.

Its arguments are a name of a function here and words for it, then perhaps `+` and another one.
Prints one JSON line for each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

import pcgsvc

SIZES = [1, 2, 4, 8, 12, 16]
ROWS = [1, 2, 3, 7, 9, 16]


class Reduces(torch.nn.Module):
    """A column- and a row-parallel product, twice, over whatever reduces."""

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor], part: int) -> None:
        super().__init__()
        self.reduce = reduce
        torch.manual_seed(0)
        wide, narrow = torch.randn(2, 8, 16), torch.randn(2, 16, 8) / 4
        mine = slice(8 * part, 8 * part + 8)
        self.wide = torch.nn.Parameter(wide[:, :, mine].clone())
        self.narrow = torch.nn.Parameter(narrow[:, mine].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            x = x + self.reduce(torch.relu(x @ wide) @ narrow)
        return x


class Whole(torch.nn.Module):
    """The same in layers, for `parallelize_module`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        wide, narrow = torch.randn(2, 8, 16), torch.randn(2, 16, 8) / 4
        pairs = [(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)) for _ in range(2)]
        for at, (up, down) in enumerate(pairs):
            up.weight.data, down.weight.data = wide[at].T.clone(), narrow[at].T.clone()
            up.bias.data.zero_(), down.bias.data.zero_()
        self.ups, self.downs = map(torch.nn.ModuleList, zip(*pairs, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(x)))
        return x


class Looks(Whole):
    """The same, and an embedding of which each rank has some rows, less one that is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 8)
        self.table = torch.nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x[:, 0] * 9).long() % 32
        return super().forward(x) + self.embed(ids) - self.table[ids]


def by_function(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x, "sum", distributed.group.WORLD)


def in_place(x: torch.Tensor) -> torch.Tensor:
    distributed.all_reduce(x)
    return x


def gathers(x: torch.Tensor) -> torch.Tensor:
    part = functional.reduce_scatter_tensor(x.t().contiguous(), "sum", 0, distributed.group.WORLD)
    return functional.all_gather_tensor(part * 2, 0, distributed.group.WORLD).t() / 2


def module_of(form: str) -> torch.nn.Module:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if form not in ("parallelize", "embedding"):
        reduce = {"functional": by_function, "in_place": in_place, "gathers": gathers}[form]
        return Reduces(reduce, distributed.get_rank()).eval().to(device)
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    styles: dict[str, Any] = {"ups.*": ColwiseParallel(), "downs.*": RowwiseParallel()}
    whole = Whole() if form == "parallelize" else Looks()
    if form == "embedding":
        styles["embed"] = RowwiseParallel(input_layouts=Replicate())
    return parallelize_module(whole.eval().to(device), init_device_mesh(device, (2,)), styles)


def build(module: torch.nn.Module, *words: str, **more: Any) -> pcgsvc.Runner:
    words = ("capture.sizes=[1,2,4,8,12,16]", "compiler=eager", "parallel.timeout_s=30", *words)
    example = torch.randn(3, 8, device=next(iter(module.parameters())).device)
    return pcgsvc.build_runner(
        module,
        (example,),
        dynamic_dims={"x": 0},
        config=pcgsvc.load_config(words),
        **more,
    )


def outcome(call: Callable[[], Any]) -> str:
    """Return what a call raises, in words."""
    try:
        call()
    except pcgsvc.PcgError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# ---- what two processes do -----------------------------------------------------------------------


def builds(folder: str, *forms: str) -> list[dict[str, Any]]:
    """Build each form in each way; return what came of it."""
    found = []
    whole = Whole()
    region = ["parallel.collectives=region", "mode=full"]
    ways = [["mode=piecewise", "parallel.collectives=boundary"], region]
    for given in forms:
        form, _, compiler = given.partition(":")
        module = module_of(form)
        for way in ways:
            for check in ("true", "false"):  # the second one starts warm
                words = [*way, f"capture.self_check={check}", f"cache.dir={folder}"]
                words.append(f"compiler={compiler or 'eager'}")
                with build(module, *words) as runner:
                    found.append({"form": form, "words": words, **_calls(runner, whole)})
    return found


def _calls(runner: pcgsvc.Runner, whole: torch.nn.Module) -> dict[str, Any]:
    generator, errors = torch.Generator().manual_seed(1), []
    device = next(iter(runner.model.module.parameters())).device  # type: ignore[attr-defined]
    for rows in [*ROWS, *ROWS]:
        x = torch.randn(rows, 8, generator=generator)
        with torch.no_grad():
            wanted = whole(x)
        errors.append(float((runner(x.to(device)).cpu() - wanted).abs().max()))
    return {
        "errors": errors,
        "hits": runner.stats()["hits"],
        "start": runner.model.start,
        "compiled": runner.model.counts.compiled,
        "regions": runner.model.image.unique_regions,
        "not_stored": runner.model.unstored,
        "graphs": runner.table.num_graphs,
    }


def differ(folder: str) -> dict[str, Any]:
    """Do other things on each rank; return what each is told."""
    rank, module, off = distributed.get_rank(), module_of("in_place"), "cache.mode=off"
    found: dict[str, Any] = {"rank": rank}
    few = ["capture.sizes=[2,4]", off]
    found["modes"] = outcome(lambda: build(module, *few, f"mode={['none', 'full'][rank]}"))
    budget = [f"capture.memory_budget={1 if rank else 1 << 30}"]
    found["budget"] = outcome(lambda: build(module, *few, *budget))
    with build(module, *few, "debug.check_calls=true") as runner:
        runner(torch.randn(2, 8))
        found["sizes"] = outcome(lambda: runner(torch.randn(2 + rank, 8)))
        found["same"] = outcome(lambda: runner(torch.randn(2, 8)))
    with build(module, *few) as runner:
        distributed.barrier()
        distributed.destroy_process_group()
        found["destroyed"] = outcome(lambda: runner(torch.randn(2, 8)))
    return found


def destroys(folder: str) -> dict[str, Any]:
    """Destroy the group while a runner holds graphs with its collectives."""
    words = ["capture.sizes=[2,4]", f"cache.dir={folder}", "parallel.collectives=region"]
    with build(module_of("in_place"), *words, "mode=full") as runner:
        x = torch.randn(2, 8, device=runner.memory.device)
        runner(x)
        began = time.monotonic()
        distributed.destroy_process_group()
        return {"seconds": time.monotonic() - began, "told": outcome(lambda: runner(x))}


def ends(folder: str, when: str) -> None:
    """Build and call; rank 1 is killed at a phase of the build, or at its second call."""

    class Killed:
        def start(self, name: str, *args: Any) -> None:
            if name == when and distributed.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        def advance(self, *args: Any) -> None:
            pass

        def stop(self, *args: Any) -> None:
            pass

    module = module_of("in_place")
    with build(module, "capture.sizes=[2,4]", "cache.mode=off", progress=Killed()) as runner:
        x = torch.randn(2, 8, device=runner.memory.device)
        runner(x)
        Killed().start("call")
        runner(x)
        if x.is_cuda:
            torch.cuda.synchronize()


def main() -> None:
    given = [list(words) for plus, words in groupby(sys.argv[1:], "+".__eq__) if not plus]
    # Each rank's device has the same name, so that what one compiles the other can load.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    jobs = {"builds": builds, "differ": differ, "destroys": destroys, "ends": ends}
    for name, *words in given:
        sys.stdout.write(json.dumps(jobs[name](*words)) + "\n")
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
