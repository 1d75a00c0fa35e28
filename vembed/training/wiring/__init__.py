"""Put a run together from its configuration: the only place that wires.

Everything below takes plain values; a key of the configuration is read here or in the plan and nowhere else. What does
work lives in the rooms below, not here.
"""
