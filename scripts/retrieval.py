"""`diffvision evaluate --tasks retrieval` from a clone.

python scripts/retrieval.py MODEL --data DIR
"""

import sys

from diffvision.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", "--tasks=retrieval", *sys.argv[1:]]))
