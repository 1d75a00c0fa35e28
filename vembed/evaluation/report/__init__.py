"""The run report: one self-contained HTML page, the same in Markdown, and the numbers as JSON.

Here: what a report is made of (data), what is shown of it (content, from comparison, curves, examples, pictures, ranks,
settings and time_split), its drawings (charts), report.json (machine), and the three files (write). How content is laid
out and escaped stands in evaluation/templates/report.*.jinja and evaluation/pages.py.
Not here: metrics and intervals (evaluation/), what goes into a report (training/).
"""
