"""Evaluations of language models: tokens and a model -> {metric: value}."""
