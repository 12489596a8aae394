"""`diffvision evaluate --tasks zero_shot` from a clone.

python scripts/zero_shot.py MODEL --data DIR
"""

import sys

from diffvision.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", "--tasks=zero_shot", *sys.argv[1:]]))
