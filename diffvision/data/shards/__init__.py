"""WebDataset shards on disk and on servers: index, order, random access, loading, checks, writing.

The other packages of `data` build on it; it imports neither `images` nor `text`.
"""
