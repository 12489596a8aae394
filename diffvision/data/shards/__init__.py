"""WebDataset shards on disk and on servers: index, order, random access, loading, checks, writing.

The ground of `data`: this package imports neither `images` nor `text`.
"""
