"""`diffvision study`: models trained by one recipe with several seeds, each by `diffvision fit`, then compared."""
