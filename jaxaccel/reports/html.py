"""One self-contained page about one run, or several side by side."""

from __future__ import annotations

import html
import os
import pathlib
from collections.abc import Iterable, Sequence

from jaxaccel.reports.chart import Line, chart
from jaxaccel.reports.run import Run, load_run


# Six colours of similar lightness, told apart with colour-blindness too; the dark
# page uses lighter ones.
_LIGHT = ("#0b62c4", "#c2410c", "#0f766e", "#9333ea", "#a16207", "#be185d")
_DARK = ("#6cb2ff", "#ff9a5c", "#4fd1c5", "#c79bff", "#e5c04b", "#ff8fbd")

_STYLE = """
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1b1f24; --soft: #5b6470;
  --rule: #d9dee4; --panel: #f6f8fa; LIGHT }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --fg: #e6e9ec;
  --soft: #9aa4af; --rule: #353c44; --panel: #1c2126; DARK } }
body { background: var(--bg); color: var(--fg); margin: 0 auto; max-width: 1240px;
  padding: 24px; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 18px; margin: 32px 0 8px }
.soft { color: var(--soft) }
.grid-of-charts { display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)) }
figure { margin: 0; padding: 12px; border: 1px solid var(--rule); border-radius: 8px }
figcaption { display: flex; flex-wrap: wrap; gap: 4px 14px; margin-bottom: 6px }
svg { width: 100%; height: auto; display: block }
.grid { stroke: var(--rule) } .tick { fill: var(--soft); font-size: 11px }
.curve { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round }
.dot { fill: currentColor } .level { color: var(--soft) }
.level.curve { stroke-dasharray: 6 4 }
.key::before { content: ""; display: inline-block; width: 16px; margin-right: 5px;
  vertical-align: middle; border-top: 3px solid currentColor }
.key.level::before { border-top-style: dashed }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: 4px 12px; border-bottom: 1px solid var(--rule); text-align: left;
  vertical-align: top }
td.number { text-align: right }
pre { background: var(--panel); border-radius: 8px; padding: 12px; margin: 6px 0;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px }
summary { cursor: pointer }
"""


def write_report(
    folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]
) -> pathlib.Path:
    """Reads runs and writes their page.

    Args:
      folders: work folders of `train`.
      out: the HTML file; its folder is made where it is missing.

    Returns:
      The path of the page.

    Raises:
      FileNotFoundError: a folder does not exist or holds no run.
      ValueError: no folder is given, or a run's files cannot be read.
    """
    if not folders:
        raise ValueError("a report needs at least one run folder")
    page = render([load_run(folder) for folder in folders])
    path = pathlib.Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    names = ", ".join(run.name for run in runs)
    title = f"Run {names}" if len(runs) == 1 else f"{len(runs)} runs"
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="soft">{html.escape(", ".join(str(run.path) for run in runs))}</p>',
        _section("Summary", _summary(runs)),
        _section("Curves", _charts(runs)),
        _section("Configuration differences", _differences(runs)),
        _section("Samples", _samples(runs)),
        _section("Configuration", _configs(runs)),
    ]
    style = _STYLE.replace("LIGHT", _variables(_LIGHT)).replace(
        "DARK", _variables(_DARK)
    )
    slots = "".join(f".s{i} {{ color: var(--s{i}) }}\n" for i in range(len(_LIGHT)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{style}{slots}</style></head>"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _variables(colours: Iterable[str]) -> str:
    return " ".join(f"--s{i}: {colour};" for i, colour in enumerate(colours))


def _section(title: str, body: str) -> str:
    return f"<h2>{html.escape(title)}</h2>{body}" if body else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts; cells that are numbers stand right."""
    titles = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = []
    for row in rows:
        cells = [
            f"<td{' class=number' if _is_number(cell) else ''}>{html.escape(cell)}</td>"
            for cell in row
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "".join(lines)
    return f'<div class="scroll"><table><tr>{titles}</tr>{body}</table></div>'


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or (text[:1] == "-" and text[1:2].isdigit())


def _summary(runs: Sequence[Run]) -> str:
    keys = dict.fromkeys(key for run in runs for key in run.summary)
    rows = [[key, *(run.summary.get(key, "") for run in runs)] for key in keys]
    return _table(["", *(run.name for run in runs)], rows)


def _charts(runs: Sequence[Run]) -> str:
    titles = dict.fromkeys(key for run in runs for key in run.series)
    figures = []
    for key in titles:
        lines, levels = [], {}
        for slot, run in enumerate(runs):
            if key in run.series:
                points = run.series[key]
                lines.append(Line(label=run.name, points=points, slot=slot))
                # Runs on the same text share a level, and one line shows it.
                levels.update(dict.fromkeys(run.levels.get(key, ())))
        steps = [step for line in lines for step, _ in line.points]
        for label, value in levels:
            ends = [(min(steps), value), (max(steps), value)]
            lines.append(Line(label=label, points=ends, slot=None))
        figures.append(chart(key[0], key[1], lines))
    body = "".join(figures)
    return f'<div class="grid-of-charts">{body}</div>' if body else ""


def _differences(runs: Sequence[Run]) -> str:
    if len(runs) < 2:
        return ""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = []
    for key in keys:
        values = [run.settings.get(key, "(not set)") for run in runs]
        if len(set(values)) > 1:
            rows.append([key, *values])
    if not rows:
        return "<p>The configurations are equal.</p>"
    return _table(["setting", *(run.name for run in runs)], rows)


def _samples(runs: Sequence[Run]) -> str:
    return "".join(
        f"<p><b>{html.escape(run.name)}</b></p><pre>{html.escape(sample)}</pre>"
        for run in runs
        for sample in run.samples
    )


def _configs(runs: Sequence[Run]) -> str:
    return "".join(
        f"<details><summary>{html.escape(run.name)}</summary>"
        f"<pre>{html.escape(run.config_text)}</pre></details>"
        for run in runs
        if run.config_text
    )
