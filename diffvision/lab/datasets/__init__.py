"""Datasets that only studies train on."""
