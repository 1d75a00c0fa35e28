"""How large an encoder is, measured before it exists: parameters and activations without weights or a device.

Here live the runs on fake tensors, and what they are turned into: the ModelSize that the plan computes with. What a
step makes of these numbers is arithmetic and lives in plan/.
"""
