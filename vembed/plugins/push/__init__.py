"""`vembed push` and `EmbeddingModel.push_to_hub`: a model on the Hugging Face hub, with its card.

Here: the command (command.py), and what is sent, what stays here and what is refused (push.py). Not here: how a model
is exported (models/export.py), and its card (workflows/publishing.py).
"""
