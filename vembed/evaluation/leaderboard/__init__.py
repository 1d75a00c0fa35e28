"""The leaderboard: several systems on several sets, as HTML, Markdown, JSON and a table for the terminal.

Here: means, intervals and tests over finished results, and how they are shown. Not here: how results come about
(evaluation/benchmark/), the report of one run (evaluation/report/), whose pieces are used.
"""
