"""Entry point of `python -m diffvision.run`."""

from diffvision.run import main

main()
