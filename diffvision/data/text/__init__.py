"""Text: tokenizers, documents, token shards, the DataModule of language models."""
