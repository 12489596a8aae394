"""Faithfulness of texts that a model writes about documents: rows, prompts, judges of the outputs, and the rates."""
