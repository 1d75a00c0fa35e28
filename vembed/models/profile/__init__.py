"""How large an encoder is, measured before it exists: parameters and activations without weights or a device.

Here live the models on the meta device, the runs on fake tensors, and what they are turned into: the ModelSize that
the plan computes with. What a step makes of these numbers is arithmetic and lives in plan/.
"""

from vembed.models.profile.formula import model_size
from vembed.models.profile.measure import ProfileTarget
from vembed.models.profile.profile import profile_model

__all__ = ["ProfileTarget", "model_size", "profile_model"]
