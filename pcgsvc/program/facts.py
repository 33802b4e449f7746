"""The facts of a program and of its environment, for its key.

In: a module, its inputs and a device. Out: flat dicts of JSON types. Gathers without tracing, and
imports no compiler unless Inductor is asked for. Knows nothing of stores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.config import Config
from pcgsvc.forward.objects import items_of
from pcgsvc.forward.specs import InputSpec
from pcgsvc.program.forms import (
    MEMBERS,
    NotCanonicalError,
    canonical,
    code_digest,
    hook_form,
    is_versioned_class,
    name_of,
    replaced_functions,
)
from pcgsvc.program.keys import config_facts, key_of
from pcgsvc.program.sources import sources_of


def program_facts(
    config: Config,
    module: Callable[..., Any],
    inputs: Sequence[InputSpec],
    constants: Mapping[str, Any],
    environment: Mapping[str, Any],
    model_facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return everything that decides a program, without tracing it.

    What tracing reads beyond this (attributes, closures, globals, source files) is compared when
    a stored program is loaded; see `pcgsvc.program.guards`.

    Args:
        config: resolved.
        module: what is traced.
        inputs: how its tensor inputs look.
        constants: its other arguments.
        environment: versions, hardware, numerics: `compilers.environment.environment_facts`.
        model_facts: what the model's family adds (`ModelBundle.facts`).

    Raises:
        NotCanonicalError: a constant argument, or what was put in the place of a function of
            torch's, has no form that can be written down.
    """
    facts = {
        **(model_facts or {}),
        **config_facts(config),
        **environment,
        "module": name_of(module),
        "module.code": _code_facts(module),
        "module.global_hooks": [hook_form(hook) for hook in torch_private.global_hooks()],
        "torch.replaced": replaced_functions(),
        "source": {name: file_digest(path) for name, path in sources_of(module).items()},
        "inputs": [_input_facts(spec) for spec in inputs],
        "constants": _constant_facts(constants),
    }
    tree = module if isinstance(module, torch.nn.Module) else torch.nn.Module()
    tensors, facts["tensors"] = _tensor_facts(tree)
    facts["tensors.digest"] = key_of({"tensors": tensors})
    facts["modules.digest"] = key_of({"modules": _module_facts(tree)})
    return facts


def _constant_facts(constants: Mapping[str, Any]) -> Any:
    try:
        return canonical(dict(constants))
    except NotCanonicalError as error:
        raise NotCanonicalError(f"constant arguments: {error}") from None


def _code_facts(module: Callable[..., Any]) -> dict[str, Any]:
    """Return digests of the code of a module's classes, or of a callable, by name."""
    if not isinstance(module, torch.nn.Module):
        return {name_of(module): code_digest(module)}
    found: dict[str, set[str]] = {}
    for cls in {type(sub) for sub in module.modules()}:
        if not is_versioned_class(cls):
            found.setdefault(name_of(cls), set()).add(code_digest(cls))
    return {name: ",".join(sorted(digests)) for name, digests in sorted(found.items())}


def file_digest(path: str) -> str | None:
    """Return the sha256 of a file, or None if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def _input_facts(spec: InputSpec) -> list[Any]:
    shape: list[Any] = ["s" if d in spec.dims else n for d, n in enumerate(spec.example.shape)]
    return [spec.name, str(spec.example.dtype), shape, spec.example.device.type, spec.order]


def _tensor_facts(module: torch.nn.Module) -> tuple[list[Any], str]:
    """Return the signature of all parameters and buffers with their ties, and it in a few words."""
    first: dict[int, str] = {}
    storages: dict[int, str] = {}
    rows: list[Any] = []
    named: list[tuple[str, torch.Tensor]] = list(module.named_parameters(remove_duplicate=False))
    named += module.named_buffers(remove_duplicate=False)
    for name, whole in named:
        tensor = torch_private.local_tensor(whole)
        tied = first.setdefault(id(tensor), name)
        row: list[Any] = [name, str(tensor.dtype), list(tensor.shape), tensor.device.type, tied]
        row += [name_of(type(whole)), str(tensor.layout), tensor.requires_grad]
        if tensor.layout is torch.strided:
            memory = storages.setdefault(torch_private.storage_id(tensor), name)
            row += [list(tensor.stride()), memory, tensor.storage_offset()]
        rows.append(row)
    elements = sum(t.numel() for t in {id(t): t for _, t in named}.values())
    dtypes = sorted({row[1] for row in rows})
    text = f"{len(rows)} tensors, {elements} elements, {', '.join(dtypes)}"
    return rows, text if rows else "none"


def _module_facts(module: torch.nn.Module) -> list[Any]:
    """Return names and classes of all submodules, and which of them are one and the same.

    And what they hold of classes' members, such as `torch.Tensor.sin`.
    """
    first: dict[int, str] = {}
    rows = []
    for name, sub in module.named_modules(remove_duplicate=False):
        held = [place for own in items_of(vars(sub)) for place in (own, *items_of(own.value))]
        members = [[p.name, canonical(p.value)] for p in held if isinstance(p.value, MEMBERS)]
        rows.append([name, name_of(type(sub)), first.setdefault(id(sub), name), *members])
    return rows


def piece_facts(
    document_hash: str,
    config: Config,
    environment: Mapping[str, Any],
    *,
    num_outputs: int,
    ops: Mapping[str, str],
    size: int | None = None,
) -> dict[str, Any]:
    """Return what decides one compiled piece.

    Args:
        document_hash: of its canonical form.
        config: resolved.
        environment: as it was before anything was compiled; see `program_facts`.
        num_outputs: how many results it has.
        ops: identities of the custom ops that it calls; the canonical form has their names only.
        size: the row count that it is compiled for; None: any.
    """
    facts = {
        "piece": document_hash,
        "ops": dict(ops),
        "compiler": config.compiler.name.value if config.compiler.name else None,
        "num_outputs": num_outputs,
    }
    compiler = {k: v for k, v in config_facts(config).items() if k.startswith("config.compiler")}
    del compiler["config.compiler.specialize_sizes"]  # a piece has its own size, or none
    del compiler["config.compiler.on_mismatch"]  # what is done with it, not how it is made
    if size is not None:
        facts["size"] = size
    return {**facts, **compiler, **environment}
