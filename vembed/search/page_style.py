"""The style of the search page, and the policy that allows it and nothing else."""

from __future__ import annotations

import base64
import hashlib

from vembed.evaluation.report.markup import Html

STYLE = Html("""
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --ink: #1d2126; --muted: #59616b; --line: #d5d9dd; --accent: #2f62b5;
  --on-accent: #ffffff; --soft: #eceef0; --warn: #a8401a; --warn-soft: #faeae3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1b1f23; --ink: #e4e7ea; --muted: #a0a8b1; --line: #3a4149; --accent: #86b2f2;
    --on-accent: #10151c; --soft: #272c32; --warn: #f0966f; --warn-soft: #40261b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 48rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
  overflow-wrap: anywhere;
}
body.pictures { max-width: 66rem; }
h1 { font-size: 1.35rem; line-height: 1.25; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1rem; margin: 0; font-weight: 600; }
a { color: var(--accent); }
.facts { margin: 0.2rem 0 1.25rem; }
.facts, .count, .meta, footer { color: var(--muted); font-size: 0.875rem; }
form { display: flex; flex-wrap: wrap; gap: 0.6rem; align-items: stretch; margin-bottom: 0.7rem; }
input, select, button {
  font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 0.6rem 0.8rem; min-height: 2.9rem;
}
input { flex: 1 1 18rem; min-width: 0; }
::placeholder { color: var(--muted); opacity: 1; }
.by-picture > input { flex: 1 1 12rem; }
button {
  background: var(--accent); color: var(--on-accent); border-color: transparent; font-weight: 600; cursor: pointer;
}
.by-picture button { background: var(--card); color: var(--accent); border-color: var(--accent); }
.drop {
  flex: 2 1 30rem; min-width: 0; display: flex; flex-wrap: wrap; align-items: center; gap: 0 0.9rem;
  border: 2px dashed var(--line); border-radius: 8px; padding: 0.45rem 0.8rem; background: var(--card);
}
.drop:hover, .drop:focus-within { border-color: var(--accent); }
.drop .title { font-weight: 600; }
.drop .hint { color: var(--muted); font-size: 0.875rem; }
.drop input {
  flex: 1 1 11rem; border: 0; padding: 0; min-height: 2rem; background: none; color: var(--muted);
  font-size: 0.875rem; cursor: pointer;
}
.drop input::file-selector-button {
  font: inherit; font-weight: 600; margin-right: 0.7rem; padding: 0.25rem 0.7rem; cursor: pointer;
  color: var(--ink); background: var(--soft); border: 1px solid var(--line); border-radius: 6px;
}
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.count { margin: 1.4rem 0 0.7rem; }
.problem {
  margin: 1.4rem 0; padding: 0.75rem 1rem; border-radius: 8px; color: var(--warn); background: var(--warn-soft);
}
.asked { display: flex; align-items: center; gap: 1rem; margin: 1.4rem 0 0.9rem; }
.asked .count { margin: 0; }
.asked img { width: 5rem; height: 5rem; object-fit: contain; border-radius: 8px; background: var(--soft); }
.asked p { margin: 0; }
.examples { margin: 1.6rem 0 0; }
.examples div { display: flex; flex-wrap: wrap; gap: 0.6rem; margin: 0.5rem 0 1.4rem; }
.chip {
  padding: 0.3rem 0.85rem; border: 1px solid var(--line); border-radius: 99px; background: var(--card);
  text-decoration: none; font-size: 0.9375rem;
}
.chip:hover, .tile:hover { border-color: var(--accent); }
.tile {
  display: block; width: 7rem; height: 7rem; border: 1px solid var(--line); border-radius: 10px; overflow: hidden;
  background: var(--soft);
}
.tile img { display: block; width: 100%; height: 100%; object-fit: contain; }
ol { list-style: none; margin: 0; padding: 0; }
li {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 0.85rem 1.1rem; margin-bottom: 0.7rem;
}
.meta { display: flex; gap: 0.9rem; margin: 0 0 0.3rem; font-variant-numeric: tabular-nums; }
.meta .id { flex: 1 1 auto; min-width: 0; color: var(--ink); font-weight: 600; }
.meta .score { flex: none; }
.text { margin: 0; white-space: pre-wrap; }
ol.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(12rem, 1fr)); gap: 0.9rem; }
.grid li { margin: 0; }
.grid li:not(.picture) { grid-column: 1 / -1; }
.grid li.picture { padding: 0; overflow: hidden; display: flex; flex-direction: column; }
.picture .thumb { display: block; border-bottom: 1px solid var(--line); outline-offset: -3px; }
.picture .thumb img { display: block; width: 100%; height: auto; aspect-ratio: 4 / 3; object-fit: contain; }
.picture .thumb:hover { filter: brightness(0.96); }
.picture .about { padding: 0.6rem 0.8rem 0.7rem; }
.picture .about p { margin: 0; }
.picture .meta { justify-content: space-between; font-size: 0.8125rem; }
.picture .rank { color: var(--ink); font-weight: 600; }
.picture .caption { font-size: 0.9375rem; line-height: 1.4; }
.picture .name { color: var(--muted); font-size: 0.75rem; }
.picture .meta + .name { font-size: 0.875rem; color: var(--ink); }
.picture .caption + .name { margin-top: 0.25rem; }
summary { cursor: pointer; list-style: none; }
summary::-webkit-details-marker { display: none; }
.short { display: block; }
details[open] .short { display: none; }
.more { color: var(--accent); font-size: 0.875rem; }
.more::after { content: "Show the whole text"; }
details[open] .more::after { content: "Show less"; }
footer { margin-top: 2rem; }
@media (max-width: 36rem) {
  body { padding: 1.1rem 0.9rem 3rem; }
  input, .drop, .by-picture > input { flex-basis: 100%; }
  .drop .hint { display: none; }
  .picture .about { padding: 0.45rem 0.6rem 0.55rem; }
  button { flex: 1 1 auto; }
  ol.grid { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0.6rem; }
}
""")

POLICY = (
    "default-src 'none'; img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; style-src "
    f"'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'"
)
"""The Content-Security-Policy: this style, pictures inside the page, and nothing else; no script from anywhere."""
