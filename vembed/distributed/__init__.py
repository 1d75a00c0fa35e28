"""Processes and devices: the only room that imports accelerate.

Comes in: what a launcher left in the environment (process_env.py, accelerate.py), and of the plan the way in which
weights are held. Goes out: a device and `Ranks`, whose every collective is the identity on one rank (runtime.py,
ranks.py); shards (fsdp.py, shards.py, starting_weights.py); one failure and one exit code for all processes
(watchdog.py), a stop that all agree on (signals.py), and one writer for each output folder (lock.py). launch.py starts
the processes of one machine. Not known here: which strategy is chosen (plan/), what is computed (gradcache/), the data.
"""
