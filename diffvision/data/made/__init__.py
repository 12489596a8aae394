"""Datasets that anyone can make again: digits, scenes, the standard library as text, recall, needles."""
