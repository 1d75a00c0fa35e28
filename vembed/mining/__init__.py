"""Hard negatives: what a model finds near a query and nobody called relevant; how many of them may be so after all.

No file of training data is read here, no model is loaded, and nothing trains.
"""
