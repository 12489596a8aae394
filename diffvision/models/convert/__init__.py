"""Weights of our models in other libraries' layouts, and back."""
