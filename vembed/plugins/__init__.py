"""Plugins that come with vembed: what not every user needs, each through the doors that a user's plugin has.

Here: hosted trackers, ONNX graphs, LanceDB tables, encoding on Ray, MTEB, published sets, and the commands `merge` and
`push`. Nothing imports this room: tables of names do, such as vembed/registry.py, when somebody asks for a plugin.

The doors: the `register_*` functions of `vembed` with the base classes of their kinds, and for a command its options
(entrypoints/options.py) and its way to run (entrypoints/command.py). Everything that works on pages, data, models,
vectors and evaluations is public too. Training, losses and the configuration aren't, but by `vembed.train`. The
contract "Plugins import public doors only" in pyproject.toml lists what a plugin may import of those rooms.
"""
