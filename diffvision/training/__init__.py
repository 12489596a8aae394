"""Training with Lightning: modules, optimizer, callbacks and the `fit` command."""
