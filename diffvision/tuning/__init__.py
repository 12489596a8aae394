"""`diffvision tune`: every backend is compared with the formula on this machine, then timed, and the fastest is kept.

`diffvision.ops.attention.tuned` reads what is written here.
"""
