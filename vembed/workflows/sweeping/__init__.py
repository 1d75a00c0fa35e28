"""Several trainings of one configuration: values to try, or seeds to repeat it with. Each is a run of its own.

Here live the values and how they are chosen, the trials with what became of each, the table and the page, and the
verdict over seeds. How a run trains doesn't: a trial is a process of `vembed train`.
"""
