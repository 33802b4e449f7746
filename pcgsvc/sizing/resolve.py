"""The one door from a config as composed to a config that can be built.

In: a config. Out: a `Resolved`: its device, the config with every open setting decided, and what it
asks for and does not get; `capture.sizes` are chosen for a traffic file. Knows nothing of models.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from pcgsvc.config import (
    AUTO,
    Arrivals,
    Config,
    Mode,
    SchedulerConfig,
    copy,
    dropped_sizes,
    resolve,
    validate,
    validate_sizing,
)
from pcgsvc.config.devices import device_of
from pcgsvc.errors import ConfigError
from pcgsvc.ops.backends import find_backend
from pcgsvc.ops.support import Support
from pcgsvc.sizing.choice import SizePlan, plan_sizes
from pcgsvc.sizing.cost import StepCost, broken, measured, modelled, read_report, rows_only
from pcgsvc.sizing.expect import Service, service_of
from pcgsvc.sizing.files import read_traffic
from pcgsvc.sizing.scheduler import Pace, simulate
from pcgsvc.sizing.traces import Trace
from pcgsvc.sizing.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A config that can be built on a device."""

    config: Config
    """Validated; nothing device-dependent is open, and `capture.sizes` are final."""
    device: torch.device
    sizes: SizePlan | None
    """How the capture sizes were chosen; None: they were named, or are the default schedule."""
    warnings: list[str]
    """What the config asks for and is not done."""


def resolve_config(config: Config, *, module_device: torch.device | None = None) -> Resolved:
    """Choose sizes for `capture.sizes=auto:FILE`, decide what is open, and validate.

    Args:
        config: as composed, or resolved already.
        module_device: of a caller's own module, for which `device` and `attention` are not read;
            None: the config names device and model.

    Raises:
        ConfigError: no such device, a traffic file that cannot be used, or a setting out of range.
    """
    device = device_of(config) if module_device is None else module_device
    config, sizes = with_sizes(config, own_module=module_device is not None)
    resolved = resolve(config, device_type=device.type)
    validate(resolved, device_type=device.type)
    warnings = []
    if dropped := dropped_sizes(config.capture):
        limit = config.capture.max_size
        warnings.append(
            f"capture.sizes: {dropped} are above capture.max_size={limit} and are dropped"
        )
    return Resolved(config=resolved, device=device, sizes=sizes, warnings=warnings)


# ---- sizes for a traffic -------------------------------------------------------------------------


def with_sizes(config: Config, *, own_module: bool = False) -> tuple[Config, SizePlan | None]:
    """Return a config in which `capture.sizes=auto:FILE` has become a list, and how it was chosen.

    Any other config comes back as it is, with None.

    Args:
        config: as composed; not resolved.
        own_module: whether the model is a caller's own, so that `attention` is not read.

    Raises:
        ConfigError: the file, or the report that gives the cost, cannot be used.
    """
    word = config.capture.sizes
    if not isinstance(word, str):
        return config, None
    support = None if own_module else support_of(config)
    plan = _plan(config, "capture.sizes", word.removeprefix(AUTO), support)
    out = copy(config)
    out.capture.sizes = plan.chosen.sizes
    return out, plan


def plan_for(config: Config, compare: dict[str, list[int]]) -> SizePlan:
    """Return the plan of `job=sizes`: for the traffic of `traffic`.

    Args:
        config: as composed.
        compare: more sizes to judge, by what they are.

    Raises:
        ConfigError: a file cannot be used, or the mode captures nothing.
    """
    if config.traffic is None:
        raise ConfigError("traffic: job=sizes needs a traffic file; set traffic=FILE.")
    if config.mode is Mode.NONE:
        raise ConfigError("mode: got 'none' with job=sizes; choose a mode that captures graphs.")
    return _plan(config, "traffic", config.traffic, support_of(config), compare)


def _plan(
    config: Config,
    setting: str,
    path: str,
    support: Support | None,
    compare: dict[str, list[int]] | None = None,
) -> SizePlan:
    """Choose sizes for a traffic file; errors of the file begin with the setting that names it."""
    validate_sizing(config)
    service = _service(config, support)
    try:
        traffic = load_traffic(config, path, service)
    except ConfigError as error:
        words = str(error)
        if not words.startswith("traffic: "):
            raise
        raise ConfigError(f"{setting}: {words.removeprefix('traffic: ')}") from error
    cost, max_size = cost_for(config, service), config.capture.max_size
    plan = plan_sizes(traffic, service, cost, config.sizing, max_size=max_size, compare=compare)
    if traffic.simulation is None and config.sizing.scheduler != SchedulerConfig():
        plan.notes.append(f"sizing.scheduler.* is not read: {traffic.source} holds calls")
    return plan


def load_traffic(config: Config, path: str, service: Service | None = None) -> Traffic:
    """Return the calls of a traffic file; requests become those of the simulated scheduler.

    Args:
        config: its `sizing.*` say what the scheduler does and what a step takes.
        path: of the file.
        service: which modes serve the traffic; None: as far as the config says.

    Raises:
        ConfigError: the file, or the cost, cannot be used; or the scheduler's settings do not fit
            the file or the runner.
    """
    found = read_traffic(path)
    if isinstance(found, Traffic):
        return found
    scheduler, query_len = config.sizing.scheduler, config.capture.uniform_query_len
    if query_len != 1 + scheduler.speculative_len:
        raise ConfigError(
            f"capture.uniform_query_len: got {query_len} with sizing.scheduler.speculative_len="
            f"{scheduler.speculative_len}, whose decode steps have {1 + scheduler.speculative_len} "
            "rows per request; set one to fit the other."
        )
    pace = _pace(config, found, service or _service(config, support_of(config)))
    arrivals = Arrivals.CLOSED_LOOP if pace is None else Arrivals.KEPT
    traffic = simulate(found, dataclasses.replace(scheduler, arrivals=arrivals), pace)
    assert traffic.simulation is not None
    most, needed = config.attention.max_num_reqs, traffic.simulation.max_requests
    if most is not None and most < needed:
        raise ConfigError(
            f"attention.max_num_reqs: got {most}, but steps of '{path}' have up to {needed} "
            "requests; lower sizing.scheduler.max_num_seqs to it, or leave attention.max_num_reqs "
            "out."
        )
    return traffic


def _pace(config: Config, trace: Trace, service: Service) -> Pace | None:
    """Return what a step takes where arrivals are kept; None: a closed loop."""
    arrivals, sizing = config.sizing.scheduler.arrivals, config.sizing
    timed = sizing.cost is not None or sizing.has_modelled_times
    if arrivals is Arrivals.KEPT and not (timed and trace.has_times):
        missing = (
            "the time of a step is not known; set sizing.cost=report.json, or sizing.fixed_us and "
            "sizing.row_us"
            if trace.has_times
            else f"'{trace.source}' does not say when requests arrive"
        )
        raise ConfigError(f"sizing.scheduler.arrivals: got 'kept', but {missing}.")
    if arrivals is Arrivals.CLOSED_LOOP or not (timed and trace.has_times):
        return None
    cost = cost_for(config, service)

    def pace(rows: int, uniform: bool) -> float:
        mode = service.decode if uniform else service.mixed
        return 1e-6 * float(cost.graphs.get(mode, cost.plain).at(rows))

    return pace


def support_of(config: Config) -> Support:
    """Return what the configured attention backend allows."""
    return find_backend(config.attention.name).cudagraph_support


def _service(config: Config, support: Support | None) -> Service:
    """Return which modes serve the traffic: as the cost's report found, else as far as is known.

    A report of the same mode knows what the model's own ops support; before a model is built only
    its attention backend is known. Where nothing is captured, it is as for graphs that serve all.
    """
    if config.mode is Mode.NONE:
        query_len = config.capture.uniform_query_len
        return Service(decode=Mode.PIECEWISE, mixed=Mode.PIECEWISE, query_len=query_len)
    service, path = service_of(config, support), config.sizing.cost
    found = read_report(path).get("mode", {}) if path is not None else {}
    if path is None or found.get("requested") != config.mode.value:
        return service
    try:
        decode, mixed = Mode(found["decode"]), Mode(found["mixed"])
    except (KeyError, ValueError) as error:
        raise broken(path, "mode", error) from error
    return dataclasses.replace(service, decode=decode, mixed=mixed)


def cost_for(config: Config, service: Service) -> StepCost:
    """Return the cost that `sizing.*` names."""
    sizing = config.sizing
    if sizing.cost is not None:
        return measured(sizing.cost, service.modes)
    if sizing.has_modelled_times:
        return modelled(sizing.fixed_us, sizing.row_us)
    return rows_only()
