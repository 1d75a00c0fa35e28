"""What the leaderboard's page adds to the report's style sheet."""

from vembed.evaluation.report.markup import Html
from vembed.evaluation.report.style import STYLE

_SHEET = """
:root { --series-2: #b0531b; --series-3: #0b735a; --series-4: #7a4fb0; }
@media (prefers-color-scheme: dark) { :root { --series-2: #f0a36f; --series-3: #5fc9a8; --series-4: #c4a3ee; } }
.series-1 { color: var(--series); }
.series-2 { color: var(--series-2); }
.series-3 { color: var(--series-3); }
.series-4 { color: var(--series-4); }
.mark-best { color: var(--better); }
.mark-behind { color: var(--worse); }
.mark-even { color: var(--even); }
header .lead { font-size: 1.0625rem; margin-top: 0.9rem; }
svg.span { width: 11rem; height: 1.05rem; color: var(--series); }
svg.span line.frame { stroke: var(--line); stroke-width: 1; }
svg.span line.span { stroke: currentColor; stroke-width: 2.4; stroke-linecap: round; }
svg.span circle { fill: currentColor; }
ul.legend.across { display: flex; flex-wrap: wrap; gap: 0.1rem 1.6rem; margin: 0.6rem 0; }
@media (max-width: 40rem) {
  table.stack svg.span { width: 100%; }
}
@media print {
  :root { --series-2: #b0531b; --series-3: #0b735a; --series-4: #7a4fb0; }
}
"""

LEADERBOARD_STYLE = Html(STYLE + _SHEET)
"""Text of the page's `style` element."""
