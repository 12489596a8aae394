"""`diffvision fit` from a clone.

python scripts/train.py --config configs/clip/debug.yaml
"""

import sys

from diffvision.cli import main

if __name__ == "__main__":
    sys.exit(main(["fit", *sys.argv[1:]]))
