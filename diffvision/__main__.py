"""`python -m diffvision` is the command line (`torchrun -m diffvision fit ...` needs a module)."""

import sys

from diffvision.cli import main

sys.exit(main())
