"""The page of a plan: one file that needs no other and no network; and its picture beside it.

In: a report with its `plan`. Out: HTML text; `plan.html` and `plan.svg`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pcgsvc.report import words
from pcgsvc.report.plan_svg import colour_of, plan_svg, rendered

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>pcgsvc plan: {{ title }}</title>
<style>
:root { color-scheme: light dark; --ink: #222; --page: #fff; --faint: #5c5f63; --line: #e4e4e4;
        --code: #f6f6f4; --bar: #355c7d; --warn: #fff3cd; --boundary: #c2421b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e3e3; --page: #1b1d22; --faint: #a5a9b0; --line: #3a3d44;
          --code: #26292f; --bar: #7aa5cc; --warn: #463a12; --boundary: #ff8a65; }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page);
       max-width: 1120px; margin: 2em auto; padding: 0 1em; overflow-wrap: break-word; }
h1 { font-size: 1.5em; margin: 0 0 .2em; } h2 { font-size: 1.15em; margin: 1.8em 0 .5em; }
p { margin: .3em 0; } .faint { color: var(--faint); }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3em .8em .3em 0;
         border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 600; } .number { text-align: right; white-space: nowrap; }
table.narrow { width: auto; } table.narrow td, table.narrow th { padding-right: 2.5em; }
code, pre { font: 12.5px/1.4 ui-monospace, monospace; }
pre { background: var(--code); padding: .7em; overflow-x: auto; margin: .4em 0;
      overflow-wrap: normal; }
.chain { display: flex; flex-wrap: wrap; align-items: stretch; gap: .5em; }
.stretch { display: flex; flex-wrap: wrap; gap: .5em; padding: 1.5em .5em .5em;
           position: relative; }
.repeats { border: 1px dashed var(--ink); border-radius: 4px; }
.repeats > b { position: absolute; top: .15em; left: .6em; white-space: nowrap; }
.box { border: 2px solid; border-radius: 8px; padding: .35em .7em; min-width: 6em;
       text-align: center; text-decoration: none; color: #fff; }
.box.boundary, .box.inline { background: var(--page); border-radius: 0; color: var(--boundary); }
.box small { display: block; max-width: 16em; }
.swatch { display: inline-block; width: .9em; height: .9em; border: 2px solid; }
.bar { height: .8em; background: var(--bar); min-width: 1px; }
.warning { background: var(--warn); padding: .4em .7em; border-left: 4px solid #d9a400; }
summary { cursor: pointer; }
@media (max-width: 44em) { /* a phone: a row is a block, each cell under its heading */
  body { overflow-wrap: anywhere; }
  table.narrow, table, tbody, tr, td { display: block; width: auto; }
  tr:has(> th) { display: none; }
  tr { border-bottom: 1px solid var(--line); padding: .4em 0; }
  td, table.narrow td { border: 0; padding: .1em 0; }
  td.number { text-align: left; }
  td[data-is]:not(:empty)::before { content: attr(data-is) ": "; color: var(--faint); }
}
</style>
</head>
<body>
<h1>Plan of {{ title }}</h1>
<p>{{ split }}</p>
<p class="faint">pcgsvc {{ report.pcgsvc }}, torch {{ report.torch }}, {{ report.device }},
{{ report.config.dtype }}, compiler {{ report.compile.compiler }},
{% if plan.weights_in_memory %}planned with the weights in memory
{%- else %}planned from shapes, no weights in memory{% endif %}</p>
{% for warning in report.warnings %}<p class="warning">{{ warning }}</p>{% endfor %}

<h2>Split</h2>
<div class="chain">
{% for stretch in chain %}
<div class="stretch{% if stretch.repeat > 1 %} repeats{% endif %}">
{%- if stretch.repeat > 1 %}<b>{{ stretch.repeat }} times</b>{% endif %}
{% for cell in stretch.cells %}
{% set kind = cell.kind %}
<a class="box {{ kind.kind }}" href="#kind-{{ cell.number }}" style="{{ kind.style }}">
{{ kind.kind }}<small>{{ kind.label }}</small><small>{{ (kind.hash or '')[:8] }}</small></a>
{% endfor %}
</div>
{% endfor %}
</div>

<h2>Pieces</h2>
<table>
<tr><th></th><th class="number">times</th><th>kind</th><th>operators and how often</th>
<th>why the model is split there</th></tr>
{% for kind in kinds %}
<tr id="kind-{{ loop.index0 }}">
<td><span class="swatch" style="{{ kind.style }}"></span></td>
<td class="number" data-is="times">{{ kind.count }}</td>
<td data-is="kind">{{ kind.kind }} <code>{{ (kind.hash or '')[:12] }}</code></td>
<td data-is="operators">{% for op in kind.ops %}
<code>{{ op.op | replace('aten::', '') }}</code>&nbsp;{{ op.count }}{{ ', ' if not loop.last }}
{% endfor %}
<details><summary class="faint">all operators in order, inputs, outputs, names</summary>
{% if kind.inputs %}<p>inputs: <code>{{ kind.inputs | join('; ') }}</code></p>{% endif %}
{% if kind.outputs %}<p>outputs: <code>{{ kind.outputs | join('; ') }}</code></p>{% endif %}
<p class="faint">names: {{ kind.pieces | join(' ') }}</p>
{% if kind.code %}<pre>{{ kind.code | join('\\n') }}</pre>{% endif %}
</details></td>
<td data-is="why">{{ kind.reason }}</td>
</tr>
{% endfor %}
</table>

<h2>Splitting operators</h2>
<table>
<tr><th>operator</th><th class="number">calls in the graph</th>
<th>which batches may be captured with it inside</th></tr>
{% for op in report.partition.splitting_ops %}
<tr><td><code>{{ op.name }}</code></td>
<td class="number" data-is="calls in the graph">{{ op.count }}</td>
<td data-is="may be captured">{{ supports.get(op.name, '') }}</td></tr>
{% else %}<tr><td colspan="3">none: the graph is not split</td></tr>
{% endfor %}
</table>

<h2>Mode</h2>
<p>{{ plan.mode }}</p>
<p>Uniform decode batches run <b>{{ report.mode.decode }}</b>, all others
<b>{{ report.mode.mixed }}</b>.</p>
<table class="narrow">
<tr><th>mode</th><th>becomes</th><th>why</th></tr>
{% for asked, got in plan.modes.items() %}
<tr><td>{{ asked }}{% if asked == report.mode.requested %} <b>(asked for)</b>{% endif %}</td>
<td data-is="becomes">{{ 'as asked' if got.resolved == asked else got.resolved }}</td>
<td data-is="why">{{ got.reasons | join('; ') }}</td></tr>
{% endfor %}
</table>

<h2>Graphs</h2>
<p>{{ graphs }}</p>
<table class="narrow">
<tr><th>mode</th><th>sizes</th><th>graphs per size</th><th>graphs</th></tr>
{% for mode, g in plan.graphs.by_mode.items() %}
<tr><td>{{ mode }}</td><td class="number" data-is="sizes">{{ g.entries }}</td>
<td class="number" data-is="graphs per size">{{ g.per_entry }}</td>
<td class="number" data-is="graphs">{{ g.graphs }}</td></tr>
{% endfor %}
</table>
{% for skip in plan.graphs.skipped %}
<p class="warning">size {{ skip.size }}: {{ skip.reason }}</p>
{% endfor %}
{% if modules %}<p>Compiled submodules: {{ modules }}</p>{% endif %}

<h2>Memory, estimated: {{ bytes(plan.memory.total_bytes) }}</h2>
<table>
<tr><th>what</th><th></th><th style="width: 25%"></th><th>how it was found</th></tr>
{% for item in plan.memory['items'] %}
<tr><td>{{ item.name }}</td><td class="number">{{ bytes(item.bytes) }}</td>
<td><div class="bar" style="width: {{ '%.1f' % (100 * item.bytes / largest) }}%"></div></td>
<td class="faint" data-is="found as">{{ item.method }}</td></tr>
{% endfor %}
</table>
{% for note in notes %}<p class="faint">{{ note }}</p>{% endfor %}
</body>
</html>
"""


def draw_plan(report: dict[str, Any], path: Path) -> None:
    """Write page and picture beside the report and note their paths in it.

    Args:
        report: with `plan`; gets `plan.files`.
        path: of the report. `report.json` has `plan.svg` and `plan.html` beside it, `NAME.json`
            has `NAME.svg` and `NAME.html`.
    """
    stem = "plan" if path.stem == "report" else path.stem
    path.parent.mkdir(parents=True, exist_ok=True)
    report["plan"]["files"] = {}
    for kind, content in (("html", plan_html(report)), ("svg", plan_svg(report))):
        place = path.with_name(f"{stem}.{kind}")
        place.write_text(content)
        report["plan"]["files"][kind] = str(place)


def plan_html(report: dict[str, Any]) -> str:
    """Return the page; everything from the report is escaped."""
    plan = report["plan"]
    kinds = [_drawn(plan["kinds"], at) for at in range(len(plan["kinds"]))]
    chain = [
        {**stretch, "cells": [{"number": at, "kind": kinds[at]} for at in stretch["kinds"]]}
        for stretch in plan["sequence"]
    ]
    return rendered(
        _PAGE,
        report=report,
        plan=plan,
        title=words.model(report["config"]["model"]),
        split=_split(report["partition"]),
        chain=chain,
        kinds=kinds,
        supports={row["op"]: words.support(row).partition(": ")[2] for row in plan["support"]},
        graphs=_graphs(plan["graphs"]),
        modules=words.modules(plan["compile_modules"]),
        largest=max([1, *(item["bytes"] for item in plan["memory"]["items"])]),
        notes=words.notes(plan),
        bytes=words.memory,
    )


def _split(partition: dict[str, Any]) -> str:
    """Return into what the model is split."""
    regions = words.count(partition["num_regions"], "region")
    boundaries = words.count(partition["num_boundaries"], "boundary", "boundaries")
    unique, strategy = partition["num_unique_pieces"], partition["strategy"]
    return f"{regions}, {unique} of them different; {boundaries}, by partition.strategy={strategy}"


def _graphs(planned: dict[str, Any]) -> str:
    """Return how many graphs would be captured, for which sizes."""
    if not planned["num_graphs"]:
        return "None would be captured."
    sizes = ", ".join(map(str, planned["sizes"]))
    return f"{words.count(planned['num_graphs'], 'graph')} in all, for batches of {sizes} rows."


def _drawn(kinds: list[dict[str, Any]], at: int) -> dict[str, Any]:
    """Return a kind of piece with how its box looks."""
    kind, colour = kinds[at], colour_of(kinds, at)
    style = f"border-color: {colour}"
    if kind["kind"] == "region":
        style += f"; background: {colour}"
    label = ", ".join(words.content(kind)).replace(" ops", " operators")
    return {**kind, "style": style, "label": label}
