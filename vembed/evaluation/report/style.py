"""The style sheet of the report: no external font, light and dark by the reader's setting, narrow screens, paper."""

from vembed.evaluation.report.markup import Html

_LIGHT = """
  --page: #f7f7f5; --card: #ffffff; --ink: #1d2126; --muted: #59616b; --line: #dfe2e5; --soft: #f0f1f2;
  --series: #2f62b5; --better: #0b735a; --worse: #a8401a; --even: #5d5a4c;
  --better-soft: #e2f2ed; --worse-soft: #faeae3; --even-soft: #efede5;
"""
_DARK = """
  --page: #14171a; --card: #1b1f23; --ink: #e4e7ea; --muted: #a0a8b1; --line: #353b42; --soft: #23282d;
  --series: #86b2f2; --better: #5fc9a8; --worse: #f0966f; --even: #c3bda6;
  --better-soft: #17352e; --worse-soft: #40261b; --even-soft: #2f2d26;
"""

_SHEET = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; scroll-behavior: smooth; }
body {
  margin: 0; padding: 0 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
}
header, main, footer { max-width: 66rem; margin-inline: auto; }
h1, h2, h3 { line-height: 1.25; font-weight: 650; text-wrap: balance; }
h1 { font-size: 1.6rem; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.25rem; margin: 3.25rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 1.75rem 0 0.6rem; }
p { margin: 0.4rem 0 0.8rem; max-width: 46rem; }
a { color: var(--series); text-underline-offset: 0.2em; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.86em; }
:focus-visible { outline: 2px solid var(--series); outline-offset: 2px; }
.muted { color: var(--muted); }
.small { font-size: 0.875rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }

.unseen {
  position: absolute; width: 1px; height: 1px; margin: -1px; padding: 0; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap;
}
.skip {
  position: absolute; left: 0.75rem; top: -6rem; z-index: 9; padding: 0.6rem 1rem; border-radius: 6px;
  background: var(--card); border: 2px solid var(--series); font-weight: 600;
}
.skip:focus { top: 0.75rem; }
main:focus { outline: none; }

header { padding-top: 2.5rem; }
header .kind { margin: 0 0 0.2rem; color: var(--muted); font-size: 0.875rem; }
.verdict { margin: 1.25rem 0 1.1rem; padding: 1.4rem 1.6rem 1.3rem; border-left: 5px solid var(--tone); }
.verdict.improved { --tone: var(--better); --tone-soft: var(--better-soft); }
.verdict.worse { --tone: var(--worse); --tone-soft: var(--worse-soft); }
.verdict.within-noise { --tone: var(--even); --tone-soft: var(--even-soft); }
.badge {
  display: inline-block; padding: 0.2rem 0.75rem; border-radius: 99px; font-weight: 650;
  color: var(--tone); background: var(--tone-soft); border: 1px solid currentColor;
}
.verdict .figures {
  display: flex; flex-wrap: wrap; align-items: baseline; gap: 0.35rem 1.6rem;
  margin: 0.9rem 0 0.7rem;
}
.verdict .figures p { margin: 0; }
.verdict .change { font-size: 2.1rem; font-weight: 650; line-height: 1.15; letter-spacing: -0.02em; }
.verdict .change .from { color: var(--muted); font-weight: 450; }
.verdict .difference { font-size: 1.35rem; font-weight: 650; color: var(--tone); }
.verdict .sentence { margin: 0; max-width: none; }
.verdict .sentence.other { margin-top: 0.35rem; color: var(--muted); font-size: 0.9375rem; }
.verdict h2 { margin: 0; font-size: 1rem; }
dl.facts { display: flex; flex-wrap: wrap; gap: 1rem 3rem; margin: 1.2rem 0; }
dl.facts dt { color: var(--muted); font-size: 0.8125rem; }
dl.facts dd { margin: 0; font-weight: 550; }
nav ul {
  display: flex; flex-wrap: wrap; gap: 0.35rem 1.25rem; margin: 1.4rem 0 0; padding: 0;
  list-style: none; font-size: 0.9375rem;
}

.scroll { overflow-x: auto; margin: 0.9rem 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.9375rem; }
caption { text-align: left; padding: 0.8rem 1rem 0.5rem; color: var(--muted); font-size: 0.875rem; }
caption span { position: sticky; left: 1rem; display: inline-block; max-width: calc(100vw - 4.5rem); }
th, td {
  padding: 0.5rem 1rem; text-align: left; vertical-align: top; border-top: 1px solid var(--line);
  overflow-wrap: normal;
}
thead th { font-weight: 550; color: var(--muted); font-size: 0.8125rem; vertical-align: bottom; white-space: nowrap; }
tbody th { font-weight: 550; position: sticky; left: 0; background: var(--card); }
.number { text-align: right; white-space: nowrap; }
.number .value, .number .bounds { display: block; }
.bounds { color: var(--muted); font-size: 0.8125rem; line-height: 1.35; }
.nowrap { white-space: nowrap; }
tr.decisive > * { background: var(--soft); }
tr.chosen > * { background: var(--better-soft); }
.scroll.pairs { max-width: 46rem; }
table.pairs th, table.pairs td { padding-block: 0.38rem; }
table.records { font-size: 0.875rem; }
table.records th, table.records td { padding-inline: 0.7rem; }
table.pairs th { width: 34%; min-width: 9rem; font-weight: 450; color: var(--muted); }
table.pairs td, .scroll.pairs { max-width: 46rem; }
table.pairs th, table.pairs td { padding-block: 0.38rem; }
table.records { font-size: 0.875rem; }
table.records th, table.records td { padding-inline: 0.7rem; }
table.pairs th { overflow-wrap: anywhere; }
.improved { color: var(--better); }
.worse { color: var(--worse); }
.within-noise { color: var(--even); }
section.verdict, tr { color: var(--ink); }

svg { display: block; }
svg.chart { width: 100%; height: auto; color: var(--muted); overflow: visible; }
svg.chart * { stroke-linejoin: round; stroke-linecap: butt; }
svg.chart text { font-family: inherit !important; }
svg.interval { width: 6.5rem; height: 1.05rem; flex: none; }
.reading { display: flex; align-items: center; gap: 0.8rem; white-space: nowrap; }
svg.interval line.zero { stroke: var(--muted); stroke-width: 1.2; }
svg.interval line.span { stroke: currentColor; stroke-width: 2.4; stroke-linecap: round; }
svg.interval circle { fill: currentColor; }
svg.shares { width: 100%; height: 0.9rem; border-radius: 4px; margin: 0.5rem 0 0.9rem; }
svg.shares .improved { fill: var(--better); }
svg.shares .unchanged { fill: var(--line); }
svg.shares .worse { fill: var(--worse); }
.grid {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); gap: 1rem;
  margin: 1rem 0;
}
.grid.two { grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); }
.grid.pairs svg.chart { max-width: 25rem; }
figure { margin: 0; padding: 1rem 1.1rem 0.9rem; display: flex; flex-direction: column; }
figure .title { margin: 0 0 0.6rem; font-weight: 600; font-size: 0.9375rem; }
figcaption { margin-top: auto; padding-top: 0.6rem; color: var(--muted); font-size: 0.8125rem; line-height: 1.5; }
.panel { padding: 1rem 1.1rem; }
.panel > :first-child { margin-top: 0; }
ul.legend { list-style: none; margin: 0; padding: 0; }
ul.legend li { display: flex; gap: 0.6rem; padding: 0.15rem 0; }
ul.legend .swatch { flex: none; width: 1.2rem; text-align: center; }

article.query { margin: 0.9rem 0; padding: 1.1rem 1.3rem 1rem; }
article.query h4 { margin: 0; font-size: 1rem; font-weight: 600; line-height: 1.45; }
article.query .scores { margin: 0.25rem 0 0.7rem; }
ol.hits, ul.missed { list-style: none; margin: 0; padding: 0; }
.hit {
  display: grid; grid-template-columns: 1.6rem 5.2rem 1fr; gap: 0 0.6rem; padding: 0.5rem 0;
  border-top: 1px solid var(--line); font-size: 0.9375rem;
}
.hit .rank { color: var(--muted); text-align: right; }
.mark { font-weight: 600; white-space: nowrap; }
.mark.right { color: var(--better); }
.mark.wrong { color: var(--worse); }
.mark.missed { color: var(--even); }
.meta { margin: 0.15rem 0 0; color: var(--muted); font-size: 0.8125rem; }
summary.meta::marker { color: var(--series); }
summary .link { color: var(--series); text-decoration: underline; text-underline-offset: 0.2em; }
h4.picture { display: flex; flex-wrap: wrap; align-items: end; gap: 0.8rem; }
.frame {
  display: grid; place-items: center; background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  width: 100%; max-width: 170px; aspect-ratio: 1; padding: 4px; overflow: hidden;
}
.frame img { display: block; border-radius: 3px; max-width: 100%; max-height: 100%; width: auto; height: auto; }
.frame.empty {
  background: var(--soft); color: var(--muted); border-style: dashed; padding: 0.6rem; text-align: center;
  font-size: 0.8125rem; font-weight: 400; line-height: 1.4;
}
h4.picture .frame { width: 170px; }
ol.tiles, ul.tiles {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(9.2rem, 44%), 1fr)); gap: 1rem 0.9rem;
  padding-top: 0.3rem;
}
.tile { display: flex; flex-direction: column; min-width: 0; max-width: 170px; }
.tile .place { display: flex; flex-wrap: wrap; gap: 0 0.6rem; margin-top: 0.4rem; font-size: 0.9375rem; }
.tile.right .frame { border: 2px solid var(--better); padding: 3px; }
.tile .rank { color: var(--muted); }
.tile .meta { margin: 0; line-height: 1.4; }
article.query h5 { margin: 0.9rem 0 0.3rem; font-size: 0.875rem; font-weight: 600; }
details { margin: 0.15rem 0; }
summary { cursor: pointer; color: var(--series); font-size: 0.8125rem; width: fit-content; }
details.section > summary { font-size: 0.9375rem; padding: 0.3rem 0; }
.full {
  white-space: pre-wrap; margin: 0.4rem 0; padding: 0.7rem 0.9rem; background: var(--soft);
  border-radius: 6px; font-size: 0.875rem; font-weight: 400;
}
ol.reasons { padding-left: 1.3rem; max-width: 46rem; }
ol.reasons li { padding: 0.15rem 0; }
pre { margin: 0.9rem 0; padding: 1rem 1.2rem; overflow-x: auto; line-height: 1.6; }
pre code { overflow-wrap: normal; user-select: all; -webkit-user-select: all; }
footer {
  margin-top: 3.5rem; padding-top: 1rem; border-top: 1px solid var(--line); color: var(--muted);
  font-size: 0.8125rem;
}

@media (max-width: 40rem) {
  table.stack, table.stack tbody, table.stack caption { display: block; }
  table.stack thead {
    display: block; position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  }
  table.stack tr {
    display: block; padding: 0.7rem 0.9rem; border-top: 1px solid var(--line);
  }
  table.stack tr.decisive { background: var(--soft); }
  table.stack tr.chosen { background: var(--better-soft); }
  table.stack td, table.stack tr.decisive > *, table.stack tr.chosen > * { background: none; }
  table.stack th { display: block; position: static; padding: 0 0 0.2rem; border: 0; background: none; }
  table.stack td {
    display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; padding: 0.15rem 0; border: 0;
    text-align: left; white-space: normal;
  }
  table.stack td::before { content: attr(data-label); color: var(--muted); }
  table.stack td::before { margin-right: auto; }
  table.stack td { align-items: baseline; gap: 0 0.6rem; justify-content: flex-end; }
  body { padding-inline: 0.9rem; }
  header { padding-top: 1.5rem; }
  h1 { font-size: 1.35rem; }
  h2 { margin-top: 2.5rem; }
  .verdict { padding: 1.1rem 1.1rem 1rem; }
  .verdict .change { font-size: 1.7rem; }
  th, td { padding-inline: 0.7rem; }
  article.query { padding-inline: 0.9rem; }
  .hit { grid-template-columns: auto 1fr; }
  .hit .rank { text-align: left; }
  .missed .hit .rank { display: none; }
  .missed .hit .mark { grid-column: 1 / -1; }
  .hit .body { grid-column: 1 / -1; }
}
@media print {
  :root { color-scheme: light; LIGHT }
  @page { margin: 16mm; }
  body { background: none; padding: 0; font-size: 10pt; }
  header { padding-top: 0; }
  nav, .skip { display: none; }
  h2, h3, h4, summary { break-after: avoid; }
  figure, article.query, tr, .verdict { break-inside: avoid; }
  .card, .badge, svg, tr > * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .scroll, pre { overflow: visible; }
  pre { white-space: pre-wrap; }
  details.section::details-content { content-visibility: visible; block-size: auto; }
}
"""

STYLE = Html(
    f":root {{ color-scheme: light dark; {_LIGHT.strip()} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK.strip()} }} }}\n" + _SHEET.replace("LIGHT", _LIGHT.strip())
)
"""Text of the page's `style` element."""
