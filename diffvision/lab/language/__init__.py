"""Evaluations of language models from the papers that only studies need."""
