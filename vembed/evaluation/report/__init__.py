"""The run report: one self-contained HTML page, the same in Markdown, and the numbers as JSON.

Here: what a report holds (data), what is chosen and computed from it (content, curves, examples), how it is drawn
(charts, style), the three forms (html, markdown, machine), and the writing of them (write). Everything that comes from
users passes `text.visible` and then the escaping of its form: `markup.Html` for HTML, `markdown.escape` for Markdown.
Not here: metrics and intervals (evaluation/), what goes into a report (training/).
"""
