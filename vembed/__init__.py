"""vembed fine-tunes embedding models for retrieval: one YAML in, a trained model and a retrieval report out.

Importing this package imports no torch, so that `vembed train --validate` answers at once.
"""

__version__ = "0.1.0"
