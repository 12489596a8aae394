"""The lesson on language models that the demo teaches on request."""
