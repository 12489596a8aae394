"""Evaluations of vision-language models: questions about images and a model's answers -> {metric: value}."""
