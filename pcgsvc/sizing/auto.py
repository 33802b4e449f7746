"""Capture sizes of a config, chosen from a traffic file.

In: a config as composed. Out: a config with a list of sizes, and the plan that they come from.
Reads files; builds nothing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pcgsvc.config import AUTO, Config, Mode, copy, validate_sizing
from pcgsvc.errors import ConfigError
from pcgsvc.ops.backends import find_backend
from pcgsvc.ops.support import Support
from pcgsvc.sizing.choice import SizePlan, plan_sizes
from pcgsvc.sizing.cost import StepCost, broken, measured, modelled, read_report
from pcgsvc.sizing.expect import Service, service_of
from pcgsvc.sizing.files import read_traffic
from pcgsvc.sizing.traffic import Traffic


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
    validate_sizing(config)
    path = word.removeprefix(AUTO)
    traffic = _named("capture.sizes", path)
    if config.mode is Mode.NONE:  # nothing is captured; sizes as for graphs that serve every call
        query_len = config.capture.uniform_query_len
        service = Service(decode=Mode.PIECEWISE, mixed=Mode.PIECEWISE, query_len=query_len)
    else:
        service = service_for(config, None if own_module else support_of(config))
    plan = _plan(config, traffic, service)
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
    validate_sizing(config)
    traffic = _named("traffic", config.traffic)
    return _plan(config, traffic, service_for(config, support_of(config)), compare)


def support_of(config: Config) -> Support:
    """Return what the configured attention backend allows."""
    return find_backend(config.attention.name).cudagraph_support


def service_for(config: Config, support: Support | None) -> Service:
    """Return which modes serve the traffic: as the cost's report found, else as far as is known.

    A report of the same mode knows what the model's own ops support; before a model is built only
    its attention backend is known.
    """
    service = service_of(config, support)
    path = config.sizing.cost
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
    return modelled(sizing.fixed_us, sizing.row_us)


def _plan(
    config: Config,
    traffic: Traffic,
    service: Service,
    compare: dict[str, list[int]] | None = None,
) -> SizePlan:
    cost, max_size = cost_for(config, service), config.capture.max_size
    return plan_sizes(traffic, service, cost, config.sizing, max_size=max_size, compare=compare)


def _named(setting: str, path: str) -> Traffic:
    """Read a traffic file for a setting; errors begin with its name."""
    try:
        return read_traffic(Path(path))
    except ConfigError as error:
        words = str(error)
        raise ConfigError(f"{setting}: {words.removeprefix('traffic: ')}") from error
