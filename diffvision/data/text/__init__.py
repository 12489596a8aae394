"""Text: tokenizers, documents, token files, the DataModule of language models."""
